#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""One family under SGLang with CrossPool, against SGLang alone, in one start of the system.

usage: family.py FAMILY

- The same greedy tokens in every case of the probe: lengths 1 to 300, a batch, prefix reuse, chunked
  prefill, a stream; and the AtnAgent and FfnAgent counted every layer of every step.
- A client that disconnects frees its request; the prefix cache can be flushed.
- A token id outside the vocabulary is a 400, no more.
- With the FFN's output zeroed fewer than a fifth of the tokens stay.
- The FFN is not in Python: no SGLang process maps the checkpoint or holds FFN weights in its memory; torch's
  profiler sees nothing but an allocation inside the shim; one weight changed in the FfnAgent changes the
  tokens, and putting it back brings them back.
- The KV Cache's memory moves: what the kernel counts falls when it is given back; and the same tokens come
  while it shrinks and grows every few steps (two families: MHA and MLA). In one family it is a fixed share.
- Observers: the records of rank, AtnAgent and FfnAgent tell the same story.
"""

import gzip
import json
import struct
import sys
import threading
import time

import checkpoints
import harness
import probe
import scene
import server
import vanilla
from harness import check, wait_until

ID = "probed"
MOST_AGREEMENT = 0.2
# Fewer cases where only a difference is wanted.
SOME = ("alone-5", "alone-64", "alone-200", "batch-31", "stream")
# 30 times the largest weight: it cannot go unnoticed.
CHANGED = struct.pack("<f", 30.0)
SEARCHED = 8
PROFILED_TOKENS = 4
# What the shim may do in torch: make its output and, where it must, its input contiguous.
# One of each kind of KV pool.
ELASTIC = ("qwen3-moe", "deepseek-v2")
# Here every model keeps its share.
STATIC = ("llama",)
ROUNDS = 6  # of probes, at most, until the KV Cache has moved often enough
TRIM_SECONDS = 0.02
LONG_TOKENS = 1200
ALLOWED = ("aten::empty", "aten::contiguous", "aten::clone", "aten::copy_")


def tokens(system, vocab, names=SOME):
    cases = probe.prompts(vocab)
    return {name: {"tokens": system.generate(ID, cases[name], probe.NEW_TOKENS)} for name in names}


def expect_tokens(found, truth, what):
    wrong = [name for name, one in found.items() if one["tokens"] != truth[name]["tokens"]]
    check(not wrong, f"{what}: other tokens in {wrong}")


def same_tokens(system, truth, vocab):
    before = counters(system)
    found = probe.probe(system.gateway, vocab, ID)
    wrong = probe.check_probe(found) + probe.compare(truth, found)
    check(not wrong, "; ".join(wrong))
    layers = system.entry(ID)["layers"]
    after = counters(system)
    calls = {key: after[key] - before[key] for key in after}
    check(calls["attention"] == calls["ffn"] == calls["model"], f"the counters differ: {calls}")
    check(calls["ffn"] > 0 and calls["ffn"] % layers == 0, f"{calls['ffn']} Invocations in {layers} layers")
    print(f"     {len(found)} cases with SGLang's tokens, {calls['ffn'] // layers} steps of {layers} layers",
          flush=True)


def counters(system):
    state = system.state()
    found = {agent["role"]: agent["counters"]["submissions"] for agent in state["agents"]}
    return {**found, "model": state["models"][0]["invocations"]}


def abort_and_flush(system, truth, vocab):
    prompt = probe.prompts(vocab)["prefix-first"]
    stream = system.stream(ID, prompt, 1500)
    stream.wait(4)
    wait_until(lambda: system.running(ID) == 1, 10, "SGLang says that one request runs", 0.2)
    stream.close()
    wait_until(lambda: system.running(ID) == 0, 20, "SGLang let go of the request whose client went away", 0.2)
    stream.thread.join(10)
    check(len(stream.ids) < 1500, "the stream had already ended")
    cached = system.generate_full(ID, prompt, 1)["meta_info"]["cached_tokens"]
    check(cached >= probe.PREFIX, f"only {cached} tokens came from the prefix cache before the flush")
    system.flush(ID)
    answer = system.generate_full(ID, prompt, probe.NEW_TOKENS)
    check(answer["meta_info"]["cached_tokens"] == 0, "the prefix cache is not empty after the flush")
    check(answer["output_ids"] == truth["prefix-first"]["tokens"], "other tokens after the flush")


def ids_outside_the_vocabulary(system, truth, vocab):
    """One wrong request is its sender's mistake, not the end of the server."""
    for ids in ([vocab], [99999999], [-1], [1, 2, vocab]):
        system.post("/v1/completions", {"model": ID, "prompt": ids, "max_tokens": 4}, expect=400)
        system.post("/generate", {"model": ID, "input_ids": ids, "sampling_params": {"max_new_tokens": 4}}, expect=400)
    system.post(
        "/generate",
        {"model": ID, "input_ids": [[1, 2, 3], [vocab]], "sampling_params": {"max_new_tokens": 4}},
        expect=400,
    )
    system.post("/generate", {"model": ID, "input_ids": [[]], "sampling_params": {"max_new_tokens": 4}}, expect=400)
    for wrong in ({"top_logprobs_num": vocab + 1}, {"logprob_start_len": -5}, {"token_ids_logprob": [vocab]}):
        body = {"model": ID, "input_ids": [1], "sampling_params": {"max_new_tokens": 4}, "return_logprob": True}
        system.post("/generate", {**body, **wrong}, expect=400)
    # SGLang would make all of these requests first.
    for body in ({"n": 1 << 31}, {"best_of": 1, "n": 129}):
        system.post("/v1/completions", {"model": ID, "prompt": [1, 2, 3], "max_tokens": 4, **body}, expect=400)
    system.post("/generate", {"model": ID, "input_ids": [1], "sampling_params": {"n": 1 << 31}}, expect=400)
    expect_tokens(tokens(system, vocab, SOME[:1]), truth, "requests with ids outside the vocabulary")


