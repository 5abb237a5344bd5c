# SPDX-License-Identifier: MIT
"""One of two TP ranks dies while KV memory moves. The two ranks of model `pair`, on two attention devices,
are processes of this test over libxpool; on each device a native Instance shares the pool. kill -9 of
either rank at each step of an operation: the other rank is told to end, no byte of either pool is lost or
counted twice, the native Instances go on, exact, and get all that there is; the next pair begins with its
floor and grows again. Memory that a rank gets reads as zeroes."""

import contextlib
import json
import mmap
import os
import pathlib
import signal
import struct
import subprocess
import sys
import time

import harness

BUILD = pathlib.Path(os.environ.get("XPOOL_BUILD", harness.ROOT / "build"))
MODEL = harness.TALES
SPEC = json.loads((MODEL / "config.json").read_text())
RANKS = 2
HEADS = SPEC["num_key_value_heads"] // RANKS
TOKEN_BYTES = 2 * SPEC["num_hidden_layers"] * HEADS * SPEC["head_dim"] * 4
NATIVE = ("left", "right")
PROMPT = [(7 * i + 3) % 500 for i in range(800)]
LENGTH = 60
# Steps of an operation in a rank, and the passages at which it dies there: the first completion is that
# of the floor.
POINTS = (
    ("kv.rank.seen", 1),
    ("kv.rank.grown", 1),
    ("kv.rank.completed", 1),
    ("kv.rank.completed", 2),
    ("kv.rank.withdrawn", 1),
    ("kv.rank.released", 1),
    ("kv.rank.completed", 3),
    ("kv.rank.grown", 2),
)


# --- a rank ---------------------------------------------------------------------------------------------


def rank_main(folder, number):
    sys.path.insert(0, str(BUILD / "python"))
    from xpool import Rank, XpoolConfig, XpoolError, kv as kvs, rank as ranks

    config = XpoolConfig()
    info = config.model_info("pair")
    ended = []
    workload = ranks.Workload(
        "test_kv_ranks", config.model_path_of("pair"), info.hidden, info.layers, RANKS, 1, 8, 128, ranks.F32
    )
    rank = Rank(config, "pair", number, workload, lambda kind, seconds, text: ended.append(kind))
    kv = kvs.Kv(rank, TOKEN_BYTES)
    try:
        rank.wait_executable()
        rank.serving("", 0, 0, 0, 0, info.max_context)
    except XpoolError as error:
        if "asked this Instance to end" not in str(error):
            raise
        return
    with open(folder / "shared", "r+b") as file:
        shared = mmap.mmap(file.fileno(), 12)
    (folder / f"ready.{number}").touch()
    last, written, since = 0, 0, 0
    while not ended:
        if number == 0:
            # Each word has one writer: `want` is the test's, and must not be written back here.
            step, want, _ = struct.unpack("III", shared[:12])
            held = want if kv.info().mapped_tokens >= want else 0
            shared[8:12] = struct.pack("I", held)
            shared[:4] = struct.pack("I", step + 1)
        step, want, live = struct.unpack("III", shared[:12])
        if step == last:
            continue
        last = step
        command = kv.poll(step, live)
        if command is not None and command.kind == kvs.SHRINK:
            kv.release(max(command.tokens, live, 1))
        mapped = kv.info().mapped_tokens * kv.token_bytes
        if mapped > written:
            memory = kv.memory(mapped)
            if bytes(memory[written:mapped]) != bytes(mapped - written):
                (folder / "dirty").touch()
            memory[written:mapped] = b"\xa5" * (mapped - written)
        written = mapped
        if kv.leader:
            demand = want > live and want > kv.info().mapped_tokens
            since = (since or time.monotonic_ns()) if demand else 0
            wants = {"demand": kvs.PREFILL, "demand_tokens": want, "demand_since_ns": since,
                     "demand_deadline_ns": since + 200_000_000} if demand else {}
            kv.report(live_tokens=live, running=1 if live else 0, waiting=1 if demand else 0,
                      last_activity_ns=time.monotonic_ns(), earliest_deadline_ns=kvs.NO_DEADLINE, **wants)
        time.sleep(0.001)
    kv.close()
    rank.close()


# --- the system -----------------------------------------------------------------------------------------


class Pair:
    """Both ranks; `victim` dies at `point`."""

    def __init__(self, system, victim=None, point=None):
        self.system = system
        self.folder = pathlib.Path(system.folder)
        (self.folder / "shared").write_bytes(bytes(12))
        self.processes = [None] * RANKS
        for number in range(RANKS):
            (self.folder / f"ready.{number}").unlink(missing_ok=True)
        # The victim last: a rank that comes when it has died already would be the next Instance's.
        for number in sorted(range(RANKS), key=lambda rank: rank == victim):
            if number == victim:
                harness.wait_until(lambda: self.registered(1 - victim), 30, "the other rank is registered", 0.005)
            env = {**system.env, "XPOOL_CONFIG": str(system.config)}
            if number == victim:
                env["XPOOL_FAILPOINTS"] = "{}=kill@{}".format(*point)
            words = [sys.executable, __file__, "--rank", str(self.folder), str(number)]
            with open(self.folder / f"rank.{number}", "ab") as output:
                self.processes[number] = subprocess.Popen(
                    words, stdout=output, stderr=subprocess.STDOUT, start_new_session=True, env=env
                )
            system.sessions.add(self.processes[number].pid)

    def registered(self, number):
        entry = next(one for one in self.system.state()["models"] if one["id"] == "pair")
        return entry["ranks"][number]["state"] != "absent"

    def ready(self):
        return all((self.folder / f"ready.{number}").exists() for number in range(RANKS))

    def ended(self):
        return all(process.poll() is not None for process in self.processes)

    def want(self, tokens):
        with open(self.folder / "shared", "r+b") as file, mmap.mmap(file.fileno(), 12) as shared:
            shared[4:8] = struct.pack("I", tokens)

    def tail(self):
        return "".join((self.folder / f"rank.{number}").read_text()[-1500:] for number in range(RANKS))


