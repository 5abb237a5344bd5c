# SPDX-License-Identifier: MIT
"""A CrossPool system with SGLang Instances, and what tests want to know of their processes.

Built on tests/e2e/harness.py: `xpool up` starts everything, SGLang is found by the daemon's state and by
/proc. Standard library only.
"""

import json
import mmap
import os
import pathlib
import re
import signal
import struct
import sys
import time

import server
import harness
from harness import Failed, check, wait_until

START_SECONDS = 300
# SGLang looks every five seconds whether it was asked to end, and then waits for open requests likewise.
STOP_SECONDS = 60
# A killed scheduler is noticed once a second; then SGLang gives itself five seconds for a diagnosis.
DEATH_SECONDS = 20
ROWS = {"decode_rows": 8, "prefill_rows": server.CHUNK_ROWS, "kv_ceiling_tokens": 4096}


def model(identifier, path=harness.TALES, **settings):
    """A [[models]] entry of an SGLang Instance, with the shapes that the vanilla results were made with."""
    return harness.model(
        identifier, path, engine="sglang", dtype="float32", python=str(server.PYTHON), **ROWS, **settings
    )


def native(identifier, path=harness.TALES):
    return harness.model(identifier, path, dtype="float32")


class Scene(harness.System):
    """Adds to System: SGLang's processes, its own HTTP interface, and bringing an Instance back."""

    def __init__(self, models, env=None, **more):
        # Tests write no bytecode of ours, but SGLang's is worth a minute at each start.
        super().__init__(models, env={"PYTHONDONTWRITEBYTECODE": "", **(env or {})}, **more)
        self.restarts = 0

    def start(self, timeout=START_SECONDS):
        began = time.monotonic()
        super().start(timeout)
        print(f"     ready after {time.monotonic() - began:.0f} s", flush=True)
        return self

    def stop(self, timeout=STOP_SECONDS):
        began = time.monotonic()
        super().stop(timeout)
        print(f"     stopped in {time.monotonic() - began:.0f} s", flush=True)

    def entry(self, identifier):
        """The model's part of /v1/state."""
        return next(one for one in self.state()["models"] if one["id"] == identifier)

    def schedulers(self, identifier):
        """The pids of the Instance's ranks."""
        return [rank["pid"] for rank in self.entry(identifier)["ranks"] if "pid" in rank]

    def main(self, identifier):
        """The pid of SGLang's main process: the ancestor that `xpool serve` became."""
        table = harness.process_table()
        pid = self.schedulers(identifier)[0]
        while "launch_server" not in " ".join(table[pid][3]):
            pid = table[pid][0]
            check(pid in table and pid > 1, f"no SGLang main process above the scheduler of {identifier}")
        return pid

    def tree(self, identifier):
        """All processes of the Instance: main and what descends from it."""
        table = harness.process_table()
        found = [self.main(identifier)]
        for pid in found:
            found += [child for child, (parent, *_) in table.items() if parent == pid]
        return found

    def direct(self, identifier):
        """The base URL of SGLang's own HTTP interface."""
        return f"http://127.0.0.1:{self.entry(identifier)['port']}"

    def running(self, identifier):
        """How many requests SGLang itself says it holds."""
        loads = self.get(self.direct(identifier) + "/v1/loads")["loads"]
        return sum(load["num_running_reqs"] + load["num_waiting_reqs"] for load in loads)

    def flush(self, identifier):
        """Empties SGLang's prefix cache; it answers when nothing runs any more."""

        def flushed():
            status, _, text = harness.http_request(self.direct(identifier) + "/flush_cache?timeout=5", "POST")
            return status == 200 and b"flushed" in text

        wait_until(flushed, 20, "/flush_cache has flushed", 0.2)

    def again(self, identifier):
        """Brings an Instance back by hand, as the operations page says."""
        self.restarts += 1
        began = time.monotonic()
        process = self.launch("serve", identifier, log=self.folder / f"log.again{self.restarts}")
        self.hand.append(process)

        def back():
            check(process.poll() is None, f"xpool serve {identifier} ended with {process.returncode}: "
                  + self.log()[-2000:])
            return identifier in self.list_models()

        wait_until(back, START_SECONDS, f"{identifier} is back", 0.1)
        print(f"     {identifier} is back after {time.monotonic() - began:.0f} s", flush=True)

    def log(self):
        return super().log() + "".join(
            path.read_text(errors="replace") for path in sorted(self.folder.glob("log.again*"))
        )

    def expect_dead(self, pids, seconds, what):
        """None of these processes lives."""
        began = time.monotonic()

        def dead():
            table = harness.process_table()
            return not [pid for pid in pids if pid in table and table[pid][2] not in "ZX"]

        wait_until(dead, seconds, f"{what}: the Instance's processes are gone")
        return time.monotonic() - began

    def expect_down(self, identifier, seconds, what):
        """The model is reported down with a reason, and no lease of it is left."""
        wait_until(lambda: identifier not in self.list_models(), seconds, f"{what}: {identifier} is reported down")
        wait_until(lambda: all(r["state"] == "absent" for r in self.entry(identifier)["ranks"]), seconds,
                   f"{what}: no rank of {identifier} is attached")
        entry = self.entry(identifier)
        check(entry["reason"], f"{what}: no reason is given")
        wait_until(lambda: sum(a["counters"]["lanes_in_use"] for a in self.state()["agents"]) == 0, 5,
                   f"{what}: no Lane is leased")
        return entry["reason"]

    def golden(self, identifier, path=harness.TALES, seconds=120):
        """All prompts of the checkpoint's golden file, at once: the tokens must be those."""
        prompts = harness.golden(path)
        calls = [
            lambda p=p: self.generate(identifier, p["ids"], len(p["greedy_ids"]), seconds) for p in prompts
        ]
        for prompt, got in zip(prompts, harness.together(calls), strict=True):
            check(got == prompt["greedy_ids"], f"{identifier}: {got} instead of {prompt['greedy_ids']}")

    def trace(self):
        """{role: records} of all observer files in observe.folder, each in the order of writing."""
        found = {"rank": [], "atnagent": [], "ffnagent": []}
        for path in sorted((self.folder / "observe").glob("*.observe")):
            code, out, error = self.run("trace", str(path))
            check(code == 0 and not error, f"xpool trace {path.name}: {code} {error}")
            lines = [json.loads(line) for line in out.splitlines()]
            check("file" in lines[0] and lines[0]["role"] in found, f"the first line of a trace: {lines[0]}")
            for line in lines[1:]:
                found[line["role"]].append({**line, "pid": lines[0]["pid"]})
        return found

    def run(self, *arguments, timeout=60):
        # `trace` alone takes no configuration: it reads files.
        if arguments[0] != "trace":
            return super().run(*arguments, timeout=timeout)
        import subprocess

        done = subprocess.run([str(harness.XPOOL), *arguments], capture_output=True, text=True, env=self.env,
                              timeout=timeout * harness.SLOW)
        return done.returncode, done.stdout, done.stderr


