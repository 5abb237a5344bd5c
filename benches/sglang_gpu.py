#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""SGLang with CrossPool on two GPUs, beside SGLang alone with the same arguments.

    benches/sglang_gpu.py --build BUILD [--out FOLDER] [--only STEP[,STEP...]] [--resume [FOLDER]] [--budget SECONDS]
                          [--again] [--site FOLDER] [--trace CSV] [--rehearse]

Steps, in this order where none are named:

    latency   one model of real size, dummy weights: TTFT, time between tokens (TBT), alone on one GPU and with
              attention on cuda:0, FFN on cuda:1; batch 1, 8, 32, contexts of 1K and 8K; where the time goes
    memory    what a server holds on its GPU, measured when it ends (taken from the same start)
    tokens    64 greedy tokens on small checkpoints of each family: graphs and eager, attention (TP, DP) (1, 1)
    kill      kill -9 of one SGLang scheduler in mid-decode; the others' tokens (in the system of `tokens`)
    cold      three MoE models at a few requests a second each, beside a static split of the same two GPUs
    layouts   tokens of (2, 1) and (1, 2), both roles on both GPUs
    float32   those tokens beside transformers in float32, on the CPU: with --resume also later and elsewhere
    spread    how dummy routers spread tokens over experts
    padded    three streams in batches captured for 4, 8, 16, 32: rows and experts that the FFN side counts; and how
              10,000 prompt tokens spread over experts there
    more      `latency` and `memory` of the other models: SGLang alone first, all on both GPUs, then one system of all

A row is written to OUT/sglang_gpu.json as soon as it is known; what has not been run stands there without a
value. `--resume` keeps the rows of such a file, with their commit and date, and measures only what has none;
`--again` measures what the named steps give once more, `--renew` what of that is of another commit. `--budget` stops in order when
the time is over. The run fails when SGLang has not captured its graphs, when its log tells of a decode step
outside them, or when the Instances count a call outside graphs in decode, or none in graphs.

