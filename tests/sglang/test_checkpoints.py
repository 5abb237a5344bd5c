#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""The seeded checkpoints and what SGLang alone makes of them, against HF transformers in float32.

For each family: transformers loads the checkpoint with nothing missing; after the same tokens its argmax is
SGLang's token at every step of the probe, and its log-probabilities of the first step are SGLang's; the
best two tokens are never closer than rounding errors reach; and with the FFN's output zeroed fewer than a
fifth of the tokens stay, so that a comparison of tokens is one of FFNs.
"""

import os
import pathlib
import sys

import checkpoints
import probe
import server
import vanilla

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "reference"))
import common  # noqa: E402

os.environ.setdefault("TQDM_DISABLE", "1")
if not server.PYTHON.exists():
    print("skipped: the Python environment is missing; scripts/test-venv makes it")
    sys.exit(server.SKIPPED)
import torch  # noqa: E402
import transformers  # noqa: E402

SMALLEST_GAP = 1e-3
TOLERANCE = 2e-4
MOST_AGREEMENT = 0.2
ZEROED = ("alone-1", "alone-5", "alone-64", "alone-200", "batch-31", "stream")


def load(path):
    model, report = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager", output_loading_info=True)
    lost = {key: value for key, value in report.items() if value}
    if lost:
        raise server.Failed(f"transformers did not load {path.name} completely: {lost}")
    return common.mend_transformers(model).eval()


def greedy(model, prompt):
    answer = model.generate(torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                            max_new_tokens=probe.NEW_TOKENS, do_sample=False, eos_token_id=None, pad_token_id=0)
    return answer[0, len(prompt):].tolist()


def check_family(family):
    path = checkpoints.checkpoint(family)
    found = vanilla.results(path)
    prompts = probe.prompts(probe.vocabulary(path))
    model = load(path)
    wrong, error = [], 0.0
    with torch.no_grad():
        for name, one in found.items():
            prompt = prompts[name]
            logits = model(torch.tensor([prompt + one["tokens"][:-1]])).logits[0, len(prompt) - 1:]
            if logits.argmax(dim=1).tolist() != one["tokens"]:
                wrong.append(f"{name}: other tokens than transformers")
            values = torch.log_softmax(logits[0], dim=0)
            error = max(error, max(abs(float(values[token]) - value) for token, value in one["first"]))
        for layer in model.model.layers:
            layer.mlp.forward = torch.zeros_like
        zeroed = {name: {"tokens": greedy(model, prompts[name])} for name in ZEROED}
    agree = probe.agreement(zeroed, found)
    gap = probe.smallest_gap(found)
    if error > TOLERANCE:
        wrong.append(f"log-probabilities differ by {error:.3g}, allowed is {TOLERANCE:g}")
    if gap < SMALLEST_GAP:
        wrong.append(f"the best two tokens come as near as {gap:.3g}; another seed is needed")
    if agree >= MOST_AGREEMENT:
        wrong.append(f"{agree:.0%} of the tokens stay with the FFN zeroed; the FFN decides too little")
    print(f"{family}: {len(found)} cases, largest error of a log-probability {error:.2g}, smallest gap {gap:.2g}, "
          f"{agree:.0%} of the tokens stay without the FFN: {'FAILS: ' + '; '.join(wrong) if wrong else 'good'}",
          flush=True)
    return not wrong


def main():
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    families = sys.argv[1:] or list(checkpoints.FAMILIES)
    sys.exit(0 if all([check_family(family) for family in families]) else 1)


if __name__ == "__main__":
    try:
        main()
    except server.Failed as failure:
        sys.exit(f"FAILED: {failure}")
