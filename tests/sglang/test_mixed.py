#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Two SGLang Instances and a native one share an FFN tier and one door: the official openai client, all three
at the same time, gets the golden text of each, streamed and not, with usage; the FFN weights of all three lie
in the FfnAgent only. Needs 8 GB of memory."""

import os
import re
import sys

import openai

import harness
import scene
from harness import ROOT, check

TALES = ROOT / "models" / "tales"
LEAST_BYTES = 7.5 * 2**30  # what is left of 8 GB
MODELS = ("deepseek-v2", "glm4-moe-lite", "qwen3-moe")  # the last one is native
ROUNDS = 2
SPECIAL = re.compile(r"<\|\w+\|>")  # special tokens, which a completion's text leaves out


def client_of(system):
    return openai.OpenAI(base_url=system.gateway + "/v1", api_key="none", timeout=120, max_retries=0)


def complete(system, name, prompt):
    count = len(prompt["greedy_ids"])
    options = {"model": name, "prompt": prompt["ids"], "max_tokens": count, "temperature": 0,
               "extra_body": {"ignore_eos": True}}
    with client_of(system) as client:
        plain = client.completions.create(**options)
        pieces, usage = [], None
        for event in client.completions.create(stream=True, stream_options={"include_usage": True}, **options):
            usage = event.usage or usage
            pieces += [choice.text for choice in event.choices]
    text, want = plain.choices[0].text, SPECIAL.sub("", prompt["greedy_text"])
    check(text == want, f"{name}: {text!r} instead of {want!r}")
    check("".join(pieces) == text, f"{name}: the stream says {''.join(pieces)!r}")
    check(sum(bool(piece) for piece in pieces) > 3, f"{name}: the text came in {len(pieces)} pieces")
    for got in (plain.usage, usage):
        check(got is not None, f"{name}: no usage")
        check((got.prompt_tokens, got.completion_tokens) == (len(prompt["ids"]), count), f"{name}: {got}")


def together():
    models = [scene.model(name, TALES / name) for name in MODELS[:2]] + [scene.native(MODELS[2], TALES / MODELS[2])]
    with scene.Scene(models) as system:
        system.start()
        prompts = {name: harness.golden(TALES / name) for name in MODELS}
        for _ in range(ROUNDS):
            harness.together([
                lambda name=name, prompt=prompt: complete(system, name, prompt)
                for name in MODELS
                for prompt in prompts[name]
            ])
        harness.together([lambda name=name: system.golden(name, TALES / name) for name in MODELS])
        sets = {entry["weight_set"] for entry in system.state()["models"]}
        check(len(sets) == len(MODELS), f"weight sets {sets}")
        agent = system.pid("ffnagent")
        resident = 0
        for pid in system.processes():
            for first, end, _, name in scene.regions(pid):
                check(".safetensors" not in name, f"pid {pid} maps {name}")
                if "xpool-ffn:" in name:
                    check(pid == agent, f"pid {pid} maps FFN weights: {name}")
                    resident += end - first
        planned = sum(entry["ffn_weight_bytes"] for entry in system.state()["models"])
        # The daemon's figure has the tables of the layers in it.
        check(0.95 * planned <= resident <= planned, f"the FfnAgent maps {resident} bytes of FFN weights of {planned}")
        print(f"     {len(MODELS)} models, {resident / 2**20:.1f} MiB of FFN weights, in the FfnAgent only", flush=True)
        system.stop()


if __name__ == "__main__":
    if os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") < LEAST_BYTES:
        print("skipped: three Instances want 8 GB of memory")
        sys.exit(harness.SKIPPED)
    scene.main(together)
