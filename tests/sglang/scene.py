# SPDX-License-Identifier: MIT
"""A CrossPool system with SGLang Instances, and what tests want to know of their processes.

Built on tests/e2e/harness.py: `xpool up` starts everything, SGLang is found by the daemon's state and by
/proc. Needs the environment of the tests.
"""

import json
import mmap
import os
import pathlib
import re
import struct
import subprocess
import sys
import time

import numpy
import server
import harness
from harness import check, wait_until

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

    def __init__(self, models, env=None, observe=False, **more):
        # Tests write no bytecode of ours, but SGLang's is worth a minute at each start.
        super().__init__(models, env={"PYTHONDONTWRITEBYTECODE": "", **(env or {})}, **more)
        # While this file exists every FFN result is zero.
        self.zero = self.folder / "zero"
        self.env["XPOOL_TEST_ZERO_FFN"] = str(self.zero)
        # SGLang's own checks for lost KV slots, after every step and while idle, end the server.
        self.env["SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY"] = "1"
        self.env["SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE"] = "1"
        if observe:
            self.env["XPOOL_OBSERVE_FOLDER"] = str(self.folder / "observe")
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
        """The model is reported down with a reason, and none of its ranks is attached."""
        wait_until(lambda: identifier not in self.list_models(), seconds, f"{what}: {identifier} is reported down")
        wait_until(lambda: all(r["state"] == "absent" for r in self.entry(identifier)["ranks"]), seconds,
                   f"{what}: no rank of {identifier} is attached")
        entry = self.entry(identifier)
        check(entry["reason"], f"{what}: no reason is given")
        return entry["reason"]

    def expect_idle(self, what):
        """While nothing is asked, no Lane is leased."""
        wait_until(lambda: sum(a["counters"]["lanes_in_use"] for a in self.state()["agents"]) == 0, 5,
                   f"{what}: no Lane is leased")

    def arenas(self):
        """How many Transport arenas the AtnAgent has mapped."""
        return sum("xpool-transport" in name for *_, name in regions(self.pid("atnagent")))

    def golden(self, identifier, path=harness.TALES, seconds=120):
        """All prompts of the checkpoint's golden file, at once: the tokens must be those."""
        prompts = harness.golden(path)
        calls = [
            lambda p=p: self.generate(identifier, p["ids"], len(p["greedy_ids"]), seconds) for p in prompts
        ]
        for prompt, got in zip(prompts, harness.together(calls), strict=True):
            check(got == prompt["greedy_ids"], f"{identifier}: {got} instead of {prompt['greedy_ids']}")

    def kv(self, identifier):
        """The groups of a model, as `xpool kv --json` shows them."""
        code, out, error = self.run("kv", "--json")
        check(code == 0, f"xpool kv --json: {error}")
        return [group for group in json.loads(out)["groups"] if group["model"] == identifier]

    def kv_do(self, *words):
        code, _, error = self.run("kv", *map(str, words))
        check(code == 0, f"xpool kv {words}: {error}")

    def kv_resident(self, identifier):
        """Bytes of KV Cache that the ranks' processes really have, by the kernel's account."""
        return sum(resident(pid, "xpool-kv:") for pid in self.schedulers(identifier))

    def trace(self):
        """{role: records} of all observer files in observe.folder, each in the order of writing."""
        found = {"rank": [], "atnagent": [], "ffnagent": []}
        for path in sorted((self.folder / "observe").glob("*.observe")):
            done = subprocess.run(
                [str(harness.XPOOL), "trace", str(path)], capture_output=True, text=True, timeout=60 * harness.SLOW
            )
            check(done.returncode == 0 and not done.stderr, f"xpool trace {path.name}: {done.stderr}")
            lines = [json.loads(line) for line in done.stdout.splitlines()]
            check("file" in lines[0] and lines[0]["role"] in found, f"the first line of a trace: {lines[0]}")
            for line in lines[1:]:
                found[line["role"]].append({**line, "pid": lines[0]["pid"]})
        return found

