# SPDX-License-Identifier: MIT
"""Load and verdicts of benches/kv_gpu.py: a shifting load from a trace, what came of it, and memory seen from
outside. Nothing here starts a server."""

import csv
import ctypes
import datetime
import pathlib
import random
import subprocess
import threading
import time

import open_client
import results
from sglang_servers import harness
from sglang_tokens import body_of

PERIOD_S = 0.1
LOOKS = 4  # at a sum that passes the pool: processes are not read at one moment
HOT, COLD = 2.2, 0.4  # times the mean rate; each model is hot in one of three phases


# ---- load --------------------------------------------------------------------------------------------------
def read_trace(path, scale=1.0):
    """[(seconds, prompt tokens, answer tokens)] in order of time, prompts `scale` times as long."""
    rows = []
    with open(path, newline="") as file:
        for row in csv.DictReader(file):
            stamp = datetime.datetime.fromisoformat(row["TIMESTAMP"][:26]).timestamp()
            rows.append((stamp, max(int(int(row["ContextTokens"]) * scale), 4), max(int(row["GeneratedTokens"]), 2)))
    rows.sort()
    return [(at - rows[0][0], prompt, answer) for at, prompt, answer in rows]


class Source:
    """One model's part of a trace; the same requests each time it is made."""

    def __init__(self, name, trace, begin, vocab, most_prompt, most_answer):
        self.name, self.trace, self.vocab = name, trace, vocab
        self.most_prompt, self.most_answer = most_prompt, most_answer
        self.next, self.made = int(begin * len(trace)), 0

    def body(self, row):
        self.made += 1
        chance = random.Random(f"{self.name} {self.made}")
        prompt, answer = min(row[1], self.most_prompt), min(row[2], self.most_answer)
        ids = [chance.randrange(16, self.vocab - 16) for _ in range(prompt)]
        sampling = {"temperature": 0, "max_new_tokens": answer, "ignore_eos": True}
        return {"input_ids": ids, "sampling_params": sampling}

    def phase(self, rate, begin, seconds):
        """[(seconds, body)]: the trace's next rows, their gaps scaled so that there are `rate` a second."""
        count = max(round(rate * seconds), 1)
        rows = [self.trace[(self.next + i) % len(self.trace)] for i in range(count + 1)]
        self.next += count
        first, span = rows[0][0], rows[-1][0] - rows[0][0]
        if span <= 0:  # the trace began anew, or all came at once
            first, span = 0, count
            rows = [(i, *row[1:]) for i, row in enumerate(rows)]
        return [(begin + (row[0] - first) / span * seconds, self.body(row)) for row in rows[:count]]


def workload(sources, rate, seconds):
    """{name: [(seconds, body)]}: as many phases as there are sources, one of them hot in each; every source has
    `rate` requests/s on the whole."""
    names = list(sources)
    shares = [HOT if len(names) > 1 else 1.0] + [COLD] * (len(names) - 1)
    total = sum(shares)
    found = {name: [] for name in names}
    each = seconds / len(names)
    for number in range(len(names)):
        for place, name in enumerate(names):
            share = shares[(place - number) % len(names)] * len(names) / total
            found[name] += sources[name].phase(rate * share, number * each, each)
    return found


def replay(servers, requests, patience):
    """{name: Answers} of an open-loop load on all servers at once; `servers`: {name: port}."""

    def one(name):
        return open_client.replay(servers[name], requests[name], patience) if requests[name] else []

    answers = harness.together([lambda name=name: one(name) for name in requests], 600)
    return dict(zip(requests, answers, strict=True))


class Trimming(harness.Repeated):
    """Takes everything that is not in use, again and again."""

    def __init__(self, fleet, pause=0.02):
        super().__init__(pause)
        self.fleet, self.count, self.errors = fleet, 0, []

    def once(self):
        try:
            self.fleet.kv("trim", "--all")
            self.count += 1
        except (harness.Failed, OSError, subprocess.SubprocessError) as error:
            self.errors.append(str(error))
            self.over.set()


