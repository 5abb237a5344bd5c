#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Elastic KV Cache under SGLang on two GPUs: three MoE models of real size with dummy weights.

    benches/kv_gpu.py --build BUILD --trace CONV.csv [--out FOLDER] [--only STEP[,STEP...]] [--resume [FOLDER]]
                      [--budget SECONDS] [--site FOLDER] [--peer FOLDER] [--rehearse]

Steps, in this order where none are named, and the seconds that they take on two H200s beside a start:

    neighbour  20  time between tokens (TBT) of one stream beside another busy model over alone
    history    25  the same requests, one at a time, in steady memory and while all KV Caches shrink and grow: the same
                   tokens, decode and prefill graphs on
    longest    60  one request of 64K tokens, far above its static share, while the others idle; they wake
    cold       90  the three at some requests/s each, 35 s of load a rate: TBT that `kvcached` and `static` are compared with
    daemon     25  kill -9 of the daemon while memory moves: all ends, nothing is left
    goodput   110  a shifting load of the trace's halves for each policy: static split, elastic in order of arrival,
                   elastic with deadlines; 110 s a rate
    kvcached  140  the load of `cold` by plain SGLang with kvcached on the same GPUs
    static    110  the same by plain SGLang with fixed KV Caches
    kills     100  kill -9 of borrower and donor at the steps of an operation, then of the AtnAgent
    driver     15  a grant and another Instance's hops (tests/cuda/run_on_device --only kv)

The first five have one start together (60 to 130 s), `goodput`, whose pool is another, `kvcached`, `static` and `kills`
each one of its own (about 60 to 120 s). A step that fails leaves a system that still serves to the next one. When one model's server ends before
it is ready, the system is started once more without it (or without its prefill graphs, if it was capturing these), and
the run counts as failed. Policies change while the system serves: `xpool kv policy` and, for a static split, floors and ceilings
that are the same. Attention is on cuda:0, the FFN side on cuda:1, for all weights together (142 GiB) are more than
one H200 has. `--pool` is the size of the KV Capacity Pool: at the rates of cold models all of a GPU would never be
short. That of `goodput` is smaller, so that memory is short at loads at which computing is not.