`--rehearse` takes the same way with small checkpoints on CPU devices. Needs SGLang in the interpreter, or in
--site (tests/cuda/sglang_bundle brings it to a machine without network).
"""

import argparse
import collections
import csv
import datetime
import json
import os
import pathlib
import random
import signal
import statistics
import subprocess
import sys
import tarfile
import tempfile
import time

import open_client
import results
import sglang_models
import sglang_padded
import sglang_servers
import sglang_spread
from sglang_servers import Fleet, Model, harness
from sglang_tokens import (
    EXPECTED,
    Replayed,
    body_of,
    check_graphs,
    checkpoints,
    ids_of,
    layouts,
    step_float32,
    step_kill,
    step_layouts,
    step_tokens,
)

ORDER = ("latency", "memory", "tokens", "kill", "cold", "layouts", "float32", "spread", "padded", "more")
MODELS = ("Qwen3-30B-A3B", "Qwen3-14B", "DeepSeek-V2-Lite", "GLM-4.7-Flash")
COLD = ("Qwen3-30B-A3B", "GLM-4.7-Flash", "DeepSeek-V2-Lite")
PLACES = {"GLM-4.7-Flash": 1}  # the others are on the first
SAMPLES = results.ROOT / "docs" / "results" / "samples"
START_S = 110  # what a start of servers of real size may take before there is a number of this run
SPARE = 1.2  # times the last start
ROUTERS_S = 60  # without prefill graphs
LEAST_TOKENS = 10000
RATIO = 3  # which of a cell's rows it is
PREFILL_COUNTED = 65536  # prompt tokens of a burst that are computed once more to tell decode from prefill


COLD_ELSEWHERE = "not run here; kv_gpu has the same load beside the same peer, with less memory for ours: kv.cold.*, tbt.cold_models.p99_static_ratio"
RENEW = "renew"  # of Book and Samples: measured nevertheless, unless it is of this commit


def place(name):
    """The GPU of a plain server where each has one of the two."""
    return PLACES.get(name, 0)


class OutOfTime(Exception):
    """The budget is used up."""


class Sizes:
    """How much of everything."""

    def __init__(self, rehearse):
        self.contexts, self.batches = ((16, 48), (1, 2)) if rehearse else ((1024, 8192), (1, 8, 32))
        self.new_tokens = 16 if rehearse else 128
        self.rounds = {1: 1} if rehearse else {1: 3, 8: 2, 32: 1}
        self.more_rounds = {1: 1} if rehearse else {1: 2}  # of the other models
        self.greedy = 8 if rehearse else 64
        self.prompts = 2 if rehearse else 8
        self.kill_tokens = 80 if rehearse else 700
        self.rows, self.context = (64, 512) if rehearse else (4096, 16384)
        # SGLang lets no more requests run than may all reach their end: room beyond the largest batch.
        self.kv_tokens = 2048 if rehearse else 36 * 9216
        self.cold_kv_tokens = 2048 if rehearse else 65536
        self.cold_seconds = 6 if rehearse else 35
        self.cold_prompt, self.cold_answer = (60, 8) if rehearse else (8192, 1024)


def of_this_commit(commit):
    """False where that is not to be known: changes that nobody has committed have no name."""
    return commit == results.commit() and commit != "unknown" and not commit.endswith("-dirty")


class Book:
    """The rows, in a file that is complete after each of them. Rows of an earlier run keep that run's commit and
    date. `again`: they are kept, and measured nevertheless (or RENEW)."""

    def __init__(self, path, machine, before, planned, bench="sglang_gpu", again=False):
        self.path, self.machine, self.bench, self.again = path, machine, bench, again
        self.plots, self.fresh = [], set()  # files beside it; metrics of this run
        self.failures = {}  # of steps whose rows are there: what went wrong
        self.rows = {metric: self.missing(metric) for metric in planned}
        if before and before.exists():
            data = json.loads(before.read_text())
            self.failures = data.get("failures", {})
            for row in data["rows"]:
                if row["value"] is not None:
                    self.rows[row["metric"]] = {**row, "commit": row.get("commit", data["commit"]), "date": row.get("date", data["date"])}
                elif row["metric"] in self.rows:
                    self.rows[row["metric"]] = row

    @staticmethod
    def missing(metric):
        return {**results.row(metric, 0, ""), "value": None, "note": "not run yet"}

    def has(self, metric):
        if self.lacks(metric):
            return False
        return not self.again or metric in self.fresh or (self.again == RENEW and of_this_commit(self.rows[metric].get("commit")))

    def lacks(self, metric):
        """Nobody has measured it so far."""
        return self.rows.get(metric, {}).get("value") is None

    def add(self, *rows):
        for row in rows:
            self.rows[row["metric"]] = row
            self.fresh.add(row["metric"])
        results.show(rows)
        self.write()

    def tell(self, step, failures, measured):
        """What went wrong in a step. Where nothing did, it is cleared when the step has `measured` something."""
        if failures:
            self.failures[step] = failures
        elif measured:
            self.failures.pop(step, None)

    def point(self, metrics, where):
        """Says of those that nobody has measured where else the figure is."""
        for metric in filter(self.lacks, metrics):
            self.rows[metric] = {**self.missing(metric), "note": where}

    def write(self):
        data = {
            "bench": self.bench,
            "machine": self.machine,
            "date": datetime.date.today().isoformat(),
            "commit": results.commit(),
            "command": results.command(),
            "rows": list(self.rows.values()),
        }
        if self.plots:
            data["plots"] = self.plots
        if self.failures:
            data["failures"] = self.failures
        partial = self.path.with_suffix(".partial")
        partial.write_text(json.dumps(data, indent=1) + "\n")
        partial.rename(self.path)


class Samples:
    """What was measured of one side, kept in files of OUT so that the other may be measured in a later run. They go on
    from those in `base`, where all_on_device puts them, and from those in `before`. Beside each its commit and day are
    kept, under "at". `again`: they are measured nevertheless (or RENEW)."""

    def __init__(self, out, before, base=None, again=False):
        self.out, self.kinds, self.again, self.fresh = out, {}, again, set()
        for folder in (base, before):
            for path in sorted(folder.glob("sglang_*.samples")) if folder else ():
                self.kinds[path.stem.removeprefix("sglang_")] = json.loads(path.read_text())
                if folder != out and folder != base:  # what is in OUT is newer than what is there
                    (out / path.name).write_bytes(path.read_bytes())

    def get(self, kind, key):
        return self.kinds.get(kind, {}).get(key)

    def wanted(self, kind, key):
        """Whether it is to be measured."""
        if not self.get(kind, key):
            return True
        renewed = (kind, key) in self.fresh or (self.again == RENEW and of_this_commit((self.at(kind, key) or [None])[0]))
        return bool(self.again) and not renewed

    def at(self, kind, key):
        """[commit, day] on which it was measured; None: it is not there, or did not say."""
        value = self.get(kind, key)
        own = value.get("at") if isinstance(value, dict) else None
        return own or (value and self.kinds[kind].get("at", {}).get(key))

    def keep(self, kind, key, value, at=None):
        """`at`: where it is another side's that was measured before."""
        one = self.kinds.setdefault(kind, {})
        one[key] = value
        one.setdefault("at", {})[key] = at or results.here()
        self.fresh.add((kind, key))
        (self.out / f"sglang_{kind}.samples").write_text(json.dumps(self.kinds[kind], separators=(",", ":")))
        return value


def start_seconds(samples):
    """What a start may take: by the last one on this machine, whose samples are not those of docs/results."""
    last = samples.get("start", "last")
    return min(START_S, SPARE * last) if last else START_S


def kept_samples(arguments):
    """Of a run that goes on from an earlier one also those of docs/results, which are of no rehearsal."""
    return Samples(arguments.out, arguments.resume, SAMPLES if arguments.resume and not arguments.rehearse else None, arguments.again)


