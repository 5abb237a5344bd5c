#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Requests that stay open from one Generation to the next, on GPUs that are a libcuda without one
(tests/tools/fake_cuda.c): all programs are real, an Instance's calls, the scheduler and the relay are host
threads over the same shared memory, and the FFN is an echo whose rows are known. Agents get SIGKILL at any
moment, again and again, and are started anew; the Instances, which call layer after layer, eagerly and by
replaying a captured graph, must go on with every row exact. Then none is started anew: every Instance ends by
itself, with the daemon's reason, and no row that it took was wrong.

    tests/cuda/open_requests.py --build BUILD [--kills N] [--seed N] [--only NAME]
"""

import argparse
import array
import ctypes
import json
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import time

import roles
import two_gpu

ROWS, LIVE_MOST = 4, 4
POISON = 0xFFFF
UNTOUCHED = 0x7171
ENDED = 5  # exit code of an Instance that was told that it ends


# ---- an Instance ---------------------------------------------------------------------------------------
def bf16(value):
    """Of a small whole number."""
    return array.array("I", array.array("f", [float(value)]).tobytes())[0] >> 16


class Driver:
    """The calls that capture a graph."""

    def __init__(self):
        self.cuda = ctypes.CDLL("libcuda.so.1")
        self.stream = ctypes.c_void_p()
        self("cuStreamCreateWithPriority", ctypes.byref(self.stream), 1, 0)

    def __call__(self, name, *arguments):
        code = getattr(self.cuda, name)(*arguments)
        roles.check(code == 0, f"{name}: {code}")

    def capture(self, calls):
        graph, executable = ctypes.c_void_p(), ctypes.c_void_p()
        self("cuStreamBeginCapture_v2", self.stream, 0)
        calls(self.stream.value)
        self("cuStreamEndCapture", self.stream, ctypes.byref(graph))
        self("cuGraphInstantiateWithFlags", ctypes.byref(executable), graph, ctypes.c_ulonglong(0))
        return executable


class Calls:
    """Layers of one Instance Rank, each with rows of its own; the echo of `members` is known."""

    def __init__(self, rank, info, members, ranks):
        self.rank, self.hidden, self.layers = rank, info.hidden, info.layers
        self.factor = members * (members + 1) // 2
        self.kind = ranks
        elements = ROWS * self.hidden
        self.given = [(ctypes.c_uint16 * elements)() for _ in range(self.layers)]
        self.taken = [(ctypes.c_uint16 * elements)() for _ in range(self.layers)]
        self.numbers = [bf16(n) for n in range(256)]
        self.wrong = 0
        self.longest = 0.0

    def fill(self, step, layer):
        for at in range(ROWS):
            for column in range(self.hidden):
                self.given[layer][at * self.hidden + column] = self.numbers[(step + layer + at + column) % 16]
        ctypes.memset(self.taken[layer], UNTOUCHED & 0xFF, ctypes.sizeof(self.taken[layer]))

    def queue(self, layer, stream=0):
        status = self.rank.queue_ffn(
            layer,
            ROWS,
            self.kind.BF16,
            ctypes.addressof(self.given[layer]),
            ctypes.addressof(self.taken[layer]),
            stream,
        )
        return status == self.kind.OK

    def wait(self, layer, live, ended):
        """Whether the last layer's rows came; False: they are poison, or the rank is at its end."""
        began, last = time.monotonic(), live * self.hidden - 1
        while self.taken[layer][last] == UNTOUCHED:
            if time.monotonic() - began > 60:
                raise RuntimeError(f"no answer to layer {layer} within 60 s")
            time.sleep(0.0002)
        self.longest = max(self.longest, time.monotonic() - began)
        time.sleep(0.0005)  # rows are written in order by one thread
        return self.taken[layer][last] != POISON

    def compare(self, step, layer, live):
        for at in range(ROWS * self.hidden):
            row, column = divmod(at, self.hidden)
            wanted = self.numbers[(step + layer + row + column) % 16 * self.factor + layer] if row < live else UNTOUCHED
            self.wrong += self.taken[layer][at] != wanted


