#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""The programs of a system with GPUs, all of them real, over a libcuda without a GPU (tests/tools/fake_cuda.c)
and an MPS controller that is a test program: start, attach, calls, a killed Instance and its successor, the
ordered end, a killed FfnAgent, and the next Generation, whose FfnAgent takes the weights over. Kernels compute
nothing there, so no row is looked at (open_requests.py does that).

    tests/cuda/roles.py --build BUILD
"""

import argparse
import ctypes
import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time

import two_gpu

SKIPPED = 77


def instance(arguments):
    global kv
    from xpool import Rank, XpoolConfig, kv, rank as ranks

    config = XpoolConfig()
    info = config.model_info("m")
    assert info.device == "cuda:0", info
    workload = ranks.Workload(
        "roles.py", config.model_path_of("m"), info.hidden, info.layers, info.attention_tp, 1, 4, 48, ranks.BF16
    )
    folder = pathlib.Path(arguments.folder)
    ended = []

    def end(kind, seconds, text):
        print("end", kind, text, flush=True)
        ended.append(kind)

    signal.signal(signal.SIGTERM, lambda *_: ended.append("SIGTERM"))
    # The devices of an Instance's ranks come first, in their order.
    rank = Rank(config, "m", arguments.rank, workload, end, arguments.rank)
    cache = open_cache(rank, info)
    rank.wait_executable()
    rows = ctypes.create_string_buffer(4 * info.hidden * 2)
    at = ctypes.addressof(rows)
    for step in range(3):
        rank.begin_step(ranks.DECODE, rows=3)
        for layer in range(info.layers):
            assert rank.queue_ffn(layer, 4, ranks.BF16, at, at, 0) == ranks.OK, rank.error(0)
        rank.look(rank.mark(0))
    rank.finish()
    assert rank.queue_ffn(0, 4, ranks.F32, at, at, 0) == ranks.INVALID
    assert rank.state().eager_decode_calls == 3 * info.layers, rank.state()
    rank.serving("", 0, 0, 0, 0, info.max_context)
    assert rank.state().ffn_calls == 0, rank.state()  # from here on it counts anew
    (folder / f"{arguments.instance}.{arguments.rank}.ready").touch()
    while not (folder / "close").exists() and not ended:
        time.sleep(0.01)
    if cache is not None:
        use_cache(cache, lambda: ended)
        cache.close()
    rank.close()


def open_cache(rank, info):
    """The rank's KV Cache on its GPU: the floor has memory."""
    if not info.kv_elastic:
        return None
    # The tests' qwen3-moe: layers, K and V, heads of one rank, 16-bit elements.
    spec = json.loads((two_gpu.TALES / "qwen3-moe" / "config.json").read_text())
    heads = max(spec["num_key_value_heads"] // info.attention_tp, 1)
    cache = kv.Kv(rank, info.layers * 2 * heads * spec["head_dim"] * 2)
    check(cache.device == rank.device and cache.elastic, "the KV Cache is not on its GPU")
    check(0 < cache.info().mapped_tokens <= cache.reserved_tokens, "the floor")
    ctypes.memset(cache.address, 7, cache.info().mapped_tokens * cache.token_bytes)
    cache.captured()
    return cache


def use_cache(cache, ended):
    """Grows to the ceiling by a demand and looks at the memory, which is the host's here."""
    floor, step = cache.info().mapped_tokens, 0
    wanted = cache.info().ceiling_tokens
    until = time.monotonic() + 10
    while cache.info().mapped_tokens < wanted and not ended():
        check(time.monotonic() < until, f"no grant: {cache.info().mapped_tokens} of {wanted} tokens")
        cache.report(demand=kv.PREFILL, demand_tokens=wanted, demand_since_ns=1, waiting=1)
        step += 1
        command = cache.poll(step, 1)
        if command is not None:
            check(command.kind == kv.GROW, "a shrink")
            cache.release(command.tokens)
        time.sleep(0.005)
    if ended():
        return
    old = ctypes.string_at(cache.address, floor * cache.token_bytes)
    new = ctypes.string_at(cache.address + len(old), (wanted - floor) * cache.token_bytes)
    check(old == b"\7" * len(old) and new == bytes(len(new)), "contents")
    cache.report()


def check(condition, what):
    if not condition:
        raise RuntimeError(what)


def prepare(arguments, folder, scene):
    (folder / "close").unlink(missing_ok=True)
    models = {"m": two_gpu.TALES / "qwen3-moe"}
    config = two_gpu.write_config(scene, folder, models)
    text = config.read_text().replace("dtype = 'float16'", "dtype = 'bfloat16'")
    memory = "".join(f"devices.'cuda:{i}'.memory = '8GiB'\n" for i in range(4))
    observe = f"observe.folder = '{folder}/observe'\n" if scene.get("observe") else ""
    config.write_text(observe + memory + text)
    system = two_gpu.System(folder, config, arguments.build / "bin" / "xpool", arguments.build)
    libraries = arguments.build / "tests" / "fake-cuda"
    system.environment["LD_LIBRARY_PATH"] = str(libraries)
    system.environment["PATH"] = f"{folder}:{os.environ['PATH']}"
    if scene.get("provider", "").startswith("nvshmem"):
        fake = arguments.build / "tests" / "fake-nvshmem"
        system.environment["XPOOL_NVSHMEM_ROOT"] = str(fake / "wheel")
        system.environment["XPOOL_NVSHMEM_PLUGIN"] = str(fake / "libxpool_nvshmem.so")
        system.environment["XPOOL_FAKE_NVSHMEM"] = scene.get("heap", "")
    system.environment["XPOOL_TEST_MPS_ROOT"] = str(folder / "mps")
    (folder / "nvidia-cuda-mps-control").symlink_to(arguments.build / "tests" / "unit_control_test_plane")
    return system


def start(arguments, folder, scene):
    system = prepare(arguments, folder, scene)
    system.role("daemon", "daemon", "serve")
    system.wait(lambda: (folder / "d.sock").exists(), "the daemon's socket", ["daemon"])
    for device in scene["atn"]:
        system.role(f"atnagent {device}", "atnagent", "--device", device)
    for device in scene["ffn"]:
        system.role(f"ffnagent {device}", "ffnagent", "--device", device)
    return system


def serve(arguments, system, scene, name):
    """Starts all ranks of the Instance; their names."""
    ranks = [f"{name}.{rank}" for rank in range(scene.get("attention_tp", 1))]
    for number, rank in enumerate(ranks):
        words = ["exec", "--config", system.config, "--model", "m", "--", sys.executable, __file__]
        words += ["--build", arguments.build, "--instance", name, "--folder", system.folder]
        system.start(rank, system.xpool, *words, "--rank", number)
    there = [system.folder / f"{rank}.ready" for rank in ranks]
    system.wait(lambda: all(file.exists() for file in there), name, list(system.processes))
    return ranks


def ready(system):
    command = [system.xpool, "daemon", "check", "--config", str(system.config)]
    return subprocess.run(command, capture_output=True, env=system.environment, timeout=120).returncode == 0


def nothing_left(system):
    """The sockets of NVSHMEM's processes; those of agents that were killed, the daemon removes."""
    for process in system.processes.values():
        left = list(pathlib.Path("/tmp").glob(f"nvshmem-socket-{process.pid}-*"))
        check(not left, f"left: {left}")


def end(system):
    """Whatever is left, the controller that a killed daemon leaves for the next one included."""
    system.end()
    for file in (system.folder / "mps").glob("*/pipe/control.pid"):
        try:
            os.kill(int(file.read_text().split()[0]), signal.SIGKILL)
        except ProcessLookupError:
            pass


def life(arguments, folder, scene):
    system = start(arguments, folder, scene)
    try:
        first = serve(arguments, system, scene, "first")
        system.wait(lambda: ready(system), "System Ready", list(system.processes))
        system.processes[first[0]].kill()
        for rank in first:  # the others of the killed one are told to end
            system.processes.pop(rank).wait(timeout=20)
        second = serve(arguments, system, scene, "second")
        system.wait(lambda: ready(system), "System Ready again", list(system.processes))
        (folder / "close").touch()
        for rank in second:
            check(system.processes[rank].wait(timeout=20) == 0, f"{rank}: {system.tail(rank)}")
        clean, words = system.down()
        for name, process in system.processes.items():
            code = process.wait(timeout=20)
            check(code == 0, f"{name} ended with {code}: {system.tail(name)}")
        check(clean, words)
        check(not (folder / "mps").exists(), "the MPS controller's folder is left")
        nothing_left(system)
    finally:
        end(system)


def last_detach(arguments, folder, scene):
    """The scheduler still executes for an Instance that died, and leaves at the ordered end: no failure."""
    os.environ["XPOOL_FAKE_BUSY"] = "1"
    try:
        system = start(arguments, folder, scene)
    finally:
        del os.environ["XPOOL_FAKE_BUSY"]
    try:
        [first] = serve(arguments, system, scene, "first")
        system.processes.pop(first).kill()
        clean, words = system.down()
        for name, process in system.processes.items():
            code = process.wait(timeout=20)
            check(code == 0, f"{name} ended with {code}: {system.tail(name)}")
        check(clean, words)
    finally:
        end(system)


def failure(arguments, folder, scene):
    system = start(arguments, folder, scene)
    try:
        [first] = serve(arguments, system, scene, "first")
        agent = f"ffnagent {scene['ffn'][-1]}"
        system.processes[agent].send_signal(signal.SIGKILL)
        began = time.monotonic()
        for name, process in system.processes.items():
            if name != first:
                process.wait(timeout=20)
        took = time.monotonic() - began
        check(took < 3, f"the others ended after {took:.1f} s")
        check(system.processes["daemon"].returncode == 1, "the daemon's exit code")
        system.wait(lambda: "canonical failure" in system.tail(first), "the Instance's news", [])
        nothing_left(system)
    finally:
        end(system)


def refused(arguments, folder, scene):
    """The agents cannot join: the Generation fails, by name, and every process ends."""
    system = start(arguments, folder, scene)
    try:
        for name, process in system.processes.items():
            process.wait(timeout=20)
            check(process.returncode == 1, f"{name} ended with {process.returncode}")
        check(scene["says"] in system.tail("daemon"), f"the daemon says: {system.tail('daemon')}")
    finally:
        end(system)


def joining(arguments, folder, scene):
    """An agent dies while all of them join: nobody waits for it longer than the others need to hear of it."""
    system = start(arguments, folder, scene)
    try:
        agent = f"ffnagent {scene['ffn'][-1]}"
        system.wait(lambda: "joining" in system.tail(agent), "the agent to join", list(system.processes))
        system.processes[agent].send_signal(signal.SIGKILL)
        began = time.monotonic()
        for name, process in system.processes.items():
            process.wait(timeout=20)
        check(time.monotonic() - began < 3, f"the others ended after {time.monotonic() - began:.1f} s")
        check("canonical failure" in system.tail("daemon"), system.tail("daemon"))
        nothing_left(system)
    finally:
        end(system)


def reform(arguments, folder, scene):
    """A killed FfnAgent: agents end, the daemon, the weights' memory and, where it is kept, the Instance stay."""
    system = start(arguments, folder, dict(scene, reform=60))
    kept = not scene.get("anew")
    try:
        first = serve(arguments, system, scene, "first")
        system.wait(lambda: ready(system), "System Ready", list(system.processes))
        for generation in (2, 3):
            agents = [name for name in system.processes if "agent" in name]
            system.processes[f"ffnagent {scene['ffn'][0]}"].send_signal(signal.SIGKILL)
            for name in agents + ([] if kept else first):
                system.processes.pop(name).wait(timeout=20)
            check(system.processes["daemon"].poll() is None, "the daemon ended")
            for name in agents:
                kind, device = name.split()
                system.role(name, kind, "--device", device)
            if not kept:
                first = serve(arguments, system, scene, f"of{generation}")
            system.wait(lambda: ready(system), "System Ready again", list(system.processes))
            said = system.tail(f"ffnagent {scene['ffn'][0]}")
            check("bytes adopted, 0 read" in said and " 0 bytes adopted" not in said, f"weights were read: {said}")
        (folder / "close").touch()
        for rank in first:
            check(system.processes[rank].wait(timeout=20) == 0, f"{rank}: {system.tail(rank)}")
        clean, words = system.down()
        check(clean, words)
    finally:
        end(system)


def children(parent):
    """command line -> pid of the live child processes."""
    found = {}
    for entry in pathlib.Path("/proc").glob("[0-9]*"):
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
            words = (entry / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if int(fields[1]) == parent and fields[0] not in "ZX":
            found[" ".join(word.decode() for word in words)] = int(entry.name)
    return found


def under_up(arguments, folder, scene):
    """The same under `xpool up`, which starts agents and Instance again."""
    system = prepare(arguments, folder, dict(scene, reform=60))
    # In SGLang's place, which is asked with -c whether it is there.
    python = folder / "python"
    words = [sys.executable, __file__, "--build", arguments.build, "--instance", "up", "--folder", folder, "--rank", 0]
    python.write_text(f'#!/bin/sh\n[ "$1" = -c ] && exit 0\nexec {" ".join(map(str, words))}\n')
    python.chmod(0o755)
    text = system.config.read_text().replace("daemon.http", "gateway.http = '127.0.0.1:0'\ndaemon.http", 1)
    system.config.write_text(text + f"python = '{python}'\n")
    try:
        system.role("up", "up")
        up = system.processes["up"].pid
        system.wait(lambda: "ready in" in system.tail("up"), "System Ready", ["up"])
        for victim in ("ffnagent", "atnagent"):
            before = children(up)
            [pid] = [pid for words, pid in before.items() if victim in words]
            os.kill(pid, signal.SIGKILL)
            agents = {pid for words, pid in before.items() if "agent" in words}
            system.wait(
                lambda: not agents & set(children(up).values()) and len(children(up)) == len(before) and ready(system),
                "System Ready again",
                ["up"],
            )
            after = children(up)
            kept = {pid for pid in before.values() if pid in after.values()}
            kept = {words for words, pid in after.items() if pid in kept}
            check(len(after) == len(before) == 5, f"before {before}, after {after}")
            # The daemon, the gateway and the Instance: agents are others.
            check(len(kept) == 3 and not any("agent" in words for words in kept), f"others than before: {after}")
        check(system.tail("up").count("bytes adopted, 0 read") >= 1, "weights were read")
        # A moment after a Generation re-formed, one that is stopped with exit code 0 stays so.
        [pid] = [pid for words, pid in children(up).items() if "--instance" in words]
        os.kill(pid, signal.SIGTERM)
        system.wait(lambda: pid not in children(up).values(), "the Instance's end", ["up"])
        time.sleep(2)
        check(not any("--instance" in words for words in children(up)), "a stopped Instance was started again")
        check(len(children(up)) == 4, f"others ended with it: {children(up)}")
        system.processes["up"].send_signal(signal.SIGINT)
        code = system.processes["up"].wait(timeout=30)
        check(code == 0, f"xpool up ended with {code}: {system.tail('up')}")
    finally:
        end(system)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=pathlib.Path, required=True)
    parser.add_argument("--only", help="a part of the names of the scenes")
    parser.add_argument("--instance", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.build = arguments.build.resolve()
    if arguments.instance:
        instance(arguments)
        return 0
    shared = dict(atn=["cuda:0"], ffn=["cuda:0"], tp=1, shared=True)
    for name, test, scene in (
        ("life", life, shared),
        # cuda:2 has no weights; with the relay cuda:3 has no rank either
        ("idle", life, dict(atn=["cuda:0"], ffn=["cuda:1", "cuda:2"], tp=1)),
        ("idle relay", life, dict(atn=["cuda:0", "cuda:3"], ffn=["cuda:1", "cuda:2"], tp=1, provider="p2p-relay")),
        ("members", life, dict(atn=["cuda:0"], ffn=["cuda:1", "cuda:2"], tp=2)),
        ("ranks", life, dict(atn=["cuda:0", "cuda:3"], ffn=["cuda:1", "cuda:2"], tp=2, attention_tp=2)),
        ("relay", life, dict(shared, provider="p2p-relay")),
        ("last detach", last_detach, dict(atn=["cuda:0"], ffn=["cuda:1"], tp=1)),
        ("failure", failure, shared),
        ("reform", reform, shared),
        ("reform anew", reform, dict(shared, anew=True)),
        ("reform relay", reform, dict(atn=["cuda:0"], ffn=["cuda:1"], tp=1, provider="p2p-relay")),
        ("reform under up", under_up, shared),
        (
            "reform ranks relay",
            reform,
            dict(atn=["cuda:0", "cuda:3"], ffn=["cuda:1", "cuda:2"], tp=2, attention_tp=2, provider="p2p-relay"),
        ),
        ("reform members", reform, dict(atn=["cuda:0"], ffn=["cuda:1", "cuda:2"], tp=2)),
        ("nvshmem", life, dict(shared, provider="nvshmem")),
        ("nvshmem idle", life, dict(atn=["cuda:0", "cuda:3"], ffn=["cuda:1", "cuda:2"], tp=1, provider="nvshmem")),
        ("nvshmem members", life, dict(atn=["cuda:0"], ffn=["cuda:1", "cuda:2"], tp=2, provider="nvshmem")),
        (
            "nvshmem ranks",
            life,
            dict(atn=["cuda:0", "cuda:3"], ffn=["cuda:1", "cuda:2"], tp=2, attention_tp=2, provider="nvshmem"),
        ),
        (
            "nvshmem far",
            life,
            dict(atn=["cuda:0", "cuda:3"], ffn=["cuda:1", "cuda:2"], tp=2, attention_tp=2, provider="nvshmem-far"),
        ),
        ("nvshmem reform", reform, dict(shared, provider="nvshmem")),
        (
            "nvshmem reform ranks",
            reform,
            dict(atn=["cuda:0", "cuda:3"], ffn=["cuda:1", "cuda:2"], tp=2, attention_tp=2, provider="nvshmem"),
        ),
        ("nvshmem failure", failure, dict(shared, provider="nvshmem")),
        ("nvshmem dies joining", joining, dict(shared, provider="nvshmem", heap="hang")),
        ("nvshmem limited", refused, dict(shared, provider="nvshmem", heap="limited", says="limited multi-process")),
        ("nvshmem refused", refused, dict(shared, provider="nvshmem", heap="refuse", says="cannot join NVSHMEM")),
    ):
        if arguments.only and arguments.only not in name:
            continue
        with tempfile.TemporaryDirectory(prefix="xpool-roles-") as folder:
            began = time.monotonic()
            try:
                test(arguments, pathlib.Path(folder), scene)
            except RuntimeError as error:
                if "this build has no device code" not in str(error):
                    raise
                print("skipped: this build has no device code, which nvcc makes")
                return SKIPPED
            print(f"{name}: good, {time.monotonic() - began:.1f} s", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
