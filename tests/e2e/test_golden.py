# SPDX-License-Identifier: MIT
"""The committed golden vectors (HF transformers, float32) through the whole system: greedy ids equal,
differences of the first step's eight largest logits within 2e-3. --short: two prompts, 12 tokens."""

import sys

import harness

SHORT = "--short" in sys.argv


def compare(system, identifier):
    prompts = harness.golden()[: 2 if SHORT else None]
    for number, prompt in enumerate(prompts):
        want = prompt["greedy_ids"][: 12 if SHORT else None]
        answer = system.generate_full(identifier, prompt["ids"], len(want), 120, top=8)
        got = answer["output_ids"]
        harness.check(got == want, f"prompt {number}: {got} instead of {want}")
        top = {int(i): float(v) for v, i, *_ in answer["meta_info"]["output_top_logprobs"][0]}
        rows = prompt["first_step_top8"]
        rows = [(r["id"], r["logit"]) if isinstance(r, dict) else (r[0], r[1]) for r in rows]
        (first, base), rest = rows[0], rows[1:]
        for token, logit in rest:
            harness.check(token in top, f"prompt {number}: token {token} is not among the top eight")
            error = abs((top[token] - top[first]) - (logit - base))
            harness.check(error < 2e-3, f"prompt {number}: token {token} is off by {error}")
        meta = answer["meta_info"]
        harness.check(meta["prompt_tokens"] == len(prompt["ids"]), f"prompt_tokens: {meta}")
        harness.check(meta["completion_tokens"] == len(want), f"completion_tokens: {meta}")
    return len(prompts)


def golden():
    with harness.System([harness.model("tales", dtype="float32")]) as system:
        system.start(120)
        compare(system, "tales")
        system.stop()


def golden_two_ids_two_of_each_device():
    models = [harness.model("left", dtype="float32"), harness.model("right", dtype="float32")]
    with harness.System(models, atn=2, ffn=2) as system:
        system.start(120)
        harness.together([lambda: compare(system, "left"), lambda: compare(system, "right")])
        system.stop()


def golden_bfloat16_weights():
    """dtype = "auto" keeps BF16 weights and computes in float32: the same ids."""
    with harness.System([harness.model("tales")]) as system:
        system.start(120)
        compare(system, "tales")
        system.stop()


if __name__ == "__main__":
    if SHORT:
        harness.main(golden)
    harness.main(golden, golden_two_ids_two_of_each_device, golden_bfloat16_weights)
