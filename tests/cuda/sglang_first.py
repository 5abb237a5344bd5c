#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""One model by SGLang through CrossPool on GPUs, beside SGLang alone: the same tokens, by captured graphs.

    tests/cuda/sglang_first.py --build BUILD [--site FOLDER] [--model PATH] [--layout tp1|one|tp2|dp2]
                               [--elastic] [--eager] [--dummy] [--limit SECONDS] [--out FOLDER] [--rehearse]

Both servers are started at once: CrossPool with attention on cuda:0 and the FFN on cuda:1 (tp2, dp2: both
roles on both; one: both roles on cuda:0, no other GPU is needed), SGLang alone on cuda:1 (one: cuda:0). Each is
asked for 64 greedy tokens of four prompts, one after the other (the prompts' lengths lie in, between and beyond
the captured prefill sizes), then for three at once, which a decode graph of four rows serves. Printed: agreement
and where it ends, with the distance of SGLang's own two best tokens there; how far both are from the checkpoint
in float32, which judges them (benches/sglang_truth.py); calls replayed by graphs and queued outside them;
memory; the tails of all logs where something went wrong. Where the KV Cache is elastic, the prompts are asked
for again and again while `xpool kv trim` takes away what they do not use: answers as good, and memory that
moved, in every group. Nothing is killed but what is left at the end.

--elastic: that, harder: SGLang's prefix cache is on, there are longer prompts, three of which begin alike, room
for 32 requests, and ceilings that fall and rise. As many requests of each wave as want four bundles beside the floor
have prompts that nobody asked before; a wave begins where all is at its floor. With tp2 both ranks have the same
slots, prefix caches and requests whenever memory has moved (tests/sglang/hooks/xpool_rank_hooks.py).

