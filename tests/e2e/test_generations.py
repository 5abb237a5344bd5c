# SPDX-License-Identifier: MIT
"""kill -9 of an agent while clients stream: the Generation fails, the next one forms by itself, FFN
weights are taken over without reading, and the streams go on after a pause with the same tokens. Agents
run by hand are waited for. An agent that always dies, or for which none comes, is the end of everything."""

import contextlib
import json
import os
import pathlib
import re
import shutil
import signal
import tempfile
import threading
import time

import harness
import test_memory
import views

MODELS = ("left", "right")
# Each event of a stream carries all tokens so far: with many more, a test that cannot keep up on a loaded
# machine is dropped as a slow reader.
LENGTH = 400
FFN = "ffnagent cpu:2"


def system_of_two(settings="", **more):
    return harness.System(
        [harness.model(m, dtype="float32") for m in MODELS], atn=2, ffn=2, settings=settings, **more
    )


def generation(system):
    return system.state()["generation"]


def formed(system, number, seconds=60):
    """The Generation of that number is READY."""
    harness.wait_until(
        lambda: generation(system) >= number and system.is_ready(), seconds, f"Generation {number} is ready", 0.02
    )


def streams_of(system, prompt, count=5):
    streams = [system.stream(m, prompt["ids"], LENGTH, 120) for m in MODELS]
    for stream in streams:
        stream.wait(count)
    return streams


def longest_pause(stream):
    return max((b - a for a, b in zip(stream.times, stream.times[1:])), default=0.0)


def kill_in_flight(system, role, prompt, count=5):
    """Streams that are certainly open at the kill; the FfnAgents that remain stand still."""
    streams = system.hold(lambda: streams_of(system, prompt, count))
    os.kill(system.pid(role), signal.SIGKILL)
    return streams


def shards(system):
    """(bytes, inodes) of the weights' memory among the daemon's descriptors, which it must not map."""
    daemon, found = system.pid("daemon"), set()
    for entry in os.listdir(f"/proc/{daemon}/fd"):
        path = f"/proc/{daemon}/fd/{entry}"
        try:
            if "xpool-ffn:" in os.readlink(path):
                info = os.stat(path)
                found.add((info.st_ino, info.st_size))
        except FileNotFoundError:
            continue
    mapped = test_memory.total(test_memory.mappings(daemon), "Size", "xpool-ffn:")
    harness.check(mapped == 0, f"the daemon maps {mapped} bytes of weights")
    return sum(size for _, size in found), {inode for inode, _ in found}


def descriptors(system, role):
    return len(os.listdir(f"/proc/{system.pid(role)}/fd"))


def survives(role, rounds=5):
    """Each round kills the agent in mid-decode; both streams give the tokens of an undisturbed run."""
    prompt = harness.golden()[0]
    with system_of_two() as system:
        system.start(120)
        want = system.generate("left", prompt["ids"], LENGTH, 120)
        kept, inodes = shards(system)
        ffn, _ = test_memory.tensor_bytes(harness.TALES)
        harness.check(kept >= 2 * ffn * 0.95, f"the daemon keeps {kept} bytes of {2 * ffn} of FFN weights")
        instances = {m: system.pid(f"serve {m}") for m in MODELS}
        open_files, pauses = None, []
        for attempt in range(rounds):
            count = 5 + 20 * attempt
            if attempt % 2 == 0:
                streams = kill_in_flight(system, role, prompt, count)
            else:
                streams = streams_of(system, prompt, count)
                os.kill(system.pid(role), signal.SIGKILL)
            for stream in streams:
                harness.check(stream.result(120) == want, f"round {attempt}: tokens changed by the new Generation")
            pauses.append(max(longest_pause(s) for s in streams))
            formed(system, attempt + 2)
            metrics = system.metrics()
            adopted = sum(v for k, v in metrics.items() if k.startswith("xpool_ffn_weights_adopted_bytes"))
            read = sum(v for k, v in metrics.items() if k.startswith("xpool_ffn_weights_read_bytes"))
            harness.check((adopted, read) == (kept, 0), f"round {attempt}: {adopted} bytes adopted, {read} read")
            harness.check(shards(system) == (kept, inodes), "the daemon keeps other memory than before")

            def now():  # connections that end take their moment
                return {r: descriptors(system, r) for r in ("daemon", *(f"serve {m}" for m in MODELS))}

            if open_files is None:
                time.sleep(0.5)
                open_files = now()
            harness.wait_until(lambda: now() == open_files, 10, f"round {attempt}: open files {open_files}, not {now()}")
        harness.check(generation(system) == rounds + 1, f"Generation {generation(system)} after {rounds} deaths")
        harness.check(instances == {m: system.pid(f"serve {m}") for m in MODELS}, "an Instance was replaced")
        print(f"     {role}: longest pauses " + ", ".join(f"{p:.2f}" for p in pauses) + " s")
        system.stop()
        failures = re.findall(r"canonical failure of Generation \d+: (.*?): ", system.log())
        harness.check(set(failures) == {role}, f"canonical failures name {set(failures)}")


