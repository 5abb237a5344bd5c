#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""A third party for two servers whose BF16 tokens part: the same checkpoint by Hugging Face transformers in
float32, on the CPU.

    benches/sglang_truth.py < QUESTION > ANSWER

QUESTION: {"model": folder, "sides": {name: [[prompt ids, tokens said], ...]}}. Each side is judged along its own
tokens, one forward pass an answer, so that a difference counts once and not until the end. ANSWER: {name: [[[best
token, by how much (nats) it is ahead of the second, by how much ahead of what was said], ... one a token], ...]}.
"""

import json
import math
import multiprocessing
import os
import statistics
import subprocess
import sys

FAR = 1.0  # nats short of float32's best: beyond what rounding does where all experts are the same
SIGMAS = 2.0  # more misses than the other side, in standard deviations of the difference of two counts
LIMIT_S = 180
MOST_WORKERS = 12
MODEL = None  # of this process and those that it forks


def load(path):
    """The model, on one thread: several wait for each other wherever the machine has other work."""
    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager").eval()
    for layer in model.model.layers if model.config.model_type == "deepseek_v2" else ():
        if not hasattr(layer.mlp, "num_experts"):  # asked for where groups limit the choice
            layer.mlp.num_experts = model.config.n_routed_experts
    return model


def judge(answer):
    """[best token, ahead of the second, ahead of what was said] of each token of a [prompt, tokens said]."""
    import torch

    prompt, said = answer
    with torch.inference_mode():
        logits = MODEL(torch.tensor([prompt + said[:-1]]), use_cache=False).logits[0, len(prompt) - 1 :].float()
    top = logits.topk(2, dim=-1)
    mine = logits.gather(1, torch.tensor(said)[:, None])[:, 0]
    rows = zip(top.indices[:, 0].tolist(), (top.values[:, 0] - top.values[:, 1]).tolist(), (top.values[:, 0] - mine).tolist(), strict=True)
    return [list(row) for row in rows]


def along(path, sides):
    """The answer to a question; torch and transformers are needed. Answers are judged by as many processes as half
    of the processors, which have the one model."""
    global MODEL
    MODEL = load(path)
    every = [(name, answer) for name, answers in sides.items() for answer in answers]
    workers = min(MOST_WORKERS, len(os.sched_getaffinity(0)) // 2, len(every))
    if workers > 1:
        with multiprocessing.get_context("fork").Pool(workers) as pool:
            judged = pool.map_async(judge, [answer for _, answer in every], chunksize=1).get(timeout=LIMIT_S * 2 / 3)  # before ask() gives up, so that they end
    else:
        judged = [judge(answer) for _, answer in every]
    found = {name: [] for name in sides}
    for (name, _), one in zip(every, judged, strict=True):
        found[name].append(one)
    return found


def ask(python, path, sides):
    """The same by another interpreter. RuntimeError: with what it said last."""
    question = json.dumps({"model": str(path), "sides": sides})
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}
    try:
        out = subprocess.run([python, __file__], input=question, capture_output=True, text=True, timeout=LIMIT_S, env=environment)
    except subprocess.TimeoutExpired as error:
        raise RuntimeError(f"float32 reference: no answer within {LIMIT_S} s") from error
    if out.returncode:
        raise RuntimeError(f"float32 reference: {(out.stderr.strip().splitlines() or ['nothing said'])[-1]}")
    return json.loads(out.stdout)


def summary(answers):
    """What one side's answers are worth: counts of its tokens, and where each answer first differs from what
    float32 says of itself (up to there both have the same prefix)."""
    firsts, gaps = [], []
    for answer in answers:
        first = next((i for i, (_, _, short) in enumerate(answer) if short > 0), len(answer))
        firsts.append(first)
        if first < len(answer):
            gaps.append((answer[first][1], answer[first][2], first))
    every = [short for answer in answers for _, _, short in answer]
    return {
        "tokens": len(every),
        "missed": sum(short > 0 for short in every),
        "far": sum(short > FAR for short in every),
        "longest": max(every, default=0.0),
        "first": statistics.mean(firsts) if firsts else 0.0,
        "gaps": gaps,
    }


def excess(ours, theirs):
    """By how many standard deviations one count is above the other, both being of independent rare events."""
    return (ours - theirs) / math.sqrt(max(ours + theirs, 1))


def verdict(ours, theirs):
    """The larger of both excesses, of tokens missed and of those missed by far; more than SIGMAS is wrong. The
    sides have judged as many tokens."""
    return max(excess(ours["missed"], theirs["missed"]), excess(ours["far"], theirs["far"]))


def words(one):
    """One side's summary, for a note."""
    text = f"{one['tokens'] - one['missed']} of {one['tokens']} tokens are float32's, {one['far']} are more than {FAR} nat short (longest {one['longest']:.2f}), "
    text += f"an answer is the same for {one['first']:.1f} tokens"
    if one["gaps"]:
        text += "; ends at (best ahead of second, of what was said: token) " + ", ".join(f"{gap:.2f} {short:.2f}: {at}" for gap, short, at in sorted(one["gaps"])[::-1])
    return text


def main():
    question = json.load(sys.stdin)
    json.dump(along(question["model"], question["sides"]), sys.stdout)


if __name__ == "__main__":
    main()
