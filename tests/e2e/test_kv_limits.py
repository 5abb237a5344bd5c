# SPDX-License-Identifier: MIT
"""Elastic KV at its limits: more at once than any pool holds, requests that nobody waits for any more,
trims without pause, floors and ceilings that change under requests. Nothing is wrong, nothing waits for
ever, and what can never be served says so."""

import json
import os
import signal
import threading
import time

import harness
from test_kv import LENGTH, MODELS, PROMPT, small_pool
from test_kv_kill import Traffic, answers, books, shown


def groups(system):
    return {group["model"]: group for group in shown(system)["groups"]}


def set_sizes(system, model, **sizes):
    code, _, err = system.run("kv", "set", model, *(f"--{name}={value}" for name, value in sizes.items()))
    harness.check(code == 0, f"kv set {model} {sizes}: {err}")


def waiting(system, model):
    return next(m["engine"]["waiting"] for m in system.state()["models"] if m["id"] == model)


def finish(stream):
    return stream.events[-1]["meta_info"]["finish_reason"]["type"]


def pages(tokens):
    return tokens // 16 * 16


def crowd(system, wants):
    """Twenty requests, of which the pool holds one."""
    got = harness.together([lambda m=MODELS[i % 3]: system.generate(m, PROMPT, LENGTH, 60) for i in range(20)])
    harness.check(got == [wants[900]] * 20, "a request of a crowd is not exact")


def gone_while_waiting(system, wants):
    """What nobody waits for any more is asked for no longer."""
    stream = system.stream("a", PROMPT, LENGTH)
    stream.wait(1)
    waiting = [system.stream("b", PROMPT[i:] + PROMPT[:i], LENGTH) for i in range(1, 11)]
    harness.wait_until(lambda: groups(system)["b"]["demand"] or stream.done, 5, "b asks for memory", 0.0)
    for other in waiting:
        other.close()
    harness.check(stream.result() == wants[900], "a's tokens changed")
    harness.wait_until(lambda: groups(system)["b"]["demand"] is None, 5, "b asks for nothing more")
    harness.check(system.generate("b", PROMPT, LENGTH) == wants[900], "b is not exact afterwards")


def trims(system, wants):
    with Traffic(system, wants, threads=1) as traffic:
        end = time.monotonic() + 1.5
        while time.monotonic() < end:
            system.run("kv", "trim", "--all")
        traffic.goes_on(MODELS)


def lowered_ceiling(system, wants):
    """Below what a request holds: it ends as at the end of a context, with the tokens it has."""
    ceiling = groups(system)["a"]["ceiling"]["tokens"]
    stream = system.stream("a", PROMPT, LENGTH)
    stream.wait(5)
    set_sizes(system, "a", ceiling=304)
    got = stream.result()
    harness.check(got == wants[900][: len(got)] and finish(stream) == "length", "a live request was cut wrongly")
    harness.wait_until(lambda: groups(system)["a"]["backed"]["tokens"] <= 304, 5, "a is below its ceiling")
    set_sizes(system, "a", ceiling=ceiling)
    harness.check(system.generate("a", PROMPT, LENGTH) == wants[900], "not exact with the ceiling of before")


def lowered_under_those_that_wait(system, wants):
    """Below their prompts: 400 as for a prompt that was too long from the start, and it says what to change."""
    ceiling = groups(system)["a"]["ceiling"]["tokens"]
    held = system.stream("b", PROMPT, LENGTH)
    held.wait(1)
    os.kill(system.pid("serve b"), signal.SIGSTOP)
    body = {"model": "a", "prompt": PROMPT, "max_tokens": LENGTH}
    answers_of_a = []

    def ask(stream):
        answers_of_a.append(
            harness.http_request(system.gateway + "/v1/completions", "POST", {**body, "stream": stream}, timeout=20)
        )

    threads = [threading.Thread(target=ask, args=(stream,)) for stream in (False, True)]
    for thread in threads:
        thread.start()
    try:
        harness.wait_until(lambda: groups(system)["a"]["demand"], 5, "a asks for memory")
        harness.wait_until(lambda: waiting(system, "a") == 2, 5, "both wait")
        set_sizes(system, "a", ceiling=304)
        for thread in threads:
            thread.join(10)
        harness.check(not any(thread.is_alive() for thread in threads), "one waits for what never comes")
    finally:
        os.kill(system.pid("serve b"), signal.SIGCONT)
    for status, _, data in answers_of_a:
        error = json.loads(data)["error"]
        harness.check(status == 400 and error["code"] == "context_length_exceeded", f"{status} {data[:300]!r}")
        harness.check("ceiling is now 304 tokens" in error["message"] and "--ceiling" in error["message"], error)
    harness.check(held.result() == wants[900], "b's tokens changed")
    set_sizes(system, "a", ceiling=ceiling)


def raised_floor(system, wants):
    """The floors of others leave too little for a request: it is refused, or ends with what it could get,
    instead of waiting for what never comes."""
    before = groups(system)
    pool = shown(system)["pools"][0]["bytes"]
    token = before["b"]["floor"]["bytes"] // before["b"]["floor"]["tokens"]
    # Room for the prompt in a, but not for all of its answer.
    set_sizes(system, "b", floor=pages(pool // token - 128 - len(PROMPT) - LENGTH // 2))
    harness.wait_until(lambda: groups(system)["b"]["demand"] is None, 5, "b has its floor")
    room = groups(system)["a"]["ceiling"]["tokens"]
    harness.check(len(PROMPT) < room < len(PROMPT) + LENGTH, f"a may hold {room} tokens")
    stream = system.stream("a", PROMPT, LENGTH)
    got = stream.result(10)
    harness.check(got == wants[900][: len(got)] and finish(stream) == "length", "not what there is room for")
    harness.check(len(got) > 10, f"only {len(got)} tokens")
    # No room for the prompt; one that waits is told too.
    held = system.stream("b", PROMPT, LENGTH)
    set_sizes(system, "b", floor=1008)
    body = {"model": "a", "input_ids": PROMPT, "sampling_params": {"max_new_tokens": LENGTH}}
    status, _, data = harness.http_request(system.gateway + "/generate", "POST", body, timeout=10)
    harness.check(status == 400 and (b"maximum context" in data or b"ceiling" in data), f"{status} {data[:200]!r}")
    harness.check(held.result() == wants[900], "b's tokens changed")
    set_sizes(system, "b", floor=before["b"]["floor"]["tokens"])
    harness.check(groups(system)["a"]["ceiling"] == before["a"]["ceiling"], "a's ceiling is as it was")
    harness.check(system.generate("a", PROMPT, LENGTH) == wants[900], "not exact afterwards")


def limits():
    system, _ = small_pool()
    with system:
        system.start(60)
        wants = answers(system)
        for scene in (crowd, gone_while_waiting, trims, lowered_ceiling, lowered_under_those_that_wait, raised_floor):
            scene(system, wants)
            harness.wait_until(lambda: all(g["demand"] is None for g in groups(system).values()), 5, "no demand is left")
            books(system)
        system.stop()


if __name__ == "__main__":
    harness.main(limits)