def ffnagent_coordinator():
    survives(FFN)


def ffnagent_other():
    survives("ffnagent cpu:3")


def atnagent():
    survives("atnagent cpu:1")


def instance_too():
    """An Instance dies together with an agent, or in the pause: the other one's stream is exact all the same,
    and a successor that comes in the pause serves."""
    prompt = harness.golden()[0]
    with system_of_two() as system:
        system.start(120)
        want = system.generate("right", prompt["ids"], LENGTH, 120)
        for attempt in range(2):
            system.hand = []
            victim = system.pid("serve left")
            _, survivor = kill_in_flight(system, FFN, prompt)
            time.sleep(0.2 * attempt)
            os.kill(victim, signal.SIGKILL)
            harness.wait_until(lambda: victim not in system.processes(), 5, "the Instance is dead")
            time.sleep(0.05)
            again = system.launch("serve", "left", log=system.folder / f"log.again{attempt}")
            harness.check(survivor.result(60) == want, "the other Instance's tokens changed")
            formed(system, attempt + 2)
            system.hand = [again]
            harness.check(system.generate("left", prompt["ids"], LENGTH, 60) == want, "not exact after its return")
        system.hand = []
        system.stop()


def agents_at_once():
    """Every agent at the same moment, and again while the next Generation forms."""
    prompt = harness.golden()[0]
    with system_of_two() as system:
        system.start(120)
        want = system.generate("left", prompt["ids"], LENGTH, 120)
        for twice in (False, True):
            streams = streams_of(system, prompt)
            before = generation(system)
            for _ in range(1 + twice):
                for role, pid in system.roles().items():
                    if "agent" in role:
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(pid, signal.SIGKILL)
                harness.wait_until(lambda: any("agent" in r for r in system.roles()), 10, "agents again", 0.002)
            for stream in streams:
                harness.check(stream.result(60) == want, "tokens changed by the new Generation")
            formed(system, before + 1)
        system.stop()


def stopped_for_good():
    """An agent that stands still past deadlines.submission is replaced; it is killed, not waited for."""
    prompt = harness.golden()[0]
    with system_of_two("[deadlines]\nsubmission = 1.0") as system:
        system.start(120)
        want = system.generate("left", prompt["ids"], LENGTH, 120)
        for number, role in enumerate((FFN, "atnagent cpu:0"), 2):
            pid = system.pid(role)
            others = [p for r, p in system.roles().items() if r.startswith("ffnagent") and r != role]
            asked = MODELS if role == FFN else MODELS[:1]  # who needs it; the other one may end without it
            for _ in range(10):  # on a fast machine the answers may be there before the signal is
                streams = streams_of(system, prompt)
                for one in (*others, pid):
                    os.kill(one, signal.SIGSTOP)
                time.sleep(0.1)
                open_ones = [s for m, s in zip(MODELS, streams) if m in asked and len(s.ids) < len(want)]
                if open_ones:
                    break
                for one in (*others, pid):
                    os.kill(one, signal.SIGCONT)
            harness.check(open_ones, "no request is open")
            for one in others:
                os.kill(one, signal.SIGCONT)
            for stream in streams:
                harness.check(stream.result(60) == want, "tokens changed by the new Generation")
            formed(system, number)
            harness.check(system.pid(role) != pid, f"the {role} that stood still was not replaced")
        system.stop()