--site: a folder with SGLang and what it needs, where the interpreter itself has it not. --dummy: no
checkpoint is read, tokens are not compared. --rehearse: CPU devices, without graphs. Exit code 77: no GPUs.
"""

import argparse
import ctypes
import glob
import json
import os
import pathlib
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "benches"))
import results  # noqa: E402
import sglang_truth  # noqa: E402
from mps_control import find_control  # noqa: E402

SKIPPED = 77
PR_SET_PDEATHSIG = 1
TOKENS = 64
PROMPTS = (10, 40, 200, 300)  # tokens
GRAPH_TOKENS = (16, 64, 256)  # of prefill graphs
DECODE_ROWS, PREFILL_ROWS, KV_TOKENS = 8, 512, 8192
# With --elastic: so many rows, since a bundle of a small model is thousands of tokens; prompts that begin alike.
ELASTIC_ROWS, ELASTIC_PROMPTS, ALIKE, CONTEXT = 32, (700, 760, 900), 600, 1024
BROKEN = ("Failed to load plugin", "Failed to execute general plugin", "Failed to apply hooks")
LOG_TAIL = 6000
TRIMMED_JUDGED = 60  # of the different answers that come while memory moves, evenly chosen; each takes a moment
MOVED_BUNDLES, MOVES = 4, 10  # that a wave wants beside the floor; states of moved memory that ranks are compared in
FRESH_PROMPT = CONTEXT - TOKENS - 16  # tokens of a prompt that is asked once
FRESH_JUDGED = len(PROMPTS + ELASTIC_PROMPTS)  # of those answers: as many as vanilla's
TRIMMED_SIGMAS = 3.0  # of one answer's misses beside vanilla's: many are looked at, and wrong memory misses nearly all

GPU_FLAGS = (
    "--attention-backend triton --sampling-backend pytorch --grammar-backend none --moe-runner-backend triton"
    " --disable-custom-all-reduce --skip-server-warmup --disable-radix-cache --random-seed 1"
    " --mem-fraction-static 0.6 --decode-log-interval 20"
).split()
CPU_FLAGS = (
    "--attention-backend torch_native --sampling-backend pytorch --grammar-backend none --disable-cuda-graph"
    " --skip-server-warmup --disable-overlap-schedule --disable-radix-cache --random-seed 1"
    " --mem-fraction-static 0.3"
).split()
LAYOUTS = {"tp1": (1, 1), "one": (1, 1), "tp2": (2, 1), "dp2": (1, 2)}  # attention (TP, DP)


class Failed(Exception):
    """What was expected did not happen."""


def free_port():
    for port in range(11000 + os.getpid() % 500 * 20, 32000, 300):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
                return port
            except OSError:
                pass
    raise Failed("no free port")


def http(url, body=None, timeout=60):
    data = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(url, data=data, headers={"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=timeout) as answer:
        return json.loads(answer.read() or b"null")


def memory():
    if not shutil.which("nvidia-smi"):
        return []
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    out = subprocess.run(command, capture_output=True, text=True, timeout=120).stdout
    return [int(line) for line in out.split()]


class Process:
    """A command in a session of its own, which ends with this program; its output goes to a file."""

    def __init__(self, name, command, environment, folder):
        self.name, self.file, self.began = name, folder / f"{name}.log", time.monotonic()
        print(f"{name}: {' '.join(map(str, command))}", flush=True)
        log = open(self.file, "wb")
        self.popen = subprocess.Popen(
            [str(word) for word in command], stdout=log, stderr=subprocess.STDOUT, env=environment, preexec_fn=self.child
        )

    @staticmethod
    def child():
        os.setsid()
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)

    def text(self):
        return self.file.read_text(errors="replace")

    def check(self):
        if self.popen.poll() is not None:
            raise Failed(f"{self.name} ended with {self.popen.returncode}")
        for words in BROKEN:
            if words in self.text():
                raise Failed(f"{self.name}: {words}")

    def end(self, seconds):
        """SIGTERM, then what is left of the session by SIGKILL; whether it ended by itself."""
        clean = True
        if self.popen.poll() is None:
            self.popen.terminate()
            try:
                self.popen.wait(seconds)
            except subprocess.TimeoutExpired:
                clean = False
        try:
            os.killpg(self.popen.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self.popen.wait(30)
        return clean


class Run:
    def __init__(self, arguments, folder):
        self.arguments, self.folder = arguments, folder
        self.until = time.monotonic() + arguments.limit
        self.gpu = not arguments.rehearse
        self.tp, self.dp = LAYOUTS[arguments.layout]
        self.ranks = self.tp * self.dp
        # Two cores take their time.
        self.rows, self.waves = (ELASTIC_ROWS, 5) if arguments.elastic and self.gpu else (DECODE_ROWS, 6 if self.gpu else 2)
        self.fresh = []  # [prompt, answer] of those that are asked once
        self.kv_tokens = self.rows * CONTEXT if arguments.elastic else KV_TOKENS
        self.lengths = PROMPTS + (ELASTIC_PROMPTS if arguments.elastic else ())
        self.processes = []
        self.result = {name: getattr(arguments, name) for name in ("layout", "eager", "elastic")}
        self.result["model"] = str(arguments.model)
        self.layers = json.loads((arguments.model / "config.json").read_text())["num_hidden_layers"]
        self.vocabulary = json.loads((arguments.model / "config.json").read_text())["vocab_size"]

    # --- starting ---------------------------------------------------------------------------------------

    def flags(self):
        flags = GPU_FLAGS if self.gpu else CPU_FLAGS
        if self.arguments.elastic:
            flags = [flag for flag in flags if flag != "--disable-radix-cache"]
        if not self.gpu:
            return flags
        if self.arguments.eager:
            return flags + ["--disable-cuda-graph", "--disable-piecewise-cuda-graph"]
        graphs = ["--cuda-graph-max-bs", str(self.rows), "--piecewise-cuda-graph-tokens", *map(str, GRAPH_TOKENS)]
        return flags + graphs + self.arguments.more.split()

    def environment(self, **more):
        site = self.arguments.site
        if self.gpu:
            more = {
                "SGLANG_IS_FLASHINFER_AVAILABLE": "false",
                "SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK": "1",
                "SGLANG_ENABLE_JIT_DEEPGEMM": "0",
                "SGLANG_TF_EXIST_OK": "1",
                "NCCL_NVLS_ENABLE": "0",
                **more,
            }
        else:
            more = {
                "SGLANG_USE_CPU_ENGINE": "1",
                "TORCHDYNAMO_DISABLE": "1",
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": str(ROOT / "tests" / "sglang" / "hooks"),
                **more,
            }
        if site:
            more["PYTHONPATH"] = str(site)
            more["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, (f"{site}/lib", os.environ.get("LD_LIBRARY_PATH"))))
        more.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", TOKENIZERS_PARALLELISM="false", PYTHONUNBUFFERED="1")
        return {**os.environ, **more}

    def start(self, *arguments):
        process = Process(*arguments, self.folder)
        self.processes.append(process)
        return process

    def start_vanilla(self):
        a = self.arguments
        self.vanilla_port = free_port()
        command = [a.python, "-m", "sglang.launch_server", "--model-path", a.model, "--host", "127.0.0.1"]
        command += ["--port", self.vanilla_port, "--dtype", a.dtype, "--max-total-tokens", self.kv_tokens]
        command += ["--max-running-requests", self.rows, "--chunked-prefill-size", PREFILL_ROWS, "--context-length", CONTEXT]
        command += ["--device", "cuda" if self.gpu else "cpu", *(["--load-format", "dummy"] if a.dummy else [])]
        plugins = "none" if self.gpu else "xpool_cpu_hooks"
        more = {"SGLANG_PLUGINS": plugins, **({"CUDA_VISIBLE_DEVICES": "0" if a.layout == "one" else "1"} if self.gpu else {})}
        self.vanilla = self.start("vanilla", command + self.flags(), self.environment(**more))

    def start_crosspool(self):
        a, folder = self.arguments, self.folder
        kind = "cuda" if self.gpu else "cpu"
        shared = self.gpu and a.layout != "tp1"
        atn = [f"{kind}:{i}" for i in range(self.ranks)]
        ffn = atn if shared else [f"{kind}:{self.ranks if not self.gpu else 1}"]
        self.gateway, self.daemon = free_port() + 100, free_port() + 101
        values = [
            ("daemon.socket", f"{folder}/d.sock"),
            ("daemon.http", f"127.0.0.1:{self.daemon}"),
            ("gateway.http", f"127.0.0.1:{self.gateway}"),
            ("cache.root", str(folder)),
            ("atn.devices", atn),
            ("ffn.devices", ffn),
            ("devices.allow_shared_roles", shared),
            ("atn.device_memory_utilization", 0.8),
            ("deadlines.submission", 120),
        ]
        if not self.gpu:
            values += [(f"devices.'{d}'.memory", "1GiB") for d in atn + ffn]
            values += [(f"devices.'{d}'.threads", 1) for d in atn + ffn]
        model = [
            ("id", "first"),
            ("path", str(a.model)),
            ("engine", "sglang"),
            ("python", a.python),
            ("dtype", a.dtype),
            ("load_format", "dummy" if a.dummy else "auto"),
            ("ffn_tp_size", self.ranks if shared else 1),
            ("attention_tp", self.tp),
            ("attention_dp", self.dp),
            ("decode_rows", self.rows),
            ("prefill_rows", PREFILL_ROWS),
            ("max_context", CONTEXT),
            ("kv_ceiling_tokens", self.kv_tokens),
            ("engine_args", self.flags()),
            *([("kv_floor_tokens", CONTEXT)] if a.elastic else []),
        ]
        config = folder / "first.toml"
        lines = [f"{k} = {json.dumps(v)}" for k, v in values] + ["[[models]]"] + [f"{k} = {json.dumps(v)}" for k, v in model]
        config.write_text("\n".join(lines) + "\n")
        plugins = {} if self.gpu else {"SGLANG_PLUGINS": "xpool_cpu_hooks"}
        environment = self.environment(**plugins)
        if a.elastic:
            self.states = folder / "states"
            self.states.mkdir()
            hooks = str(ROOT / "tests" / "sglang" / "hooks")
            plugins = [*plugins.values(), "xpool_rank_hooks"]
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, (environment.get("PYTHONPATH"), hooks)))
            environment.update(SGLANG_PLUGINS=",".join(plugins), XPOOL_TEST_KV_STATES=str(self.states), XPOOL_TEST_OVERLAP="1")
        if a.lazy:
            environment["CUDA_MODULE_LOADING"] = "LAZY"
        self.xpool = a.build / "bin" / "xpool"
        plan = subprocess.run([self.xpool, "plan", "--config", config], capture_output=True, text=True, env=environment, timeout=120)
        if plan.returncode:
            raise Failed(f"xpool plan: {plan.stderr}{plan.stdout}")
        print(plan.stdout, flush=True)
        self.up = self.start("up", [self.xpool, "up", "--config", config], environment)

    def wait(self, what, condition, process):
        while not condition():
            process.check()
            if time.monotonic() > self.until:
                raise Failed(f"{what} did not come within the limit of {self.arguments.limit} s")
            time.sleep(0.25)
        print(f"{what} after {time.monotonic() - process.began:.0f} s", flush=True)

    # --- asking -----------------------------------------------------------------------------------------

    def drawn(self, state, count):
        """Token ids by a small generator of its own, the same wherever this runs."""
        ids = []
        for _ in range(count):
            state = (state * 1103515245 + 12345) & 0x7FFFFFFF
            ids.append(10 + (state >> 8) % (self.vocabulary - 10))
        return ids

    def prompt(self, number):
        """Of `number`, or [a number of its own]: then one that is asked once."""
        if isinstance(number, list):
            return self.drawn(1_000_003 + number[0], FRESH_PROMPT)
        alike = ALIKE if number >= len(PROMPTS) else 0
        return self.drawn(99, alike) + self.drawn(12345 + number, self.lengths[number] - alike)

    def ask(self, port, number, logprobs=False):
        body = {
            "input_ids": self.prompt(number),
            "sampling_params": {"temperature": 0.0, "max_new_tokens": TOKENS, "ignore_eos": True},
        }
        if logprobs:
            body.update(return_logprob=True, top_logprobs_num=2)
        left = max(5, self.until - time.monotonic())
        return http(f"http://127.0.0.1:{port}/generate", body, left)

    def tokens(self, port, number):
        began = time.monotonic()
        ids = self.ask(port, number)["output_ids"]
        if len(ids) != TOKENS:
            raise Failed(f"prompt {number}: {len(ids)} tokens came instead of {TOKENS}")
        return ids, time.monotonic() - began

    def together(self, port, numbers):
        found = {}

        def one(number):
            try:
                found[number] = self.tokens(port, number)[0]
            except Exception as error:
                found[number] = error

        threads = [threading.Thread(target=one, args=(n,)) for n in numbers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        if len(found) != len(numbers):
            raise Failed(f"{len(numbers) - len(found)} prompts among others have no answer after 120 s")
        for number, answer in found.items():
            if isinstance(answer, Exception):
                raise Failed(f"prompt {number} among others: {answer!r}")
        return found

    def ask_all(self, port, name):
        answers = []
        for number in range(len(self.lengths)):
            ids, took = self.tokens(port, number)
            print(f"{name}: prompt of {self.lengths[number]}: {took:.2f} s, {ids[:8]} ...", flush=True)
            answers.append(ids)
        return answers, self.together(port, (0, 1, 2))

    def healthy(self, port):
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
                return answer.status == 200
        except OSError:
            return False

    def state(self):
        return http(f"http://127.0.0.1:{self.daemon}/v1/state")

    def serving(self):
        try:
            model = self.state()["models"][0]
            return bool(model["healthy"]) and model["state"] == "serving"
        except (OSError, KeyError):
            return False

    # --- the run ----------------------------------------------------------------------------------------

    def run(self):
        before = memory()
        self.start_crosspool()
        if not self.arguments.no_vanilla:
            self.start_vanilla()
            self.wait("vanilla serves", lambda: self.healthy(self.vanilla_port), self.vanilla)
            wanted, wanted_together = self.ask_all(self.vanilla_port, "vanilla")
            distances = [self.distances(number) for number in range(len(self.lengths))]
            self.graphs(self.vanilla)
            self.vanilla.end(10)
        self.wait("CrossPool serves", self.serving, self.up)
        entry = self.state()["models"][0]
        port = entry["port"]
        print(f"memory in use, MiB: {before} before all, {memory()} now; counters {entry['engine']}", flush=True)
        steps = []
        good = True
        said, alone = [], None
        for turn in range(2):
            first = self.counters()
            got, got_together = self.ask_all(port, "crosspool")
            last = self.counters()
            steps.append({key: last[key] - first[key] for key in last if isinstance(last[key], int)})
            print(f"turn {turn}: {steps[-1]}", flush=True)
            alone = alone or got
            if self.arguments.no_vanilla or self.arguments.dummy:
                continue
            said.append(got)
            for number in range(len(self.lengths)):
                self.compare(f"prompt of {self.lengths[number]}", wanted[number], got[number], distances[number])
            for number, ids in got_together.items():
                self.compare(f"prompt of {self.lengths[number]}, three at once", wanted_together[number], ids, distances[number])
        good &= self.check_graphs(steps)
        if said:
            elastic, trimmed = self.elastic(port, said[0])
            good &= self.third_party(wanted, said, trimmed) and elastic
        elif self.arguments.elastic:
            good &= self.elastic(port, alone)[0]
        self.result.update(turns=steps, good=good)
        self.graphs(self.up)
        clean = subprocess.run([self.xpool, "down", "--config", self.folder / "first.toml"], capture_output=True, text=True, timeout=120)
        print(f"down: exit code {clean.returncode} {clean.stderr[-800:]}", flush=True)
        self.up.popen.wait(30)
        print(f"up ended with {self.up.popen.returncode}; memory in use {memory()}", flush=True)
        self.result["down"] = [clean.returncode, self.up.popen.returncode]
        return good

    def counters(self):
        """Of the Instance, once they stand still (they come twice a second)."""
        found = self.state()["models"][0]["engine"]
        for _ in range(20):
            time.sleep(0.6)
            again = self.state()["models"][0]["engine"]
            if again == found:
                return found
            found = again
        raise Failed("the counters do not come to rest")

    def kv(self, *words):
        command = [self.xpool, "kv", *words, "--config", self.folder / "first.toml"]
        out = subprocess.run(command, capture_output=True, text=True, timeout=20)
        if out.returncode:
            raise Failed(f"xpool kv {' '.join(words)}: {out.stderr}")
        return out.stdout

    def groups(self):
        return json.loads(self.kv("--json"))["groups"]

    def wave(self, turn, many, fresh):
        """What `many` requests at once ask for: numbers of prompts, and [number] of `fresh` ones a group that are asked
        here alone, spread evenly. SGLang deals requests out to its groups in turn."""
        asked, each = [], many // self.dp
        for i in range(each):
            new = (i + 1) * fresh // each > i * fresh // each
            for g in range(self.dp):
                slot = i * self.dp + g
                asked.append([turn * many + slot] if new else len(self.lengths) - 1 - slot % (len(self.lengths) - 2))
        return asked

    def at_floors(self, failed):
        """Waits until trims have taken all that is above the floors."""
        end = min(self.until, time.monotonic() + 10)
        while any(group["backed"]["tokens"] > group["floor"]["tokens"] for group in self.groups()):
            if failed or time.monotonic() > end:
                failed.append("memory that nobody uses was not taken within 10 s")
                return
            time.sleep(0.1)

    def elastic(self, port, alone):
        """The KV Cache grows by demands and shrinks by trims under the requests: whether it did, and the answers
        that were given, each different one once: [(prompt, tokens)]."""
        before = self.groups()
        if not before[0]["elastic"]:
            print("the KV Cache is fixed", flush=True)
            return not self.arguments.elastic, []
        ceiling, floor, bundle = before[0]["ceiling"]["tokens"], before[0]["floor"]["tokens"], before[0]["bundle_tokens"]
        many, fresh, least = self.rows * self.dp, 0, 1
        if self.arguments.elastic:
            fresh, least = -(-MOVED_BUNDLES * bundle // (FRESH_PROMPT + TOKENS)), self.waves
            if fresh > self.rows - 4 or ceiling < floor + MOVED_BUNDLES * bundle:
                raise Failed(f"no scene: bundles of {bundle} tokens, a floor of {floor}, a ceiling of {ceiling}, {self.rows} requests")
        stop, failed = threading.Event(), []
        sizes = [set() for _ in before]

        def trim():
            turn = 0
            while not stop.wait(0.05 if self.arguments.elastic else 0.15):
                turn += 1
                try:
                    if self.arguments.elastic and turn % 8 == 0:
                        self.kv("set", "first", "--ceiling", str(ceiling // 2 if turn % 16 else ceiling))
                    self.kv("trim", "first")
                    for group, seen in zip(self.groups(), sizes, strict=True):
                        seen.add(group["backed"]["tokens"])
                except (Failed, subprocess.TimeoutExpired) as error:
                    failed.append(str(error))

        def one(slot, number, found):
            try:
                found[slot] = number, self.tokens(port, number)[0]
            except (Failed, OSError) as error:
                failed.append(str(error))

        thread, found = threading.Thread(target=trim), {}
        began = time.monotonic()
        thread.start()
        for turn in range(self.waves):
            asking = [threading.Thread(target=one, args=((turn, i), number, found)) for i, number in enumerate(self.wave(turn, many, fresh))]
            for request in asking:
                request.start()
            for request in asking:
                request.join(120)
            if self.arguments.elastic:
                self.at_floors(failed)
            time.sleep(0.1 if self.arguments.elastic else 0.4)
        stop.set()
        thread.join(120)
        after = self.groups()
        grants = [new["grants"] - old["grants"] for new, old in zip(after, before, strict=True)]
        moved = all(len(seen) > 1 for seen in sizes) and min(grants) >= least
        good = not failed and len(found) == self.waves * many and moved and self.same_states()
        self.fresh = [[self.prompt(number), ids] for _, (number, ids) in sorted(found.items()) if isinstance(number, list)]
        known = [(number, ids) for number, ids in found.values() if not isinstance(number, list)]
        same = sum(ids == alone[number] for number, ids in known)
        good &= self.gpu or same == len(known)  # in float32 nothing excuses another token
        print(f"{many} at once, {fresh * self.dp} of them of new prompts, trimmed, {self.waves} times in {time.monotonic() - began:.1f} s:"
              f" {same} of {len(known)} answers are those given alone", flush=True)  # fmt: skip
        print(f"elastic KV: {'good' if good else 'WRONG'}; {grants} grants, sizes in tokens {[sorted(seen) for seen in sizes]},"
              f" bundles of {bundle}; {failed[:3]}", flush=True)  # fmt: skip
        every = sorted(set().union(*sizes))
        self.result["elastic KV"] = dict(good=good, sizes=every, grants=sum(grants), same=same, answers=len(known), fresh=len(self.fresh))
        return good, [(number, list(ids)) for number, ids in sorted({(number, tuple(ids)) for number, ids in known})]

    def same_states(self):
        """Of tensor parallel ranks, as far as both have written them down."""
        if self.tp == 1 or not self.arguments.elastic:
            return True
        written = [file.read_text().splitlines()[:-1] for file in sorted(self.states.glob("*"))]
        count = min(map(len, written), default=0)
        part = next((i for i in range(count) if len({lines[i] for lines in written}) > 1), None)
        moved = min((sum(line.endswith(" moved") for line in lines) for lines in written), default=0)
        good = len(written) == self.tp and moved > MOVES and part is None
        print(f"states of the ranks: {[len(lines) for lines in written]}, {moved} of them where memory had moved ({MOVES + 1} wanted),"
              f" {'the same' if part is None else f'they part at {part}'}", flush=True)  # fmt: skip
        return good

    def check_graphs(self, steps):
        if not self.gpu:
            return True
        good = True
        for turn in steps:
            if self.arguments.eager:
                good &= turn["replayed_calls"] == 0 and turn["eager_decode_calls"] > 0
            else:
                good &= turn["eager_decode_calls"] == 0
                good &= turn["replayed_calls"] >= (TOKENS - 1) * self.layers * len(self.lengths)
        print(f"graphs: {'good' if good else 'WRONG'}", flush=True)
        self.result["graphs"] = good
        return good

    def distances(self, number):
        """How far SGLang's best token was from its second best, at every step."""
        tops = self.ask(self.vanilla_port, number, logprobs=True)["meta_info"]["output_top_logprobs"]
        return [top[0][0] - top[1][0] for top in tops]

    def compare(self, name, wanted, got, distances):
        same = next((i for i, (a, b) in enumerate(zip(wanted, got)) if a != b), TOKENS)
        note = "all" if same == TOKENS else f"first {same}; there SGLang's two best were {distances[same]:.4f} apart"
        print(f"tokens equal, {name}: {note}", flush=True)
        self.result.setdefault("tokens", []).append({"what": name, "equal": same, "distance": None if same == TOKENS else distances[same]})

    def third_party(self, wanted, said, trimmed):
        """Both sides beside the checkpoint in float32 (benches/sglang_truth.py); the first turn is judged, and each
        answer that was given while the KV Cache moved, beside vanilla's to the same prompt."""
        began = time.monotonic()
        prompts = [self.prompt(number) for number in range(len(self.lengths))]
        if len(trimmed) > TRIMMED_JUDGED:
            print(f"{len(trimmed)} different answers, {TRIMMED_JUDGED} of them are judged", flush=True)
            trimmed = [trimmed[i * len(trimmed) // TRIMMED_JUDGED] for i in range(TRIMMED_JUDGED)]
        sides = {name: [list(pair) for pair in zip(prompts, one)] for name, one in (("ours", said[0]), ("plain", wanted))}
        sides["trimmed"] = [[prompts[number], ids] for number, ids in trimmed]
        sides["fresh"] = [self.fresh[i * len(self.fresh) // FRESH_JUDGED] for i in range(FRESH_JUDGED)] if self.fresh else []
        # Asked again elsewhere: sglang_truth.py reads it.
        self.result["question"] = {"model": str(self.arguments.model), "sides": sides}
        judged = sglang_truth.ask(self.arguments.python, self.arguments.model, sides)
        ours, plain = (sglang_truth.summary(judged[side]) for side in ("ours", "plain"))
        worse = sglang_truth.verdict(ours, plain)
        good = worse <= sglang_truth.SIGMAS
        print(f"float32, CrossPool: {sglang_truth.words(ours)}", flush=True)
        print(f"float32, vanilla: {sglang_truth.words(plain)}", flush=True)
        print(f"float32: CrossPool is {worse:.2f} sigma worse, {'good' if good else 'WRONG'} ({time.monotonic() - began:.1f} s);"
              f" turns the same: {all(one == said[0] for one in said)}", flush=True)  # fmt: skip
        self.result["float32"] = {"ours": ours, "plain": plain, "worse": worse, "good": good}
        if sides["fresh"]:
            fresh = sglang_truth.summary(judged["fresh"])
            fine = sglang_truth.verdict(fresh, plain) <= TRIMMED_SIGMAS
            good &= fine
            print(f"float32, new prompts while memory moves: {'' if fine else 'WRONG: '}{sglang_truth.words(fresh)}", flush=True)
            self.result["float32"]["fresh"] = fresh
        for (number, ids), answer in zip(trimmed, judged["trimmed"], strict=True):
            one, other = sglang_truth.summary([answer]), sglang_truth.summary([judged["plain"][number]])
            fine = sglang_truth.verdict(one, other) <= TRIMMED_SIGMAS
            good &= fine
            if ids != said[0][number] or not fine:
                print(f"float32, prompt of {self.lengths[number]}, trimmed: {'' if fine else 'WRONG: '}{sglang_truth.words(one)}", flush=True)
        return good

    def graphs(self, process):
        text = process.text()
        ends = re.findall(r"Capture (?:piecewise CUDA|cuda) graph end\. Time elapsed: [\d.]+ s\. mem usage=[\d.]+ GB", text)
        batches = re.findall(r"(Decode|Prefill) batch.*?cuda graph: (True|False)", text)
        counts = {f"{kind} {graph}": batches.count((kind, graph)) for kind, graph in sorted(set(batches))}
        print(f"{process.name}: {ends}; batches by graph, as logged: {counts}", flush=True)
        self.result[f"{process.name} log"] = [ends, counts]

    def end(self):
        for process in reversed(self.processes):
            process.end(20)
        for file in glob.glob(f"/tmp/xpool-mps-{os.getuid()}/*") if self.gpu else ():
            print(f"left behind: {file}", flush=True)


def rows_of(found):
    """In the form of docs/results; what did not come is left out."""
    rows, name = [], f"{pathlib.Path(found['model']).name}, layout {found['layout']}{', eager' if found['eager'] else ''}"
    name += ", prefix cache on" if found["elastic"] else ""
    for turn in [turn for turn in found.get("turns", [])[-1:] if "eager_decode_calls" in turn]:  # a rehearsal has none
        rows.append(
            results.row(
                "sglang_first.eager_decode_calls",
                turn["eager_decode_calls"],
                "calls",
                target=None if found["eager"] else "0",
                note=f"{name}: FFN calls of decode steps outside graphs; {turn['replayed_calls']} in replayed ones,"
                f" {turn['eager_prefill_calls']} of prefill outside",
            )
        )
    if "float32" in found:
        shares = {side: 1 - one["missed"] / one["tokens"] for side, one in found["float32"].items() if side in ("ours", "plain")}
        note = f"{name}: greedy tokens that are transformers' float32 ones, each judged by its own prefix; peer: SGLang alone"
        rows.append(results.row("sglang_first.float32_agreement", shares["ours"], "ratio", peer=shares["plain"], note=note))
    if "elastic KV" in found:
        one = found["elastic KV"]
        rows.append(
            results.row(
                "sglang_first.trimmed_answers_good",
                int(one["good"]),
                "bool",
                target=">= 1",
                note=f"{name}: answers while the KV Cache is trimmed under them again and again: {one['same']} of"
                f" {one['answers']} the same as before, the others judged by float32, of {one['fresh']} to new prompts some; {one['grants']} grants, {one['sizes'][0]} to {one['sizes'][-1]} tokens",
            )
        )
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=pathlib.Path, required=True)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--site", type=pathlib.Path)
    parser.add_argument("--model", type=pathlib.Path, default=ROOT / "models" / "tales" / "qwen3-moe")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--layout", choices=list(LAYOUTS), default="tp1")
    parser.add_argument("--elastic", action="store_true", help="prefix cache on, more that moves")
    parser.add_argument("--eager", action="store_true", help="no graphs on either side")
    parser.add_argument("--dummy", action="store_true")
    parser.add_argument("--lazy", action="store_true", help="CUDA_MODULE_LOADING=LAZY for SGLang under CrossPool")
    parser.add_argument("--no-vanilla", action="store_true")
    parser.add_argument("--more", default="", help="further arguments for both servers")
    parser.add_argument("--limit", type=float, default=280)
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--rehearse", action="store_true")
    arguments = parser.parse_args()
    arguments.build, arguments.model = arguments.build.resolve(), arguments.model.resolve()
    if arguments.rehearse:
        arguments.dtype = "float32"
    else:
        find_control()
        told = subprocess.run([str(arguments.build / "bin" / "xpool"), "devices", "--json"], capture_output=True, timeout=120)
        gpus = [d for d in json.loads(told.stdout)["devices"] if d["device"].startswith("cuda:")]
        needed = 1 if arguments.layout == "one" else 2
        if len(gpus) < needed:
            print(f"skipped: {needed} GPU(s) are needed, {len(gpus)} found")
            return SKIPPED
    began, good = time.monotonic(), False
    with tempfile.TemporaryDirectory(prefix="xpool-first-") as scratch:
        run = Run(arguments, pathlib.Path(scratch))
        try:
            good = run.run()
        except (Failed, OSError, KeyError, RuntimeError, subprocess.SubprocessError) as error:
            print(f"WRONG: {error!r}", flush=True)
            for process in run.processes:
                print(f"--- {process.name}\n{process.text()[-LOG_TAIL:]}", flush=True)
        finally:
            run.end()
            if arguments.out:
                arguments.out.mkdir(parents=True, exist_ok=True)
                for process in run.processes:
                    shutil.copy(process.file, arguments.out)
                (arguments.out / "sglang_first.json").write_text(json.dumps(run.result, indent=1))
                results.write("sglang_first_cuda", rows_of(run.result), folder=arguments.out)
    print(f"{'good' if good else 'WRONG'} after {time.monotonic() - began:.0f} s", flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