class Run:
    """What all steps share."""

    def __init__(self, arguments):
        self.arguments = arguments
        self.sizes = Sizes(arguments.rehearse)
        self.host = sglang_servers.Cpus() if arguments.rehearse else sglang_servers.Gpus(arguments.site, arguments.caches)
        self.end = time.monotonic() + arguments.budget
        self.fleet = None
        self.failures = []
        self.recorded = False  # whether SGLang's recorder was asked, whatever came of it
        self.samples = kept_samples(arguments)
        self.start_s = start_seconds(self.samples)
        models = arguments.models if arguments.rehearse else MODELS
        planned = [f"{cell_name(m, c, b)}.ratio" for m in models for c in self.sizes.contexts for b in self.sizes.batches]
        planned = ["tbt.one_model.sglang_ratio", *planned]
        planned += [f"sglang.memory.{m}.gib" for m in models]
        planned += [f"sglang.tokens.{c}.{mode}.1x1.agreement" for c in checkpoints(arguments) for mode in self.modes()]
        planned += ["sglang.kill.wrong_tokens", "sglang.kill.killed", "sglang.kill.left_mib"]
        planned += ["tbt.cold_models.p99_static_ratio", *(f"sglang.cold.{r:g}.tbt_p99_ms" for r in arguments.rates)]
        planned += [f"sglang.tokens.{c}.graphs.{x}.agreement" for c, x in layouts(arguments)]
        planned += ["sglang.spread.plain.least_tokens", "sglang.spread.crosspool.least_tokens"]
        planned += sglang_padded.planned()
        name = "sglang_rehearsal.json" if arguments.rehearse else "sglang_gpu.json"
        before = arguments.resume and arguments.resume / name
        if arguments.only == "float32" and before and before.exists():  # of what was measured there
            machine = json.loads(before.read_text())["machine"]
        else:
            machine = self.host.describe()
        self.book = Book(arguments.out / name, machine, before, planned, again=arguments.again)
        self.book.point(["tbt.cold_models.p99_static_ratio", *(f"sglang.cold.{r:g}.tbt_p99_ms" for r in arguments.rates)], COLD_ELSEWHERE)

    def modes(self):
        """Of small checkpoints' servers; in a rehearsal they do not differ."""
        return self.arguments.modes

    def fails(self, what, error):
        """A check that failed, where the step goes on."""
        self.failures.append(f"{what}: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}")
        print(f"    FAILS {what}: {type(error).__name__}: {error}", flush=True)

    def left(self):
        return self.end - time.monotonic()

    def need(self, seconds, what):
        if self.left() < seconds:
            raise OutOfTime(f"{what} needs about {seconds:.0f} s, {self.left():.0f} s are left")

    def begin(self, name, start_s=None, **what):
        """The Fleet of this name: the running one, or a new one in its place, which has only begun to start."""
        if self.fleet is None or self.fleet.name != name:
            self.stop()
            self.need((start_s or self.start_s) + 30, f"starting {name}")
            self.fleet = Fleet(self.host, self.arguments, name, **what)
            self.fleet.start()
        return self.fleet

    def start(self, name, **what):
        """The same when all its servers serve."""
        running = self.fleet
        if self.begin(name, **what) is not running:
            self.fleet.ready(min(self.host.start_s, self.left() - 15))
            self.start_s = SPARE * self.samples.keep("start", "last", round(time.monotonic() - self.fleet.began, 1))
        return self.fleet

    def start_most(self, name, **what):
        """The same when every server serves or has ended, which costs its own rows only."""
        running = self.fleet
        if self.begin(name, **what) is not running:
            self.fleet.settle(min(self.host.start_s, self.left() - 15))
            self.failures += [f"{server}: {reason.splitlines()[0]}" for server, reason in self.fleet.lost.items()]
        return self.fleet

    def stop(self):
        fleet, self.fleet = self.fleet, None
        if fleet is None:
            return
        clean = fleet.end()
        if self.arguments.keep_logs:
            self.keep_logs(fleet)
        left = self.memory_left(fleet)
        print(f"    {fleet.name}: ended {'in order' if clean else 'BY FORCE'}; {left} MiB of GPU memory left", flush=True)
        if fleet.roles and not clean:
            self.failures.append(f"{fleet.name} did not end in order")

    def keep_logs(self, fleet):
        """Both ends of the Fleet's logs, in one archive of all of them."""
        kept = self.arguments.scratch / "logs"
        kept.mkdir(exist_ok=True)
        for log in fleet.folder.glob("*.log"):
            data = log.read_bytes()
            (kept / f"{fleet.name}-{log.name}").write_bytes(data if len(data) < 400000 else data[:100000] + data[-300000:])
        with tarfile.open(self.arguments.out / "logs.tar.gz", "w:gz") as packed:
            packed.add(kept, "logs")

    def memory_left(self, fleet, seconds=20):
        """MiB more in use than before the fleet was started, when it has settled."""
        end = time.monotonic() + seconds
        while True:
            left = max(now - then for now, then in zip(self.host.used(), fleet.before, strict=True))
            if left <= 64 or time.monotonic() > end:
                return left
            time.sleep(0.3)

    def real(self, name, kv_tokens=None, requests=32):
        """A model of real size; in a rehearsal a small one of its family."""
        if self.arguments.rehearse:
            family = {"Qwen3-30B-A3B": "qwen3-moe", "Qwen3-14B": "qwen3-moe"}.get(name, "deepseek-v2")
            path, dummy = sglang_models.TALES / (family if name != "GLM-4.7-Flash" else "glm4-moe-lite"), False
        else:
            path, dummy = sglang_models.real_size(name, self.arguments.scratch / "models"), True
        s = self.sizes
        return Model(name, path, dummy=dummy, kv_tokens=kv_tokens or s.kv_tokens, context=s.context, rows=s.rows, requests=requests)

    def small(self, checkpoint, mode, tp=1, dp=1):
        arguments = self.arguments
        if checkpoint.startswith("seeded-"):
            dtype = "f32" if arguments.rehearse else "bf16"
            family = checkpoint.removeprefix("seeded-")
            path = sglang_models.seeded(family, arguments.scratch / "models", arguments.build / "bin" / "xpool", dtype)
        else:
            path = sglang_models.TALES / checkpoint.removeprefix("tales-")
        if not arguments.rehearse and not sglang_models.triton_decodes(sglang_models.facts(path)):
            raise harness.Failed(f"{checkpoint}: SGLang's Triton kernels do not decode with this shape of MLA on a GPU")
        rows = 64 if arguments.rehearse else 512
        name = f"{checkpoint}-{mode}" + (f"-{tp}x{dp}" if tp * dp > 1 else "")
        kv_tokens = 2048 if arguments.rehearse else 16384
        return Model(name, path, mode=mode, tp=tp, dp=dp, kv_tokens=kv_tokens, context=1024, rows=rows, requests=8)


def cell_name(model, context, batch):
    return f"sglang.{model}.{context}.b{batch}"


# ---- asking ------------------------------------------------------------------------------------------------
def quantile(values, part):
    ordered = sorted(values)
    return ordered[min(int(part * len(ordered)), len(ordered) - 1)] if ordered else float("nan")