def by_hand():
    """Roles in terminals: the daemon waits for agents that somebody starts again; the rest is as under up."""
    prompt = harness.golden()[0]
    with system_of_two() as system:
        system.start_by_hand(120)
        want = system.generate("left", prompt["ids"], LENGTH, 120)
        agents = [p for p in system.hand if "agent" in p.args[1]]
        streams = kill_in_flight(system, FFN, prompt)
        for process in agents:
            process.wait(5 * harness.SLOW)
        code, out, _ = system.run("daemon", "check")
        harness.check(code == 1 and "the next one forms" in out, f"daemon check while one forms: {code} {out}")
        status, _, data = harness.http_request(system.daemon + "/ready")
        harness.check(status == 503 and b"not registered" in data, f"/ready while one forms: {status} {data!r}")
        harness.check(not any(s.done or s.error for s in streams), "a stream ended without agents")
        system.hand = [p for p in system.hand if p not in agents]
        for process in agents:
            system.hand.append(system.launch(*process.args[1:-2]))
        for stream in streams:
            harness.check(stream.result(60) == want, "tokens changed by the new Generation")
        formed(system, 2)
        code, out, error = system.run("down", timeout=40)
        harness.check(code == 0, f"xpool down: {code} {out} {error}")
        for process in system.hand:
            harness.check(process.wait(10) == 0, f"{process.args[1:3]} ended with {process.returncode}")


def nobody_comes():
    """No successor: after deadlines.reform the failure is everybody's, and no client hangs."""
    prompt = harness.golden()[0]
    with system_of_two("[deadlines]\nreform = 2.0") as system:
        system.start_by_hand(120)
        streams = kill_in_flight(system, FFN, prompt)
        began = time.monotonic()
        harness.wait_until(lambda: not system.processes(), 10, f"everything ends (left: {system.roles()})")
        took = time.monotonic() - began
        harness.check(1.5 < took < 4 * harness.SLOW, f"everything ended after {took:.1f} s")
        harness.check("deadlines.reform" in system.log(), "the reason is not given")
        for stream in streams:
            stream.thread.join(5)
            harness.check(not stream.thread.is_alive() and not stream.done, "a stream ended as if it were complete")


def fall_together():
    """Eight agents that wait for the next Generation die at once: that is one misfortune, not eight, and
    brings nothing nearer to the end."""
    with harness.System([harness.model("left", dtype="float32")], atn=4, ffn=4) as system:
        system.start(120)
        for _ in range(2):
            before = generation(system)
            # One that stands still keeps the next Generation from its plan until it is killed.
            still = system.pid("ffnagent cpu:7")
            os.kill(still, signal.SIGSTOP)
            os.kill(system.pid("atnagent cpu:0"), signal.SIGKILL)
            harness.wait_until(lambda: generation(system) > before, 10, "the next Generation begins", 0.005)
            harness.wait_until(lambda: sum(a["registered"] for a in system.state()["agents"]) >= 6, 10, "agents", 0.005)
            for role, pid in system.roles().items():
                if "agent" in role and pid != still:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
            formed(system, before + 1)
        fallen = system.log().count("waits for another one")
        harness.check(fallen >= 6, f"only {fallen} agents died before the plan")
        system.stop()


def dies_again_and_again():
    """Each new FfnAgent is killed once it has registered: a bounded number of them, then the end."""
    with system_of_two() as system:
        system.start(120)
        killed, seen, ended = 0, set(), threading.Event()

        def executioner():
            nonlocal killed
            while not ended.is_set():
                with contextlib.suppress(OSError, harness.Failed, ProcessLookupError):
                    pid = {a["device"]: a.get("pid") for a in system.state()["agents"]}["cpu:2"]
                    if pid and pid not in seen:
                        seen.add(pid)
                        os.kill(pid, signal.SIGKILL)
                        killed += 1
                time.sleep(0.005)

        thread = threading.Thread(target=executioner, daemon=True)
        thread.start()
        try:
            system.expect_end(None, 60)
        finally:
            ended.set()
            thread.join(5)
        print(f"     {killed} FfnAgents died")
        harness.check(3 <= killed <= 10, f"{killed} FfnAgents were started and died")
        harness.check("Generations that computed nothing" in system.log(), "the last failure does not say why")


