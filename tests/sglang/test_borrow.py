#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""An SGLang Instance and a native one of the same checkpoint on one attention device, whose pool holds one
long request and little more: they borrow from each other in turn, then both at once, and SGLang dies while it
holds what it borrowed. Both engines give the same tokens, whatever moved; what their processes really hold
never exceeds the pool; and after the death the native one gets all that there is."""

import json
import os
import signal
import sys
import time

import harness
import scene
from harness import check, wait_until

SGLANG, NATIVE = "sglang", "native"
FLOOR = 128
POOL_TOKENS = 1300
LENGTH = 60
LONG = [[(7 * i + 3 + 11 * turn) % 500 for i in range(800)] for turn in range(4)]
SHORT = [prompt[:200] for prompt in LONG]
LOOKS = 4


def models():
    native = harness.model(
        NATIVE, dtype="float32", kv_floor_tokens=FLOOR, decode_rows=8, prefill_rows=scene.ROWS["prefill_rows"]
    )
    return [scene.model(SGLANG, kv_floor_tokens=FLOOR), native]


def small_pool():
    """Memory of the attention device such that its pool is POOL_TOKENS."""
    with scene.Scene(models(), memory="64MiB") as probe:
        code, out, error = probe.run("plan", "--json")
        check(code == 0, error)
        plan = json.loads(out)
    device = plan["devices"][0]
    taken = device["weight_bytes"] + device["workspace_bytes"] + device["arena_bytes"]
    token = plan["models"][0]["kv_bytes"] // plan["models"][0]["kv_tokens"]
    memory = int((taken + POOL_TOKENS * token) * (64 << 20) / device["budget_bytes"])
    settings = '[scheduler]\nffn_policy = "deadline"\nslo = { ttft_ms = 4000, tbt_ms = 500 }'
    system = scene.Scene(models(), settings=settings)
    text = system.config.read_text().replace('memory = "1GiB"', f'memory = "{memory}"', 1)
    system.config.write_text(text)
    return system, token


class Watch(harness.Repeated):
    """What the KV memfds of both Instances really hold, every 100 ms, by the kernel's account. Readings of two
    processes are not of one moment: what counts is the least of some looks."""

    def __init__(self, system, pool):
        super().__init__(0.1)
        self.system, self.pool, self.error, self.most = system, pool, None, dict.fromkeys((SGLANG, NATIVE), 0)

    def look(self):
        held = {}
        for model in self.most:
            try:
                held[model] = self.system.kv_resident(model)
            except OSError:
                held[model] = 0  # it has just ended
        return held

    def once(self):
        held = self.look()
        self.most = {model: max(self.most[model], held[model]) for model in held}
        if sum(held.values()) > self.pool:
            looks = [held] + [self.look() for _ in range(LOOKS)]
            least = {model: min(look[model] for look in looks) for model in held}
            if sum(least.values()) > self.pool:
                self.error = f"{least} is more than the pool of {self.pool} bytes"


def backed(system, model):
    (group,) = system.kv(model)
    return group["backed"]["tokens"]


def in_turn(system):
    """Each takes from the other what its request needs; the tokens of each prompt."""
    wants = {}
    whole = len(LONG[0]) + LENGTH - 1
    for turn, prompt in enumerate(LONG):
        first, second = (SGLANG, NATIVE) if turn % 2 else (NATIVE, SGLANG)
        got = {}
        for model, other in ((first, second), (second, first)):
            got[model] = system.generate(model, prompt, LENGTH, 60)
            check(backed(system, model) >= whole, f"{model} has {backed(system, model)} tokens")
            left = POOL_TOKENS - whole
            check(backed(system, other) <= left, f"{other} still has {backed(system, other)} tokens of {left}")
        check(len(got[first]) == LENGTH, f"{len(got[first])} tokens")
        check(got[first] == got[second], f"the engines differ: {got}")
        wants[turn] = got[first]
    return wants


def at_once(system, wants):
    short = [system.generate(NATIVE, prompt, LENGTH, 60) for prompt in SHORT]
    calls = []
    for turn in range(len(LONG)):
        for model in (SGLANG, NATIVE):
            calls.append((model, LONG[turn], wants[turn]))
            calls.append((model, SHORT[turn], short[turn]))
    got = harness.together([lambda m=m, p=p: system.generate(m, p, LENGTH, 120) for m, p, _ in calls])
    for (model, prompt, want), tokens in zip(calls, got, strict=True):
        check(tokens == want, f"{model}, {len(prompt)} tokens: {tokens} instead of {want}")


def death(system, wants):
    system.generate(SGLANG, LONG[0], LENGTH, 60)
    check(backed(system, NATIVE) < len(LONG[0]), "SGLang has borrowed nothing")
    pids = system.tree(SGLANG)
    os.kill(system.schedulers(SGLANG)[0], signal.SIGKILL)
    check(system.generate(NATIVE, LONG[1], LENGTH, 60) == wants[1], "the native Instance is not exact after the death")
    system.expect_dead(pids, scene.DEATH_SECONDS, "a killed scheduler")
    (group,) = system.kv(SGLANG)
    check(group["state"] == "absent" and group["backed"]["tokens"] == 0, f"it still holds memory: {group}")


def borrow():
    system, token = small_pool()
    with system:
        system.start()
        pool = system.state()["kv"]["pools"][0]["bytes"]
        check(abs(pool - POOL_TOKENS * token) < 64 * token, f"the scene is none: a pool of {pool} bytes")
        with Watch(system, pool) as watch:
            wants = in_turn(system)
            at_once(system, wants)
            check(watch.error is None, watch.error)
            most = {model: held // token for model, held in watch.most.items()}
            check(all(held >= len(LONG[0]) for held in most.values()), f"at most {most} tokens were held")
            death(system, wants)
            wait_until(lambda: system.kv_resident(NATIVE) <= pool, 5, "the native Instance is within the pool")
        check(watch.error is None, watch.error)
        print(f"     pool of {pool // token} tokens, at most {most} held", flush=True)
        began = time.monotonic()
        system.again(SGLANG)
        check(system.generate(SGLANG, LONG[2], LENGTH, 60) == wants[2], "SGLang is not exact after its return")
        print(f"     back and exact after {time.monotonic() - began:.0f} s", flush=True)
        system.stop()


if __name__ == "__main__":
    if os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") < 6 * 2**30:
        print("skipped: SGLang wants 6 GB of memory")
        sys.exit(harness.SKIPPED)
    scene.main(borrow)