# --- memory of processes ------------------------------------------------------------------------------


def regions(pid):
    """[(first, end, permissions, name)] of /proc/PID/maps."""
    found = []
    for line in pathlib.Path(f"/proc/{pid}/maps").read_text().splitlines():
        words = line.split(None, 5)
        first, end = (int(word, 16) for word in words[0].split("-"))
        found.append((first, end, words[1], words[5] if len(words) > 5 else ""))
    return found


def resident(pid, name):
    """Bytes in memory of the mappings whose name holds `name`, from /proc/PID/smaps."""
    found, counts = 0, False
    for line in pathlib.Path(f"/proc/{pid}/smaps").read_text().splitlines():
        words = line.split()
        if "-" in words[0] and not words[0].endswith(":"):
            counts = name in line
        elif counts and words[0] == "Rss:":
            found += int(words[1]) << 10
    return found


PAGE = os.sysconf("SC_PAGE_SIZE")
PRESENT = 3 << 62  # in memory or swapped out, in /proc/PID/pagemap
BLOCK = 16 << 20
OVERLAP = PAGE


def touched(pid, first, end):
    """The runs of pages of [first, end) that the process has ever used."""
    with open(f"/proc/{pid}/pagemap", "rb", buffering=0) as file:
        entries = os.pread(file.fileno(), (end - first) // PAGE * 8, first // PAGE * 8)
    used = numpy.frombuffer(entries[: len(entries) // 8 * 8], numpy.uint64) & numpy.uint64(PRESENT) != 0
    edges = numpy.flatnonzero(numpy.diff(numpy.concatenate(([False], used, [False])).astype(numpy.int8)))
    return [(first + int(a) * PAGE, first + int(b) * PAGE) for a, b in edges.reshape(-1, 2)]


def memory(pid, wanted):
    """(address, bytes) of the writable memory of a process, and of its frozen FFN weights, in overlapping
    blocks. Memory that cannot be read, such as a device's, is left out."""
    with open(f"/proc/{pid}/mem", "rb", buffering=0) as file:
        for first, end, permissions, name in regions(pid):
            if not (permissions.startswith("rw") or "xpool-ffn:" in name) or not wanted(name):
                continue
            # Frozen memory is there whether the process has looked at it or not.
            for at, stop in touched(pid, first, end) if permissions.startswith("rw") else [(first, end)]:
                while at < stop:
                    try:
                        data = os.pread(file.fileno(), min(BLOCK, stop - at), at)
                    except OSError:
                        break
                    if not data:
                        break
                    yield at, data
                    at += len(data) if at + len(data) >= stop else max(len(data) - OVERLAP, PAGE)


def search(pid, patterns, wanted=lambda name: True):
    """{pattern: address of the first place where it lies in the memory of the process}. Patterns are
    floats and so are looked for at multiples of four bytes; each has its own first eight bytes."""
    keys = {pattern[:8]: pattern for pattern in patterns}
    check(len(keys) == len(patterns), "two patterns begin alike")
    values = numpy.sort(numpy.frombuffer(b"".join(keys), numpy.uint64))
    found = {}
    for address, data in memory(pid, wanted):
        for shift in (0, 4):
            words = numpy.frombuffer(data, numpy.uint64, (len(data) - shift) // 8, shift)
            for index in numpy.flatnonzero(numpy.isin(words, values, kind="sort" if len(values) > 40 else None)):
                at = shift + 8 * int(index)
                pattern = keys[data[at : at + 8]]
                if data.startswith(pattern, at):
                    found.setdefault(pattern, address + at)
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
    """harness.main, which also asks that nothing is left in /dev/shm: SGLang's names neither."""
    if not server.PYTHON.exists():
        print("skipped: the Python environment is missing; scripts/test-venv makes it")
        sys.exit(harness.SKIPPED)
    harness.main(*tests)
