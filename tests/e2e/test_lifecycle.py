# SPDX-License-Identifier: MIT
"""Starting and stopping as people do: `up` and Ctrl-C, `xpool down`, SIGTERM, each role by hand,
`daemon check`, wrong configurations."""

import os
import signal
import time

import harness


def one():
    return harness.System([harness.model("tales", dtype="float32")])


def prompt():
    return harness.golden()[0]


def up_and_interrupt():
    """Ctrl-C reaches every process of the group; the order is `up`'s, the exit code 0."""
    with one() as system:
        system.start(120)
        code, out, error = system.run("daemon", "check")
        harness.check(code == 0, f"daemon check of a ready system: {code} {out} {error}")
        harness.check(system.generate("tales", prompt()["ids"], 48) == prompt()["greedy_ids"], "not exact")
        system.stop()
        code, out, error = system.run("daemon", "check")
        harness.check(code != 0, "daemon check exits 0 although nothing runs")


def interrupt_while_serving():
    """Ctrl-C with a request open: it is finished or ended, and the exit code is 0."""
    with one() as system:
        system.start(120)
        stream = system.stream("tales", prompt()["ids"], 200)
        stream.wait(2)
        system.stop(30)
        stream.thread.join(5)
        harness.check(not stream.thread.is_alive(), "the client hangs after the stop")


def interrupt_while_daemon_starts():
    """A Ctrl-C that comes before the daemon takes signals is not lost."""
    for delay in (0.0, 0.002, 0.005, 0.01, 0.02, 0.04):
        with one() as system:
            system.up = system.launch("up")
            harness.wait_until(lambda: "daemon" in system.roles(), 5, "the daemon's process is there", 0.001)
            time.sleep(delay)
            system.interrupt()
            system.expect_end(0, 5)
            harness.check("canonical failure" not in system.log(), f"called a failure: {system.log()[-600:]}")


def interrupt_while_starting():
    for delay in (0.0, 0.05, 0.3):
        with one() as system:
            system.up = system.launch("up")
            time.sleep(delay)
            with_handler = harness.wait_until(lambda: system.roles(), 5, "the process is there")
            time.sleep(0.05)
            system.interrupt()
            try:
                system.up.wait(20 * harness.SLOW)
            except Exception:
                raise harness.Failed(f"Ctrl-C {delay} s after the start does not end it: {with_handler}") from None
            harness.check(system.up.returncode == 0, f"Ctrl-C {delay} s after the start: exit {system.up.returncode}")
            log = system.log_path.read_text()
            harness.check("canonical failure" not in log, f"Ctrl-C at the start is called a failure: {log[-600:]}")
            system.expect_nothing_left()


def down():
    with one() as system:
        system.start(120)
        code, out, error = system.run("down", timeout=40)
        harness.check(code == 0, f"xpool down: {code} {out} {error}")
        system.expect_end(0)


def terminate_daemon():
    with one() as system:
        system.start(120)
        os.kill(system.pid("daemon"), signal.SIGTERM)
        system.expect_end(0, 30)


def terminate_up():
    with one() as system:
        system.start(120)
        os.kill(system.up.pid, signal.SIGTERM)
        system.expect_end(0, 30)


def by_hand():
    """Every role in a terminal of its own; `daemon check` says what it waits for; `down` ends all with 0."""
    with harness.System([harness.model("tales", dtype="float32")], ffn=2) as system:
        daemon = system.launch("daemon", "serve")
        system.hand = [daemon]
        harness.wait_until(lambda: os.path.exists(system.folder / "daemon.sock"), 10, "the daemon's socket")
        code, out, error = system.run("daemon", "check")
        harness.check(code == 1, f"daemon check of a lonely daemon: {code} {out} {error}")
        for name in ("cpu:0", "cpu:1", "cpu:2", "tales"):
            harness.check(name in out + error, f"daemon check does not say that it waits for {name}: {out} {error}")
        status, _, data = harness.http_request(system.daemon + "/ready")
        harness.check(status == 503 and b"cpu:1" in data, f"/ready of a lonely daemon: {status} {data!r}")
        status, _, _ = harness.http_request(system.daemon + "/health")
        harness.check(status == 200, f"/health of a lonely daemon: {status}")
        # In the least convenient order: the Instance and gateway before the agents.
        for command in (["gateway"], ["serve", "tales"], ["ffnagent", "--device", "cpu:2"], ["atnagent"]):
            system.hand.append(system.launch(*command))
        time.sleep(0.5)
        code, out, error = system.run("daemon", "check")
        harness.check(code == 1 and "cpu:1" in out + error, f"daemon check: {code} {out} {error}")
        system.hand.append(system.launch("ffnagent", "--device", "cpu:1"))
        system.wait_ready(120)
        code, out, error = system.run("daemon", "check")
        harness.check(code == 0, f"daemon check of a ready system: {code} {out} {error}")
        harness.check(system.generate("tales", prompt()["ids"], 48) == prompt()["greedy_ids"], "not exact")
        code, out, error = system.run("down", timeout=40)
        harness.check(code == 0, f"xpool down: {code} {out} {error}")
        for process in system.hand:
            harness.check(process.wait(10) == 0, f"{process.args[1:3]} ended with {process.returncode}")
        system.expect_nothing_left()


def by_hand_interrupted_in_order():
    """Ctrl-C in each terminal, the daemon last: every process ends with 0."""
    with harness.System([harness.model("tales", dtype="float32")]) as system:
        system.start_by_hand(120)
        by_role = {harness.role_of(p.args[0:-2]): p for p in system.hand}
        order = ["gateway", "serve tales", "atnagent cpu:0", "ffnagent cpu:1", "daemon"]
        for role in order:
            process = by_role[role]
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
            try:
                code = process.wait(30 * harness.SLOW)
            except Exception:
                raise harness.Failed(f"{role} does not end at Ctrl-C") from None
            harness.check(code == 0, f"{role} ended with {code}")
        system.expect_nothing_left()


