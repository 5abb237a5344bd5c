#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Deaths under load, in a system of one SGLang and one native Instance of the same checkpoint.

An end of SGLang, however it comes, is its own: the native tokens stay exact, the model is reported down
with the reason, its leases are taken back, `xpool serve` brings it back. With deadlines.reform = 0 the end of
an agent is everybody's, at once and with the one canonical failure, which SGLang's log shows; by default both
streams go on in the next Generation, with the same tokens. An FfnAgent that stands still only
delays; past `deadlines.submission` it is a failure too, and SGLang does not hang in the C call.
"""

import os
import signal
import time

import harness
import scene
from harness import check, wait_until

SGLANG, NATIVE = "served", "native"
# Nearly the whole context, so that the streams are in flight when the signal comes.
LENGTH = 900
AGENT_DEATH_SECONDS = 10
SUBMISSION_SECONDS = 3
STILL_SECONDS = 2


def models():
    return [scene.model(SGLANG), scene.native(NATIVE)]


def cut_off(stream):
    """The client's stream has ended, and not as if it were complete."""
    stream.thread.join(20 * harness.SLOW)
    check(not stream.thread.is_alive(), "a client's stream hangs after the end")
    check(stream.error or not stream.done, "a broken stream ended as if it were complete")


def streams_of(system, prompt):
    """A stream of each Instance, both running."""
    streams = []
    for model in (SGLANG, NATIVE):  # one after the other: the native one is soon over
        streams.append(system.stream(model, prompt["ids"], LENGTH, 120))
        streams[-1].wait(3)
    return streams


def dies_alone(system, what, victim, number, want):
    """This signal to this process of SGLang in mid-stream; then the Instance is brought back."""
    prompt = harness.golden()[0]
    served, native = streams_of(system, prompt)
    tree = system.tree(SGLANG)
    others = {role: pid for role, pid in system.roles().items()}
    os.kill(victim, number)
    took = system.expect_dead(tree, scene.DEATH_SECONDS, what)
    reason = system.expect_down(SGLANG, 5, what)
    wait_until(lambda: system.arenas() == 1, 5, f"{what}: the AtnAgent has let go of the dead one's arena")
    print(f"     {what}: nothing of it left after {took:.1f} s; {reason!r}", flush=True)
    cut_off(served)
    check(native.result(120) == want, f"{what}: the native Instance's tokens changed")
    check(system.up.poll() is None, f"{what}: xpool up ended")
    for role, pid in others.items():
        check(role in system.roles() and system.roles()[role] == pid, f"{what}: {role} is another process")
    system.expect_idle(what)
    body = {"model": SGLANG, "input_ids": prompt["ids"]}
    system.post("/generate", body, 20, expect=503)
    system.golden(NATIVE)
    system.again(SGLANG)
    system.golden(SGLANG)


def drained(system, want):
    """SIGTERM to SGLang's main: it completes its stream and ends by itself."""
    prompt = harness.golden()[0]
    served, native = streams_of(system, prompt)
    tree = system.tree(SGLANG)
    os.kill(system.main(SGLANG), signal.SIGTERM)
    took = system.expect_dead(tree, scene.STOP_SECONDS, "SIGTERM")
    reason = system.expect_down(SGLANG, 5, "SIGTERM")
    wait_until(lambda: system.arenas() == 1, 5, "the AtnAgent has let go of the arena")
    check(served.result(30) == want, "SIGTERM: the stream was not completed")
    check(native.result(120) == want, "SIGTERM: the native Instance's tokens changed")
    print(f"     SIGTERM to main: drained, nothing of it left after {took:.1f} s; {reason!r}", flush=True)
    system.again(SGLANG)
    system.golden(SGLANG)


def stands_still(system, want):
    """A stopped FfnAgent delays, no more."""
    served, native = system.hold(lambda: streams_of(system, harness.golden()[0]))
    before = [len(served.ids), len(native.ids)]
    time.sleep(STILL_SECONDS)
    check([len(served.ids), len(native.ids)] == before, "tokens appeared although the FfnAgent stood still")
    system.go_on()
    check(served.result(120) == want and native.result(120) == want, "other tokens after the FfnAgent went on")


def ends_all(system, role, seconds, words):
    """The death of an agent in mid-stream, or that it stands still for good if `role` is None, ends everything
    with one canonical failure."""
    streams = system.hold(lambda: streams_of(system, harness.golden()[0]))
    began = time.monotonic()
    if role:
        os.kill(system.pid(role), signal.SIGKILL)
        system.go_on()
    wait_until(lambda: not system.processes(), seconds, f"everything ends (left: {system.roles()})")
    took = time.monotonic() - began
    system.expect_end(None)
    for process in system.hand[-1:]:  # the Instance that was brought back by hand last
        check(process.wait(5) != 0, "xpool serve ended with 0 after a failure")
    found = scene.failures(system.log())
    role = role or "an FfnAgent that stands still"
    check(len(found) == 1, f"{role}: canonical failures: {found}")
    text = found.pop()
    check(words in text, f"{role}: {words!r} is not in {text!r}")
    shown = [line for line in system.log().splitlines() if line.startswith("xpool: ") and text in line]
    check(shown, f"{role}: SGLang's log does not show {text!r}")
    print(f"     {role}: everything ended after {took:.1f} s; {text}", flush=True)
    for stream in streams:
        cut_off(stream)


def instance_and_atnagent():
    prompt = harness.golden()[0]
    with scene.Scene(models(), settings="[deadlines]\nreform = 0") as system:
        system.start()
        system.golden(SGLANG)
        check(system.arenas() == 2, f"the AtnAgent has {system.arenas()} arenas mapped, not one of each Instance")
        want = system.generate(NATIVE, prompt["ids"], LENGTH, 120)
        dies_alone(system, "kill -9 of the scheduler", system.schedulers(SGLANG)[0], signal.SIGKILL, want)
        dies_alone(system, "kill -9 of SGLang's main", system.main(SGLANG), signal.SIGKILL, want)
        drained(system, want)
        stands_still(system, want)
        ends_all(system, "atnagent", AGENT_DEATH_SECONDS, "cpu:0")


def ffnagent():
    with scene.Scene(models(), settings="[deadlines]\nreform = 0") as system:
        system.start()
        ends_all(system, "ffnagent", AGENT_DEATH_SECONDS, "cpu:1")


def generations():
    """kill -9 of an agent in mid-stream: SGLang's call waits for the next Generation."""
    with scene.Scene(models()) as system:
        system.start()
        prompt = harness.golden()[0]
        want = system.generate(NATIVE, prompt["ids"], LENGTH, 120)
        tree = system.tree(SGLANG)
        for number, role in ((2, "ffnagent"), (3, "atnagent")):
            streams = streams_of(system, prompt)
            os.kill(system.pid(role), signal.SIGKILL)
            for stream in streams:
                check(stream.result(120) == want, f"{role}: other tokens in the next Generation")
            wait_until(lambda n=number: system.state()["generation"] == n and system.is_ready(), 30, "READY again")
            system.golden(SGLANG)
        check(system.tree(SGLANG) == tree, "SGLang's processes are others now")
        system.stop(scene.STOP_SECONDS)


def deadline():
    with scene.Scene(models(), settings=f"[deadlines]\nreform = 0\nsubmission = {SUBMISSION_SECONDS}") as system:
        system.start()
        seconds = SUBMISSION_SECONDS + AGENT_DEATH_SECONDS
        ends_all(system, None, seconds, "no answer in")


if __name__ == "__main__":
    scene.main(instance_and_atnagent, ffnagent, deadline, generations)
