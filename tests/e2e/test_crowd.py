# SPDX-License-Identifier: MIT
"""More connections than a process has descriptors: whoever only looks at the daemon's pages, or leaves
connections open, takes nothing from those who steer and serve."""

import contextlib
import os
import pathlib
import resource
import signal
import socket
import time

import harness

LIMIT = 256
CROWD = 400
PROMPT = [1, 2, 3]


def descriptors(pid):
    return len(os.listdir(f"/proc/{pid}/fd"))


def processor_seconds(pid):
    fields = pathlib.Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextlib.contextmanager
def crowd(port, count):
    """So many idle connections, of which some may wait in the listener's queue."""
    with contextlib.ExitStack() as open_ones:
        for _ in range(count):
            try:
                open_ones.enter_context(socket.create_connection(("127.0.0.1", port), timeout=0.2))
            except OSError:
                break
        yield


def visitors():
    with harness.System([harness.model("a"), harness.model("b")]) as system:
        system.start(60)
        want = system.generate("a", PROMPT, 8)
        daemon = system.pid("daemon")
        before = descriptors(daemon)
        resource.prlimit(daemon, resource.RLIMIT_NOFILE, (LIMIT, LIMIT))
        with crowd(system.daemon_port, CROWD):
            harness.wait_until(lambda: descriptors(daemon) > before + LIMIT // 4, 5, "visitors are let in")
            said, used = len(system.log()), processor_seconds(daemon)
            time.sleep(0.5)
            harness.check(descriptors(daemon) < LIMIT - LIMIT // 8, f"{descriptors(daemon)} descriptors of {LIMIT}")
            code, _, error = system.run("daemon", "check", timeout=3)
            harness.check(code == 0, f"daemon check beside a crowd: {code} {error}")
            code, out, error = system.run("kv", timeout=3)
            harness.check(code == 0 and "a" in out, f"xpool kv beside a crowd: {code} {error}")
            # A new participant finds its descriptors: pidfd, arena, KV.
            os.kill(system.pid("serve b"), signal.SIGKILL)
            harness.wait_until(lambda: "b" not in system.list_models(), 5, "b is gone")
            system.hand = [system.launch("serve", "b", log=system.folder / "log.b")]
            harness.wait_until(lambda: "b" in system.list_models(), 10, "b is back beside a crowd")
            harness.check(system.generate("b", PROMPT, 8) == want, "b's tokens are others")
            harness.check(len(system.log()) - said < 10000, f"{len(system.log()) - said} bytes of log")
            harness.check(processor_seconds(daemon) - used < 1, "the daemon's loop spins")
        harness.wait_until(lambda: descriptors(daemon) < before + 20, 5, "the crowd's descriptors are back")
        harness.check(system.state()["verdict"], "the pages are there again")
        system.stop()


def none_left():
    """Not one descriptor: the loop waits, and goes on when there are some."""
    with harness.System([harness.model("a")]) as system:
        system.start(60)
        daemon = system.pid("daemon")
        resource.prlimit(daemon, resource.RLIMIT_NOFILE, (8, resource.prlimit(daemon, resource.RLIMIT_NOFILE)[1]))
        with contextlib.ExitStack() as open_ones:
            for address, family in (
                (("127.0.0.1", system.daemon_port), socket.AF_INET),
                (str(system.folder / "daemon.sock"), socket.AF_UNIX),
            ):
                one = open_ones.enter_context(socket.socket(family, socket.SOCK_STREAM))
                if family == socket.AF_UNIX:
                    one.close()
                    one = open_ones.enter_context(socket.socket(family, socket.SOCK_SEQPACKET))
                one.connect(address)
            said, used = len(system.log()), processor_seconds(daemon)
            harness.check(system.generate("a", PROMPT, 8), "no answer")
            time.sleep(1)
            harness.check(len(system.log()) - said < 5000, f"{len(system.log()) - said} bytes of log in a second")
            harness.check(processor_seconds(daemon) - used < 0.5, "the daemon's loop spins")
        resource.prlimit(daemon, resource.RLIMIT_NOFILE, (LIMIT, resource.prlimit(daemon, resource.RLIMIT_NOFILE)[1]))
        code, _, error = system.run("daemon", "check", timeout=5)
        harness.check(code == 0, f"daemon check afterwards: {code} {error}")
        system.stop()


if __name__ == "__main__":
    harness.main(visitors, none_left)