def shown(system):
    code, out, err = system.run("kv", "--json")
    harness.check(code == 0, f"xpool kv --json: {code} {err}")
    return json.loads(out)


def group(system, model):
    return next(one for one in shown(system)["groups"] if one["model"] == model)


def books(system):
    """Of every byte of both pools it is said once where it is."""
    kv = shown(system)
    for pool in kv["pools"]:
        charged = 0
        for one in kv["groups"]:
            members = len(one["devices"])  # what is shown is the sum over them
            token_bytes = members * one["bundle_bytes"] // one["bundle_tokens"]
            goal = one["last_command"]["tokens"] * token_bytes if one["last_command"] else 0
            size = max(one["floor"]["bytes"], one["backed"]["bytes"], goal)
            charged += size // members * one["devices"].count(pool["device"])
        harness.check(charged == pool["charged_bytes"] <= pool["bytes"], f"{charged} bytes are charged in {kv}")
        harness.check(pool["free_bytes"] == pool["bytes"] - charged, f"free bytes of {pool}")
    return kv


def system_of_three():
    """One native Instance a device; the pair at its ceiling and a prompt of a native one do not fit together."""
    rows = {"dtype": "float32", "kv_floor_tokens": 128, "decode_rows": 8, "prefill_rows": 128}
    models = [harness.model("pair", engine="sglang", attention_tp=RANKS, **rows)]
    models += [harness.model(model, **rows) for model in NATIVE]
    return harness.System(models, atn=2, memory="26000KiB")


def start(system):
    """All roles but the pair."""
    commands = [["daemon", "serve"], *(["atnagent", "--device", device] for device in system.atn)]
    commands += [["ffnagent", "--device", device] for device in system.ffn]
    commands += [*(["serve", model] for model in NATIVE), ["gateway"]]
    system.hand = [system.launch(*command) for command in commands]

    def serve():
        try:
            return [m["state"] for m in system.state()["models"] if m["id"] in NATIVE] == ["serving"] * len(NATIVE)
        except OSError:
            return False

    harness.wait_until(serve, 60, "the native Instances serve", 0.05)


def fill(system, wants):
    """The native Instances take, for their prompts, what the pair has above its floor."""
    got = harness.together([lambda m=m: system.generate(m, PROMPT, LENGTH, 60) for m in NATIVE])
    for model, tokens in zip(NATIVE, got, strict=True):
        if wants:
            harness.check(tokens == wants[model], f"{model}: other tokens")
    return dict(zip(NATIVE, got, strict=True))


def death(system, wants, most, victim, point):
    pair = Pair(system, victim, point)
    try:
        # Twice back and forth: each side is borrower and donor.
        for _ in range(2):
            harness.wait_until(lambda: pair.ready() or pair.ended(), 30, "the pair is there")
            pair.want(most)
            harness.wait_until(
                lambda: pair.ended() or group(system, "pair")["backed"]["tokens"] >= most, 20, "the pair has grown"
            )
            pair.want(0)
            if pair.ended():
                break
            fill(system, wants)
            books(system)
        harness.wait_until(pair.ended, 20, f"rank {victim} dies at {point}, and the other one ends")
        codes = [process.returncode for process in pair.processes]
        harness.check(codes[victim] == -signal.SIGKILL and codes[1 - victim] == 0, f"{point}: {codes} {pair.tail()}")
    finally:
        for process in pair.processes:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            process.wait(30)
    harness.wait_until(lambda: group(system, "pair")["state"] == "absent", 10, "the pair's bytes are back")
    kv = books(system)
    one = next(g for g in kv["groups"] if g["model"] == "pair")
    harness.check(one["backed"]["bytes"] == 0, f"the pair holds {one['backed']}")
    fill(system, wants)
    print(f"     rank {victim} at {point[0]}@{point[1]}", flush=True)


def one_rank():
    with system_of_three() as system:
        start(system)
        wants = fill(system, None)
        kv = books(system)
        pair = next(g for g in kv["groups"] if g["model"] == "pair")
        harness.check(sorted(pair["devices"]) == ["cpu:0", "cpu:1"], f"the pair is on {pair['devices']}")
        most = pair["ceiling"]["tokens"]
        for point in POINTS:
            for victim in range(RANKS):
                death(system, wants, most, victim, point)
        harness.check(not (pathlib.Path(system.folder) / "dirty").exists(), "a rank saw old contents")
        code, _, err = system.run("down")
        harness.check(code == 0, f"xpool down: {code} {err}")
        system.expect_nothing_left()


if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1] == "--rank":
        rank_main(pathlib.Path(sys.argv[2]), int(sys.argv[3]))
    else:
        try:
            import cffi  # noqa: F401
        except ImportError:
            print("skipped: the Python binding needs cffi")
            sys.exit(harness.SKIPPED)
        harness.main(one_rank)