# --- memory of processes ------------------------------------------------------------------------------


def regions(pid):
    """[(first, end, permissions, name)] of /proc/PID/maps."""
    found = []
    for line in pathlib.Path(f"/proc/{pid}/maps").read_text().splitlines():
        words = line.split(None, 5)
        first, end = (int(word, 16) for word in words[0].split("-"))
        found.append((first, end, words[1], words[5] if len(words) > 5 else ""))
    return found


def memory(pid, wanted=lambda name: True, block=16 << 20, overlap=256):
    """(address, bytes) of the writable memory of a process, in overlapping blocks. Memory that cannot be
    read is left out."""
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as file:
        for first, end, permissions, name in regions(pid):
            if not permissions.startswith("rw") or not wanted(name):
                continue
            at = first
            while at < end:
                try:
                    data = os.pread(file.fileno(), min(block, end - at), at)
                except OSError:
                    break
                if not data:
                    break
                yield at, data
                at += len(data) if at + len(data) >= end else max(len(data) - overlap, 1)


def search(pid, patterns, wanted=lambda name: True):
    """{pattern: address of the first place where it lies in the memory of the process}."""
    found = {}
    for address, data in memory(pid, wanted):
        for pattern in patterns:
            if pattern not in found:
                place = data.find(pattern)
                if place >= 0:
                    found[pattern] = address + place
    return found


def poke(pid, address, data):
    """Writes into the memory of a process, as a debugger does."""
    with open(f"/proc/{pid}/mem", "r+b", buffering=0) as file:
        check(os.pwrite(file.fileno(), data, address) == len(data), "could not write into a process")


# --- checkpoints ------------------------------------------------------------------------------------


PANEL = 16  # rows that the processor kernels interleave, a column after the other


class Tensors:
    """F32 tensors of a checkpoint by name, mapped."""

    def __init__(self, folder):
        self.found = {}
        for path in sorted(pathlib.Path(folder).glob("*.safetensors")):
            with open(path, "rb") as file:
                data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            length = struct.unpack("<Q", data[:8])[0]
            for name, entry in json.loads(data[8 : 8 + length]).items():
                if name != "__metadata__":
                    check(entry["dtype"] == "F32", f"{name} is {entry['dtype']}, not F32")
                    self.found[name] = (data, 8 + length + entry["data_offsets"][0], entry["shape"])

    def ffn(self):
        """The names of the FFN's matrices."""
        return [name for name, (_, _, shape) in self.found.items() if ".mlp." in name and len(shape) == 2]

    def row(self, name, row=0, column=0, count=PANEL):
        """`count` consecutive weights of a row, as they lie in the checkpoint and in torch's tensors."""
        data, begin, shape = self.found[name]
        at = begin + 4 * (row * shape[1] + column)
        return data[at : at + 4 * count]

    def panel(self, name, row=0, column=0):
        """The same column of PANEL rows, as it lies in the FfnAgent."""
        return b"".join(self.row(name, row + lane, column, 1) for lane in range(PANEL))


# --- reading a log ------------------------------------------------------------------------------------


def check_no_broken_plugin(log):
    for words in server.BROKEN_PLUGIN:
        check(words not in log, f"SGLang went on without a plugin: {words}")


def failures(log):
    """The texts of all canonical failures in a log."""
    return set(re.findall(r"canonical failure(?: of Generation \d+)?: (.*)", log))


def main(*tests):
    """harness.main with what these tests need."""
    if not server.PYTHON.exists():
        print("skipped: the Python environment is missing; scripts/test-venv makes it")
        sys.exit(harness.SKIPPED)
    harness.main(*tests)


def kill(pid, number=signal.SIGKILL):
    os.kill(pid, number)


__all__ = ["Failed"]