class Traffic:
    """Requests to each of some servers, again and again, `streams` at a time. With `truth` each answer is compared,
    for which one stream a server is right. `excused`: of servers that are to die."""

    def __init__(self, servers, prompts, count, truth=None, streams=1, pause=0.0, excused=False):
        self.prompts, self.count, self.truth, self.pause, self.excused = prompts, count, truth, pause, excused
        self.stop, self.errors, self.wrong = threading.Event(), [], 0
        self.served = {server.model.name: 0 for server in servers}
        self.threads = [threading.Thread(target=self.run, args=(server, i), daemon=True) for server in servers for i in range(streams)]

    def run(self, server, turn):
        name = server.model.name
        while not self.stop.wait(self.pause if turn else 0):
            turn += 1
            prompt = self.prompts[turn % len(self.prompts)]
            try:
                ids = server.post("/generate", body_of(prompt, self.count), 60)["output_ids"]
            except (OSError, ValueError, harness.Failed, harness.http.client.HTTPException) as error:
                if not self.excused and not self.stop.is_set():
                    self.errors.append(f"{server.name()}: {error}")
                    return
                time.sleep(0.05)
                continue
            if self.truth:
                want = self.truth[turn % len(self.prompts)]
                self.wrong += sum(a != b for a, b in zip(ids, want, strict=False)) + abs(len(ids) - len(want))
            self.served[name] += 1

    def __enter__(self):
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_):
        self.stop.set()
        for thread in self.threads:
            thread.join(70)


# ---- outcome -----------------------------------------------------------------------------------------------
def mean_tbt(answer):
    return (answer.times[-1] - answer.times[0]) / max(len(answer.times) - 1, 1)


def quantile(values, part):
    ordered = sorted(values)
    return ordered[min(int(part * len(ordered)), len(ordered) - 1)] if ordered else float("nan")


def verdict(body, answer, target):
    """What came of one request, in the words of `judge`. `target`: (TTFT, TBT) in ms."""
    if answer.status is not None and (answer.status != 200 or (answer.finished and not answer.ids)):
        return "refused"
    if not answer.finished:
        return "unfinished"
    if len(answer.ids) < body["sampling_params"]["max_new_tokens"]:
        return "cut"
    return "good" if answer.times[0] * 1e3 <= target[0] and mean_tbt(answer) * 1e3 <= target[1] else "late"


def judge(requests, answers, targets, seconds):
    """What came of a load: counts for each model and in all, times of what was served whole, goodput.
    `targets`: {name: (TTFT, TBT) in ms}. Goodput counts answers that are whole and whose first token and mean time
    between tokens kept the targets. `refused`: a status other than 200, or an end without a token, as a stream tells
    it; `cut`: ended with fewer tokens than asked for; `unfinished`: neither ended nor refused when the client left."""
    by, ttft, gaps = {}, [], []
    for name, sent in requests.items():
        count = dict.fromkeys(("asked", "good", "late", "refused", "cut", "unfinished"), 0)
        for (_, body), answer in zip(sent, answers[name], strict=True):
            word = verdict(body, answer, targets[name])
            count["asked"] += 1
            count[word] += 1
            if word in ("good", "late"):
                ttft.append(answer.times[0])
                gaps += [b - a for a, b in zip(answer.times, answer.times[1:], strict=False)]
        by[name] = count
    whole = {key: sum(count[key] for count in by.values()) for key in next(iter(by.values()))}
    return {
        "by": by, **whole, "seconds": seconds, "goodput": whole["good"] / seconds, "offered": whole["asked"] / seconds,
        "ttft": [quantile(ttft, part) * 1e3 for part in (0.5, 0.99)],
        "tbt": [quantile(gaps, part) * 1e3 for part in (0.5, 0.99)],
    }  # fmt: skip


def alone(points, tokens):
    """Seconds that a prompt takes where nothing else runs; `points`: [(tokens, seconds)] as measured, by length.
    Between two of them a line, beyond the last one that of the last two."""
    if len(points) == 1 or tokens <= points[0][0]:
        return points[0][1]
    after = next((i for i in range(1, len(points)) if tokens <= points[i][0]), len(points) - 1)
    (n0, t0), (n1, t1) = points[after - 1], points[after]
    return t0 + (t1 - t0) * (tokens - n0) / (n1 - n0)


def by_request(requests, answers, targets):
    """[[model, seconds when it was due, prompt, answer asked for, verdict, TTFT or None, mean TBT or None]] in seconds."""
    rows = []
    for name, sent in requests.items():
        for (at, body), answer in zip(sent, answers[name], strict=True):
            first, between = (round(answer.times[0], 4), round(mean_tbt(answer), 5)) if answer.times else (None, None)
            sizes = len(body["input_ids"]), body["sampling_params"]["max_new_tokens"]
            rows.append([name, round(at, 3), *sizes, verdict(body, answer, targets[name]), first, between])
    return sorted(rows, key=lambda row: row[1])


def compute(rows, points, targets, took):
    """The part that computing had in a load: tokens and seconds alone of the prompts whose first token came, as a
    share of the seconds `took`; of what was late, how much by its first token, by the time between tokens, and how
    much would have been late alone, whatever the memory. `rows`: of `by_request`; `points`: {model: of `alone`}."""
    begun = [row for row in rows if row[5] is not None]
    seconds = sum(alone(points[row[0]], row[2]) for row in begun)
    late = [row for row in rows if row[4] == "late"]
    return {
        "prefill_tokens": sum(row[2] for row in begun), "prefill_alone": seconds, "prefill_fraction": seconds / took, "took": took,
        "late_first": sum(row[5] * 1e3 > targets[row[0]][0] for row in late),
        "late_between": sum(row[6] * 1e3 > targets[row[0]][1] for row in late),
        "late_alone": sum(alone(points[row[0]], row[2]) * 1e3 > targets[row[0]][0] for row in late),
    }  # fmt: skip


