#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Runs the lines of docs/quickstart.md, in order, in one shell, as a reader does.

Every line (a here document counts as one) must exit 0. Afterwards no process of the page is left.
"""

import contextlib
import os
import pathlib
import re
import signal
import subprocess
import sys
import threading

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "e2e"))
from harness import ROOT, SLOW, Failed, check, free_port, process_table, wait_until  # noqa: E402

PAGE = ROOT / "docs" / "quickstart.md"
LIMIT_S = 420 * SLOW
DONE = "quickstart-line-done"


def commands(text):
    """The shell commands of the page's ```sh blocks; a here document stays with its first line."""
    found = []
    for block in re.findall(r"^```sh\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        lines = block.splitlines()
        while lines:
            command = [lines.pop(0)]
            here = re.search(r"<<(\w+)", command[0])
            while here and command[-1] != here[1]:
                command.append(lines.pop(0))
            found.append("\n".join(command))
    return found


def session_processes(session):
    return {
        pid: command for pid, (_, s, state, command) in process_table().items() if s == session and state not in "ZX"
    }


def main():
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))
    steps = commands(PAGE.read_text())
    check(len(steps) > 15, f"{PAGE} has {len(steps)} commands")
    # The page's ports may be taken on this machine; nothing else of it is changed.
    http, engine = str(free_port()), str(free_port())
    steps = [s.replace("127.0.0.1:8200", f"127.0.0.1:{http}").replace("PORT=30000", f"PORT={engine}") for s in steps]
    environment = {k: v for k, v in os.environ.items() if not k.startswith("XPOOL") and k != "PYTHONPATH"}
    shell = subprocess.Popen(
        ["bash", "--norc"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=ROOT,
        env=environment,
        start_new_session=True,
        bufsize=1,
    )
    # A line that hangs ends with the whole session.
    limit = threading.Timer(LIMIT_S, kill_session, [shell.pid])
    limit.start()
    try:
        output = {}
        for step in steps:
            print("$", step.splitlines()[0], flush=True)
            code, output[step] = run(shell, step)
            if code != 0:
                run(shell, 'tail -n 40 "$RUN"/*.log')
                raise Failed(f"exit code {code} of: {step}")
        answer = next(text for step, text in output.items() if step.startswith("curl") and "completions" in step)
        check('"text"' in answer and '"completion_tokens":24' in answer.replace(" ", ""), f"no completion: {answer}")
        shell.stdin.close()
        check(shell.wait(30) == 0, "the shell ended with an error")
        wait_until(lambda: not session_processes(shell.pid), 5, "no process of the page is left")
    finally:
        limit.cancel()
        kill_session(shell.pid)
        shell.wait(10)
    print(f"{len(steps)} commands of {PAGE.relative_to(ROOT)} work as written")


def run(shell, step):
    """Types `step` into the shell; its exit code and output."""
    # What a command prints may not end its line.
    shell.stdin.write(f"{step}\nprintf '\\n%s %s\\n' {DONE} $?\n")
    shell.stdin.flush()
    lines = []
    for line in shell.stdout:
        if line.startswith(DONE):
            return int(line.split()[1]), "".join(lines)
        lines.append(line)
        print("   ", line, end="", flush=True)
    raise Failed(f"the shell ended (or the page took longer than {LIMIT_S:g} s) in: {step}")


def kill_session(session):
    for pid in session_processes(session):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    try:
        main()
    except Failed as failed:
        print(f"FAILED: {failed}")
        sys.exit(1)
