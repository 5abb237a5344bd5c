# SPDX-License-Identifier: MIT
"""What the reference programs of this folder share: where things lie, and comparison helpers."""

import math
import os
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
SHARED = ROOT.parent / "shared"
XPOOL = pathlib.Path(os.environ.get("XPOOL_BIN", ROOT / "build" / "bin" / "xpool"))
BUILD = pathlib.Path(os.environ.get("XPOOL_BUILD", ROOT / "build"))
TALES = ROOT / "models" / "tales"
SMOLLM = ROOT / ".xpool-cache" / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
SKIPPED = 77


def skip(reason):
    """Ends the program as skipped, with the reason as its last line."""
    print(f"skipped: {reason}")
    sys.exit(SKIPPED)


def synth(architecture, out, seed, **options):
    """A seeded checkpoint of a family, made by the program itself."""
    command = [str(XPOOL), "model", "synth", "--arch", architecture, "--out", str(out), "--seed", str(seed)]
    for name, value in options.items():
        command += [f"--{name.replace('_', '-')}", str(value)]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=600)
    return pathlib.Path(out)


def mend_transformers(model):
    """Two faults of transformers 5.8.1 in DeepSeek-V2, against DeepSeek's own published code: the number of
    experts is missing where groups limit the choice, and under YaRN the attention's scale lacks mscale squared
    (for GLM it is there). Changes nothing of other models; returns the model."""
    config = model.config
    if config.model_type == "deepseek_v2":
        rope = config.rope_parameters
        mscale = 1.0
        if rope["rope_type"] == "yarn" and rope.get("mscale_all_dim"):
            mscale = 0.1 * rope["mscale_all_dim"] * math.log(rope["factor"]) + 1
        for layer in model.model.layers:
            layer.mlp.num_experts = config.n_routed_experts
            layer.self_attn.scaling *= mscale**2
    return model