def counts(one):
    """In words, for a note."""
    words = ", ".join(f"{one[key]} {key}" for key in ("good", "late", "refused", "cut", "unfinished"))
    each = "; ".join(f"{name} {count['good']} of {count['asked']}" for name, count in one["by"].items())
    return f"of {one['asked']} requests in {one['seconds']:g} s: {words} ({each})"


def policy_rows(rate, policy, one, targets):
    """Of what `judge` and `compute` found."""
    named = ", ".join(f"{m} {a:g}/{b:g}" for m, (a, b) in targets.items())
    name = f"rate{rate:g}.{policy}"
    seen = f"{one['samples']} samples of memory from outside, {one['missed']} missed"
    grown = f"; {one['grown'] / 2**20:.0f} MiB that engines took for good meanwhile are left out" if one["grown"] else ""
    whole = one["good"] + one["late"]
    times = [
        results.row(f"kv.{key}.{name}.p99", one[key][1], "ms", note=f"P50 {one[key][0]:.2f}; of what was served whole{results.few(whole) if key == 'ttft' else ''}")
        for key in ("ttft", "tbt") if one[key][1] == one[key][1]
    ]  # fmt: skip
    late = f"of {one['late']} late {one['late_first']} by the first token, {one['late_between']} by the time between tokens, {one['late_alone']} would be late alone"
    return [
        results.row(f"kv.goodput.{name}", one["goodput"], "requests/s", peer=one["offered"], note=f"{counts(one)}; one load, a pool of {one['pool'] / 2**20:.0f} MiB; peer: offered; targets TTFT/TBT in ms: {named}"),
        results.row(f"kv.goodput.{name}.refused_or_late", one["refused"] + one["cut"] + one["late"] + one["unfinished"], "requests", note=f"of {one['asked']}"),
        results.row(f"kv.goodput.{name}.prefill_fraction", one["prefill_fraction"], "fraction",
                    note=f"{one['prefill_tokens']} prompt tokens served, {one['prefill_tokens'] / one['took']:.0f} a second; alone their prefill takes "
                    f"{one['prefill_alone']:.1f} of {one['took']:.1f} s; {late}"),
        *times,
        results.row(f"kv.pool.{name}.peak_fraction", one["peak"] / one["pool"], "fraction", target="<= 1", note=f"most of a pool of {one['pool'] / 2**20:.0f} MiB; {seen}{grown}"),
    ]  # fmt: skip


def ratio_rows(rate, peer, ours, theirs, pool):
    """Of cold models at `rate`: the peer's P99 over ours, of TBT and TTFT, then what each is, ours beside the peer's.
    `pool`: bytes of ours. Where a side says by "at" that it is of another commit or day, each row does."""
    found, times = [], []
    words = {"kvcached": "SGLang with kvcached 0.1.6, without prefill graphs", "static": "plain SGLang, fixed KV Caches that fill their GPU"}[peer]
    words += ", without MPS"
    kept = results.kept(ours=ours.get("at"), peer=theirs.get("at"))
    for key, name in (("tbt", f"{peer}_p99_ratio"), ("ttft", f"{peer}_ttft_p99_ratio")):
        mine, other = (quantile(side[key], 0.99) for side in (ours, theirs))
        half, half_other = (quantile(side[key], 0.5) for side in (ours, theirs))
        largest = results.few(len(theirs[key]), len(ours[key]))
        note = f"{key.upper()} P99{largest} of three cold models at {rate:g} requests/s each: {other * 1e3:.2f} ms over {mine * 1e3:.2f} ms; P50 {half_other * 1e3:.2f} and {half * 1e3:.2f}; "
        note += f"peer: {words}, two GPUs; ours: a pool of {pool / 2**20:.0f} MiB; unfinished: {theirs['unfinished']} of {theirs['asked']}, ours {ours['unfinished']} of {ours['asked']}{kept}"
        found.append(results.row(f"kv.cold.rate{rate:g}.{name}", other / mine, "ratio", note=note))
        each = ", ".join(f"{m} {ours['by'][m][key == 'ttft'] * 1e3:.1f} (peer {theirs['by'][m][key == 'ttft'] * 1e3:.1f})" for m in ours.get("by", {}))
        about = f"of {len(ours[key])}, peer of {len(theirs[key])}; peer: {words}{kept}"
        times += [results.row(f"kv.cold.rate{rate:g}.{peer}.{key}_p50_ms", half * 1e3, "ms", peer=half_other * 1e3, note=about),
                  results.row(f"kv.cold.rate{rate:g}.{peer}.{key}_p99_ms", mine * 1e3, "ms", peer=other * 1e3, note=f"{about}{'; ' if each or largest else ''}P99{largest}{' of each: ' if each else ''}{each}"
                              if each or largest else about)]  # fmt: skip
    return found + times