def never_registers():
    """Agents that end before they register, because the configuration cannot be read any more: a bounded
    number of them, further and further apart, then the end, which says which agent and how."""
    with system_of_two() as system:
        system.start(120)
        system.config.write_text("this is no configuration\n" + system.config.read_text())
        began = time.monotonic()
        os.kill(system.pid(FFN), signal.SIGKILL)
        system.expect_end(1, 60)
        took = time.monotonic() - began
        started = system.log().count(f"{FFN} started again")
        print(f"     {started} FfnAgents in {took:.1f} s")
        harness.check(2 <= started <= 6, f"{started} FfnAgents were started")
        harness.check(took > 3, f"{took:.1f} s are no pause")
        harness.check("before it had registered" in system.log(), "the failure does not say why")
        harness.check("ended with exit code 2" in system.log(), "the failure does not say how")


def down_while_forming():
    """`xpool down`, and Ctrl-C, while requests wait for the next Generation: an ordered end with 0."""
    prompt = harness.golden()[0]
    for how in ("down", "interrupt"):
        with system_of_two() as system:
            system.start(120)
            # Agents that live shortly are started again after a pause.
            streams = kill_in_flight(system, FFN, prompt)
            harness.wait_until(lambda: generation(system) == 2, 5, "the next Generation begins", 0.005)
            if how == "down":
                code, out, error = system.run("down", timeout=40)
                harness.check(code == 0, f"xpool down: {code} {out} {error}")
                system.expect_end(0)
            else:
                system.stop()
            for stream in streams:
                stream.thread.join(5)
                harness.check(not stream.thread.is_alive(), "a client hangs after the stop")


def killed_while_draining():
    """An agent that dies while requests drain: nobody waits for deadlines.drain, the end is no clean one."""
    prompt = harness.golden()[0]
    with system_of_two() as system:
        system.start(120)
        streams = system.hold(lambda: streams_of(system, prompt))
        system.interrupt()
        harness.wait_until(lambda: "-> DRAINING" in system.log(), 5, "DRAINING", 0.005)
        os.kill(system.pid(FFN), signal.SIGKILL)
        system.expect_end(None, 8)
        harness.check(f"{FFN}: its process" in system.log(), "the reason is not given")
        for stream in streams:
            stream.thread.join(5)
            harness.check(not stream.thread.is_alive(), "a client hangs after the end")


@contextlib.contextmanager
def copied_checkpoint():
    """A copy of a small model that a test may change."""
    with tempfile.TemporaryDirectory() as folder:
        copy = pathlib.Path(folder, "checkpoint")
        shutil.copytree(harness.TALES, copy)
        yield copy


def rewrite(folder, change):
    """Every weight file of a checkpoint is written anew, its last half backwards if `change`."""
    for path in folder.glob("*.safetensors"):
        data = path.read_bytes()
        if change:
            half = len(data) // 2
            data = data[:half] + data[:half - 1 : -1]
        fresh = path.with_suffix(".new")
        fresh.write_bytes(data)
        fresh.replace(path)


def checkpoint_changed():
    """Files written anew with the same bytes are read again; with other bytes, nothing is served that mixes
    them with what the Instances hold: no new Instance, and no next Generation."""
    prompt = harness.golden()[0]
    with copied_checkpoint() as copy:
        with harness.System([harness.model("left", copy, dtype="float32")], atn=1, ffn=1) as system:
            system.start(120)
            want = system.generate("left", prompt["ids"], LENGTH, 120)
            rewrite(copy, False)
            os.kill(system.pid("ffnagent"), signal.SIGKILL)
            formed(system, 2)
            harness.check(system.generate("left", prompt["ids"], LENGTH, 60) == want, "the same files, other tokens")
            rewrite(copy, True)
            os.kill(system.pid("serve left"), signal.SIGKILL)
            harness.wait_until(lambda: "serve left" not in system.roles(), 5, "the Instance is dead")
            code, _, error = system.run("serve", "left", timeout=30)
            harness.check(code != 0 and "is not the one" in error, f"an Instance of other files: {code} {error}")
            os.kill(system.pid("ffnagent"), signal.SIGKILL)
            system.expect_end(None)
            harness.check("the checkpoint of model left" in system.log(), "the reason is not given")