def burst(server, batch, context, count, seed, limit=120):
    """`batch` requests at once, all different: their Answers."""
    vocab = sglang_models.facts(server.model.path)["vocab_size"]
    requests = [(0.0, body_of(ids_of(f"{seed} {i}", context, vocab), count)) for i in range(batch)]
    answers = open_client.replay(server.port, requests, limit)
    bad = [a for a in answers if not a.finished or len(a.ids) != count]
    harness.check(not bad, f"{server.name()}: {len(bad)} of {batch} requests failed (status {bad[0].status if bad else 0})")
    return answers


def steady_gaps(answers):
    """Times between tokens, seconds, while all streams decode: after the last first token, before the first
    last one. Tokens that came in one piece count as one."""
    begin = max(a.due + a.times[0] for a in answers)
    end = min(a.due + a.times[-1] for a in answers)
    gaps = []
    for answer in answers:
        times = [answer.due + t for t in answer.times]
        gaps += [b - a for a, b in zip(times, times[1:], strict=False) if a >= begin and b <= end + 1e-9 and b > a]
    return gaps


def all_gaps(answers):
    return [b - a for answer in answers for a, b in zip(answer.times, answer.times[1:], strict=False)]


# ---- latency and memory ------------------------------------------------------------------------------------
def real_fleet(run, name):
    # Two more than the largest batch: SGLang counts a request whose prompt comes in chunks twice.
    model = run.real(name, requests=max(run.sizes.batches) + 2)
    return run.start(f"latency-{name}", vanilla=[(model, run.host.atn)], models=[model])


def warm_up(run, server):
    """Kernels that are compiled at first use."""
    for number, (batch, context) in enumerate([(1, run.sizes.contexts[0]), (run.sizes.batches[-1], 16), (1, run.sizes.contexts[-1])]):
        burst(server, batch, context, 4, f"warm {number}")


def cells_of(run):
    return [(c, b) for b in run.sizes.batches[::-1] for c in run.sizes.contexts]  # what is furthest from its target comes first


def cell_seconds(batch, context):
    """What a cell takes about, of both sides."""
    return 10 + batch * context / 10000


def measure_cell(run, server, batch, context, rounds):
    """{ttft, gaps} of all rounds."""
    found = {"ttft": [], "gaps": []}
    for number in range(rounds):
        answers = burst(server, batch, context, run.sizes.new_tokens, f"{context} {batch} {number}")
        found["ttft"] += [a.times[0] for a in answers]
        found["gaps"] += steady_gaps(answers)
    harness.check(found["gaps"], f"{server.name()}: {batch} streams of {context} tokens never decoded all at once")
    return found


def ours_cell(run, name, metric, context, batch, rounds, plain, how=""):
    """Measures one context and batch with CrossPool. `plain`: what measure_cell found of SGLang alone; `how`: words on
    how both were measured."""
    sizes, fleet = run.sizes, run.fleet
    prefill = None
    if batch * context <= PREFILL_COUNTED:
        with Replayed(run, name) as prefill:
            burst(fleet.instances[name], batch, context, 2, "prefill")
    with Replayed(run, name, since=prefill) as replayed:
        ours = measure_cell(run, fleet.instances[name], batch, context, rounds)
    replayed.check(rounds * (sizes.new_tokens - 2))
    check_graphs(run, [server for server in fleet.servers() if server.model.name == name])
    words = "decode only" if prefill else "prefill included"
    rows = cell_rows(metric, plain, ours, replayed.layer(prefill, rounds), replayed.layers, words)
    rows[RATIO]["note"] += f"{how}; FFN calls: {replayed.words()}"
    if prefill:
        with Replayed(run, name, since=replayed) as alone:
            burst(fleet.instances[name], batch, context, 1, "prefill alone")
        rows += prefill_rows(metric, alone.layer(), alone.layers)
    run.book.add(*rows)


def latency_of(run, name):
    """Both sides in one start, cell by cell."""
    book = run.book
    if all(book.has(f"{cell_name(name, *cell)}.ratio") for cell in cells_of(run)):
        return
    fleet = real_fleet(run, name)
    check_graphs(run, fleet.servers())
    for server in fleet.servers():
        warm_up(run, server)
    try:
        for context, batch in cells_of(run):
            metric, rounds = cell_name(name, context, batch), run.sizes.rounds.get(batch, 1)
            if book.has(f"{metric}.ratio"):
                continue
            run.need(cell_seconds(batch, context), metric)
            try:
                ours_cell(run, name, metric, context, batch, rounds, measure_cell(run, fleet.vanilla[name], batch, context, rounds))
            except EXPECTED as error:
                run.fails(metric, error)
    finally:
        worst_ratio(book)


def worst_ratio(book):
    """Of the first model's cells, as far as they were measured."""
    cells = [metric for metric in book.rows if metric.startswith(f"sglang.{MODELS[0]}.") and metric.endswith(".ratio")]
    ratios = {metric: book.rows[metric]["value"] for metric in cells if not book.lacks(metric)}
    if not book.fresh.intersection(ratios):
        return
    worst = max(ratios, key=ratios.get)
    by = collections.Counter(book.rows[metric].get("commit", results.commit()) for metric in ratios)
    commits = "; of commits: " + ", ".join(f"{commit} {count}" for commit, count in by.items()) if len(by) > 1 else ""
    book.add(results.row("tbt.one_model.sglang_ratio", ratios[worst], "ratio", target="<= 1.15",
                         note=f"the largest of {len(ratios)} of {len(cells)} cells: {worst}; median {statistics.median(ratios.values()):.3f}{commits}"))