def instance(arguments):
    from xpool import Rank, XpoolConfig, rank as ranks

    config = XpoolConfig()
    info = config.model_info("m")
    workload = ranks.Workload(
        "open_requests.py", config.model_path_of("m"), info.hidden, info.layers, info.attention_tp, 1, 4, 48, ranks.BF16
    )
    folder, ended = pathlib.Path(arguments.folder), []

    def end(kind, seconds, text):
        print("end", kind, text, flush=True)
        ended.append(text)

    rank = Rank(config, "m", arguments.rank, workload, end, arguments.rank)
    rank.wait_executable()
    calls, driver = Calls(rank, info, arguments.members, ranks), Driver()
    rank.begin_step(ranks.DECODE, rows=1)
    graph = driver.capture(lambda stream: [calls.queue(layer, stream) for layer in range(info.layers)])
    rank.serving("", 0, 0, 0, 0, info.max_context)
    (folder / f"{arguments.instance}.{arguments.rank}.ready").touch()
    step = answers = 0
    going, through = True, False
    while going and not ended:
        # All ranks of an Instance stop after the same step: the first one that sees the wish names it.
        last = folder / "last"
        if arguments.rank == 0 and (folder / "close").exists() and not last.exists():
            last.with_suffix(".new").write_text(str(step + 3))
            last.with_suffix(".new").rename(last)
        if last.exists() and step >= int(last.read_text()):
            through = True  # another rank may have left already, and this one is told to end
            break
        live = 1 + step % LIVE_MOST
        rank.begin_step(ranks.DECODE, rows=live)
        for layer in range(info.layers):
            calls.fill(step, layer)
        if step % 2:
            driver("cuGraphLaunch", graph, driver.stream)
            going = all([calls.wait(layer, live, ended) for layer in range(info.layers)])
        for layer in range(0 if step % 2 == 0 else info.layers, info.layers):
            going = going and calls.queue(layer) and calls.wait(layer, live, ended)
        if going:
            for layer in range(info.layers):
                calls.compare(step, layer, live)
            answers += info.layers
            step += 1
            (folder / f"{arguments.instance}.{arguments.rank}.steps").write_text(str(step))
    print(f"steps {step} answers {answers} wrong {calls.wrong} longest {calls.longest:.3f}", flush=True)
    if through:
        rank.finish()
        roles.check(rank.state().ffn_calls == answers, f"{rank.state().ffn_calls} calls, {answers} answers")
    else:
        until = time.monotonic() + 10
        while not ended and time.monotonic() < until:
            time.sleep(0.01)
        try:
            rank.finish()
        except Exception as error:  # the words of the end
            print("finish:", error, flush=True)
    rank.close()
    roles.check(calls.wrong == 0, f"{calls.wrong} wrong elements")
    sys.exit(0 if through else ENDED)


# ---- scenes --------------------------------------------------------------------------------------------
def serve(arguments, system, scene):
    names = [f"i.{rank}" for rank in range(scene.get("attention_tp", 1))]
    for number, name in enumerate(names):
        words = ["exec", "--config", system.config, "--model", "m", "--", sys.executable, __file__]
        words += ["--build", arguments.build, "--instance", "i", "--folder", system.folder]
        system.start(name, system.xpool, *words, "--rank", number, "--members", scene["tp"])
    there = [system.folder / f"{name}.ready" for name in names]
    system.wait(lambda: all(file.exists() for file in there), "the Instance", list(system.processes))
    return names


def steps(system, names):
    def one(name):
        try:
            return int((system.folder / f"{name}.steps").read_text() or 0)
        except FileNotFoundError:
            return 0

    return min(one(name) for name in names)