CODE.csv, which `goodput` needs, is looked for beside CONV.csv. A row is written to OUT/kv_gpu.json as soon as it is known, what has not
been run stands there without a value; `--resume` keeps the rows of such a file. A peer that does not run is
printed as failed. `--rehearse` takes the same way with small checkpoints on CPU devices.
"""

import argparse
import json
import os
import pathlib
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time

import kv_load
import open_client
import results
import sglang_gpu
import sglang_models
import sglang_servers
import svg
from kv_pool import begin_system, group_of, set_policy, settle, trim, warm
from sglang_gpu import OutOfTime, burst, check_graphs, due, place
from sglang_servers import Fleet, Model, harness

ORDER = ("neighbour", "history", "longest", "cold", "daemon", "goodput", "kvcached", "static", "kills", "driver")
MODELS = sglang_gpu.COLD
QWEN, GLM, DEEPSEEK = MODELS
# Who plays which part, in the order in which one is taken in another's place.
LONG, BUSY, ALONE = (DEEPSEEK, GLM, QWEN), (DEEPSEEK, GLM, QWEN), (QWEN, GLM, DEEPSEEK)
# Of which half of the trace, and where in it to begin.
SOURCES = {QWEN: ("conv", 0.0), GLM: ("code", 0.0), DEEPSEEK: ("conv", 0.5)}
# Of a pool: 64K tokens of DeepSeek-V2-Lite beside the floors of the others, of GLM-4.7-Flash where the other is not
# there.
POOL, GLM_POOL = 2560 << 20, 4 << 30
# An equal share is less than some prompts of the trace want alone (up to 0.4 GiB); computing these takes a tenth of the time.
GOODPUT_POOL = 704 << 20
LATER_S = {"cold": 55, "daemon": 60}  # that a step needs which follows `goodput`
POLICIES = ("static", "arrival", "deadline")
LEFT_MIB = 64
WARM_S = 10  # kernels compiled at first use, prompts alone
# Steps of an operation in a rank, and at which passage it dies there. The first grow and its completion are those
# of the floor.
VICTIMS = (("kv.rank.demanded", 1), ("kv.rank.grown", 2), ("kv.rank.withdrawn", 1), ("kv.rank.released", 1), ("kv.rank.completed", 2))


class Sizes(sglang_gpu.Sizes):
    def __init__(self, arguments):
        rehearse = arguments.rehearse
        super().__init__(rehearse)
        self.pool = int(arguments.pool * 2**20) if arguments.pool else (4 << 20 if rehearse else POOL)
        self.goodput_pool = self.pool if rehearse or arguments.pool else GOODPUT_POOL
        self.kv_tokens = 4096 if rehearse else 2_000_000  # ceilings: the pool's
        self.long_prompt, self.long_answer = (960, 24) if rehearse else (65536, 128)
        self.context = 1000 if rehearse else 70000
        self.floor = 128 if rehearse else None
        self.most_prompt, self.most_answer = (240, 12) if rehearse else (24576, 1024)
        self.scale = arguments.scale or (0.1 if rehearse else 1.0)
        self.seconds = arguments.seconds or (9 if rehearse else 30)
        self.alone = (30, 120) if rehearse else (512, 2048, 4096)  # tokens, and the longest prompt of each
        self.patience = 30 if rehearse else 10
        # TTFT and TBT in ms, as configured and as judged.
        tbt = 5000 if rehearse else 100
        self.targets = {name: (ttft * (10 if rehearse else 1), tbt) for name, ttft in ((QWEN, 2500), (GLM, 6000), (DEEPSEEK, 4000))}
        self.cold_seconds = 6 if rehearse else 35
        self.history, self.history_answer, self.history_rounds = ((40, 300), 12, 2) if rehearse else ((1000, 3550), 64, 3)
        self.kill_length = 60 if rehearse else 100
        self.kill_prompts = (900, 350, 40)
        self.kill_streams = 2 if rehearse else 8  # of those who borrow and give, of prompts of the first length
        self.kill_pause = 0.7
        self.victims = VICTIMS[1:3] if rehearse else VICTIMS
        self.survivors = 1 if rehearse else 2
        self.neighbour_rounds, self.busy_streams = (1, 2) if rehearse else (3, 8)
        self.busy_tokens = 60 if rehearse else 700


class Run(sglang_gpu.Run):
    def __init__(self, arguments):
        self.arguments, self.sizes = arguments, Sizes(arguments)
        self.host = sglang_servers.Cpus() if arguments.rehearse else sglang_servers.Gpus(arguments.site, arguments.caches)
        self.host.peer = arguments.peer
        self.end, self.fleet, self.failures = time.monotonic() + arguments.budget, None, []
        self.names = [name for name in MODELS if name in arguments.models]
        self.eager_prefill = set()
        self.fit_pool()
        self.samples = sglang_gpu.kept_samples(arguments)
        self.start_s = sglang_gpu.start_seconds(self.samples)
        name = "kv_rehearsal.json" if arguments.rehearse else "kv_gpu.json"
        before = arguments.resume and arguments.resume / name
        self.book = sglang_gpu.Book(arguments.out / name, self.host.describe(), before, planned_rows(arguments), "kv_gpu", arguments.again)
        if before and before.exists():
            self.book.plots = json.loads(before.read_text()).get("plots", [])
            for plot in self.book.plots if before.parent != arguments.out else ():
                shutil.copy(before.parent / plot, arguments.out)

    def model(self, name):
        found = self.real(name)
        facts = sglang_models.facts(found.path)
        found.context = min(self.sizes.context, facts["max_position_embeddings"])
        ttft, tbt = self.sizes.targets[name]
        found.more_settings = {"slo": {"ttft_ms": float(ttft), "tbt_ms": float(tbt)}}
        found.more = ["--disable-piecewise-cuda-graph"] if name in self.eager_prefill else []
        if self.sizes.floor:
            found.more_settings["kv_floor_tokens"] = self.sizes.floor
        return found

    def system(self, pool=None):
        """The three models on one pool, of `pool` bytes where it is another than that of most steps; the running system,
        where it runs."""
        pool = pool or self.sizes.pool
        fleet_name = self.fleet_name(pool)
        fresh = self.fleet is None or self.fleet.name != fleet_name
        while True:
            models = [self.model(name) for name in self.names]
            try:
                fleet = self.start(fleet_name, models=models, kv_policy="deadline", pool=pool)
                break
            except harness.Failed as error:
                self.without(error)
        if fresh:
            begin_system(self, fleet)
        return fleet

    def start_left(self, pool):
        """Seconds that system(pool) takes before it serves."""
        running = self.fleet is not None and self.fleet.name == self.fleet_name(pool)
        return 0 if running else self.start_s + WARM_S

    def fleet_name(self, pool):
        return "kv-ours" if pool == self.sizes.pool else "kv-goodput"

    def without(self, error):
        """Gives up the model whose server ended before it was ready, if it was that; before, the prefill graphs of
        those with latent attention, if it was in the midst of these."""
        ended = [name for name in self.names if str(error).startswith(f"crosspool {name} ended")]
        latent = {name for name in self.names if "kv_lora_rank" in sglang_models.facts(self.real(name).path)}
        # It has captured its decode graphs, and ended in capturing those of prefill.
        prefill = bool(ended) and ended[0] in latent - self.eager_prefill and set(self.fleet.instances[ended[0]].captured()) == {"cuda"}
        if not ended or (len(self.names) < 3 and not prefill):
            raise error
        print(f"    FAILED: {error}", flush=True)
        self.failures.append(f"{ended[0]} does not start: {str(error).splitlines()[0]}")
        self.stop()
        if prefill:
            self.eager_prefill = latent
            print(f"    once more, without prefill graphs of {', '.join(sorted(latent))}", flush=True)
        else:
            self.names.remove(ended[0])
            self.fit_pool()

    def fit_pool(self):
        if DEEPSEEK not in self.names and not self.arguments.pool and not self.arguments.rehearse:
            self.sizes.pool = GLM_POOL

    def who(self, part):
        """The model that plays LONG, BUSY or ALONE."""
        return next(name for name in part if name in self.names)

    def memory(self, fleet):
        """A function: {name: bytes} that KV Caches may be in, as seen from outside."""
        if self.host.kind == "cpu":
            pids = {name: server.schedulers()[0] for name, server in fleet.instances.items()}
            return lambda: {name: kv_load.held(pid) for name, pid in pids.items()}
        index = int(fleet.atn[0].partition(":")[2])
        try:
            nvml = kv_load.Nvml(index)
        except OSError as error:
            print(f"    {error}: nvidia-smi is asked, which is slower", flush=True)
            return lambda: {"device": sglang_servers.query("memory.used")[index] << 20}
        return lambda: {"device": nvml.used()}


def planned_rows(arguments):
    rows = ["kv.longest.tokens", "kv.longest.woken_ttft_ms", "kv.longest.woken_within", "kv.longest.returned_ms", "tbt.neighbour.growth", "kv.history.wrong_tokens"]
    rows += [f"kv.goodput.rate{rate:g}.{policy}" for rate in arguments.rates for policy in POLICIES]
    rows += [f"kv.goodput.rate{rate:g}.{policy}.prefill_fraction" for rate in arguments.rates for policy in POLICIES]
    rows += [f"kv.pool.rate{rate:g}.{policy}.peak_fraction" for rate in arguments.rates for policy in POLICIES]
    rows += [f"kv.goodput.rate{rate:g}.deadline_{other}_ratio" for rate in arguments.rates for other in POLICIES[:2]]
    rows += ["kv.goodput.replayed_differently", "tbt.cold_models.p99_kvcached_ratio", "tbt.cold_models.p99_static_ratio"]
    rows += [f"kv.cold.rate{rate:g}.{peer}_p99_ratio" for rate in arguments.cold_rates for peer in ("kvcached", "static")]
    rows += [f"kv.longest.{name}.capacity_tokens" for name in MODELS]
    return rows + ["kv.kill.wrong_tokens", "kv.kill.lost_bytes", "kv.kill.atnagent_left_mib", "kv.kill.daemon_left_mib"]


# ---- longest -----------------------------------------------------------------------------------------------
def step_longest(run):
    if run.book.has("kv.longest.woken_within"):
        return
    run.need(70 + (run.start_s if run.fleet is None else 0), "a long request")
    fleet, sizes = run.system(), run.sizes
    set_policy(fleet, "deadline")
    trim(fleet)
    long = run.who(LONG)
    vocab = sglang_models.facts(fleet.instances[long].model.path)["vocab_size"]
    body = sglang_gpu.body_of(sglang_gpu.ids_of("long", sizes.long_prompt, vocab), sizes.long_answer)
    share = kv_load.shares(fleet.books())[long]
    look = run.memory(fleet)
    rest = sum(look().values())
    most = [0]

    def held(row):
        most[0] = max(most[0], sum(row.values()) - rest)
        return row

    with kv_load.Watch(lambda: held(look())):
        (answer,) = open_client.replay(fleet.instances[long].port, [(0.0, body)], min(120, run.left() - 20))
    backed = group_of(fleet.books(), long)["backed"]
    whole = answer.finished and len(answer.ids) == sizes.long_answer
    harness.check(whole, f"the long request: status {answer.status}, {len(answer.ids)} of {sizes.long_answer} tokens")
    run.book.add(
        results.row("kv.longest.tokens", sizes.long_prompt + sizes.long_answer, "tokens", floor=share, target=f"> {share}",
                    note=f"{long}, one request while the others idle, served; floor: its equal share of a pool of {sizes.pool / 2**20:.0f} MiB; "
                    f"TTFT {answer.times[0] * 1e3:.0f} ms, TBT {kv_load.mean_tbt(answer) * 1e3:.2f} ms; {backed['bytes'] / 2**20:.0f} MiB were its "
                    f"KV Cache, {most[0] / 2**20:.0f} MiB more in use seen from outside"))
    # The donor idles now, and keeps what it has until others want it.
    first = woken(run, fleet, long, "woken")
    there = woken(run, fleet, long, "there")
    inside = [ttft <= sizes.targets[name][0] for name, values in first.items() for ttft in values]
    note = "; ".join(f"{name}: {max(values):.0f} ms, {max(there[name]):.0f} with the memory there, target {sizes.targets[name][0]}" for name, values in first.items())
    run.book.add(
        results.row("kv.longest.woken_ttft_ms", max(max(values) for values in first.values()), "ms",
                    peer=max(max(values) for values in there.values()), note=f"largest TTFT of the models that wake while {long} holds the memory; peer: the same once more; {note}"),
        results.row("kv.longest.woken_within", sum(inside) / len(inside), "fraction", target=">= 1",
                    note=f"of {len(inside)} requests that came when the others woke, within their TTFT targets"))
    returned(run, fleet, look)


def woken(run, fleet, long, seed):
    """{model: TTFTs in ms}: all but `long` get at once requests that together want nearly the whole pool."""
    books, requests, ports = fleet.books(), {}, {}
    for name, server in fleet.instances.items():
        if name == long:
            continue
        group = group_of(books, name)
        pool = books["pools"][0]["bytes"] // (group["bundle_bytes"] // group["bundle_tokens"])
        tokens, count = int(0.4 * pool), 4
        length = min(tokens // count, run.sizes.most_prompt, server.model.context - 40)
        vocab = sglang_models.facts(server.model.path)["vocab_size"]
        requests[name] = [(0.0, sglang_gpu.body_of(sglang_gpu.ids_of(f"{seed} {name} {i}", length, vocab), 16)) for i in range(count)]
        ports[name] = server.port
    answers = kv_load.replay(ports, requests, 60)
    for name, those in answers.items():
        harness.check(all(a.finished and len(a.ids) == 16 for a in those), f"{name}, {seed}: a request failed")
    return {name: [a.times[0] * 1e3 for a in those] for name, those in answers.items()}


def returned(run, fleet, look):
    """How long it takes until memory that was given back is seen to be free, from outside."""
    before, was = sum(look().values()), fleet.books()
    give = sum(g["backed"]["bytes"] - g["floor"]["bytes"] for g in was["groups"])
    began = time.monotonic()
    fleet.kv("trim", "--all")
    gone = None
    while time.monotonic() < began + 10 and gone is None:
        if before - sum(look().values()) >= 0.9 * give:
            gone = time.monotonic() - began
        time.sleep(0.005)
    if gone is None:
        run.failures.append(f"of {give} bytes given back {before - sum(look().values())} are seen to be free after 10 s")
        return
    run.book.add(results.row("kv.longest.returned_ms", gone * 1e3, "ms", target="<= 1000",
                             note=f"until {give / 2**20:.0f} MiB that idle models gave back were free as seen from outside (nine tenths of it)"))


# ---- history -----------------------------------------------------------------------------------------------
def answers_alone(run, fleet):
    """{(model, length): tokens}; one request at a time in the whole system, so that the same are to be expected."""
    found = {}
    for length in run.sizes.history:
        for name, server in fleet.instances.items():
            ids = sglang_gpu.ids_of(f"history {length}", length, sglang_models.facts(server.model.path)["vocab_size"])
            found[name, length] = server.post("/generate", sglang_gpu.body_of(ids, run.sizes.history_answer), 60)["output_ids"]
    return found


def step_history(run):
    if run.book.has("kv.history.wrong_tokens"):
        return
    fleet, sizes = run.system(), run.sizes
    run.need(40, "the same tokens whatever moves")
    set_policy(fleet, "deadline")
    truth = answers_alone(run, fleet)
    same = answers_alone(run, fleet) == truth
    harness.check(same, "one request at a time has other tokens the second time, without anything that moves")
    before, wrong, compared = fleet.books(), 0, 0
    with kv_load.Trimming(fleet) as trims:
        for _ in range(sizes.history_rounds):
            for key, ids in answers_alone(run, fleet).items():
                wrong += sum(a != b for a, b in zip(ids, truth[key], strict=False)) + abs(len(ids) - len(truth[key]))
                compared += 1
    harness.check(not trims.errors, "; ".join(trims.errors[:1]))
    after = fleet.books()
    grants = {name: group_of(after, name)["grants"] - group_of(before, name)["grants"] for name in fleet.instances}
    harness.check(min(grants.values()) > 0, f"it did not move everywhere: grants of {grants}")
    run.book.add(results.row("kv.history.wrong_tokens", wrong, "tokens", target="<= 0",
                             note=f"of {compared} answers of {sizes.history_answer} tokens, prompts of {', '.join(map(str, sizes.history))}, one at a time, beside the same in "
                             f"steady memory; {trims.count} trims of everything meanwhile, grants: {', '.join(f'{name} {count}' for name, count in grants.items())}"))
    harness.check(wrong == 0, f"{wrong} tokens differ")


# ---- neighbour ---------------------------------------------------------------------------------------------
def growth(run, servers):
    """TBT P50 of one stream of a model, seconds: alone, and while another answers `busy_streams` at once."""
    sizes, found, alone, busy = run.sizes, {}, run.who(ALONE), run.who(BUSY)
    context = sizes.contexts[0]
    for kind in ("alone", "beside"):
        gaps, stop, errors = [], threading.Event(), []

        def keep_busy(stop=stop, errors=errors):
            turn = 0
            while not stop.is_set():
                turn += 1
                try:
                    burst(servers[busy], sizes.busy_streams, context, sizes.busy_tokens, f"busy {turn}")
                except (harness.Failed, OSError) as error:
                    errors.append(error)
                    return

        other = threading.Thread(target=keep_busy, daemon=True)
        if kind == "beside":
            other.start()
            time.sleep(2.5)
        for number in range(sizes.neighbour_rounds):
            gaps += sglang_gpu.steady_gaps(burst(servers[alone], 1, context, sizes.new_tokens, f"{kind} {number}"))
        stop.set()
        if kind == "beside":
            other.join(600)
        if errors:
            raise errors[0]
        found[kind] = kv_load.quantile(gaps, 0.5)
    return found


def step_neighbour(run):
    if run.samples.wanted("kv_neighbour", "ours"):
        fleet = run.system()
        set_policy(fleet, "deadline")
        run.need(30, "a busy neighbour")
        run.samples.keep("kv_neighbour", "ours", growth(run, fleet.instances))
    neighbour_rows(run)


def neighbour_rows(run):
    ours, peer = (run.samples.get("kv_neighbour", side) for side in ("ours", "kvcached"))
    keys = [("kv_neighbour", side) for side in ("ours", "kvcached")]
    if not ours or not (due(run, "tbt.neighbour.growth", keys) or (peer and run.book.rows["tbt.neighbour.growth"]["peer"] is None)):
        return
    words = f"{run.who(ALONE)}, 1 stream of {run.sizes.contexts[0]} tokens, beside {run.who(BUSY)} with {run.sizes.busy_streams}; TBT P50 {ours['alone'] * 1e3:.2f} and {ours['beside'] * 1e3:.2f} ms"
    if peer:
        words += f"; kvcached, both on one GPU, without prefill graphs and MPS: {peer['alone'] * 1e3:.2f} and {peer['beside'] * 1e3:.2f} ms"
    words += results.kept(ours=run.samples.at("kv_neighbour", "ours"), peer=run.samples.at("kv_neighbour", "kvcached"))
    run.book.add(results.row("tbt.neighbour.growth", ours["beside"] / ours["alone"], "ratio", target="<= 1.2",
                             peer=peer["beside"] / peer["alone"] if peer else None, note=words))


# ---- cold models: ours and the peers ---------------------------------------------------------------------------
def measure_cold(run, side, servers):
    """The load of benches/sglang_gpu.py's `cold`, at the rates that are not among the samples yet."""
    path = run.arguments.trace
    lengths = sglang_gpu.read_trace(path) if path else [(30, 6), (50, 8)]
    for rate in run.arguments.cold_rates:
        if not run.samples.wanted(f"kv_cold_{side}", f"{rate:g}"):
            continue
        run.need(run.sizes.cold_seconds + 20, f"cold models at {rate:g} requests/s")
        one = sglang_gpu.cold_summary(sglang_gpu.cold_load(run, servers, rate, lengths))
        check_graphs(run, servers)  # a peer outside its graphs is slow by itself
        one["load"] = sglang_gpu.cold_load_words(run, path, [server.model.name for server in servers])
        one["context"] = run.sizes.context
        run.samples.keep(f"kv_cold_{side}", f"{rate:g}", one)
        print(f"    {side} at {rate:g}: {one['asked']} requests, {one['unfinished']} unfinished, TBT P50 {kv_load.quantile(one['tbt'], 0.5) * 1e3:.2f} "
              f"P99 {kv_load.quantile(one['tbt'], 0.99) * 1e3:.2f} ms, TTFT P99 {kv_load.quantile(one['ttft'], 0.99) * 1e3:.0f} ms", flush=True)
        cold_rows(run)  # the next rate may not fit
    cold_rows(run)