def cell_rows(metric, plain, ours, layer, layers, steps):
    rows = []
    for key, part, word in (("gaps", 0.5, "tbt_p50"), ("gaps", 0.99, "tbt_p99"), ("ttft", 0.5, "ttft_p50")):
        values = [quantile(side[key], part) * 1e3 for side in (ours, plain)]
        largest = results.few(len(ours[key]), len(plain[key])) if part == 0.99 else ""
        rows.append(results.row(f"{metric}.{word}_ms", values[0], "ms", peer=values[1], note=f"of {len(ours[key])}; peer of {len(plain[key])}{largest}"))
    ratio = rows[0]["value"] / rows[0]["peer"]
    rows.append(results.row(f"{metric}.ratio", ratio, "ratio", target="<= 1.15", note="TBT P50 over that of SGLang alone"))
    # Where the time of a token is.
    execution, waiting = layer["execution"], layer["waiting"]
    words = f"a layer, mean of {layer['calls']} Invocations, {steps}; {layers} layers a token"
    rows.append(results.row(f"{metric}.split.execution_us", execution, "us", note=words))
    rows.append(results.row(f"{metric}.split.waiting_us", waiting, "us", note="for a Lane, " + words))
    if "round_trip" in layer:
        hops = layer["round_trip"] - execution - waiting
        rows.append(results.row(f"{metric}.split.mailbox_hops_us", hops, "us", note="what is left of the wait for answers, " + words))
    rest = rows[0]["value"] * 1e3 - layers * layer.get("round_trip", execution + waiting)
    rows.append(results.row(f"{metric}.split.attention_us", rest, "us",
                            note="a token: TBT P50 less all layers' " + ("round trips" if "round_trip" in layer else "execution and waiting; hops are in it")))
    return rows


def prefill_rows(metric, layer, layers):
    """Where a layer of prefill is; put and take of the rows are not in it."""
    words = f"a layer of prefill, mean of {layer['calls']} Invocations; {layers} layers a chunk"
    rows = [results.row(f"{metric}.prefill.{part}_us", layer[part], "us", note=words) for part in ("execution", "waiting")]
    if "round_trip" in layer:
        hops = layer["round_trip"] - layer["execution"] - layer["waiting"]
        rows.append(results.row(f"{metric}.prefill.hops_us", hops, "us", note="host, scheduler and words on the way, " + words))
    return rows


def step_latency(run):
    latency_of(run, run.arguments.models[0])


def given_back(run, server, gpu):
    """GiB of this GPU's memory that a server gives back when it ends."""
    before = run.host.used()[gpu]
    server.end()
    end, after = time.monotonic() + 15, before
    while time.monotonic() < end:
        time.sleep(0.5)
        now = run.host.used()[gpu]
        if now == after and now < before:
            break
        after = now
    return (before - after) / 1024


def entry_of(fleet, name):
    """What the daemon says of a model whose Instance serves."""
    return next(one for one in fleet.state()["models"] if one["id"] == name)


def memory_rows(run, name, entry, ours, plain, how=""):
    """Of what given_back() and SGLang's own account of loading say of each side: (GiB, GB). `how`: as in ours_cell()."""
    kv_tokens = next(model.kv_tokens for model in run.fleet.models if model.name == name)
    run.book.add(
        results.row(f"sglang.memory.{name}.gib", ours[0], "GiB", peer=plain[0],
                    note=f"memory of its GPU given back when the server ended; both with a KV Cache of {kv_tokens} tokens{how}"),
        results.row(f"sglang.memory.{name}.attention_weights_gib", entry["attention_weight_bytes"] / 2**30, "GiB",
                    note=f"held by the Instance; {entry['ffn_weight_bytes'] / 2**30:.2f} GiB of FFN weights on the FFN side; "
                    f"SGLang's own account of loading: {ours[1]} GB, alone {plain[1]} GB{how}"),
    )


def memory_of(run, name):
    """Ends both servers of the model, one after the other, and looks at what each gives back."""
    if run.book.has(f"sglang.memory.{name}.gib") or run.host.kind == "cpu":
        return
    fleet = real_fleet(run, name)
    entry = entry_of(fleet, name)
    plain, ours = ((given_back(run, server, 0), server.loaded_gb()) for server in (fleet.vanilla[name], fleet.instances[name]))
    memory_rows(run, name, entry, ours, plain)
    run.stop()


def step_memory(run):
    memory_of(run, run.arguments.models[0])


# ---- latency and memory of the other models: a start of each side -----------------------------------------------
def more_model(run, name):
    return run.real(name, requests=max(run.sizes.batches) + 2)


def cells_left(run, name):
    return [cell for cell in cells_of(run) if not run.book.has(f"{cell_name(name, *cell)}.ratio")]


def step_more(run):
    """SGLang alone with the models on both GPUs, then one system of all of them; one model is asked at a time. A server
    that ends costs its own rows only."""
    names = [name for name in run.arguments.models[1:] if cells_left(run, name) or not run.book.has(f"sglang.memory.{name}.gib")]
    if names:
        more_plain(run, names)
        more_ours(run, names)


def plain_wanted(run, name):
    return [cell for cell in cells_left(run, name) if run.samples.wanted("latency_plain", cell_name(name, *cell))]


