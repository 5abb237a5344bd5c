#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""The plugin fails closed: SGLang, started by `xpool exec`, ends with the reason and a non-zero code.

Without it SGLang would log the reason and serve the model by itself. Each case is a server that must
not come up; nothing of it may be left, and its HTTP port must never answer.
"""

import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))
sys.path.insert(0, str(HERE.parent / "e2e"))
from harness import SLOW, TALES, TWO_DEVICES, XPOOL, Failed, check, free_port, wait_until  # noqa: E402
from server import ARGUMENTS, PYTHON  # noqa: E402

SECONDS = 300  # imports of SGLang, on a loaded machine
CONFIG = """
[daemon]
socket = "{folder}/daemon.sock"
[deadlines]
registration = {registration}
{devices}[[models]]
id = "tale"
path = "{model}"
engine = "sglang"
dtype = "float32"
"""


# SGLang says this shortly before the model is built. The daemon is started then: its own deadline, for
# agents that never come, must not depend on how long imports take.
ALMOST_THERE = "Init torch distributed ends"


class Scene:
    def __init__(self, folder):
        self.folder = pathlib.Path(folder)
        self.config = self.folder / "xpool.toml"

    def start_daemon(self):
        return subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", str(XPOOL), "daemon", "serve", "--config", str(self.config)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def refused(self, name, reason, arguments=(), checkpoint=TALES, daemon=False):
        """Starts SGLang; it must end by itself, say `reason`, and leave nothing. `daemon`: one is there,
        without agents."""
        began = time.monotonic()
        log = self.folder / "server.log"
        registration = 40 if daemon else 5
        self.config.write_text(
            CONFIG.format(folder=self.folder, devices=TWO_DEVICES, model=TALES, registration=registration)
        )
        command = [
            *[str(XPOOL), "exec", "--config", str(self.config), "--model", "tale", "--"],
            *[str(PYTHON), "-m", "sglang.launch_server", "--model-path", str(checkpoint)],
            *["--host", "127.0.0.1", "--port", str(free_port())],
            *ARGUMENTS,
            *arguments,
        ]
        helper = None
        with open(log, "w") as output:
            server = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env={**os.environ, "SGLANG_GRPC_PORT": "1", "HF_HUB_OFFLINE": "1"},
            )
            try:
                if daemon:
                    wait_until(lambda: ALMOST_THERE in log.read_text(errors="replace"), SECONDS, name, 0.2)
                    helper = self.start_daemon()
                code = server.wait(SECONDS * SLOW)
                ended = time.monotonic() - began
                wait_until(lambda: not session(server.pid), 5, f"{name}: nothing is left")
            except subprocess.TimeoutExpired:
                raise Failed(f"{name}: SGLang did not end:\n{log.read_text()[-3000:]}") from None
            finally:
                for pid in session(server.pid):
                    os.kill(pid, signal.SIGKILL)
                server.wait(30)
                if helper is not None:
                    helper.kill()
                    helper.wait(30)
                (self.folder / "daemon.sock").unlink(missing_ok=True)
        text = log.read_text(errors="replace")
        lines = [line for line in text.splitlines() if line.startswith("xpool: ")]
        check(code != 0, f"{name}: exit code {code}")
        check("ready to roll" not in text, f"{name}: SGLang came up")
        check(any(reason in line for line in lines), f"{name}: no line says {reason!r}:\n{text[-3000:]}")
        print(f"{name}: exit code {code} after {ended:.0f} s: {lines[0]}", flush=True)


def session(leader):
    """Processes of a session that are not dead."""
    found = []
    for entry in pathlib.Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:
                continue
            if int(fields[3]) == leader and fields[0] not in "ZX":
                found.append(int(entry.name))
    return found


def other_checkpoint(folder):
    """The same geometry with other weights: only the content tells that it is another model."""
    copy = pathlib.Path(folder) / "other"
    shutil.copytree(TALES, copy)
    weights = next(copy.glob("*.safetensors"))
    weights.chmod(0o644)
    data = bytearray(weights.read_bytes())
    data[8 + int.from_bytes(data[:8], "little")] ^= 1  # the first byte of the first tensor
    weights.write_bytes(data)
    return copy


def main():
    with tempfile.TemporaryDirectory() as folder:
        scene = Scene(folder)
        try:
            scene.refused(
                "capacity too small",
                "--chunked-prefill-size gives 129 rows a step, the plan has room for 128",
                arguments=("--chunked-prefill-size", "129"),
            )
            scene.refused("no daemon", "no daemon at")
            other = other_checkpoint(folder)
            scene.refused("another checkpoint", "checkpoint", checkpoint=other, daemon=True)
            scene.refused("no FFN tier", "ffnagent cpu:1 is not registered", daemon=True)
        except Failed as error:
            print(f"FAILED: {error}")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