def cold_sample(run, side, rate):
    one = run.samples.get(f"kv_cold_{side}", f"{rate:g}")
    return one and {**one, "at": run.samples.at(f"kv_cold_{side}", f"{rate:g}")}


def cold_rows(run):
    for rate in run.arguments.cold_rates:
        ours = cold_sample(run, "ours", rate)
        for peer in ("kvcached", "static"):
            theirs = cold_sample(run, peer, rate)
            metric = f"kv.cold.rate{rate:g}.{peer}_p99_ratio"
            keys = [(f"kv_cold_{side}", f"{rate:g}") for side in ("ours", peer)]
            if ours and theirs and ours["load"] != theirs["load"]:
                print(f"    {peer} at {rate:g}: measured with another load ({theirs['load']}, ours {ours['load']}), no ratio", flush=True)
            elif ours and theirs and due(run, metric, keys):
                rows = kv_load.ratio_rows(rate, peer, ours, theirs, run.sizes.pool)
                run.book.add(*rows)
                if rate == run.arguments.cold_rates[0]:
                    target = ">= 10.4" if peer == "kvcached" else ">= 1"
                    run.book.add({**rows[0], "metric": f"tbt.cold_models.p99_{peer}_ratio", "target": target})


def step_cold(run):
    wanted = [("kv_capacity", "ours"), *(("kv_cold_ours", f"{rate:g}") for rate in run.arguments.cold_rates)]
    if not any(run.samples.wanted(*key) for key in wanted):
        cold_rows(run)
        return
    fleet = run.system()
    set_policy(fleet, "deadline")
    run.samples.keep("kv_capacity", "ours", {m: high for m, (_, high) in fleet.first.items()})
    measure_cold(run, "ours", list(fleet.instances.values()))
    check_graphs(run, fleet.servers())