def more_plain(run, names):
    names = [name for name in names if plain_wanted(run, name) or (run.host.kind == "cuda" and run.samples.wanted("memory_plain", name))]
    if not names:
        return
    gpus = run.host.both[0]
    fleet = run.start_most("more-plain", vanilla=[(more_model(run, name), [gpus[place(name)]]) for name in names])
    for name, server in list(fleet.vanilla.items()):
        try:
            check_graphs(run, [server])
            warm_up(run, server)
            for context, batch in plain_wanted(run, name):
                run.need(cell_seconds(batch, context) / 2, cell_name(name, context, batch))
                found = measure_cell(run, server, batch, context, run.sizes.more_rounds.get(batch, 1))
                run.samples.keep("latency_plain", cell_name(name, context, batch), {key: [round(1e6 * value) for value in values] for key, values in found.items()})
            check_graphs(run, [server])
        except EXPECTED as error:
            run.fails(f"SGLang alone, {name}", error)
        if run.host.kind == "cuda" and run.samples.wanted("memory_plain", name) and server.process.poll() is None:
            run.samples.keep("memory_plain", name, [given_back(run, server, place(name)), server.loaded_gb()])
            del fleet.vanilla[name]
    run.stop()


def more_ours(run, names):
    names = [name for name in names if any(run.samples.get("latency_plain", cell_name(name, *cell)) for cell in cells_of(run))]
    harness.check(names, "there is nothing of SGLang alone to compare with")
    fleet = run.start_most("more-ours", models=[more_model(run, name) for name in names])
    for name, server in list(fleet.instances.items()):
        try:
            check_graphs(run, [server])
            warm_up(run, server)
        except EXPECTED as error:
            run.fails(name, error)
            continue
        for context, batch in cells_left(run, name):
            metric, rounds = cell_name(name, context, batch), run.sizes.more_rounds.get(batch, 1)
            plain = run.samples.get("latency_plain", metric)
            if not plain:
                continue
            run.need(cell_seconds(batch, context), metric)
            plain = {key: [value / 1e6 for value in values] for key, values in plain.items()}
            how = "; the sides one after the other, each in a start of its own" + results.kept(peer=run.samples.at("latency_plain", metric))
            try:
                ours_cell(run, name, metric, context, batch, rounds, plain, how)
            except EXPECTED as error:
                run.fails(metric, error)
    for name, server in fleet.instances.items():
        plain = run.samples.get("memory_plain", name)
        if plain and run.host.kind == "cuda" and not run.book.has(f"sglang.memory.{name}.gib") and server.process.poll() is None:
            how = results.kept(peer=run.samples.at("memory_plain", name))
            memory_rows(run, name, entry_of(fleet, name), (given_back(run, server, 0), server.loaded_gb()), plain, how)
    run.stop()


# ---- several cold models -----------------------------------------------------------------------------------
def read_trace(path):
    """[(prompt tokens, answer tokens)] of the trace's conversations."""
    with open(path, newline="") as file:
        return [(int(row["ContextTokens"]), int(row["GeneratedTokens"])) for row in csv.DictReader(file)]


def arrivals(run, name, rate, vocab, lengths):
    """[(seconds, body)]: Poisson, the same each time."""
    chance = random.Random(f"cold {name} {rate}")
    at, found, sizes = 0.0, [], run.sizes
    while True:
        at += chance.expovariate(rate)
        if at > sizes.cold_seconds:
            break
        prompt, answer = lengths[chance.randrange(len(lengths))]
        prompt, answer = min(max(prompt, 4), sizes.cold_prompt), min(max(answer, 2), sizes.cold_answer)
        found.append((at, body_of(ids_of(f"{name} {rate} {len(found)}", prompt, vocab), answer)))
    return found


def cold_load(run, servers, rate, lengths):
    """{model: Answers} of an open-loop load on all servers at once."""

    def one(server):
        vocab = sglang_models.facts(server.model.path)["vocab_size"]
        requests = arrivals(run, server.model.name, rate, vocab, lengths)
        return open_client.replay(server.port, requests, 30) if requests else []

    answers = harness.together([lambda server=server: one(server) for server in servers], run.sizes.cold_seconds + 120)
    return {server.model.name: answer for server, answer in zip(servers, answers, strict=True)}


def cold_summary(answers):
    whole = {name: [a for a in one if a.finished and a.times] for name, one in answers.items()}
    every = [a for one in whole.values() for a in one]
    asked = sum(len(one) for one in answers.values())
    return {
        "tbt": [round(gap, 6) for gap in all_gaps(every)],
        "ttft": [round(a.times[0], 6) for a in every],
        "by": {name: (quantile(all_gaps(one), 0.99), quantile([a.times[0] for a in one], 0.99)) for name, one in whole.items()},
        "asked": asked,
        "unfinished": asked - len(every),
    }


def cold_load_words(run, path, names):
    """What has to be the same for two sides to be compared."""
    return [path.name if path else "rehearsal", run.sizes.cold_seconds, run.sizes.cold_prompt, run.sizes.cold_answer, *sorted(names)]


def shared_static(run, rate):
    """The same load on plain SGLang as benches/kv_gpu.py measured it, or None."""
    one = run.samples.get("kv_cold_static", f"{rate:g}")
    return one if one and one["load"] == cold_load_words(run, run.arguments.trace, COLD) else None


