# SPDX-License-Identifier: MIT
"""The seeded checkpoints on which SGLang alone and SGLang with CrossPool are compared, a family each.

Written by `xpool model synth`: at least 4 layers and 8 experts, groups of experts where the family has
them, a correction bias, a routed scale other than 1, shared experts, a first dense layer. Their weights
are scaled so that the FFN decides which token wins. They lie under .xpool-cache/sglang-checkpoints, in
folders named by their content, so that whatever is derived from one can be found by its name.
"""

import hashlib
import os
import pathlib
import shutil
import subprocess
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
XPOOL = pathlib.Path(os.environ.get("XPOOL_BIN", ROOT / "build" / "bin" / "xpool"))
FOLDER = ROOT / ".xpool-cache" / "sglang-checkpoints"
KEPT_SECONDS = 24 * 3600

MOE = {"experts": 16, "top-k": 4}
# Family -> options of `xpool model synth`. Qwen3-MoE has no dense layer, since SGLang takes all its layers
# for sparse whatever config.json says; the MLA families have theirs by default. The seeds were picked for
# wide gaps between the best two tokens.
FAMILIES = {
    "llama": {"seed": 40},
    "qwen2": {"seed": 41},
    "qwen3": {"seed": 33, "shards": 2},
    "qwen3-moe": {"seed": 40, "shards": 3, **MOE},
    "deepseek-v2": {"seed": 49, "rope": "yarn", "groups": 4, "top-groups": 2, **MOE},
    "glm4-moe-lite": {"seed": 36, "groups": 4, "top-groups": 2, **MOE},
}
COMMON = {"layers": 4, "dtype": "f32", "vocab": 512, "context": 2048}


def digest(folder):
    """Of names and contents of the folder's files, 16 hexadecimal digits."""
    state = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.is_file():
            state.update(f"{path.name} {path.stat().st_size}\n".encode())
            state.update(path.read_bytes())
    return state.hexdigest()[:16]


def checkpoint(family):
    """The folder of the family's checkpoint. It is written anew each time, since the generator may have
    changed, and kept under its digest."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=FOLDER) as scratch:
        made = pathlib.Path(scratch) / family
        command = [str(XPOOL), "model", "synth", "--arch", family, "--out", str(made)]
        for name, value in {**COMMON, **FAMILIES[family]}.items():
            command += [f"--{name}", str(value)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=120)
        place = FOLDER / f"{family}-{digest(made)}"
        for old in FOLDER.glob(f"{family}-" + "[0-9a-f]" * 16):
            # Recent ones may be in use by a run of another build.
            if old != place and time.time() - old.stat().st_mtime > KEPT_SECONDS:
                shutil.rmtree(old, ignore_errors=True)
        try:
            made.rename(place)
        except OSError:
            if not place.exists():
                raise
    return place
