# SPDX-License-Identifier: MIT
"""Elastic KV Cache on the CPU: a grant beside the system's own calls (bench_kv.c), and the goodput of
three Instances on one attention device under shifting load, with each scheduler.kv_policy and with ample
memory.

    benches/run kv [--quick] [--load SHARE] [--traces FOLDER] [--policy]

The load is the Azure LLM inference trace: its conversation half, its code half and a later part of the
conversations go to one Instance each, scaled in length to the model's context and in time to this
machine. In each phase one or two of the three are hot and the others nearly idle. Open loop, streamed
over HTTP, real tokens. Every request is the same for all policies, so their tokens are compared too.

Two calibrations: requests one by one, memory ample, give the targets (TARGET times the medians of TTFT
and TBT, and no less than LEAST_MS); many at once, one Instance hot and the pool small, give the rate of
which the loads are shares. A request counts for goodput when its answer is whole and its first token and
the mean time between its tokens keep the targets. Standard library only.

What a busy machine hides, which of two orders of demands keeps more targets, is counted in a model in virtual time too
(tests/unit/kv/test_policy_load.c), with the policy that the daemon links; --policy: that alone, in seconds.
"""

import argparse
import csv
import datetime
import json
import pathlib
import os
import random
import re
import statistics
import subprocess
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "tests" / "e2e"))
import bench_native  # noqa: E402
import harness  # noqa: E402
import open_client  # noqa: E402
import results  # noqa: E402
import svg  # noqa: E402

TRACES = results.ROOT.parent / "shared" / "data" / "traces"
FILE = "AzureLLMInferenceTrace_{}.csv"
# Instance -> its half of the trace, and where in it to begin (a part of the whole).
SOURCES = {"chat": ("conv", 0.0), "code": ("code", 0.0), "talk": ("conv", 0.5)}
PHASES = (("chat",), ("code",), ("talk",), ("chat", "code"), ("code", "talk"), ("talk", "chat"))
AMPLE = "ample"  # fixed caches larger than any load: what the machine does without a shortage
POLICIES = (AMPLE, "static", "arrival", "deadline")
CONTEXT = 1024
PROMPT_SCALE, ANSWER_SCALE = 4, 3
COLD = 20  # a cold Instance gets one of so many requests
POOL_CONTEXTS = 1.5
FLOOR = 128
# Shares of the measured rate that the hot ones get together. With the last one queues grow in the hot phases,
# and whose targets are kept is a matter of the order in which memory is given.
LOADS = (0.2, 0.4, 0.8)
OVERLOAD = 0.8
PLOTTED = 0.4  # whose memory is drawn
TARGET = 10.0
LEAST_MS = {"chat": {"ttft": 500.0, "tbt": 50.0}, "code": {"ttft": 250.0, "tbt": 50.0}, "talk": {"ttft": 500.0, "tbt": 50.0}}
PATIENCE = 4.0
PERIOD = 0.1