def replace_agents(system, agents):
    for name in agents:
        system.processes.pop(name).wait(timeout=20)
    for name in agents:
        kind, device = name.split()
        system.role(name, kind, "--device", device)


def all_end(system, names, began, text=""):
    """Every process ends by itself, the ranks without a wrong row and with `text`; seconds since `began`."""
    for process in system.processes.values():
        process.wait(timeout=20)
    took = time.monotonic() - began
    for name in names:
        said, found = system.tail(name), system.processes[name].returncode
        roles.check(found == ENDED and "wrong 0 " in said and text in said, f"{name} ended with {found}: {said}")
    roles.check(took < 8, f"all ended after {took:.1f} s")
    return took


def carried(system, folder):
    """What the observers of the AtnAgents say: the requests of all their lives, none of a Generation twice."""
    total = 0
    for path in sorted((folder / "observe").glob("atnagent-*")):
        done = subprocess.run([system.xpool, "trace", path], capture_output=True, text=True, timeout=60, check=True)
        found = [json.loads(line) for line in done.stdout.splitlines()]
        records = [record for record in found if "sequence" in record]
        keys = {(record["rank"], record["sequence"]) for record in records}
        roles.check(len(keys) == len(records), f"{path}: {len(records)} records of {len(keys)} requests")
        good = [r["model"] == "m" and 0 <= r["ns"] < 60e9 and -60 < r["time"] - time.time() < 1 for r in records]
        roles.check(all(good), f"{path}: {records[:3]}")
        total += len(records)
    return total


def go_on(arguments, folder, scene):
    chance = random.Random(arguments.seed)
    system = roles.start(arguments, folder, dict(scene, reform=60, observe=True))
    pauses, handed = [], 0
    try:
        names = serve(arguments, system, scene)
        system.wait(lambda: roles.ready(system), "System Ready", list(system.processes))
        agents = [name for name in system.processes if "agent" in name]
        others = [name for name in system.processes if "agent" not in name]
        for number in range(arguments.kills):
            before = steps(system, names)
            system.wait(lambda: steps(system, names) > before, "a step", others)
            time.sleep(chance.uniform(0, 0.05))
            victim = chance.choice(agents)
            system.processes[victim].send_signal(signal.SIGKILL)
            began = time.monotonic()
            replace_agents(system, agents)
            # At most one step was on its way when all agents had gone, so the third was answered by new ones.
            seen = steps(system, names)
            system.wait(lambda: steps(system, names) > seen + 2, f"steps after the end of {victim}", others)
            pauses.append(time.monotonic() - began)
            system.wait(lambda: roles.ready(system), "System Ready again", list(system.processes))
            handed += sum("got its last answer from" in system.tail(name) for name in agents)
            if not scene["provider"].startswith("nvshmem"):
                said = system.tail(f"ffnagent {scene['ffn'][0]}")
                roles.check("bytes adopted, 0 read" in said, f"weights were read: {said}")
        (folder / "close").touch()
        for name in names:
            code = system.processes.pop(name).wait(timeout=30)
            said = system.tail(name)
            roles.check(code == 0 and "wrong 0 " in said, f"{name} ended with {code}: {said}")
        clean, words = system.down()
        for name, process in system.processes.items():
            code = process.wait(timeout=20)
            roles.check(code == 0, f"{name} ended with {code}: {system.tail(name)}")
        roles.check(clean, words)
        observed = carried(system, folder)
        roles.check((observed > 0) == scene["provider"].endswith("relay"), f"{observed} Submissions observed")
        return f"{arguments.kills} agents killed, requests paused {min(pauses):.2f} to {max(pauses):.2f} s, {handed} answers handed on; {said.splitlines()[-1]}"
    finally:
        roles.end(system)