def capacity(server):
    """Tokens that SGLang says its KV Cache has at most."""
    return int(server.get("/server_info")["max_total_num_tokens"])


def fixed_tokens(run):
    """{model: tokens} of KV Caches that share what weights leave of their GPU, in equal parts. Weights by their
    sizes in the plan of the system, which does not start for that."""
    if run.host.kind == "cpu":
        return dict.fromkeys(MODELS, run.sizes.context * 2)
    total = sglang_servers.query("memory.total")
    probe = Fleet(run.host, run.arguments, "kv-sizes", models=[run.model(name) for name in MODELS], kv_policy="deadline")
    plan = probe.plan()
    found = {}
    for name in MODELS:
        here = [m for m in plan["models"] if place(m["id"]) == place(name)]
        weights = sum(m["ffn_shard_bytes"] + m["attention_bytes"] for m in here)
        rest = total[place(name)] * 2**20 * 0.95 - weights - len(here) * run.arguments.engine_gib * 2**30
        mine = next(m for m in here if m["id"] == name)
        found[name] = int(rest / len(here) / (mine["kv_bundle_bytes"] / mine["kv_bundle_tokens"]))
        harness.check(found[name] > 20000, f"{name}: no room for a fixed KV Cache on its GPU")
    return found


def plain_side(run, side):
    """Starts, measures; a peer that does not run is told so."""
    wanted = [(f"kv_cold_{side}", f"{rate:g}") for rate in run.arguments.cold_rates]
    wanted += [("kv_neighbour", side)] if side == "kvcached" else []
    if not any(run.samples.wanted(*key) for key in wanted):
        cold_rows(run)
        neighbour_rows(run)
        capacity_rows(run)
        return
    models = [run.model(name) for name in MODELS]
    if side == "static":
        tokens = fixed_tokens(run)
        for model in models:
            model.kv_tokens = tokens[model.name]
    gpus = run.host.both[0]
    try:
        fleet = run.start(f"kv-{side}", vanilla=[(m, [gpus[place(m.name)]]) for m in models],
                          plain="kvcached" if side == "kvcached" else "vanilla")
        servers = fleet.vanilla
        for server in servers.values() if side == "kvcached" else ():
            print(f"    {server.name()}: {len(sglang_servers.kvcached_patches(server.text())[0])} patches", flush=True)
        check_graphs(run, list(servers.values()))
        run.samples.keep("kv_capacity", side, {name: capacity(server) for name, server in servers.items()})
        warm(run, list(servers.values()), min(run.sizes.cold_prompt, run.sizes.context - 40))
        measure_cold(run, side, list(servers.values()))
        if side == "kvcached" and run.samples.wanted("kv_neighbour", side):
            run.need(20, "a busy neighbour")
            found = growth(run, servers)
            check_graphs(run, list(servers.values()))
            run.samples.keep("kv_neighbour", side, found)
            neighbour_rows(run)
    except (harness.Failed, OSError, RuntimeError, ValueError, KeyError) as error:
        why = f"{type(error).__name__}: {str(error).splitlines()[0]}"
        print(f"    FAILED {side}: {error}", flush=True)
        run.failures.append(f"{side}: {why}")
        for metric in run.book.rows:
            if f"{side}_" in metric and not run.book.has(metric):
                run.book.rows[metric] = {**run.book.missing(metric), "note": f"{side} failed to run: {why}"[:300]}
        run.book.write()
    finally:
        run.stop()
        capacity_rows(run)


