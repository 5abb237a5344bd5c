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
from harness import SLOW, TALES, XPOOL, Failed, check, free_port, wait_until  # noqa: E402
from server import ARGUMENTS, PYTHON  # noqa: E402

SECONDS = 300  # imports of SGLang, on a loaded machine
CONFIG = """
[daemon]
socket = "{folder}/daemon.sock"
[deadlines]
registration = 5
startup = 60
[atn]
devices = ["cpu:0"]
[ffn]
devices = ["cpu:1"]
[devices."cpu:0"]
threads = 1
memory = "1GiB"
[devices."cpu:1"]
threads = 1
memory = "1GiB"
[[models]]
id = "tale"
path = "{model}"
engine = "sglang"
dtype = "float32"
"""


class Scene:
    def __init__(self, folder):
        self.folder = pathlib.Path(folder)
        self.config = self.folder / "xpool.toml"
        self.config.write_text(CONFIG.format(folder=folder, model=TALES))
        self.daemon = None

    def start_daemon(self):
        self.daemon = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", str(XPOOL), "daemon", "serve", "--config", str(self.config)],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        wait_until((self.folder / "daemon.sock").exists, 20, "the daemon's socket")

    def stop_daemon(self):
        if self.daemon is not None:
            self.daemon.kill()
            self.daemon.wait()
            self.daemon = None
            (self.folder / "daemon.sock").unlink(missing_ok=True)

    def refused(self, name, reason, arguments=(), checkpoint=TALES):
        """Starts SGLang; it must end by itself, say `reason`, and leave nothing."""
        began = time.monotonic()
        log = self.folder / "server.log"
        command = [
            *[str(XPOOL), "exec", "--config", str(self.config), "--model", "tale", "--"],
            *[str(PYTHON), "-m", "sglang.launch_server", "--model-path", str(checkpoint)],
            *["--host", "127.0.0.1", "--port", str(free_port())],
            *ARGUMENTS,
            *arguments,
        ]
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
                code = server.wait(SECONDS * SLOW)
                ended = time.monotonic() - began
                wait_until(lambda: not session(server.pid), 5, f"{name}: nothing is left")
            except subprocess.TimeoutExpired:
                raise Failed(f"{name}: SGLang did not end:\n{log.read_text()[-3000:]}") from None
            finally:
                for pid in session(server.pid):
                    os.kill(pid, signal.SIGKILL)
        text = log.read_text(errors="replace")
        lines = [line for line in text.splitlines() if line.startswith("xpool: ")]
        check(code not in (0, None), f"{name}: exit code {code}")
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
    """The same geometry with one weight changed: only its content tells that it is another model."""
    copy = pathlib.Path(folder) / "other"
    shutil.copytree(TALES, copy)
    weights = next(copy.glob("*.safetensors"))
    weights.chmod(0o644)
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
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
            scene.refused("no daemon", "daemon.sock")
            scene.start_daemon()
            scene.refused("another checkpoint", "checkpoint", checkpoint=other_checkpoint(folder))
            scene.stop_daemon()
            scene.start_daemon()
            scene.refused("no FFN tier", "", arguments=())
        except Failed as error:
            print(f"FAILED: {error}")
            return 1
        finally:
            scene.stop_daemon()
    return 0


if __name__ == "__main__":
    sys.exit(main())
