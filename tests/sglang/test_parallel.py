#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Attention over two ranks, tensor parallel or data parallel, beside a native Instance of the same checkpoint
on the same devices: the golden tokens, and the row counts that the observers saw. Under data parallelism one
rank is idle at times, both are busy at others.

The KV Caches begin with little, shrink all the time and grow again: tensor parallel ranks together, data
parallel ones each by itself; first as SGLang works on a CPU, then with overlapped steps, as it does on GPUs.
The tokens are those of the native Instance, and tensor parallel ranks are the same after every step.

Each time the SGLang Instance ends by kill -9 of one rank at a point of an operation: the native one goes on,
exact, of every byte of both pools it is said once where it is, and all of the dead one's come back.

usage: test_parallel.py [tensor_parallel|data_parallel] [--whole]

--whole: every rank at every point (some minutes).
"""

import contextlib
import json
import os
import sys
import threading

import harness
import kv_ranks
import probe
import scene
import server
from harness import check, wait_until

sys.path.insert(0, str(server.HOOKS))
from xpool_rank_hooks import POINTS  # noqa: E402

ID, BESIDE = "tale", "beside"
WHOLE = "--whole" in sys.argv
FLOOR, CEILING = 128, 4096
LOW_CEILING = 640  # more than any one request needs
LONG, SHARED = 300, 220
GRANTS = 5  # at least, in the history of a group


def system_of(**layout):
    models = [
        scene.model(ID, kv_floor_tokens=FLOOR, **layout),
        harness.model(BESIDE, dtype="float32", kv_floor_tokens=FLOOR, decode_rows=8, prefill_rows=128),
    ]
    system = scene.Scene(models, atn=2, observe=True)
    states = system.folder / "states"
    states.mkdir()
    system.env |= {
        # What SGLang lacks on a CPU for data parallel attention; `xpool exec` adds the plugin to it.
        "SGLANG_PLUGINS": f"{server.HOOKS_PLUGIN},xpool_rank_hooks",
        "PYTHONPATH": str(server.HOOKS),
        "XPOOL_TEST_KV_STATES": str(states),
        "XPOOL_TEST_KV_DEATH": str(system.folder / "death"),
    }
    return system


def expect_delivery(system, kind):
    code, out, error = system.run("plan", "--json")
    check(code == 0, f"xpool plan: {error}")
    found = json.loads(out)["models"][0]["delivery"]
    check(found == kind, f"the plan says delivery {found}, not {kind}")


class Moving(harness.Repeated):
    """While it is open, the KV Cache is trimmed every few steps, and its ceiling falls and rises."""

    def __init__(self, system):
        super().__init__(0.02)
        self.system, self.seen = system, []

    def once(self):
        # While the Instance is away there is nothing to trim.
        with contextlib.suppress(harness.Failed):
            turn = len(self.seen)
            if turn % 8 == 7:
                self.system.kv_do("set", ID, "--ceiling", LOW_CEILING if turn % 16 == 7 else CEILING)
            self.system.kv_do("trim", ID)
            self.seen.append(tuple(group["backed"]["tokens"] for group in self.system.kv(ID)))


def long_prompts():
    """Some begin alike."""
    vocabulary = probe.vocabulary(harness.TALES)
    alike = probe.prompt(9, SHARED, vocabulary)
    ends = [probe.prompt(seed, LONG - SHARED, vocabulary) for seed in (3, 4)]
    return [probe.prompt(1, LONG, vocabulary), *(alike + end for end in ends)]


def moving_requests(system):
    """`requests`, and longer ones that need more than the floor, while the KV Caches shrink and grow."""
    long = long_prompts()
    wanted = [system.generate(BESIDE, ids, 16) for ids in long]
    before = system.kv(ID)
    with Moving(system) as moving:
        requests(system)
        for _ in range(2):
            got = harness.together([lambda ids=ids: system.generate(ID, ids, 16) for ids in long * 2])
            check(got == wanted * 2, "other tokens for long prompts while the KV Cache moves")
    system.kv_do("set", ID, "--ceiling", CEILING)
    for number, (old, group) in enumerate(zip(before, system.kv(ID), strict=True)):
        seen, grants = {backed[number] for backed in moving.seen}, group["grants"] - old["grants"]
        check(grants >= GRANTS and max(seen) > min(seen), f"the KV Cache did not move: {seen}, {old}, {group}")
        print(f"     KV group {number}: {grants} grants between {len(moving.seen)} trims, "
              f"{min(seen)} to {max(seen)} tokens", flush=True)
    kv_ranks.books(system)


def same_states(system):
    """Tensor parallel ranks had the same slots, prefix caches and requests at the beginning of every step."""
    lines = {}
    for pid in system.schedulers(ID):
        (file,) = (system.folder / "states").glob(f"*.{pid}")
        lines[file.name] = file.read_text().splitlines()
    one, other = lines.values()
    count = min(len(one), len(other)) - 1  # the last one may be half written
    check(count > 100, f"{count} steps were written down")
    first = next((i for i in range(count) if one[i] != other[i]), None)
    check(first is None, f"the ranks part: {first and [one[first], other[first]]} of {list(lines)}")
    print(f"     {count} states of both ranks are the same", flush=True)


def death(system, rank, point):
    """`rank` dies at `point` of an operation, amid requests."""
    long, file = long_prompts(), system.folder / "death"
    want = system.generate(BESIDE, long[0], 16)
    pids, stop, wrong = system.tree(ID), threading.Event(), []

    def ask(ids):
        while not stop.is_set():
            with contextlib.suppress(OSError, harness.Failed, harness.http.client.HTTPException):
                system.generate(ID, ids, 16, 20)

    def ask_beside():
        while not stop.is_set():
            if (got := system.generate(BESIDE, long[0], 16)) != want:
                wrong.append(got)

    threads = [threading.Thread(target=ask, args=(ids,)) for ids in long] + [threading.Thread(target=ask_beside)]
    file.write_text(f"{rank} {point}")
    with Moving(system):
        for thread in threads:
            thread.start()
        try:
            system.expect_dead(pids, 2 * scene.DEATH_SECONDS, f"kill -9 of rank {rank} at {point}")
            check((system.folder / "death.done").exists(), f"rank {rank} did not come to {point}, and yet it ended")
            wait_until(lambda: all(group["state"] == "absent" for group in system.kv(ID)), 10, "the bytes are back")
        finally:
            stop.set()
            for thread in threads:
                thread.join(120)
    os.remove(system.folder / "death.done")
    check(not wrong, f"the native Instance is not exact: {wrong}")
    check(all(group["backed"]["bytes"] == 0 for group in system.kv(ID)), f"it still holds memory: {system.kv(ID)}")
    kv_ranks.books(system)
    system.kv_do("set", ID, "--ceiling", CEILING)
    check(system.generate(BESIDE, long[0], 16) == want, "the native Instance is not exact afterwards")
    print(f"     rank {rank} died at {point}: the native Instance goes on, the bytes are back", flush=True)


def deaths(system, first, second, same=lambda system: None):
    """One as SGLang works on a CPU; the Instance comes back with overlapped steps and dies once more."""
    death(system, *first)
    system.env["XPOOL_TEST_OVERLAP"] = "1"
    for victim in [(rank, point) for point in POINTS for rank in (0, 1)] if WHOLE else [second]:
        system.again(ID)
        check("disable_overlap_schedule=False" in system.log(), "steps do not overlap")
        moving_requests(system)
        same(system)
        death(system, *victim)


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
    found = {role: [r for r in all_of_it if r["model"] == ID] for role, all_of_it in system.trace().items()}
    ranks = {rank: [r for r in found["rank"] if r["rank"] == rank] for rank in (0, 1)}
    check(len(ranks[0]) == len(ranks[1]) > 0, f"{len(ranks[0])} and {len(ranks[1])} records of the two ranks")
    check(len(found["atnagent"]) == 2 * len(ranks[0]), f"{len(found['atnagent'])} records of the AtnAgents")
    check(len(found["ffnagent"]) == len(ranks[0]), f"{len(found['ffnagent'])} records of the FfnAgent")
    return system.entry(ID)["layers"], ranks, found["atnagent"], found["ffnagent"]


def tensor_parallel():
    with system_of(attention_tp=2) as system:
        expect_delivery(system, "replicated-complete")
        system.start()
        moving_requests(system)
        same_states(system)
        layers, ranks, _, ffn = records(system)
        for i, (one, other, executed) in enumerate(zip(ranks[0], ranks[1], ffn, strict=True)):
            rows = {one["rows"], other["rows"], executed["rows"]}
            check(len(rows) == 1, f"record {i}: the ranks hand in the same rows, executed once: {rows}")
            check(one["layer"] == other["layer"] == executed["layer"] == i % layers, f"record {i}: layers")
        scene.check_no_broken_plugin(system.log())
        print(f"     {len(ffn) // layers} steps, up to {max(r['rows'] for r in ffn)} rows", flush=True)
        deaths(system, (1, "shrink.emptied"), (0, "grow.mapped"), same_states)
        scene.check_no_broken_plugin(system.log())
        system.stop()


def data_parallel():
    with system_of(attention_dp=2) as system:
        expect_delivery(system, "single-complete")
        system.start()
        moving_requests(system)
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
        deaths(system, (0, "shrink.released"), (1, "grow.exposed"))
        scene.check_no_broken_plugin(system.log())
        system.stop()


if __name__ == "__main__":
    scene.main(tensor_parallel, data_parallel)