def step_kvcached(run):
    plain_side(run, "kvcached")


def step_static(run):
    plain_side(run, "static")


def capacity_rows(run):
    """Tokens of the longest context that each could serve, by memory alone."""
    by = {side: run.samples.get("kv_capacity", side) for side in ("whole", "ours", "kvcached", "static")}
    if not by["whole"] and run.host.kind == "cuda":
        models = [run.model(name) for name in MODELS]
        for model in models:
            model.kv_tokens = 16_000_000  # no limit but the memory
        plan = Fleet(run.host, run.arguments, "kv-whole", models=models, kv_policy="deadline").plan()
        by["whole"] = run.samples.keep("kv_capacity", "whole", {m["id"]: m["kv_tokens"] for m in plan["models"]})
    for name in MODELS:
        mine = (by["whole"] or by["ours"] or {}).get(name)
        peers = {side: by[side][name] for side in ("kvcached", "static") if by[side]}
        told = ["whole" if by["whole"] else "ours", *peers]
        metric = f"kv.longest.{name}.capacity_tokens"
        if mine and peers and due(run, metric, [("kv_capacity", side) for side in told]):
            words = ", ".join(f"{side} {tokens}" for side, tokens in peers.items())
            more = "as planned for the whole GPU, not run at that size" if by["whole"] else "as it ran"
            run.book.add(results.row(metric, mine, "tokens", peer=peers.get("kvcached"), target=">= peer",
                                     note=f"memory for one context, {more}; peers by their own words: {words}; the model itself allows "
                                     f"{sglang_models.facts(run.real(name).path)['max_position_embeddings']}"
                                     + results.kept(**{side if side in peers else "ours": run.samples.at("kv_capacity", side) for side in told})))


# ---- goodput -------------------------------------------------------------------------------------------------
def halves(path):
    """{half of the trace: its file}; `path` is that of the conversations."""
    return {half: path.with_name(path.name.replace("conv", half)) for half in ("conv", "code")}


def traces(run):
    path = run.arguments.trace
    if path is None and run.arguments.rehearse:
        chance = random.Random("trace")
        rows = [(0.7 * i, chance.randrange(8, 240), chance.randrange(2, 12)) for i in range(200)]
        return {"conv": rows, "code": rows}
    if path is None:
        raise harness.Failed("--trace names no CSV of the conversations")
    return {half: kv_load.read_trace(one, run.sizes.scale) for half, one in halves(path).items()}


def longest_prompt(run, server):
    return min(run.sizes.most_prompt, server.model.context - run.sizes.most_answer - 8)


def alone_times(run, fleet, trace):
    """{name: [(tokens, seconds)]}: TTFT of prompts where nothing else runs, up to the longest of the load that its ceiling
    lets in."""
    trim(fleet)
    found = {}
    for name, server in fleet.instances.items():
        vocab = sglang_models.facts(server.model.path)["vocab_size"]
        top = min(max(row[1] for row in trace[SOURCES[name][0]]), longest_prompt(run, server), fleet.first[name][1] - 16)
        found[name] = []
        for tokens in [*(n for n in run.sizes.alone if n < 0.9 * top), top]:
            body = sglang_gpu.body_of(sglang_gpu.ids_of(f"alone {tokens}", tokens, vocab), 2)
            (one,) = open_client.replay(server.port, [(0.0, body)], 60)
            harness.check(one.finished and one.times, f"{name}: {tokens} tokens alone: status {one.status}")
            found[name].append((tokens, one.times[0]))
    print("    prompts alone, tokens and ms: " + "; ".join(f"{m} {', '.join(f'{n} {s * 1e3:.0f}' for n, s in points)}" for m, points in found.items()), flush=True)
    return found


def measure_policy(run, fleet, policy, rate, trace, points):
    """Judged load, with the peak of the KV Caches as seen from outside and the part that computing had."""
    sizes = run.sizes
    set_policy(fleet, policy)
    sources = {}
    for name, server in fleet.instances.items():
        half, begin = SOURCES[name]
        vocab = sglang_models.facts(server.model.path)["vocab_size"]
        sources[name] = kv_load.Source(name, trace[half], begin, vocab, longest_prompt(run, server), sizes.most_answer)
    requests = kv_load.workload(sources, rate, sizes.seconds)
    look, cpu, held = run.memory(fleet), run.host.kind == "cpu", fleet.books()
    before = sum(look().values())
    pool = held["pools"][0]["bytes"]
    floors = sum(g["backed"]["bytes"] for g in held["groups"])
    with kv_load.Watch(look, pool if cpu else None) as watch:
        began = time.monotonic()
        answers = kv_load.replay({name: server.port for name, server in fleet.instances.items()}, requests, sizes.patience)
        took = max(time.monotonic() - began, sizes.seconds)
        books = fleet.books()
    # Slot 0, which belongs to nobody, counts as used.
    settle(fleet, lambda books: all(g["used"]["tokens"] <= 1 for g in books["groups"]), "all requests have ended", 60)
    wrong = kv_load.wrong_books(fleet.books())
    if wrong:
        run.failures.append(f"{policy} at {rate:g}: {wrong}")
    if policy != "static":
        trim(fleet)
    time.sleep(0.5)
    after = sum(look().values())
    rows = watch.rows if cpu else [(at, {"device": value}) for at, value in kv_load.kv_of_device(watch.rows, before, after, floors)]
    one = kv_load.judge(requests, answers, sizes.targets, sizes.seconds)
    one["requests"] = kv_load.by_request(requests, answers, sizes.targets)
    one.update(kv_load.compute(one["requests"], points, sizes.targets, took))
    peak = max((sum(row.values()) for _, row in rows), default=0)
    one.update(peak=peak, pool=pool, samples=len(rows), grown=0 if cpu else max(after - before, 0), missed=len(watch.errors),
               commands=books["commands"], rows=[(round(at, 2), sum(row.values())) for at, row in rows])
    return one