def change_one_weight(folder):
    """In place, in an FFN, where the digest of a checkpoint does not look: it takes the first MiB and 64 pieces."""
    path = folder / "model.safetensors"
    with open(path, "r+b") as file:
        head = 8 + int.from_bytes(file.read(8), "little")
        tensors = json.loads(file.read(head - 8))
        first, bytes_in_all = 1 << 20, path.stat().st_size
        for piece in range(63):  # half way to the next one
            at = first + (bytes_in_all - first) * (2 * piece + 1) // 126
            for name, tensor in tensors.items():
                begin, end = tensor.get("data_offsets", (0, 0))
                if ".mlp.experts." in name and head + begin <= at < head + end:
                    file.seek(at)
                    byte = file.read(1)[0]
                    file.seek(at)
                    file.write(bytes([byte ^ 0x10]))
                    return
    raise harness.Failed("no expert's weight lies between two samples")


def one_weight_changed():
    """A shard that is read again is compared byte by byte with what was read first."""
    with copied_checkpoint() as copy:
        (copy / "model.safetensors").chmod(0o644)
        with harness.System([harness.model("left", copy, dtype="float32")], atn=1, ffn=1) as system:
            system.start(120)
            change_one_weight(copy)
            os.kill(system.pid("ffnagent"), signal.SIGKILL)
            system.expect_end(None)
            words = "read other FFN weights; put that back"
            harness.check(words in system.log() and str(copy) in system.log(), "the reason is not given")


def checkpoint_gone():
    """A model's folder is away, as where a file system is not mounted any more: what runs is steered, and ends as
    one says; a Generation that needs the files ends with their path."""
    for how in ("down", "agent"):
        with copied_checkpoint() as copy:
            models = [harness.model("left", copy, dtype="float32"), harness.model("right", dtype="float32")]
            with harness.System(models, atn=1, ffn=1) as system:
                system.start(120)
                copy.rename(copy.with_name("away"))
                for words in (("daemon", "check"), ("kv",), ("kv", "trim", "left")):
                    code, out, error = system.run(*words)
                    harness.check(code == 0, f"{words}: {code} {out} {error}")
                code, _, error = system.run("plan")
                harness.check(code == 2 and str(copy) in error, f"plan: {code} {error}")
                if how == "down":
                    code, out, error = system.run("down")
                    harness.check(code == 0, f"down: {code} {out} {error}")
                    harness.check(system.up.wait(20) == 0, "xpool up after down")
                    continue
                os.kill(system.pid("ffnagent"), signal.SIGKILL)
                system.expect_end(None)
                log = system.log()
                harness.check("the checkpoint of model left" in log and str(copy) in log, "the path is not named")
                harness.check("exit code 2" not in log, "an agent ended by itself for the same reason")


def off():
    """deadlines.reform = 0: an agent's death is everybody's, as test_kill has it in full."""
    with system_of_two("[deadlines]\nreform = 0") as system:
        system.start(120)
        harness.check(shards(system)[0] == 0, "weights are kept although nobody will adopt them")
        os.kill(system.pid(FFN), signal.SIGKILL)
        system.expect_end(None)
        views.check_one_failure(system, FFN)


if __name__ == "__main__":
    harness.main(
        ffnagent_coordinator,
        ffnagent_other,
        atnagent,
        instance_too,
        agents_at_once,
        stopped_for_good,
        by_hand,
        nobody_comes,
        fall_together,
        dies_again_and_again,
        never_registers,
        down_while_forming,
        killed_while_draining,
        checkpoint_changed,
        one_weight_changed,
        checkpoint_gone,
        off,
    )