def cold_side(run, side, rates, lengths):
    """Measures one side, at the rates that are not among the samples yet."""
    kind = f"cold_{side}"
    for rate in rates if side == "static" else ():
        if run.samples.wanted(kind, f"{rate:g}") and (one := shared_static(run, rate)):
            run.samples.keep(kind, f"{rate:g}", {**one, "kv": "filled its GPU"}, run.samples.at("kv_cold_static", f"{rate:g}"))
    todo = [rate for rate in rates if run.samples.wanted(kind, f"{rate:g}")]
    if not todo:
        return
    models = [run.real(name, run.sizes.cold_kv_tokens) for name in COLD]
    if side == "ours":
        fleet = run.start("cold-ours", models=models, kv_policy="deadline")
        servers = list(fleet.instances.values())
    else:
        gpus = run.host.both[0]
        fleet = run.start("cold-static", vanilla=[(m, [gpus[place(m.name)]]) for m in models])
        servers = list(fleet.vanilla.values())
    check_graphs(run, servers)
    for server in servers:
        for batch, context in ((1, 16), (4, run.sizes.contexts[0]), (1, run.sizes.cold_prompt // 2)):
            burst(server, batch, context, 4, "warm")
    for rate in todo:
        run.need(run.sizes.cold_seconds + 25, f"cold models at {rate:g} requests/s")
        if side == "ours":
            before = {name: fleet.counters(name) for name in COLD[:1]}
        one = cold_summary(cold_load(run, servers, rate, lengths))
        check_graphs(run, servers)
        if side == "ours" and run.host.kind == "cuda":
            eager = fleet.counters(COLD[0])["rank_eager_decode_calls"] - before[COLD[0]]["rank_eager_decode_calls"]
            harness.check(eager == 0, f"{COLD[0]}: {eager} FFN calls of decode steps outside graphs")
        run.samples.keep(kind, f"{rate:g}", one)
        print(f"    {side} at {rate:g}: {one['asked']} requests, {one['unfinished']} unfinished, TBT P50 {quantile(one['tbt'], 0.5) * 1e3:.2f} "
              f"P99 {quantile(one['tbt'], 0.99) * 1e3:.2f} ms, TTFT P50 {quantile(one['ttft'], 0.5) * 1e3:.0f} P99 {quantile(one['ttft'], 0.99) * 1e3:.0f} ms", flush=True)


def step_cold(run):
    rates = run.arguments.rates
    if all(run.book.has(f"sglang.cold.{rate:g}.tbt_p99_ms") for rate in rates):
        return
    if run.arguments.trace:
        lengths, words = read_trace(run.arguments.trace), f"lengths of {run.arguments.trace.name}"
    elif run.arguments.rehearse:
        lengths, words = [(30, 6), (50, 8)], "lengths of a rehearsal"
    else:
        raise harness.Failed("cold: --trace names no CSV of conversation lengths")
    try:
        for side in ("ours", "static"):
            cold_side(run, side, rates, lengths)
    finally:
        cold_rows(run, rates, words)


def cold_rows(run, rates, words):
    sizes = run.sizes
    for rate in rates:
        keys = [(f"cold_{side}", f"{rate:g}") for side in ("ours", "static")]
        ours, static = (run.samples.get(*key) for key in keys)
        if not ours or not static or not (run.samples.fresh.intersection(keys) or run.book.lacks(f"sglang.cold.{rate:g}.tbt_p99_ms")):
            continue
        note = f"{ours['asked']} requests in {sizes.cold_seconds} s, Poisson, {words}, prompts up to {sizes.cold_prompt}, answers up to {sizes.cold_answer}; "
        peers = "the peer's " + static.get("kv", "fixed")
        note += f"unfinished: ours {ours['unfinished']}, peer {static['unfinished']}; KV Caches of up to {sizes.cold_kv_tokens} tokens a model, {peers}, ours elastic; "
        note += f"contexts of up to {sizes.context} tokens, the peer's {static.get('context', sizes.context)} or what the model itself allows; the peer without MPS"
        note += results.kept(ours=run.samples.at(*keys[0]), peer=run.samples.at(*keys[1]))
        rows = []
        for key, part, word in (("tbt", 0.5, "tbt_p50"), ("tbt", 0.99, "tbt_p99"), ("ttft", 0.5, "ttft_p50"), ("ttft", 0.99, "ttft_p99")):
            values = [quantile(side[key], part) * 1e3 for side in (ours, static)]
            each = ""
            if part == 0.99:
                index = 0 if key == "tbt" else 1
                each = f"; P99{results.few(*(len(side[key]) for side in (ours, static)))} of each: " + ", ".join(f"{m} {ours['by'][m][index] * 1e3:.1f} (peer {static['by'][m][index] * 1e3:.1f})" for m in ours["by"])
            rows.append(results.row(f"sglang.cold.{rate:g}.{word}_ms", values[0], "ms", peer=values[1], note=note + each))
        run.book.add(*rows)
        if rate == rates[0]:
            run.book.add(results.row("tbt.cold_models.p99_static_ratio", rows[1]["peer"] / rows[1]["value"], "ratio", target=">= 1",
                                     note=f"P99 TBT at {rate:g} requests/s each: peer's over ours; peer: {COLD[1]} on one GPU, the others on the other, plain SGLang"))


# ---- spread and padded rows: one start ----------------------------------------------------------------------
def router_fleet(run):
    """SGLang alone with its recorder, and Instances with one captured batch each, as far as the steps that were asked
    for want them. A server that ends costs its own rows only."""
    if run.fleet is None or run.fleet.name != "routers":
        steps, name = run.arguments.only.split(","), COLD[0]
        plain = sglang_spread.plain_model(run, run.real(name, run.sizes.cold_kv_tokens))
        vanilla = [(plain, run.host.atn)] if "spread" in steps and sglang_spread.wants_server(run) and not run.recorded else []
        run.padded = sglang_padded.models(run, name) if "padded" in steps and sglang_padded.missing(run) else []
        run.start_most("routers", start_s=ROUTERS_S, vanilla=vanilla, models=[model for _, model in run.padded])
    return run.fleet


def step_spread(run):
    if all(run.book.has(f"sglang.spread.{side}.least_tokens") for side in ("plain", "crosspool")):
        return
    fleet = router_fleet(run) if sglang_spread.wants_server(run) else None
    run.recorded = True
    try:
        sglang_spread.measure(run, COLD[0], LEAST_TOKENS, fleet and fleet.vanilla.get(COLD[0]), burst)
    except EXPECTED as error:  # the Instances beside it go on
        run.fails("spread", error)
    end_recorder(run)


def end_recorder(run):
    """SGLang alone is not needed any more."""
    if run.fleet and run.fleet.name == "routers":
        for server in run.fleet.vanilla.values():
            server.end()
        run.fleet.vanilla.clear()


def step_padded(run):
    if sglang_padded.missing(run):
        fleet = router_fleet(run)
        sglang_padded.measure(run, COLD[0], LEAST_TOKENS, fleet, run.padded, check_graphs, (burst, steady_gaps, Replayed))


STEPS = {
    "latency": step_latency,
    "memory": step_memory,
    "tokens": step_tokens,
    "kill": step_kill,
    "cold": step_cold,
    "layouts": step_layouts,
    "float32": step_float32,
    "spread": step_spread,
    "padded": step_padded,
    "more": step_more,
}


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=pathlib.Path, required=True)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path(os.environ.get("OUT", ".")))
    parser.add_argument("--only", default=",".join(ORDER), help="steps, in the order in which they are to run")
    parser.add_argument("--resume", type=pathlib.Path, nargs="?", const=True,
                        help="keep the rows of an earlier run's file in this folder (default: OUT)")
    parser.add_argument("--again", action="store_true", help="with --resume: measure also what the earlier file has; its other rows are kept")
    parser.add_argument("--renew", dest="again", action="store_const", const=RENEW, help="the same, but for what is of this commit")
    parser.add_argument("--budget", type=float, default=1e9, help="seconds")
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--rates", default="0.8,0.4", help="requests/s of each cold model; the first one gives the ratio")
    parser.add_argument("--trace", type=pathlib.Path, help="CSV with ContextTokens and GeneratedTokens (the Azure trace's conversations)")
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--more-victims", type=int, default=4, help="Instances beyond those of `tokens`")
    parser.add_argument("--checkpoints", type=lambda text: text.split(","), help="small ones, tales-FAMILY or seeded-FAMILY, instead of one of each family")
    parser.add_argument("--modes", type=lambda text: text.split(","), default=["graphs", "eager"], help="of their servers; the first ones start first")
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--site", type=pathlib.Path, help="folder that goes in front of the servers' PYTHONPATH")
    parser.add_argument("--caches", type=pathlib.Path, help="archive of compiled kernels of an earlier run; a new one goes to OUT/caches.tar.gz")
    parser.add_argument("--flags", default="", help="further arguments of all servers, both sides")
    parser.add_argument("--observe", action="store_true", help="observers on (xpool trace)")
    parser.add_argument("--keep-logs", action="store_true", help="the ends of all logs go to OUT/logs.tar.gz")
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("--recorder", action="store_true", help=argparse.SUPPRESS)  # SGLang's, also on a CPU
    arguments = parser.parse_args()
    arguments.models = arguments.models.split(",")
    arguments.rates = [float(rate) for rate in arguments.rates.split(",")]
    arguments.build, arguments.out = arguments.build.resolve(), arguments.out.resolve()
    if arguments.rehearse and arguments.out == results.ROOT / "docs" / "results":
        arguments.out = results.ROOT / ".xpool-cache" / "sglang-rehearsal"
    arguments.resume = arguments.out if arguments.resume is True else arguments.resume
    unknown = [step for step in arguments.only.split(",") if step not in STEPS]
    if unknown:
        parser.error(f"no such step: {', '.join(unknown)}")
    if arguments.rehearse:
        most = 3 if "more" in arguments.only.split(",") else 1
        arguments.models, arguments.rates, arguments.more_victims, arguments.kills = arguments.models[:most], arguments.rates[:1], 1, 2
    return arguments