def following(run):
    """Steps that come after `goodput`."""
    steps = run.arguments.only.split(",")
    return steps[steps.index("goodput") + 1 :]


def goodput_sample(run, rate, policy):
    """Of the same load on the same pool, or None."""
    one = run.samples.get("kv_goodput", f"{rate:g} {policy}")
    return one if one and one.get("load") == goodput_load(run) else None


def goodput_load(run):
    path, sizes = run.arguments.trace, run.sizes
    return [path.name if path else "rehearsal", sizes.scale, sizes.seconds, sizes.goodput_pool, *sorted(run.names)]


def cell_seconds(run, todo, number):
    """That have to be left for this one. A rate without all of its policies says nothing: but for the first, none is
    begun that has not the time for the rest, and for the steps that follow."""
    rate, first = todo[number][0], todo[number][0] == run.arguments.rates[0]
    rest = 1 if first else sum(other == rate for other, _ in todo[number:])
    later = 0 if first else sum(LATER_S.get(step, 0) for step in following(run))
    return rest * (run.sizes.seconds + run.sizes.patience) + 10 + later


def step_goodput(run):
    todo = [(rate, policy) for rate in run.arguments.rates for policy in POLICIES
            if not goodput_sample(run, rate, policy) or run.samples.wanted("kv_goodput", f"{rate:g} {policy}")]  # fmt: skip
    try:
        if todo:
            pool = run.sizes.goodput_pool
            run.need(run.start_left(pool) + cell_seconds(run, todo, 0), f"{todo[0][1]} at {todo[0][0]:g} requests/s")
            trace, fleet = traces(run), run.system(pool)
            points = run.samples.keep("kv_goodput_alone", "ours", alone_times(run, fleet, trace))
        for number, (rate, policy) in enumerate(todo):
            run.need(cell_seconds(run, todo, number), f"{policy} at {rate:g} requests/s")
            one = {**measure_policy(run, fleet, policy, rate, trace, points), "load": goodput_load(run)}
            run.samples.keep("kv_goodput", f"{rate:g} {policy}", one)
            run.book.add(*kv_load.policy_rows(rate, policy, one, run.sizes.targets))
            check_graphs(run, fleet.servers())
            if policy == "deadline" and rate == run.arguments.rates[0]:
                replayed(run, fleet)
    finally:
        goodput_rows(run)


def replayed(run, fleet):
    """The market's newest decisions, decided once more from their records."""
    record = fleet.folder / "record"
    fleet.kv("--record", str(record))
    out = subprocess.run([str(run.arguments.build / "bin" / "xpool"), "kv", "--replay", str(record)], capture_output=True, text=True, timeout=30)
    run.book.add(results.row("kv.goodput.replayed_differently", int(out.returncode != 0), "runs", target="<= 0", note=(out.stdout or out.stderr).strip()[:200]))


def goodput_rows(run):
    for rate in run.arguments.rates:
        by = {policy: goodput_sample(run, rate, policy) for policy in POLICIES}
        for other in POLICIES[:2]:
            metric = f"kv.goodput.rate{rate:g}.deadline_{other}_ratio"
            keys = {policy: ("kv_goodput", f"{rate:g} {policy}") for policy in ("deadline", other)}
            if by["deadline"] and by[other] and due(run, metric, keys.values()):
                target = "> 1" if other == "static" and rate == run.arguments.rates[0] else ">= 1"
                run.book.add(results.row(metric, by["deadline"]["goodput"] / max(by[other]["goodput"], 1e-9),
                                         "ratio", peer=by[other]["goodput"], target=target,
                                         note=f"one load of {run.sizes.seconds:g} s, {by['deadline']['asked']} requests, at {rate:g} requests/s each, prompts {run.sizes.scale:g} times the trace's, a pool of {run.sizes.goodput_pool / 2**20:g} MiB; prefill alone takes "
                                         f"{by['deadline']['prefill_fraction']:.2f} of the time, {other} {by[other]['prefill_fraction']:.2f}; "
                                         f"refused, cut or unfinished {missed(by['deadline'])}, {other} {missed(by[other])}"
                                         + results.kept(**{policy: run.samples.at(*key) for policy, key in keys.items()})))
    plots(run)
    run.book.write()


def missed(one):
    return one["refused"] + one["cut"] + one["unfinished"]


def plots(run):
    cells = [(rate, [(policy, goodput_sample(run, rate, policy)) for policy in POLICIES]) for rate in run.arguments.rates]
    cells = [(rate, those) for rate, those in cells if all(one for _, one in those)]
    if not cells:
        return
    bars = [(f"{policy}, {rate:g}/s", one["goodput"]) for rate, those in cells for policy, one in those]
    bounds = [(f"offered: {those[0][1]['offered']:.2f}", those[0][1]["offered"]) for _, those in cells]
    svg.write_bars(run.arguments.out / "kv-gpu-goodput.svg", "Goodput under SLO, requests/s, three models on one pool", bars, bounds)
    rate, those = cells[0]
    unit = 2**20
    panels = [(f"{policy}, {rate:g} requests/s", [("KV Caches", [(at, value / unit) for at, value in one["rows"]])], ("pool", one["pool"] / unit))
              for policy, one in those if one["rows"]]
    svg.write_lines(run.arguments.out / "kv-gpu-memory.svg", "KV memory of all models as seen from outside, MiB, over seconds", panels)
    run.book.plots = ["kv-gpu-goodput.svg", "kv-gpu-memory.svg"]


# ---- kills -----------------------------------------------------------------------------------------------------
def small_model(run, name, floor=128):
    path = sglang_models.TALES / "qwen3-moe"
    mode = "eager" if run.arguments.rehearse else "graphs"
    model = Model(name, path, mode=mode, kv_tokens=9000, context=1024, rows=64 if run.arguments.rehearse else 512, requests=8)
    model.more_settings = {"kv_floor_tokens": floor}
    return model