def zeroed(system, truth, vocab):
    system.zero.touch()
    try:
        system.flush(ID)
        found = tokens(system, vocab)
    finally:
        system.zero.unlink()
    system.flush(ID)
    agree = probe.agreement(found, truth)
    check(agree < MOST_AGREEMENT, f"{agree:.0%} of the tokens stay without the FFN")
    expect_tokens(tokens(system, vocab, SOME[:2]), truth, "the FFN back")
    print(f"     {agree:.0%} of the tokens stay with the FFN's output zeroed", flush=True)


def not_in_python(system, path):
    """Maps and memory of all SGLang processes."""
    tensors = scene.Tensors(path)
    names = tensors.ffn()
    names = names[:: max(1, len(names) // SEARCHED)][:SEARCHED]
    here = {form: name for name in names for form in (tensors.row(name, 1, 8), tensors.panel(name, 0, 3))}
    agent = scene.search(system.pid("ffnagent"), here, lambda name: "xpool-ffn:" in name)
    held = {here[form] for form in agent}
    check(held == set(names), f"not found in the FfnAgent: {set(names) - held}")
    # That the search finds what is there is shown with an attention weight.
    known = next(name for name in tensors.found if name.endswith("self_attn.o_proj.weight"))
    attention = tensors.row(known, 1, 8)
    began, seen = time.monotonic(), 0
    for pid in system.tree(ID):
        for *_, name in scene.regions(pid):
            check(str(path) not in name and not name.endswith(".safetensors"), f"pid {pid} maps {name}")
            check("xpool-ffn:" not in name, f"pid {pid} maps FFN weights: {name}")
        found = scene.search(pid, [*here, attention])
        seen += attention in found
        check(not set(found) & set(here), f"pid {pid} holds weights of {[here[f] for f in found if f in here]}")
    check(seen > 0, "the search does not even find an attention weight in SGLang")
    print(f"     {len(names)} FFN tensors: in the FfnAgent, in none of SGLang's {len(system.tree(ID))} processes "
          f"({time.monotonic() - began:.0f} s)", flush=True)


def changed_weight(system, truth, vocab, path):
    """One weight of the FfnAgent's memory, and nothing else anywhere."""
    tensors = scene.Tensors(path)
    down = [name for name in tensors.ffn() if "down_proj" in name]
    # A shared expert or a dense layer, where there is one, works for every token.
    name = next((n for n in down if "shared" in n or ".experts." not in n), down[0])
    forms = [tensors.panel(name), tensors.row(name)]
    pid = system.pid("ffnagent")
    place = scene.search(pid, forms, lambda region: "xpool-ffn:" in region)
    check(len(place) == 1, f"{name}: found in {len(place)} forms in the FfnAgent")
    address = next(iter(place.values()))
    scene.poke(pid, address, CHANGED)
    try:
        system.flush(ID)
        other = tokens(system, vocab)
    finally:
        scene.poke(pid, address, forms[0][:4])
    changed = [n for n, one in other.items() if one["tokens"] != truth[n]["tokens"]]
    check(changed, f"a changed weight of {name} in the FfnAgent changes no token")
    system.flush(ID)
    expect_tokens(tokens(system, vocab), truth, f"{name} put back")
    print(f"     one weight of {name} changed in the FfnAgent: other tokens in {len(changed)} of {len(other)} cases",
          flush=True)


def profiled(system, vocab):
    """What torch sees inside the shim."""
    folder = system.folder / "profile"
    # The profiler knows only threads that it started with; one request wakes them all.
    options = {"output_dir": str(folder), "activities": ["CPU"], "with_stack": False, "record_shapes": False}
    status, _, text = harness.http_request(system.direct(ID) + "/start_profile", "POST", options, 60)
    check(status == 200, f"/start_profile: {status} {text!r}")
    system.generate(ID, probe.prompt(77, 40, vocab), PROFILED_TOKENS)
    status, _, text = harness.http_request(system.direct(ID) + "/stop_profile", "POST", {}, 120)
    check(status == 200, f"/stop_profile: {status} {text!r}")

    def finished():
        for file in folder.glob("**/*.trace.json.gz"):
            try:
                return json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]
            except (EOFError, OSError, ValueError):
                pass  # still being written
        return None

    events = wait_until(finished, 60, "the profiler's trace is there", 0.2)
    events = [e for e in events if e.get("ph") == "X" and e.get("cat") == "cpu_op"]
    shims = [e for e in events if e["name"] == "xpool::ffn_shim"]
    layers = system.entry(ID)["layers"]
    check(len(shims) == layers * PROFILED_TOKENS, f"{len(shims)} shims in {PROFILED_TOKENS} steps of {layers} layers")
    inside = set()
    for shim in shims:
        end = shim["ts"] + shim["dur"]
        inside |= {e["name"] for e in events
                   if e is not shim and e["tid"] == shim["tid"] and shim["ts"] <= e["ts"] < end}
    outside = {e["name"] for e in events} - inside
    check("aten::mm" in outside or "aten::addmm" in outside or "aten::linear" in outside,
          "the profiler saw no matrix product at all, not even attention's")
    wrong = [name for name in inside if not name.startswith(ALLOWED)]
    check(not wrong, f"inside the shim torch runs {wrong}")
    print(f"     the profiler saw {len(shims)} shims, inside them only {sorted(inside)}", flush=True)


def elastic(system, truth, vocab):
    """The KV Cache shrinks to what live requests need and grows again by their demands, all the time."""
    wait_until(lambda: system.running(ID) == 0, 10, "no request runs", 0.2)
    system.generate(ID, probe.prompt(78, LONG_TOKENS, vocab), 1)
    (before,) = system.kv(ID)
    resident = system.kv_resident(ID)
    check(before["backed"]["tokens"] > LONG_TOKENS, f"a long prompt has no memory: {before}")
    token_bytes = before["backed"]["bytes"] // before["backed"]["tokens"]
    check(LONG_TOKENS * token_bytes <= resident <= before["backed"]["bytes"], f"{resident} bytes are resident: {before}")
    system.kv_do("trim", ID)

    def floor():
        (group,) = system.kv(ID)
        return group["backed"]["tokens"] <= group["floor"]["tokens"] and group["backed"]["bytes"]

    at_floor = wait_until(floor, 2, "the KV Cache is at its floor", 0.05)
    left = system.kv_resident(ID)
    check(left <= at_floor, f"{left} bytes are resident of {at_floor} at the floor")
    (trimmed,) = system.kv(ID)
    stop, trims = threading.Event(), []

    def trim():
        while not stop.wait(TRIM_SECONDS):
            system.kv_do("trim", ID)
            trims.append(system.kv_resident(ID))

    thread = threading.Thread(target=trim)
    thread.start()
    grants = 0
    try:
        for _ in range(ROUNDS):  # a busy machine trims seldom
            wrong = probe.compare(truth, probe.probe(system.gateway, vocab, ID))
            check(not wrong, "; ".join(wrong))
            (after,) = system.kv(ID)
            grants = after["grants"] - trimmed["grants"]
            if grants > 10:
                break
    finally:
        stop.set()
        thread.join(120)
    check(grants > 10 and max(trims) > min(trims), f"{grants} grants, {set(trims)} bytes in {len(trims)} trims")
    wait_until(lambda: system.running(ID) == 0, 10, "no request is left over", 0.2)
    print(f"     KV Cache: {resident >> 10} KiB resident with {LONG_TOKENS} tokens, {left >> 10} KiB at the floor; "
          f"the same tokens during {len(trims)} trims and {grants} grants, "
          f"{min(trims) >> 10} to {max(trims) >> 10} KiB", flush=True)


def fixed(system):
    """scheduler.kv_policy = "static": all of the share has memory from the start, for good."""
    (group,) = system.kv(ID)
    share = group["ceiling"]
    check(not group["elastic"] and group["backed"] == group["floor"] == share, f"not a fixed share: {group}")
    check(group["grants"] == 0, f"a fixed share was changed: {group}")
    resident = system.kv_resident(ID)
    check(0 < resident <= share["bytes"], f"{resident} bytes are resident: {group}")


def check_observers(system):
    """After all requests: what rank, AtnAgent and FfnAgent wrote down, joined."""
    code, text, _ = system.run("trace", "--help")
    check(code == 0, f"xpool trace --help: {code}")
    found = system.trace()
    layers = system.entry(ID)["layers"]
    rank, atn, ffn = found["rank"], found["atnagent"], found["ffnagent"]
    check(len(rank) > 0 and len(rank) == len(atn) == len(ffn), f"records: {[len(r) for r in found.values()]}")
    check(len(rank) % layers == 0, f"{len(rank)} records in {layers} layers")
    templates = {}
    for number, (one, carried, executed) in enumerate(zip(rank, atn, ffn, strict=True)):
        where = f"record {number}: {one} {carried} {executed}"
        check(one["layer"] == carried["layer"] == executed["layer"] == number % layers, where)
        check(one["rows"] == carried["rows"] == executed["rows"] > 0, where)
        check(one["execution"] == "eager" and one["step"] in ("decode", "prefill") and one["step"] == carried["step"],
              where)
        check(one["model"] == carried["model"] == executed["model"] == ID, where)
        check(carried["request"] == one["sequence"] == number + 1, where)
        check(carried["lane"] == executed["lane"], where)
        check(executed["capacity"] >= executed["rows"], where)
        check(min(one["ns"], carried["ns"]) >= executed["ns"] > 0, where)
        check(all(field in text for field in {*one, *carried, *executed} - {"pid"}), f"a field is not in --help: {where}")
        templates.setdefault(executed["graph_template"], set()).add(executed["layer"])
    steps = [rank[i] for i in range(0, len(rank), layers)]
    for i, first in enumerate(steps):
        check(all(one["rows"] == first["rows"] for one in rank[i * layers : (i + 1) * layers]), f"rows of step {i}")
    rows = {kind: [s["rows"] for s in steps if s["step"] == kind] for kind in ("decode", "prefill")}
    check(max(rows["prefill"]) == server.CHUNK_ROWS, f"no prefill filled a chunk: {max(rows['prefill'])} rows")
    check(max(rows["decode"]) == len(probe.BATCH), f"the batch was never decoded together: {max(rows['decode'])}")
    print(f"     observers: {len(steps)} steps, prefills of {min(rows['prefill'])} to {max(rows['prefill'])} rows, "
          f"decodes of up to {max(rows['decode'])}, layers by GraphTemplate {[sorted(t) for t in templates.values()]}",
          flush=True)


def check_family(family):
    path = checkpoints.checkpoint(family)
    truth, vocab = vanilla.results(path), probe.vocabulary(path)
    # So little that nearly every request needs more.
    floor = {"kv_floor_tokens": 128} if family in ELASTIC else {}
    settings = '[scheduler]\nkv_policy = "static"' if family in STATIC else ""
    with scene.Scene([scene.model(ID, path, **floor)], observe=True, settings=settings) as system:
        system.start()
        steps = {
            "tokens": lambda: same_tokens(system, truth, vocab),
            "abort and flush": lambda: abort_and_flush(system, truth, vocab),
            "ids outside the vocabulary": lambda: ids_outside_the_vocabulary(system, truth, vocab),
            "the FFN is not in Python": lambda: not_in_python(system, path),
            "profile": lambda: profiled(system, vocab),
            "changed weight": lambda: changed_weight(system, truth, vocab, path),
            "zeroed FFN": lambda: zeroed(system, truth, vocab),
            **({"elastic": lambda: elastic(system, truth, vocab)} if family in ELASTIC else {}),
            **({"fixed": lambda: fixed(system)} if family in STATIC else {}),
            "observers": lambda: check_observers(system),
            "log": lambda: scene.check_no_broken_plugin(system.log()),
        }
        # A start is dear: what fails does not keep the others from being looked at.
        wrong = []
        for name, step in steps.items():
            began = time.monotonic()
            try:
                step()
            except harness.Failed as failed:
                wrong.append(f"{name}: {failed}")
                print(f"     FAILS {name}: {failed}", flush=True)
            print(f"     {name}: {time.monotonic() - began:.1f} s", flush=True)
        check(not wrong, "; ".join(wrong))
        system.stop()


def main():
    family = sys.argv[1] if len(sys.argv) > 1 else None
    if family not in checkpoints.FAMILIES:
        sys.exit(f"usage: family.py {'|'.join(checkpoints.FAMILIES)}")

    def one():
        check_family(family)

    one.__name__ = family
    scene.main(one)


if __name__ == "__main__":
    main()
