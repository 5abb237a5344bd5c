#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""The FFN tier, asked through libxpool by the example engine, against Hugging Face transformers' own FFN
modules in float32: every layer of a seeded checkpoint of every family, 37 rows and 1 row.

usage: ffn_library.py [--only WORD]

A layer's largest error over its largest value has to be at most 1e-4. Correction bias changes the choice
of experts and nothing else: a bias that is the same for all experts leaves every answer as it was, one
that forces an expert into every choice agrees with the reference. Exits 0 when everything agrees.
"""

import argparse
import os
import pathlib
import shutil
import subprocess
import sys
import tempfile

import common

sys.path.insert(0, str(common.ROOT / "tests" / "e2e"))
import harness  # noqa: E402

os.environ.setdefault("TQDM_DISABLE", "1")
try:
    import numpy
    import safetensors.torch
    import torch
    import transformers
except ImportError as error:
    common.skip(f"{error}; scripts/test-venv makes the environment")

ENGINE = common.BUILD / "examples" / "engine"
ROWS = 37
MAX_ERROR = 1e-4
MOE = {"experts": 16, "top_k": 4}
FAMILIES = {
    "llama": ("llama", {}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
    "qwen3-moe": ("qwen3-moe", MOE),
    "qwen3-moe-unnormalised": ("qwen3-moe", {**MOE, "norm_topk": "false"}),
    "deepseek-v2-groups": ("deepseek-v2", {**MOE, "groups": 4, "top_groups": 2, "routed_scale": 2.5}),
    "deepseek-v2-greedy": ("deepseek-v2", {**MOE, "groups": 1, "top_groups": 1, "routed_scale": 16}),
    "glm4-moe-lite": ("glm4-moe-lite", {**MOE, "groups": 1, "top_groups": 1}),
    "glm4-moe-lite-groups": ("glm4-moe-lite", {**MOE, "groups": 4, "top_groups": 2}),
}
BIASED = "glm4-moe-lite"
FORCED = 5  # the expert that a bias forces into every choice


def edit_bias(source, folder, change):
    """A copy of a checkpoint whose correction biases went through change()."""
    shutil.copytree(source, folder)
    for file in folder.glob("*.safetensors"):
        tensors = safetensors.torch.load_file(file)
        touched = [name for name in tensors if name.endswith("e_score_correction_bias")]
        for name in touched:
            tensors[name] = change(tensors[name].clone())
        if touched:
            safetensors.torch.save_file(tensors, file, metadata={"format": "pt"})
    return folder


def force(bias):
    bias[FORCED] += 10
    return bias


def make_checkpoints(scratch, only):
    paths = {}
    for seed, (name, (family, options)) in enumerate(FAMILIES.items()):
        if only is None or only in name:
            paths[name] = common.synth(family, scratch / name, 41 + seed, layers=4, dtype="f32", **options)
    if BIASED in paths:
        paths["bias-shifted"] = edit_bias(paths[BIASED], scratch / "bias-shifted", lambda bias: bias + 0.75)
        paths["bias-forced"] = edit_bias(paths[BIASED], scratch / "bias-forced", force)
    return paths


class Tier(harness.System):
    """Daemon and agents; every model is somebody else's engine's."""

    def __enter__(self):
        commands = [["daemon", "serve"], ["atnagent", "--device", "cpu:0"], ["ffnagent", "--device", "cpu:1"]]
        self.hand = [self.launch(*command) for command in commands]
        return self

    def answers(self, model, rows):
        """[layers][rows][hidden] from the FFN tier."""
        given, got = self.folder / "rows", self.folder / "answers"
        rows.astype(numpy.float32).tofile(given)
        command = [str(ENGINE), "--config", str(self.config), "--model", model, "--rows", str(len(rows))]
        command += ["--input", str(given), "--output", str(got), "--quiet"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=self.env)
        harness.check(done.returncode == 0, f"{model}: {done.stdout}{done.stderr}")
        return numpy.fromfile(got, dtype=numpy.float32).reshape(-1, *rows.shape)


def reference(path, rows):
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    common.mend_transformers(model)
    with torch.no_grad():
        given = torch.from_numpy(rows)[None]
        answers = [layer.mlp(given) for layer in model.model.layers]
        answers = [answer[0] if isinstance(answer, tuple) else answer for answer in answers]
    return numpy.stack([answer[0].numpy() for answer in answers])


def make_rows(hidden):
    """As after a norm: each row of about unit scale, and one of zeros."""
    rows = numpy.random.default_rng(3).standard_normal((ROWS, hidden)).astype(numpy.float32)
    rows[7] = 0
    return rows


def relative(got, want):
    return float((numpy.abs(got - want).max(axis=(1, 2)) / numpy.abs(want).max(axis=(1, 2))).max())


def check(tier, name, path):
    hidden = transformers.AutoConfig.from_pretrained(path).hidden_size
    rows = make_rows(hidden)
    want, got = reference(path, rows), tier.answers(name, rows)
    harness.check(got.shape == want.shape, f"{name}: {got.shape}, not {want.shape}")
    error = relative(got, want)
    alone = relative(tier.answers(name, rows[:1]), want[:, :1])
    print(f"{name:24} {len(want)} layers  relative error {error:.1e}  one row {alone:.1e}", flush=True)
    harness.check(error <= MAX_ERROR and alone <= MAX_ERROR, f"{name}: error {max(error, alone):.2e}")
    return got


def check_bias(answers):
    plain, shifted, forced = (answers[name] for name in (BIASED, "bias-shifted", "bias-forced"))
    harness.check(numpy.array_equal(plain, shifted), "a bias that is the same for all experts changed an answer")
    # The first layer is dense; in the others the forced expert is new to most rows.
    harness.check(numpy.array_equal(plain[0], forced[0]), "the bias reached a dense layer")
    changed = (plain[1:] != forced[1:]).any(axis=2).mean()
    harness.check(changed > 0.5, f"forcing an expert changed only {changed:.0%} of the rows")
    print(f"correction bias: shifted by a constant, nothing changes; one expert forced, {changed:.0%} of the rows do")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", metavar="WORD", help="cases whose name holds WORD")
    options = parser.parse_args()
    if not ENGINE.exists():
        print(f"{ENGINE} is missing: build with scripts/build --tests")
        return 1
    torch.set_num_threads(2)
    transformers.logging.set_verbosity_error()
    with tempfile.TemporaryDirectory(prefix="xpool-ffn-") as name:
        paths = make_checkpoints(pathlib.Path(name), options.only)
        models = [harness.model(name, path, engine="sglang", dtype="float32") for name, path in paths.items()]
        with Tier(models) as tier:
            answers = {name: check(tier, name, path) for name, path in paths.items()}
            if BIASED in answers:
                check_bias(answers)
            code, out, error = tier.run("down")
            harness.check(code == 0, f"xpool down: {out}{error}")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except harness.Failed as failure:
        print(f"FAIL: {failure}")
        sys.exit(1)