def alive(pids):
    table = harness.process_table()
    return [pid for pid in pids if pid in table and table[pid][2] not in "ZX"]


def step_kills(run):
    """A victim dies at a step of an operation while it and another want the whole pool in turn. Survivors have
    enough in their floors, and answer one request at a time, so that the tokens are to be the same."""
    if run.book.has("kv.kill.atnagent_left_mib"):
        return
    sizes = run.sizes
    survivors = [small_model(run, f"s{i}", 1024) for i in range(sizes.survivors)]
    victims = [small_model(run, point.rpartition(".")[2]) for point, _ in sizes.victims]
    for model, (point, passage) in zip(victims, sizes.victims, strict=True):
        model.failpoints = f"{point}=kill@{passage}"
    other = small_model(run, "other")
    models = [*survivors, other, *victims]
    fleet = run.start("kv-kills", models=models, kv_policy="deadline", pool=kill_pool(run, models), reform=0)
    servers = [fleet.instances[model.name] for model in survivors]
    settle(fleet, lambda books: all(pool["formed"] for pool in books["pools"]), "the pool is formed", 30)
    vocab = sglang_models.facts(survivors[0].path)["vocab_size"]
    prompts = [sglang_gpu.ids_of(f"kill {n}", n, vocab) for n in sizes.kill_prompts]
    truth = [servers[0].post("/generate", sglang_gpu.body_of(prompt, sizes.kill_length), 120)["output_ids"] for prompt in prompts]
    wrong, died, lost = 0, [], 0
    try:
        for model in victims:
            run.need(40, f"a kill at {model.failpoints}")
            victim = fleet.instances[model.name]
            pids = victim.schedulers()
            busy = {"streams": sizes.kill_streams, "pause": sizes.kill_pause}
            with kv_load.Traffic(servers, prompts, sizes.kill_length, truth) as traffic, kv_load.Traffic([fleet.instances["other"]], prompts[:1], sizes.kill_length, **busy) as rest:
                with kv_load.Traffic([victim], prompts[:1], sizes.kill_length, excused=True, **busy):
                    began = time.monotonic()
                    while alive(pids) and time.monotonic() < began + 40:
                        harness.check(not traffic.errors + rest.errors, "; ".join([*traffic.errors, *rest.errors][:2]))
                        time.sleep(0.05)
                    harness.check(not alive(pids), f"{model.failpoints}: not passed within 40 s")
                    took = time.monotonic() - began
                    sglang_servers.kill_group(victim.process)
                settle(fleet, lambda books, m=model: group_of(books, m.name)["state"] == "absent" and not group_of(books, m.name)["backed"]["bytes"],
                       f"the bytes of {model.name} return")  # fmt: skip
                goes_on(traffic, rest)
            harness.check(not traffic.errors + rest.errors, "; ".join([*traffic.errors, *rest.errors][:2]))
            wrong += traffic.wrong
            trouble = kv_load.wrong_books(fleet.books())
            lost += trouble is not None
            if trouble:
                run.failures.append(f"after {model.failpoints}: {trouble}")
            died.append(f"{model.failpoints} after {took:.1f} s")
    finally:
        note = f"{len(died)} Instances dead by kill -9 at a step of an operation: {'; '.join(died)}; {sizes.survivors} survivors, each answer compared"
        if died:
            run.book.add(results.row("kv.kill.wrong_tokens", wrong, "tokens", target="<= 0", note=note),
                         results.row("kv.kill.lost_bytes", lost, "kills", target="<= 0", note="after which the books of the pool were wrong; " + note))  # fmt: skip
    harness.check(wrong == 0, f"{wrong} tokens differ")
    end_by_kill(run, fleet, f"atnagent {fleet.atn[0]}", servers, prompts, "kv.kill.atnagent_left_mib")


def goes_on(*traffics):
    """All that are asked answer from now on."""
    before = [dict(traffic.served) for traffic in traffics]

    def so():
        return any(t.errors for t in traffics) or all(t.served[name] > was[name] for t, was in zip(traffics, before, strict=True) for name in was)

    harness.wait_until(so, 40, "the survivors are served", 0.1)


