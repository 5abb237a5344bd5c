# SPDX-License-Identifier: MIT
"""kill -9 of any process. An Instance: the others go on, exact, and it may come back. Of the gateway or the
daemon, and with deadlines.reform = 0 of an agent (test_generations has the other case): everything ends
within a second, with the one canonical failure and a non-zero exit. Of everything at once: nothing is left
and the next start works."""

import os
import signal
import time

import harness
import views

MODELS = ("left", "right")
# Nearly the whole context, so that the streams are in flight when the signal comes.
LENGTH = 980


def system_of_two(**more):
    return harness.System([harness.model(m, dtype="float32") for m in MODELS], atn=2, ffn=2, **more)


def cut_off(stream):
    """The client sees that its stream broke, unless it had all of it before."""
    stream.thread.join(5)
    harness.check(not stream.thread.is_alive(), "a client's stream hangs after the end")
    whole = len(stream.ids) == LENGTH
    harness.check(whole or stream.error or not stream.done, "a broken stream ended as if it were complete")


def instance():
    prompt = harness.golden()[0]
    with system_of_two() as system:
        system.start(120)
        want = system.generate("right", prompt["ids"], LENGTH, 120)

        def begin():
            streams = [system.stream(m, prompt["ids"], LENGTH, 60) for m in MODELS]
            for stream in streams:
                stream.wait(2)
            return streams

        for attempt in range(3):
            # In the first attempts the Instance dies for certain in the middle of an Invocation: the
            # FfnAgents stand still meanwhile. Then once at any moment.
            victim, survivor = system.hold(begin) if attempt < 2 else begin()
            os.kill(system.pid("serve left"), signal.SIGKILL)
            if attempt < 2:
                time.sleep(0.2)
                system.go_on()
            harness.check(survivor.result(120) == want, "the other Instance's tokens changed")
            harness.check(system.up.poll() is None, "xpool up ended although only an Instance died")
            harness.check(
                system.generate("right", prompt["ids"], 48) == prompt["greedy_ids"], "a new request is not exact"
            )
            cut_off(victim)
            system.post("/generate", {"model": "left", "input_ids": prompt["ids"]}, 20, expect=503)
            # Put back by hand, it serves again.
            again = system.launch("serve", "left", log=system.folder / f"log.again{attempt}")
            harness.wait_until(lambda: "left" in system.list_models(), 60, "the Instance is back")
            system.hand = [again]
            harness.check(
                system.generate("left", prompt["ids"], 48, 60) == prompt["greedy_ids"], "not exact after its return"
            )
        system.hand = []
        system.stop()


def answers(system, identifier, ids):
    """Whether a token is to be had. That the model is listed may still be said of the Instance that has died."""
    body = {"model": identifier, "input_ids": ids, "sampling_params": {"temperature": 0, "max_new_tokens": 1}}
    return harness.http_request(system.gateway + "/generate", "POST", body, 60)[0] == 200


def restart_at_once():
    """An Instance that is started in the moment of its predecessor's kill waits for that end by itself, and so
    does one that comes while the predecessor drains."""
    prompt = harness.golden()[0]
    with system_of_two() as system:
        system.start(120)
        for attempt in range(6):
            victim = system.stream("left", prompt["ids"], LENGTH, 60)
            victim.wait(2)
            pid = system.pid("serve left")
            os.kill(pid, signal.SIGTERM if attempt == 5 else signal.SIGKILL)
            again = system.launch("serve", "left", log=system.folder / f"log.again{attempt}")
            harness.wait_until(
                lambda: pid not in system.processes() and answers(system, "left", prompt["ids"]),
                60,
                "the Instance is back",
            )
            system.hand = [again]
            harness.check(
                system.generate("left", prompt["ids"], 48, 60) == prompt["greedy_ids"], "not exact after its return"
            )
            cut_off(victim)
        system.hand = []
        system.stop()


def ends_all(role):
    """kill -9 of this role under load: the whole system ends within a second with one failure."""
    prompt = harness.golden()[0]
    with system_of_two(settings="[deadlines]\nreform = 0") as system:
        system.start(120)
        streams = [system.stream(m, prompt["ids"], LENGTH, 60) for m in MODELS]
        for stream in streams:
            stream.wait(2)
        pid = system.pid(role)
        names = system.roles()
        others = {p: n for n, p in names.items() if p != pid and n != "up"}
        began = time.monotonic()
        os.kill(pid, signal.SIGKILL)
        harness.wait_until(lambda: not system.processes(), 20, f"everything ends (left: {system.roles()})", 0.005)
        took = time.monotonic() - began
        system.expect_end(None)
        print(f"     {role}: {len(others)} other processes ended within {took * 1000:.0f} ms")
        harness.check(took < 1.0 * harness.SLOW, f"it took {took:.2f} s until everything had ended")
        views.check_one_failure(system, role)
        for stream in streams:
            cut_off(stream)


def atnagent():
    ends_all("atnagent cpu:1")


def ffnagent_coordinator():
    ends_all("ffnagent cpu:2")


def ffnagent_other():
    ends_all("ffnagent cpu:3")


def gateway():
    ends_all("gateway")


def daemon():
    ends_all("daemon")


def up():
    """`up` itself: its children die with it."""
    with system_of_two() as system:
        system.start(120)
        began = time.monotonic()
        os.kill(system.up.pid, signal.SIGKILL)
        harness.wait_until(lambda: not system.processes(), 20, f"everything ends (left: {system.roles()})", 0.005)
        harness.check(time.monotonic() - began < 1.0 * harness.SLOW, "it took longer than a second")
        system.up.wait(5)


def everything():
    """All at once, then the same configuration starts again, on the same ports and socket path."""
    prompt = harness.golden()[0]
    with system_of_two() as system:
        for attempt in range(3):
            system.start(120)
            streams = [system.stream(m, prompt["ids"], LENGTH, 60) for m in MODELS]
            streams[0].wait(2)
            for pid in system.processes():
                os.kill(pid, signal.SIGKILL)
            system.up.wait(10)
            system.expect_nothing_left()
            for stream in streams:
                stream.thread.join(5)
        system.start(120)
        for m in MODELS:
            harness.check(system.generate(m, prompt["ids"], 48) == prompt["greedy_ids"], "not exact after restart")
        system.stop()


def during_start():
    """Each role killed as soon as it appears, before the system is ready: no hang, nothing left."""
    for role in ("daemon", "ffnagent cpu:3", "atnagent cpu:0", "serve right", "gateway"):
        with system_of_two() as system:
            system.up = system.launch("up")
            pid = harness.wait_until(lambda: system.roles().get(role), 20, f"{role} appears", 0.002)
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
            if role.startswith("serve"):
                # Without this Instance the system cannot become ready; `up` may end or wait for it.
                time.sleep(1)
                if system.up.poll() is None:
                    system.interrupt()
                    system.up.wait(20 * harness.SLOW)
            else:
                system.up.wait(20 * harness.SLOW)
                harness.check(system.up.returncode != 0, f"xpool up ended with 0 after {role} died")
            system.expect_nothing_left()


if __name__ == "__main__":
    harness.main(
        instance, restart_at_once, atnagent, ffnagent_coordinator, ffnagent_other, gateway, daemon, up, everything, during_start
    )