def no_successor(arguments, folder, scene):
    """None comes within deadlines.reform: the daemon's failure, by name, and nothing hangs."""
    system = roles.start(arguments, folder, dict(scene, reform=2))
    try:
        names = serve(arguments, system, scene)
        system.wait(lambda: roles.ready(system), "System Ready", list(system.processes))
        system.wait(lambda: steps(system, names) > 2, "steps", list(system.processes))
        system.processes[f"ffnagent {scene['ffn'][0]}"].send_signal(signal.SIGKILL)
        began = time.monotonic()
        took = all_end(system, names, began, "no next Generation within its time")
        roles.check(took > 1.5, f"all ended after {took:.1f} s")
        roles.check(system.processes["daemon"].returncode == 1, "the daemon's exit code")
        return f"all ended {took:.2f} s after the death, deadlines.reform is 2 s"
    finally:
        roles.end(system)


def ordered_end(arguments, folder, scene):
    """`xpool down` between two Generations, with a request open: the Instance ends in time, by itself."""
    system = roles.start(arguments, folder, dict(scene, reform=60))
    try:
        names = serve(arguments, system, scene)
        system.wait(lambda: roles.ready(system), "System Ready", list(system.processes))
        system.processes[f"ffnagent {scene['ffn'][0]}"].send_signal(signal.SIGKILL)
        for name in [name for name in system.processes if "agent" in name]:
            system.processes.pop(name).wait(timeout=20)
        began = time.monotonic()
        system.down()
        return f"all ended after {all_end(system, names, began):.2f} s"
    finally:
        roles.end(system)


def switched_off(arguments, folder, scene):
    """fabric.keep_requests = false: the Instance ends with its Generation."""
    system = roles.start(arguments, folder, dict(scene, reform=60, anew=True))
    try:
        names = serve(arguments, system, scene)
        system.wait(lambda: roles.ready(system), "System Ready", list(system.processes))
        system.processes[f"ffnagent {scene['ffn'][0]}"].send_signal(signal.SIGKILL)
        for name in names:
            code, said = system.processes[name].wait(timeout=20), system.tail(name)
            roles.check(code == ENDED and "canonical failure of Generation 1" in said, f"{name}: {code}: {said}")
        roles.check(system.processes["daemon"].poll() is None, "the daemon ended")
        return "the Instance ended, the daemon did not"
    finally:
        roles.end(system)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=pathlib.Path, required=True)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--only", help="a part of the names of the scenes")
    parser.add_argument("--instance", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--members", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.build = arguments.build.resolve()
    if arguments.instance:
        instance(arguments)
        return 0
    os.environ["XPOOL_FAKE_ECHO"] = "1"
    apart = dict(atn=["cuda:0"], ffn=["cuda:1"], tp=1, provider="p2p")
    both = dict(apart, ffn=["cuda:1", "cuda:2"], tp=2)
    for name, test, scene in (
        ("direct", go_on, apart),
        ("relay", go_on, dict(apart, provider="p2p-relay")),
        ("shared", go_on, dict(apart, ffn=["cuda:0"], shared=True)),
        ("members", go_on, both),
        ("members relay", go_on, dict(both, provider="p2p-relay")),
        ("ranks", go_on, dict(both, atn=["cuda:0", "cuda:3"], attention_tp=2)),
        ("ranks relay", go_on, dict(both, atn=["cuda:0", "cuda:3"], attention_tp=2, provider="p2p-relay")),
        ("no successor", no_successor, apart),
        ("no successor, relay", no_successor, dict(apart, provider="p2p-relay")),
        ("ordered end", ordered_end, apart),
        ("switched off", switched_off, apart),
    ):
        if arguments.only and arguments.only not in name:
            continue
        with tempfile.TemporaryDirectory(prefix="xpool-open-") as folder:
            began = time.monotonic()
            try:
                said = test(arguments, pathlib.Path(folder), scene)
            except RuntimeError as error:
                if "this build has no device code" not in str(error):
                    raise
                print("skipped: this build has no device code, which nvcc makes")
                return two_gpu.SKIPPED
            print(f"{name}: good, {time.monotonic() - began:.1f} s: {said}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