def main():
    arguments = parse()
    arguments.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="xpool-sglang-gpu-") as scratch:
        arguments.scratch = pathlib.Path(scratch)
        return perform(Run(arguments), STEPS)


def perform(run, steps):
    """The steps that were asked for, one after the other; the exit code."""
    arguments = run.arguments
    run.host.flags = [*run.host.flags, *arguments.flags.split()]
    run.book.failures.pop("end", None)  # of this run
    run.book.write()
    try:
        for step in arguments.only.split(","):
            began, before, fresh = time.monotonic(), len(run.failures), len(run.book.fresh)
            print(f"=== {step}: {run.left():.0f} s left" if arguments.budget < 1e8 else f"=== {step}", flush=True)
            try:
                steps[step](run)
            except OutOfTime as over:
                print(f"    stops: {over}", flush=True)  # a shorter step may still fit
            except (harness.Failed, OSError, ValueError, KeyError, RuntimeError, subprocess.SubprocessError) as error:
                run.fails(step, error)
                run.stop()
            except BaseException as error:  # a fault of this program, or its end from outside
                run.fails(step, error)
                run.book.tell(step, run.failures[before:], False)
                raise
            run.book.tell(step, run.failures[before:], len(run.book.fresh) > fresh)
            print(f"    {step}: {time.monotonic() - began:.0f} s", flush=True)
    finally:
        before = len(run.failures)
        run.stop()
        run.book.tell("end", run.failures[before:], False)
        run.book.write()
        if run.host.caches:
            run.host.caches.keep(arguments.out / "caches.tar.gz")
    missing = [metric for metric in run.book.rows if not run.book.has(metric)]
    print(f"not run: {', '.join(missing) or 'nothing'}")
    print(f"failed: {'; '.join(run.failures)}" if run.failures else "no check failed", flush=True)
    return 1 if run.failures else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(f"ended by signal {number}"))
    sys.exit(main())
