#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Attention over two ranks, tensor parallel or data parallel: the golden tokens, and the row counts that the
observers saw. Under data parallelism one rank is idle at times, both are busy at others. The KV Caches begin
with little, are trimmed all the time and grow again: tensor parallel ranks together, data parallel ones each
by itself.

usage: test_parallel.py [tensor_parallel|data_parallel]
"""

import json
import threading

import harness
import probe
import scene
import server
from harness import check

ID = "tale"
LONG = 300
ENVIRONMENT = {
    # What SGLang lacks on a CPU for data parallel attention; `xpool exec` adds the plugin to it.
    "SGLANG_PLUGINS": server.HOOKS_PLUGIN,
    "PYTHONPATH": str(server.HOOKS),
}


def system_of(**layout):
    models = [scene.model(ID, kv_floor_tokens=128, **layout)]
    return scene.Scene(models, atn=2, observe=True, env=ENVIRONMENT)


def expect_delivery(system, kind):
    code, out, error = system.run("plan", "--json")
    check(code == 0, f"xpool plan: {error}")
    found = json.loads(out)["models"][0]["delivery"]
    check(found == kind, f"the plan says delivery {found}, not {kind}")


def trimmed_requests(system):
    """`requests`, and longer ones that need more than the floor, while the KV Caches shrink and grow."""
    stop, trims = threading.Event(), []
    long = [probe.prompt(seed, LONG, probe.vocabulary(harness.TALES)) for seed in (1, 2)]
    wanted = [system.generate(ID, ids, 16) for ids in long]

    def trim():
        while not stop.wait(0.02):
            system.kv_do("trim", ID)
            trims.append(tuple(group["backed"]["tokens"] for group in system.kv(ID)))

    thread = threading.Thread(target=trim)
    thread.start()
    try:
        requests(system)
        got = harness.together([lambda ids=ids: system.generate(ID, ids, 16) for ids in long * 2])
        check(got == wanted * 2, "other tokens for long prompts while the KV Cache moves")
    finally:
        stop.set()
        thread.join(120)
    for number, group in enumerate(system.kv(ID)):
        seen = {backed[number] for backed in trims}
        check(group["grants"] > 1 and max(seen) > min(seen), f"the KV Cache did not move: {seen}, {group}")
        print(f"     KV group {number}: {group['grants']} grants between {len(trims)} trims, "
              f"{min(seen)} to {max(seen)} tokens", flush=True)


def requests(system):
    """One alone, several at once, unlike lengths at once, and again one alone."""
    prompts = harness.golden()
    first = prompts[0]
    check(system.generate(ID, first["ids"], 48) == first["greedy_ids"], "not exact alone")
    for _ in range(2):
        system.golden(ID)
    lengths = [6, 12, 24, 48, 48, 30]
    calls = [
        lambda p=prompts[i % len(prompts)], n=n: (p["greedy_ids"][:n], system.generate(ID, p["ids"], n))
        for i, n in enumerate(lengths)
    ]
    for want, got in harness.together(calls):
        check(got == want, f"{got} instead of {want}")


def records(system):
    """(layers, {rank: its records}, AtnAgent records, FfnAgent records)."""
    found = system.trace()
    ranks = {rank: [r for r in found["rank"] if r["rank"] == rank] for rank in (0, 1)}
    check(len(ranks[0]) == len(ranks[1]) > 0, f"{len(ranks[0])} and {len(ranks[1])} records of the two ranks")
    check(len(found["atnagent"]) == 2 * len(ranks[0]), f"{len(found['atnagent'])} records of the AtnAgents")
    check(len(found["ffnagent"]) == len(ranks[0]), f"{len(found['ffnagent'])} records of the FfnAgent")
    return system.entry(ID)["layers"], ranks, found["atnagent"], found["ffnagent"]


def tensor_parallel():
    with system_of(attention_tp=2) as system:
        expect_delivery(system, "replicated-complete")
        system.start()
        trimmed_requests(system)
        layers, ranks, _, ffn = records(system)
        for i, (one, other, executed) in enumerate(zip(ranks[0], ranks[1], ffn, strict=True)):
            rows = {one["rows"], other["rows"], executed["rows"]}
            check(len(rows) == 1, f"record {i}: the ranks hand in the same rows, executed once: {rows}")
            check(one["layer"] == other["layer"] == executed["layer"] == i % layers, f"record {i}: layers")
        scene.check_no_broken_plugin(system.log())
        print(f"     {len(ffn) // layers} steps, up to {max(r['rows'] for r in ffn)} rows", flush=True)
        system.stop()


def data_parallel():
    with system_of(attention_dp=2) as system:
        expect_delivery(system, "single-complete")
        system.start()
        trimmed_requests(system)
        layers, ranks, _, ffn = records(system)
        idle = busy = 0
        for i, (one, other, executed) in enumerate(zip(ranks[0], ranks[1], ffn, strict=True)):
            check(one["rows"] + other["rows"] == executed["rows"], f"record {i}: {one} {other} {executed}")
            check(one["layer"] == other["layer"] == executed["layer"] == i % layers, f"record {i}: layers")
            check(one["step"] == other["step"], f"record {i}: the ranks call the step differently: {one} {other}")
            idle += 0 in (one["rows"], other["rows"])
            busy += 0 not in (one["rows"], other["rows"])
        check(idle > 0 and busy > 0, f"{idle} layers with an idle rank, {busy} with two busy ones")
        scene.check_no_broken_plugin(system.log())
        print(f"     {len(ffn) // layers} steps: {idle // layers} with an idle rank, {busy // layers} with both busy",
              flush=True)
        system.stop()


if __name__ == "__main__":
    scene.main(tensor_parallel, data_parallel)