# --- load ------------------------------------------------------------------------------------------
def read_trace(folder, half):
    """[(seconds, prompt tokens, generated tokens)], scaled in length, in order of time."""
    rows = []
    with open(folder / FILE.format(half), newline="") as file:
        for row in csv.DictReader(file):
            stamp = datetime.datetime.fromisoformat(row["TIMESTAMP"][:26])
            prompt = max(int(row["ContextTokens"]) // PROMPT_SCALE, 1)
            generated = max(int(row["GeneratedTokens"]) // ANSWER_SCALE, 2)
            rows.append((stamp.timestamp(), min(prompt, CONTEXT - generated), generated))
    rows.sort()
    return [(at - rows[0][0], prompt, generated) for at, prompt, generated in rows]


class Source:
    """One Instance's part of the trace; the same requests each time it is made."""

    def __init__(self, model, trace, part):
        self.model, self.trace = model, trace
        self.next = int(part * len(trace))
        self.seed = 0

    def body(self, row):
        self.seed += 1
        chance = random.Random(f"{self.model} {self.seed}")
        sampling = {"temperature": 0, "max_new_tokens": row[2], "ignore_eos": True}
        ids = [chance.randrange(3, 4000) for _ in range(row[1])]
        return {"model": self.model, "input_ids": ids, "sampling_params": sampling}

    def take(self, count):
        rows = [self.trace[(self.next + i) % len(self.trace)] for i in range(count)]
        self.next += count
        return rows

    def phase(self, rate, seconds, hot):
        """[(seconds, body)]: the next rows of the trace, its gaps scaled to `rate` over this phase."""
        rows = self.take(max(int(rate * seconds), 2))
        begin, end = rows[0][0], max(rows[-1][0], rows[0][0] + 1.0)
        scale = seconds / (end - begin)
        return [
            ((row[0] - begin) * scale, self.body(row))
            for i, row in enumerate(rows)
            if (hot or i % COLD == 0) and row[0] >= begin
        ]


def workload(sources, rates, load, seconds):
    """[(seconds, body)] of all phases, in order of time."""
    requests = []
    for number, hot in enumerate(PHASES):
        for model, source in sources.items():
            for at, body in source.phase(rates[model] * load / len(hot), seconds, model in hot):
                requests.append((at + number * seconds, body))
    return sorted(requests, key=lambda request: request[0])


# --- system ----------------------------------------------------------------------------------------
def models(targets):
    entries = []
    for model in SOURCES:
        slo = {f"{kind}_ms": round(targets[model][kind], 3) for kind in ("ttft", "tbt")} if targets else None
        more = {"slo": slo} if slo else {}
        entries.append(harness.model(model, dtype="float32", kv_floor_tokens=FLOOR, **more))
    return entries


def memory_for(tokens):
    """(bytes of the attention device that leave a pool of so many tokens, bytes of a token)."""
    with harness.System(models(None), memory="256MiB") as probe:
        code, out, err = probe.run("plan", "--json")
        harness.check(code == 0, err)
        plan = json.loads(out)
    device = plan["devices"][0]
    taken = device["weight_bytes"] + device["workspace_bytes"] + device["arena_bytes"]
    share = device["budget_bytes"] / (256 << 20)
    token = plan["models"][0]["kv_bytes"] // plan["models"][0]["kv_tokens"]
    return int((taken + tokens * token) / share), token


def system(policy, memory, targets):
    running = harness.System(models(targets), settings=f'[scheduler]\nkv_policy = "{policy}"')
    text = running.config.read_text()
    device = '[devices."cpu:0"]\nthreads = 1\nmemory = '
    running.config.write_text(text.replace(f'{device}"1GiB"', f'{device}"{memory}"'))
    return running.start(120)


class Sampler(harness.Repeated):
    """What the Instances' KV Caches hold, read from /proc every 100 ms: rows of (seconds, {model: bytes
    resident}). Processes are not read at one moment, and bytes pass from one to another meanwhile; so where
    a sum passes the pool, the least of some readings in a row is what counts."""

    def __init__(self, running, pool):
        super().__init__(PERIOD)
        roles = running.roles()
        self.pids = {m: roles[f"serve {m}"] for m in SOURCES}
        self.pool, self.rows, self.began = pool, [], time.monotonic()

    @staticmethod
    def resident(pid):
        text = pathlib.Path(f"/proc/{pid}/smaps").read_bytes()
        total, at = 0, text.find(b"xpool-kv:")
        while at >= 0:
            rss = text.index(b"\nRss:", at)
            total += int(text[rss + 5 : text.index(b"kB", rss)]) << 10
            at = text.find(b"xpool-kv:", rss)
        return total

    def look(self):
        return {m: self.resident(pid) for m, pid in self.pids.items()}

    def once(self):
        at, row = time.monotonic() - self.began, self.look()
        for _ in range(4):
            if sum(row.values()) <= self.pool:
                break
            again = self.look()
            row = {m: min(row[m], again[m]) for m in row}
        self.rows.append((at, row))

    def peak(self):
        return max(sum(row.values()) for _, row in self.rows)


# --- measuring -------------------------------------------------------------------------------------
def tbt(answer):
    """The mean time between its tokens, seconds."""
    return (answer.times[-1] - answer.times[0]) / max(len(answer.times) - 1, 1)


def calibrate_targets(traces, count):
    """{model: {"ttft", "tbt"}} in milliseconds."""
    targets = {}
    with system("static", "256MiB", None) as running:
        for model, (half, part) in SOURCES.items():
            source = Source(model, traces[half], part)
            alone = []
            for row in source.take(count):
                alone += open_client.replay(running.gateway_port, [(0.0, source.body(row))], 30)
            harness.check(all(a.finished for a in alone), f"{model}: a request of the calibration failed")
            median = {"ttft": statistics.median(a.times[0] for a in alone), "tbt": statistics.median(tbt(a) for a in alone)}
            targets[model] = {kind: max(TARGET * value * 1e3, LEAST_MS[model][kind]) for kind, value in median.items()}
            print(
                f"calibration, {model}: alone TTFT {median['ttft'] * 1e3:.1f} ms, TBT {median['tbt'] * 1e3:.2f} ms; "
                f"targets {targets[model]['ttft']:.0f} and {targets[model]['tbt']:.0f} ms", flush=True)
        running.stop()
    return targets


def calibrate_rates(traces, memory, targets, count):
    """{model: requests/s} when only this one is hot and all its requests come at once."""
    rates = {}
    with system("deadline", memory, targets) as running:
        for model, (half, part) in SOURCES.items():
            source = Source(model, traces[half], part)
            bodies = [(0.0, source.body(row)) for row in source.take(count)]
            began = time.monotonic()
            answers = open_client.replay(running.gateway_port, bodies, 60)
            rates[model] = count / (time.monotonic() - began)
            harness.check(all(a.finished for a in answers), f"{model}: a request of the calibration failed")
        running.stop()
    print("calibration, at once: " + ", ".join(f"{m} {rate:.1f} requests/s" for m, rate in rates.items()), flush=True)
    return rates


def quantile(values, part):
    ordered = sorted(values)
    return ordered[min(int(part * len(ordered)), len(ordered) - 1)] if ordered else 0.0


class Outcome:
    """One policy under one load, all rounds."""

    def __init__(self, policy, load):
        self.policy, self.load = policy, load
        self.name = f"load{load * 100:.0f}.{policy}"
        self.seconds, self.peak, self.pool, self.rows, self.answers = 0.0, 0, 0, [], []

    def add(self, requests, answers, sampler, seconds):
        self.answers += [(body, answer) for (_, body), answer in zip(requests, answers, strict=True)]
        self.rows += [(at + self.seconds, row) for at, row in sampler.rows if at <= seconds]
        self.peak, self.pool = max(self.peak, sampler.peak()), sampler.pool
        self.seconds += seconds

    def count(self, targets):
        ended = [(b, a) for b, a in self.answers if a.finished]
        self.served = [(b, a) for b, a in ended if len(a.ids) == b["sampling_params"]["max_new_tokens"]]
        self.cut = len(ended) - len(self.served)  # by the context that its cache allows
        self.refused = sum(a.status is not None and a.status != 200 for _, a in self.answers)
        self.unfinished = len(self.answers) - len(ended) - self.refused
        self.good = [(b, a) for b, a in self.served if keeps(a, targets[b["model"]])]
        self.late = len(self.served) - len(self.good)
        self.goodput, self.offered = len(self.good) / self.seconds, len(self.answers) / self.seconds


def keeps(answer, target):
    return answer.times[0] * 1e3 <= target["ttft"] and tbt(answer) * 1e3 <= target["tbt"]


def measure(outcome, requests, memory, targets, seconds):
    policy = outcome.policy
    with system(*(("static", "256MiB") if policy == AMPLE else (policy, memory)), targets) as running:
        pool = running.state()["kv"]["pools"][0]["bytes"]
        with Sampler(running, pool) as sampler:
            answers = open_client.replay(running.gateway_port, requests, PATIENCE)
        running.stop()
    outcome.add(requests, answers, sampler, seconds)


def run_load(load, traces, rates, memory, targets, seconds, rounds):
    """The Outcomes of one load, in the order of POLICIES. What else this machine does changes from minute
    to minute, so the policies take turns, and begin with another one in each round."""
    sources = {m: Source(m, traces[half], part) for m, (half, part) in SOURCES.items()}
    outcomes = [Outcome(policy, load) for policy in POLICIES]
    for turn in range(rounds):
        requests = workload(sources, rates, load, seconds)
        for outcome in outcomes[:: -1 if turn % 2 else 1]:
            measure(outcome, requests, memory, targets, seconds * len(PHASES))
    for outcome in outcomes:
        outcome.count(targets)
    return outcomes


def wrong_tokens(fixed, moved):
    """(requests compared, tokens that differ) of what both served."""
    compared = different = 0
    for (_, one), (_, other) in zip(fixed.answers, moved.answers, strict=True):
        if one.finished and other.finished:
            compared += 1
            # A fixed cache may cut an answer short; what it said is compared.
            different += sum(a != b for a, b in zip(one.ids, other.ids, strict=False))
    return compared, different


def rows_of_load(outcomes):
    by = {o.policy: o for o in outcomes}
    load = f"load{outcomes[0].load * 100:.0f}"
    rows = [results.row(f"kv.goodput.{load}.offered", outcomes[0].offered, "requests/s")]
    for o in outcomes:
        each = ", ".join(f"{m} {sum(b['model'] == m for b, _ in o.good)}" for m in SOURCES)
        rows.append(results.row(
            f"kv.goodput.{o.name}", o.goodput, "requests/s",
            note=f"of {len(o.answers)}: {len(o.good)} within both targets ({each}), {o.late} late, {o.refused} refused, "
            f"{o.cut} cut short, {o.unfinished} unfinished" + ("; fixed caches with memory for all" if o.policy == AMPLE else "")))
    # Where the machine itself is short, a fixed share gains by what it refuses: the longest prompts.
    much = outcomes[0].load >= OVERLOAD
    for other, target in (("static", None if much else "> 1"), ("arrival", ">= 1"), (AMPLE, None)):
        rows.append(results.row(
            f"kv.goodput.{load}.deadline_{other}_ratio", by["deadline"].goodput / max(by[other].goodput, 1e-9), "ratio",
            peer=by[other].goodput, target=target,
            note="refusing long prompts sheds load" if much and other == "static" else ""))
    for o in outcomes:
        ttft = [a.times[0] * 1e3 for _, a in o.served]
        gaps = [(after - before) * 1e3 for _, a in o.served for before, after in zip(a.times, a.times[1:], strict=False)]
        for name, values in (("ttft", ttft), ("tbt", gaps)):
            rows.append(results.row(
                f"kv.{name}.{o.name}.p99", quantile(values, 0.99), "ms",
                note=f"P50 {quantile(values, 0.5):.1f}; of what was served whole"))
        if o.policy == AMPLE:
            continue
        rows.append(results.row(
            f"kv.pool.{o.name}.peak_fraction", o.peak / o.pool, "fraction", target="<= 1",
            note=f"most that was resident, of {o.pool / (1 << 20):.1f} MiB; {len(o.rows)} samples of smaps"))
    return rows


def exactness(runs):
    compared = [wrong_tokens(run[0], moved) for run in runs for moved in run[1:]]
    return results.row(
        "kv.history.wrong_tokens", sum(d for _, d in compared), "tokens", target="<= 0",
        note=f"of all others beside the fixed caches with memory for all, {sum(c for c, _ in compared)} answers compared")


def plot(runs, folder):
    bars = [(f"{o.policy}, {o.load * 100:.0f} %", o.goodput) for run in runs for o in run]
    bounds = [(f"offered: {run[0].offered:.1f}", run[0].offered) for run in runs]
    svg.write_bars(folder / "kv-goodput.svg", "Goodput under SLO, requests/s", bars, bounds)
    panels = []
    for o in runs[LOADS.index(PLOTTED)][1:]:
        lines = [(m, [(at, row[m] / (1 << 20)) for at, row in o.rows]) for m in SOURCES]
        panels.append((o.policy, lines, ("pool", o.pool / (1 << 20))))
    svg.write_lines(folder / "kv-backed.svg", "Resident KV Cache of each Instance, MiB, over seconds", panels)
    return ["kv-goodput.svg", "kv-backed.svg"]


def policy_rows():
    """Requests that keep their targets in order of deadlines over those in order of arrival, in the model."""
    program = pathlib.Path(os.environ.get("XPOOL_BUILD", results.ROOT / "build")) / "tests" / "unit_kv_test_policy_load"
    said = subprocess.run([str(program), "print"], capture_output=True, text=True, check=True, timeout=600).stdout
    found = re.findall(r"(\w+) targets, (\d+) requests/s: of (\d+) kept (\d+) by deadline, (\d+) by arrival", said)
    harness.check(found, f"{program.name} says {said[:200]!r}")
    return [
        results.row(
            f"kv.policy.{kind}{rate}.deadline_arrival_ratio", int(deadline) / int(arrival), "ratio", target=">= 1",
            note=f"{'the same' if kind == 'like' else 'different'} targets of three engines, {rate} requests/s: of {asked} kept {deadline} in order of deadlines, "
            f"{arrival} in order of arrival; a model in virtual time, which serves about 20 requests/s in time")
        for kind, rate, asked, deadline, arrival in found if int(rate) >= 20
    ]


def main():
    parser = argparse.ArgumentParser(prog="benches/run kv")
    parser.add_argument("--traces", type=pathlib.Path, default=TRACES, help="folder of the Azure traces (default: %(default)s)")
    parser.add_argument("--load", type=float, action="append", help="only this one; not written to docs/results")
    parser.add_argument("--quick", action="store_true", help="one short round; not written to docs/results")
    parser.add_argument("--policy", action="store_true", help="only the model of the orders of demands (docs/results/kv_policy.json)")
    arguments = parser.parse_args()
    if not arguments.quick and not arguments.load:
        results.write("kv_policy", policy_rows())
    if arguments.policy:
        return
    rows = bench_native.rows_of("kv")
    results.show(rows)
    halves = sorted({half for half, _ in SOURCES.values()})
    missing = [FILE.format(half) for half in halves if not (arguments.traces / FILE.format(half)).exists()]
    if missing:
        print(f"goodput is left out: {arguments.traces} has no {', '.join(missing)}; --traces names the folder")
        sys.exit(0)
    traces = {half: read_trace(arguments.traces, half) for half in halves}
    seconds, rounds, count = (1.5, 1, 16) if arguments.quick else (2.0, 2, 48)
    targets = calibrate_targets(traces, count)
    memory, token = memory_for(int(POOL_CONTEXTS * CONTEXT))
    rates = calibrate_rates(traces, memory, targets, 2 * count)
    print(f"{rounds} rounds of {len(PHASES)} phases of {seconds:g} s; a pool of {POOL_CONTEXTS:g} contexts; {token} bytes a token", flush=True)
    runs, more = [], []
    for load in arguments.load or LOADS:
        runs.append(run_load(load, traces, rates, memory, targets, seconds, rounds))
        results.show(rows_of_load(runs[-1]))
        more += rows_of_load(runs[-1])
    more.append(exactness(runs))
    results.show(more[-1:])
    named = "; ".join(f"{m} {t['ttft']:.0f}/{t['tbt']:.0f}" for m, t in targets.items())
    more[0]["note"] = f"targets TTFT/TBT in ms: {named}"
    if arguments.quick or arguments.load:
        return
    folder = results.ROOT / "docs" / "results"
    results.write("kv", rows + more, plots=plot(runs, folder))


if __name__ == "__main__":
    main()