def wrong_digest():
    """A process with another resolved configuration is refused, with the reason, and exits non-zero."""
    with one() as system:
        system.hand = [system.launch("daemon", "serve")]
        harness.wait_until(lambda: os.path.exists(system.folder / "daemon.sock"), 10, "the daemon's socket")
        code, out, error = system.run("gateway", "--set", "scheduler.ffn_concurrency=7", timeout=30)
        harness.check(code not in (0, None), "a process with another configuration was accepted")
        harness.check("configuration" in out + error, f"the reason is not said: {out} {error}")


def second_up():
    """The socket is taken: the second start says so and leaves the first alone."""
    with one() as system:
        system.start(120)
        code, out, error = system.run("up", timeout=60)
        harness.check(code != 0, "a second system started on the same socket")
        harness.check(system.generate("tales", prompt()["ids"], 48) == prompt()["greedy_ids"], "not exact")
        system.stop()


def port_taken():
    """A port that another program holds: an error that names it, and nothing is left."""
    import socket

    with one() as system, socket.socket() as taken:
        taken.bind(("127.0.0.1", system.gateway_port))
        taken.listen()
        code, out, error = system.run("up", timeout=60)
        harness.check(code != 0, "xpool up goes on without its gateway")
        harness.check(str(system.gateway_port) in out + error, f"the port is not named: {(out + error)[-600:]}")
        system.expect_nothing_left()


def wrong_configuration():
    """Exit code 2, and the message names file, line and the nearest key."""
    with one() as system:
        text = system.config.read_text()
        system.config.write_text(text + '\n[gatewai]\nhttp = "127.0.0.1:1"\n')
        for command in (["up"], ["config", "check"], ["daemon", "serve"]):
            code, out, error = system.run(*command)
            harness.check(code == 2, f"{command}: exit code {code}")
            harness.check("system.toml:" in error and "gateway" in error, f"{command}: {error}")
        system.config.write_text(text.replace(str(harness.TALES), str(system.folder / "nowhere")))
        code, out, error = system.run("up")
        harness.check(code != 0 and "nowhere" in out + error, f"a missing checkpoint: {code} {out} {error}")


def broken_checkpoint():
    """A truncated file: the system does not start, and the message names file and tensor or reason."""
    import shutil

    with one() as system:
        broken = system.folder / "broken"
        shutil.copytree(harness.TALES, broken)
        file = broken / "model.safetensors"
        os.truncate(file, file.stat().st_size - 1000)
        system.config.write_text(system.config.read_text().replace(str(harness.TALES), str(broken)))
        code, out, error = system.run("up", timeout=60)
        harness.check(code != 0, "a truncated checkpoint was served")
        harness.check("model.safetensors" in out + error, f"the file is not named: {(out + error)[-600:]}")
        system.expect_nothing_left()


def damaged_weights():
    """NaN in a norm: the warm-up finds it, the system does not start, and the model is named."""
    import json
    import shutil
    import struct

    with one() as system:
        broken = system.folder / "damaged"
        shutil.copytree(harness.TALES, broken)
        file = broken / "model.safetensors"
        data = bytearray(file.read_bytes())
        (length,) = struct.unpack("<Q", data[:8])
        where = json.loads(data[8 : 8 + length])["model.norm.weight"]
        first, last = (8 + length + offset for offset in where["data_offsets"])
        data[first:last] = b"\xc0\x7f" * ((last - first) // 2)
        file.write_bytes(data)
        system.config.write_text(system.config.read_text().replace(str(harness.TALES), str(broken)))
        code, out, error = system.run("up", timeout=60)
        harness.check(code == 1, f"weights that are no numbers: exit code {code}")
        harness.check("no finite number" in out + error, f"the reason is not given: {(out + error)[-600:]}")
        system.expect_nothing_left()


def hung_instance_at_down():
    """An Instance that does not answer is killed at the deadline and named; nobody else is blamed."""
    with one() as system:
        text = system.config.read_text()
        system.config.write_text(text + "\n[deadlines]\ndrain = 1.0\nstop = 1.0\n")
        system.start(120)
        os.kill(system.pid("serve"), signal.SIGSTOP)
        code, out, error = system.run("down", timeout=60)
        harness.check(code == 1, f"down of a system with a hung Instance: exit code {code}")
        harness.check("instance tales" in error, f"the Instance is not named: {error}")
        for other in ("ffnagent", "atnagent", "gateway"):
            harness.check(other not in error, f"{other} is blamed too: {error}")
        harness.check(system.up.wait(20) != 0, "up exits 0 although a process was killed")
        system.expect_nothing_left()


def gateway_gone():
    """A gateway that was stopped is a reason not to be ready, not a silent hole."""
    with one() as system:
        system.start(120)
        os.kill(system.pid("gateway"), signal.SIGTERM)
        harness.wait_until(lambda: system.run("daemon", "check")[0] == 1, 10, "not ready without the gateway")
        code, out, error = system.run("daemon", "check")
        harness.check("gateway" in out, f"the reason is not given: {out}")
        system.stop()


if __name__ == "__main__":
    harness.main(
        up_and_interrupt,
        interrupt_while_serving,
        interrupt_while_daemon_starts,
        interrupt_while_starting,
        down,
        terminate_daemon,
        terminate_up,
        by_hand,
        by_hand_interrupted_in_order,
        wrong_digest,
        second_up,
        port_taken,
        wrong_configuration,
        broken_checkpoint,
        damaged_weights,
        hung_instance_at_down,
        gateway_gone,
    )