def kill_pool(run, models):
    """Bytes in which one has the memory that its requests want beside the floors of all, and no second one."""
    probe = Fleet(run.host, run.arguments, "kv-sizes-small", models=models, kv_policy="deadline", pool=64 << 20)
    facts = probe.plan()["models"]
    bundle = facts[0]["kv_bundle_bytes"]
    token = bundle // facts[0]["kv_bundle_tokens"]
    floors = sum(m["kv_floor_tokens"] * token for m in facts)
    wanted = run.sizes.kill_streams * (run.sizes.kill_prompts[0] + run.sizes.kill_length) * token
    return floors + max(-(-wanted // bundle) * bundle - facts[-1]["kv_floor_tokens"] * token, bundle)


def end_by_kill(run, fleet, role, servers, prompts, metric):
    """kill -9 of an agent or the daemon while requests run and memory moves: with no next Generation everything
    ends by itself; nothing is left, and a next daemon starts and ends."""
    run.need(60, f"kill -9 of {role}")
    pids = [pid for server in fleet.servers() for pid in (server.process.pid, *server.schedulers())]
    with kv_load.Traffic(servers, prompts, run.sizes.kill_length, streams=2, excused=True):
        time.sleep(1.0)
        began = time.monotonic()
        fleet.roles[role].kill()
        others = [process for name, process in fleet.roles.items() if name != role]

        def ended():
            return all(process.poll() is not None for process in others) and not alive(pids)

        try:
            harness.wait_until(ended, 45, f"all ends after the death of {role}", 0.1)
            took, stuck = time.monotonic() - began, ""
        except harness.Failed:
            took = 45.0
            stuck = f"; still there: {[name for name, process in fleet.roles.items() if process.poll() is None]}, {len(alive(pids))} of {len(pids)} processes of Instances"
            run.failures.append(f"{role}: not all has ended 45 s after its death{stuck}")
    # What has not ended by itself is ended now; the Fleet is no longer one.
    run.fleet = None
    told = fleet.role_tail("daemon") if role != "daemon" else ""
    cause = [line for line in told.splitlines() if "failure" in line.lower()]
    left_over, before = fleet.kill_all()
    if run.arguments.keep_logs:
        run.keep_logs(fleet)
    left = run.memory_left(fleet)
    run.book.add(results.row(metric, left, "MiB", target=f"<= {LEFT_MIB}",
                             note=f"of GPU memory after kill -9 of {role} while KV memory moved; everything had ended by itself after {took:.1f} s{stuck}; "
                             f"of MPS: {', '.join(before) or 'nothing'}, after the next daemon's start and end: {', '.join(left_over) or 'nothing'}; "
                             f"the daemon said: {(cause[0][-160:] if cause else 'nothing (it was killed)' if role == 'daemon' else 'no failure')}"))  # fmt: skip
    if left_over:
        run.failures.append(f"kill -9 of {role} left {left_over}")
    if role != "daemon" and not cause:
        run.failures.append(f"kill -9 of {role}: the daemon told no failure")


def step_daemon(run):
    """Of the system that runs; it ends with it."""
    if run.book.has("kv.kill.daemon_left_mib"):
        return
    fleet, sizes = run.system(), run.sizes
    set_policy(fleet, "deadline")
    trim(fleet)
    vocab = min(sglang_models.facts(server.model.path)["vocab_size"] for server in fleet.servers())
    length = min(sizes.most_prompt, min(server.model.context for server in fleet.servers()) - sizes.kill_length - 8)
    prompts = [sglang_gpu.ids_of(f"daemon {n}", n, vocab) for n in (length, length // 2, length // 3)]
    end_by_kill(run, fleet, "daemon", fleet.servers(), prompts, "kv.kill.daemon_left_mib")


# ---- the driver's part -------------------------------------------------------------------------------------------
def step_driver(run):
    program = run.arguments.build / "tests" / "cuda_kv_bench"
    if run.host.kind == "cpu" or not program.exists():
        print(f"    left out: {'no GPU' if run.host.kind == 'cpu' else 'the build has no tests/cuda_kv_bench'}", flush=True)
        return
    run.need(30, "cuda_kv_bench")
    run.stop()
    folder = run.arguments.scratch / "driver"
    command = [sys.executable, str(results.ROOT / "tests" / "cuda" / "run_on_device"), "--build", str(run.arguments.build), "--out", str(folder), "--only", "kv"]
    out = subprocess.run(command, capture_output=True, text=True, timeout=min(100, run.left()))
    harness.check(out.returncode == 0, f"run_on_device: {out.returncode} {(out.stdout + out.stderr)[-600:]}")
    run.book.add(*json.loads((folder / "kv_cuda.json").read_text())["rows"])


def keeping(step):
    """The step; when it fails and the system still serves, the next one takes it over."""

    def tried(run):
        try:
            step(run)
        except (harness.Failed, OSError, ValueError, KeyError, RuntimeError, subprocess.SubprocessError) as error:
            if run.fleet is None or not run.fleet.serves():
                raise
            run.failures.append(f"{step.__name__}: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}")
            print(f"    FAILS {step.__name__}: {type(error).__name__}: {error}; the system goes on", flush=True)

    return tried


STEPS = {
    "history": keeping(step_history),
    "longest": keeping(step_longest),
    "neighbour": keeping(step_neighbour),
    "cold": keeping(step_cold),
    "goodput": keeping(step_goodput),
    "daemon": step_daemon,
    "kvcached": step_kvcached,
    "static": step_static,
    "kills": step_kills,
    "driver": step_driver,
}


def parse(words=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=pathlib.Path, required=True)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path(os.environ.get("OUT", ".")))
    parser.add_argument("--only", default=",".join(ORDER), help="steps, in the order in which they are to run")
    parser.add_argument("--resume", type=pathlib.Path, nargs="?", const=True, help="keep the rows of an earlier run in this folder (default: OUT)")
    parser.add_argument("--again", action="store_true", help="with --resume: measure also what is there; other rows are kept")
    parser.add_argument("--renew", dest="again", action="store_const", const=sglang_gpu.RENEW, help="the same, but for what is of this commit")
    parser.add_argument("--budget", type=float, default=1e9, help="seconds")
    parser.add_argument("--trace", type=pathlib.Path, help="CSV of the Azure trace's conversations; that of the code is beside it")
    parser.add_argument("--models", default=",".join(MODELS), help="of one system (default: all)")
    parser.add_argument("--rates", default="0.75,1,0.5,1.5", help="requests/s of each model in `goodput`")
    parser.add_argument("--cold-rates", default="0.8,0.2", help="requests/s of each model in `cold` and of the peers; the first one gives the ratios")
    parser.add_argument("--pool", type=float, help="MiB of the KV Capacity Pool (default: 2560, in `goodput` 704; rehearsal: 4)")
    parser.add_argument("--scale", type=float, help="by which the trace's prompts are longer in `goodput` (default: 1)")
    parser.add_argument("--seconds", type=float, help="of load of each cell of `goodput` (default: 30)")
    parser.add_argument("--engine-gib", type=float, default=8.0, help="what a plain server takes beside weights and KV Cache")
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--site", type=pathlib.Path, help="folder that goes in front of the servers' PYTHONPATH")
    parser.add_argument("--peer", type=pathlib.Path, help="folder in which kvcached is installed (tests/cuda/sglang_bundle peer)")
    parser.add_argument("--caches", type=pathlib.Path, help="archive of compiled kernels of an earlier run; a new one goes to OUT/caches.tar.gz")
    parser.add_argument("--flags", default="", help="further arguments of all servers")
    parser.add_argument("--observe", action="store_true", help="observers on (xpool trace)")
    parser.add_argument("--keep-logs", action="store_true", help="the ends of all logs go to OUT/logs.tar.gz")
    parser.add_argument("--rehearse", "--cpu", action="store_true")
    arguments = parser.parse_args(words)
    arguments.models = arguments.models.split(",")
    arguments.rates = [float(rate) for rate in arguments.rates.split(",")]
    arguments.cold_rates = [float(rate) for rate in arguments.cold_rates.split(",")]
    arguments.build, arguments.out = arguments.build.resolve(), arguments.out.resolve()
    arguments.resume = arguments.out if arguments.resume is True else arguments.resume
    unknown = [step for step in arguments.only.split(",") if step not in STEPS]
    if unknown:
        parser.error(f"no such step: {', '.join(unknown)}")
    if not set(arguments.models) <= set(MODELS) or len(set(arguments.models)) < 2:
        parser.error(f"--models: two or three of {', '.join(MODELS)}")
    if "goodput" in arguments.only.split(",") and arguments.trace:
        absent = [path for path in halves(arguments.trace).values() if not path.exists()]
        if absent:
            parser.error(f"goodput needs both halves of the trace; not there: {', '.join(map(str, absent))}")
    if arguments.rehearse:
        arguments.rates = arguments.rates[:1]
        arguments.cold_rates = arguments.cold_rates[:1]
    return arguments


def main():
    arguments = parse()
    arguments.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="xpool-kv-gpu-") as scratch:
        arguments.scratch = pathlib.Path(scratch)
        return sglang_gpu.perform(Run(arguments), STEPS)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(f"ended by signal {number}"))
    sys.exit(main())