# ---- memory from outside -----------------------------------------------------------------------------------
class Nvml:
    """The driver's own account of a GPU's memory, without a process for each look."""

    PLACES = ("", "/usr/local/nvidia/lib64/", "/usr/local/nvidia/lib/", "/usr/lib/x86_64-linux-gnu/")

    def __init__(self, index):
        for place in self.PLACES:
            try:
                self.library = ctypes.CDLL(f"{place}libnvidia-ml.so.1")
                break
            except OSError:
                continue
        else:
            raise OSError("libnvidia-ml.so.1 is not here")
        if self.library.nvmlInit_v2():
            raise OSError("nvmlInit failed")
        self.handle = ctypes.c_void_p()
        if self.library.nvmlDeviceGetHandleByIndex_v2(ctypes.c_uint(index), ctypes.byref(self.handle)):
            raise OSError(f"NVML knows no GPU {index}")

    def used(self):
        """Bytes in use."""
        found = (ctypes.c_ulonglong * 3)()  # total, free, used
        if self.library.nvmlDeviceGetMemoryInfo(self.handle, ctypes.byref(found)):
            raise OSError("nvmlDeviceGetMemoryInfo failed")
        return found[2]


def held(pid):
    """Bytes that the KV memfds of a process hold."""
    total, seen = 0, set()
    for link in pathlib.Path(f"/proc/{pid}/fd").iterdir():
        try:
            if "xpool-kv:" in link.readlink().name:
                stat = link.stat()
                total += 0 if stat.st_ino in seen else stat.st_blocks * 512
                seen.add(stat.st_ino)
        except OSError:
            continue
    return total


class Watch(harness.Repeated):
    """Reads bytes every 100 ms; `look()` gives {name: bytes}. Where the sum is above `bound`, what counts is the
    least of some readings of each name."""

    def __init__(self, look, bound=None, period=PERIOD_S):
        super().__init__(period)
        self.look, self.bound, self.rows, self.errors = look, bound, [], []
        self.began = time.monotonic()

    def once(self):
        try:
            row = self.look()
            for _ in range(LOOKS if self.bound is not None else 0):
                if sum(row.values()) <= self.bound:
                    break
                again = self.look()
                row = {name: min(row[name], again.get(name, 0)) for name in row}
        except OSError as error:
            self.errors.append(str(error))
            return
        self.rows.append((time.monotonic() - self.began, row))

    def peak(self):
        return max((sum(row.values()) for _, row in self.rows), default=0)


def kv_of_device(rows, before, after, floors):
    """[(seconds, bytes of KV)] of a device whose memory in use was `before` and `after` the load while only the
    floors were there; what engines took for good meanwhile is no KV."""
    base = max(before, after)
    return [(at, sum(row.values()) - base + floors) for at, row in rows]


# ---- the daemon's books --------------------------------------------------------------------------------------
def charged(books):
    """What `xpool kv --json` has to say that it charges: for each group once the largest of its floor, what it
    has and what it was last told. {device: bytes}"""
    found = dict.fromkeys((pool["device"] for pool in books["pools"]), 0)
    for group in books["groups"]:
        token_bytes = group["bundle_bytes"] // group["bundle_tokens"]
        last = group["last_command"]
        goal = last["tokens"] * token_bytes if last else 0
        for device in group["devices"]:
            found[device] += max(group["floor"]["bytes"], group["backed"]["bytes"], goal)
    return found


def wrong_books(books):
    """What is wrong with them, or None."""
    for pool in books["pools"]:
        bytes_, sums = pool["charged_bytes"], charged(books)[pool["device"]]
        if sums != bytes_ or bytes_ > pool["bytes"] or pool["free_bytes"] != pool["bytes"] - bytes_:
            return f"{pool['device']}: {sums} bytes by its groups, {bytes_} charged, {pool['free_bytes']} free of {pool['bytes']}"
    return None


def shares(books):
    """{model: tokens} of an equal split of the pool in bytes, in whole bundles. One pool, one group a model."""
    pool, groups = books["pools"][0]["bytes"], books["groups"]
    return {g["model"]: pool // len(groups) // g["bundle_bytes"] * g["bundle_tokens"] for g in groups}
