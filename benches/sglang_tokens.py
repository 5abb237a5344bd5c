# SPDX-License-Identifier: MIT
"""Small checkpoints for benches/sglang_gpu.py: what SGLang says with CrossPool and alone, also while other
Instances are killed; and the checks that a step was made of captured graphs.

All servers are one Fleet that is not waited for: those with graphs start first, the others when these are there,
and each pair is asked as soon as both sides serve. A server that does not start costs its own rows only.
"""

import json
import os
import random
import signal
import time

import results
import sglang_models
import sglang_truth
from sglang_servers import NO_PREFILL_GRAPHS, harness

FAMILIES = ("qwen3", "qwen3-moe", "deepseek-v2", "glm4-moe-lite")
ROUNDING = 0.25  # of two log-probabilities: what BF16 may change
WAVE = 0.3  # of Host.start_s: the other servers start, also where one of the first is not there
ANSWER_S = 60  # for 64 tokens, kernels that are compiled at first use included
KILLS_S, END_S = 90, 30  # what tokens leave to the kills, and those to the end of everything
EXPECTED = (harness.Failed, OSError, ValueError, KeyError, RuntimeError)


# ---- checks ------------------------------------------------------------------------------------------------
def check_graphs(run, servers):
    """Graphs were captured, and the log tells of no decode step outside them."""
    if run.host.kind == "cpu":
        return
    for server in servers:
        if server.model.mode == "eager":
            continue
        captured = server.captured()
        harness.check("cuda" in captured, f"{server.name()}: SGLang did not report a captured decode graph\n{server.tail()}")
        # Where they were left out after a capture that ended a server, that has been counted.
        missing = f"{server.name()}: no piecewise prefill graph was captured"
        if "piecewise" not in captured and server.model.dp == 1 and NO_PREFILL_GRAPHS not in server.arguments and missing not in run.failures:
            run.failures.append(missing)
        eager = server.batches().get(("Decode", False), 0)
        harness.check(eager == 0, f"{server.name()}: {eager} lines of the log tell of decode steps outside graphs")


class Replayed:
    """Counts an Instance's calls around a measurement."""

    def __init__(self, run, name, since=None):
        self.run, self.name = run, name
        self.before = since and since.after  # nothing was asked since then

    def __enter__(self):
        self.before = self.before or self.run.fleet.counters(self.name)
        return self

    def __exit__(self, kind, error, trace):
        if kind is None:
            self.after = self.run.fleet.counters(self.name)
            self.layers = self.after["layers"]
            self.delta = {key: value - self.before[key] for key, value in self.after.items() if key != "layers"}
        return False

    def layer(self, prefill=None, times=0):
        """What one call of a layer took, us, without what `prefill` counted, `times` times."""
        delta = dict(self.delta)
        if prefill is not None:
            delta = {key: value - times * prefill.delta[key] for key, value in delta.items()}
        calls = max(delta["invocations"], 1)
        found = {"calls": calls, "execution": delta["busy_ns"] / calls / 1e3, "waiting": delta["queue_ns"] / calls / 1e3}
        if delta.get("rank_ffn_wait_ns") and delta["rank_ffn_calls"]:
            found["round_trip"] = delta["rank_ffn_wait_ns"] / delta["rank_ffn_calls"] / 1e3
        return found

    def check(self, steps):
        """At least `steps` decode steps, all of them replayed."""
        if self.run.host.kind == "cpu":
            return
        harness.check("rank_replayed_calls" in self.delta, f"the daemon does not tell {self.name}'s calls in graphs")
        eager, replayed = self.delta["rank_eager_decode_calls"], self.delta["rank_replayed_calls"]
        harness.check(eager == 0, f"{self.name}: {eager} FFN calls of decode steps outside graphs")
        least = steps * self.layers
        harness.check(replayed >= least, f"{self.name}: {replayed} replayed FFN calls, {least} or more were expected")

    def words(self):
        found = {key: self.delta.get(f"rank_{key}_calls", 0) for key in ("replayed", "eager_decode", "eager_prefill")}
        return ", ".join(f"{key.replace('_', ' ')} {value}" for key, value in found.items())


# ---- asking ------------------------------------------------------------------------------------------------
def ids_of(seed, length, vocab):
    chance = random.Random(seed)
    return [chance.randrange(16, vocab - 16) for _ in range(length)]


def body_of(ids, count):
    return {"input_ids": ids, "sampling_params": {"temperature": 0, "max_new_tokens": count, "ignore_eos": True}}


# ---- which ones --------------------------------------------------------------------------------------------
def checkpoints(arguments):
    """One of each family; why two of data/tales are not among them is said at sglang_models.SEEDED."""
    if arguments.checkpoints:
        return arguments.checkpoints
    return ["tales-qwen3-moe", *(() if arguments.rehearse else (f"seeded-{family}" for family in FAMILIES if family != "qwen3-moe"))]


def layouts(arguments):
    """[(checkpoint, "TPxDP")]; data parallel attention is for MoE models."""
    both = ("2x1",) if arguments.rehearse else ("2x1", "1x2")
    return [(c, layout) for c in checkpoints(arguments) for layout in (both if c != "seeded-qwen3" else both[:1])]


# ---- tokens ------------------------------------------------------------------------------------------------
def small_fleet(run):
    """The servers of all small checkpoints; see advance()."""
    modes, found = run.modes(), checkpoints(run.arguments)
    models = [run.small(c, mode) for mode in modes for c in found]
    more = [run.small(found[0], f"{modes[n % len(modes)]}-{n}") for n in range(run.arguments.more_victims)]
    for number, model in enumerate(more):
        model.mode = modes[number % len(modes)]
    for model in models + more:
        model.more = ["--sleep-on-idle"]  # there are more servers than the machine has processors to spin on
    later = [model.name for model in models + more if model.mode != modes[0]]
    return run.begin("small", vanilla=[(m, run.host.atn) for m in models], models=models + more, later=later)


def advance(run, fleet):
    """One look at the servers; starts the second part when the first is there, or has had its time."""
    fleet.poll()
    if fleet.later and (not fleet.starting() or time.monotonic() - fleet.began > WAVE * run.host.start_s):
        fleet.launch()


def as_they_come(run, fleet, todo, reserve, ask):
    """Asks each of `todo`, {what is measured: (name of its plain server or None, name of its Instance)}, when its
    servers serve: ask(what, plain server, Instance). What is wrong with one does not end the step. `reserve`: seconds
    that are left to what follows."""
    while todo:
        advance(run, fleet)
        for what, (plain, ours) in list(todo.items()):
            lost = [reason for side, name in (("vanilla", plain), ("crosspool", ours)) if (reason := fleet.lost.get(f"{side} {name}"))]
            servers = plain and fleet.vanilla.get(plain), fleet.instances.get(ours)
            if not lost and not all(server.ready_after is not None if server else not name for server, name in zip(servers, (plain, ours), strict=True)):
                continue
            if lost:
                run.failures.append(f"{what}: {lost[0].splitlines()[0]}")
                if plain == ours and fleet.without_prefill_graphs(ours):
                    print(f"    {what}: once more, without prefill graphs", flush=True)
                    continue
            del todo[what]
            if lost:
                continue
            run.need(reserve + 5, what)
            try:
                ask(what, *servers)
            except EXPECTED as error:
                run.fails(what, error)
        if todo:
            run.need(reserve + 5, ", ".join(todo))
            time.sleep(0.2)


def prompts_of(run, path):
    vocab = sglang_models.facts(path)["vocab_size"]
    found = [ids_of(f"prompt {i}", length, vocab) for i, length in enumerate((5, 17, 64, 128, 200, 31, 90, 2))]
    golden = path / "golden.json"
    if golden.exists():
        found = [prompt["ids"] for prompt in json.loads(golden.read_text())["prompts"]] + found
    return found[: run.sizes.prompts]


def greedy(run, server):
    """[(tokens, distance of the best two log-probabilities at each)]: the first prompts alone, the others
    together."""
    prompts = prompts_of(run, server.model.path)
    more = {"return_logprob": True, "top_logprobs_num": 2}
    answers = []
    for group in [[p] for p in prompts[:2]] + [prompts[2:]]:
        if group:
            answers += server.post("/generate", {**body_of(group, run.sizes.greedy), **more}, ANSWER_S)
    found = []
    for answer in answers:
        tops = answer["meta_info"]["output_top_logprobs"]
        found.append((answer["output_ids"], [top[0][0] - top[1][0] for top in tops]))
        harness.check(len(answer["output_ids"]) == run.sizes.greedy, f"{server.name()}: {len(answer['output_ids'])} tokens")
    return found


def compare(metric, plain, ours):
    """Rows: the share of tokens before the first that differs, and how many prompts part where the best two
    were further apart than rounding."""
    same = total = wrong = 0
    parted = []
    for (want, gaps), (got, _) in zip(plain, ours, strict=True):
        first = next((i for i, (a, b) in enumerate(zip(want, got, strict=True)) if a != b), len(want))
        same, total = same + first, total + len(want)
        if first < len(want):
            parted.append((gaps[first], first))
            wrong += gaps[first] > ROUNDING
    words = f"{len(plain)} prompts of {len(plain[0][0])} tokens"
    if parted:
        words += "; part at (distance of the best two: token) " + ", ".join(f"{gap:.3f}: {at}" for gap, at in sorted(parted)[::-1])
    return [
        results.row(f"{metric}.agreement", same / total, "fraction", note=words),
        results.row(f"{metric}.far", wrong, "prompts", note=f"part where SGLang's best two are more than {ROUNDING} apart; which side is right, float32 tells"),
    ]


def float32_rows(metric, judged):
    """Both sides beside the same checkpoint in float32; `judged` is sglang_truth's answer."""
    ours, theirs = (sglang_truth.summary(judged[side]) for side in ("ours", "plain"))
    worse = sglang_truth.verdict(ours, theirs)
    return [
        results.row(f"{metric}.float32_agreement", 1 - ours["missed"] / ours["tokens"], "fraction",
                    peer=1 - theirs["missed"] / theirs["tokens"], note=f"ours: {sglang_truth.words(ours)}; peer: {sglang_truth.words(theirs)}"),
        results.row(f"{metric}.float32_first", ours["first"], "tokens", peer=theirs["first"], note="of an answer before the first that is not float32's, mean"),
        results.row(f"{metric}.float32_worse", worse, "sigma", target=f"<= {sglang_truth.SIGMAS:g}",
                    note="by which ours misses float32's tokens more often than the peer, or by more than "
                    f"{sglang_truth.FAR} nat: {ours['missed']} and {ours['far']}, peer {theirs['missed']} and {theirs['far']}, of {ours['tokens']}"),
    ]


def step_float32(run):
    """Of what `tokens` and `layouts` have kept; needs no server and no GPU."""
    for metric in [key for key in run.samples.kinds.get("ours", {}) if key != "at"]:
        checkpoint, mode, name, ours = run.samples.get("ours", metric)
        plain = run.samples.get("tokens", name)
        if plain and not run.book.has(f"{metric}.float32_worse"):
            how = results.kept(ours=run.samples.at("ours", metric), peer=run.samples.at("tokens", name))
            third_party(run, metric, run.small(checkpoint, mode).path, plain, ours, how)


def third_party(run, metric, path, plain, ours, how=""):
    """`how`: words on when the sides were measured."""
    prompts = prompts_of(run, path)
    sides = {name: [[prompt, said] for prompt, (said, _) in zip(prompts[: len(ours)], side, strict=True)] for name, side in (("ours", ours), ("plain", plain))}
    run.need(10, "the float32 reference")
    rows = float32_rows(metric, sglang_truth.ask(run.arguments.python, path, sides))
    run.book.add(*({**row, "note": row["note"] + how} for row in rows))
    if rows[2]["value"] > sglang_truth.SIGMAS:
        run.failures.append(f"{metric}: further from float32 than SGLang alone: {rows[2]['note']}")


def kills_left(run):
    """How many schedulers are still to be killed."""
    book, kills = run.book, run.arguments.kills
    done = book.rows["sglang.kill.killed"]["value"] if book.has("sglang.kill.killed") else 0
    return max(kills - done, 0) if book.has("sglang.kill.wrong_tokens") else kills


def step_tokens(run):
    metrics = {f"sglang.tokens.{c}.{mode}.1x1": (c, mode) for mode in run.modes() for c in checkpoints(run.arguments)}
    todo = {metric: pair for metric, pair in metrics.items() if not run.book.has(f"{metric}.agreement")}
    if not todo:
        return
    fleet = small_fleet(run)
    reserve = KILLS_S if "kill" in run.arguments.only.split(",") and kills_left(run) else 0

    def ask(metric, plain, ours):
        try:
            pair_of_tokens(run, metric, *todo[metric], plain, ours)
        finally:  # SGLang alone is not needed any more
            plain.end()
            del fleet.vanilla[plain.model.name]

    as_they_come(run, fleet, {metric: 2 * ("-".join(pair),) for metric, pair in todo.items()}, reserve, ask)


def pair_of_tokens(run, metric, checkpoint, mode, plain_server, server):
    """Rows of one checkpoint. `plain_server`: None where its answers are among the samples."""
    servers = [one for one in (plain_server, server) if one]
    name = f"{checkpoint}-{mode}"
    check_graphs(run, servers)
    plain = run.samples.get("tokens", name) or run.samples.keep("tokens", name, greedy(run, plain_server))
    with Replayed(run, server.model.name) as replayed:
        ours = greedy(run, server)
    run.samples.keep("ours", metric, [checkpoint, mode, name, ours])
    agreement, far = compare(metric, plain, ours)
    agreement["note"] += f"; FFN calls: {replayed.words()}{results.kept(peer=run.samples.at('tokens', name))}"
    run.book.add(agreement, far)
    if mode == "graphs":
        replayed.check(run.sizes.greedy - 2)
    check_graphs(run, servers)


def step_layouts(run):
    metrics = {f"sglang.tokens.{c}.graphs.{x}": (c, x) for c, x in layouts(run.arguments)}
    todo = {metric: pair for metric, pair in metrics.items() if not run.book.has(f"{metric}.agreement")}
    if not todo:
        return
    atn, ffn = run.host.both
    pairs = {metric: run.small(c, "graphs", *map(int, x.split("x"))) for metric, (c, x) in todo.items()}
    plain = {c: run.small(c, "graphs") for c, _ in todo.values()}
    # `tokens` has asked SGLang alone already, in this run or the one before.
    asked = [m for m in plain.values() if not run.samples.get("tokens", m.name)]
    fleet = run.begin("layouts", vanilla=[(m, run.host.atn) for m in asked], models=pairs.values(), atn=atn, ffn=ffn)
    names = {metric: (plain[c].name if plain[c] in asked else None, pairs[metric].name) for metric, (c, _) in todo.items()}
    as_they_come(run, fleet, names, 0, lambda metric, plain, ours: pair_of_tokens(run, metric, todo[metric][0], "graphs", plain, ours))


# ---- kill --------------------------------------------------------------------------------------------------
def stream(server, ids, count):
    return harness.Stream(server.port, "/generate", {**body_of(ids, count), "stream": True}, 120)


def without_kill(run, survivors, prompts):
    """What the survivors say, {name: tokens}, the seconds that takes, and the longest time between two tokens. Twice:
    it has to be the same to be compared with."""
    truth, gap = {}, 0.0
    for _ in range(2):
        began = time.monotonic()
        for server, one in [(s, stream(s, prompts[s.model.name], run.sizes.kill_tokens)) for s in survivors]:
            ids = one.result(ANSWER_S)
            harness.check(truth.setdefault(server.model.name, ids) == ids, f"{server.name()}: other tokens without any kill")
            gap = max([gap, *(b - a for a, b in zip(one.times, one.times[1:], strict=False))])
        took = time.monotonic() - began
    return truth, took, gap


def kill_one(run, victim, survivors, prompts, truth, moment):
    """Kills the victim's scheduler `moment` seconds after the survivors have begun. {"at": its tokens then, None: it
    had said all; "wrong": tokens of the survivors; "gap": their longest time between two tokens after the kill;
    "ended": survivors whose answer broke off}."""
    count = run.sizes.kill_tokens
    pids = victim.schedulers()
    harness.check(len(pids) == 1, f"{victim.name()} has schedulers {pids}")
    dying = stream(victim, prompts[victim.model.name], min(3 * count, 900))
    dying.wait(3)
    streams = [(s, stream(s, prompts[s.model.name], count)) for s in survivors]
    for _, one in streams:
        one.wait(3)
    time.sleep(moment)
    at = time.monotonic()
    os.kill(pids[0], signal.SIGKILL)
    decoding = not dying.done and all(len(one.ids) < count for _, one in streams)
    found = {"at": len(dying.ids) if decoding else None, "wrong": 0, "gap": 0.0, "ended": []}
    for server, one in streams:
        try:
            one.result(60)
        except Exception as error:  # whatever ended it, its tokens are missing
            found["ended"].append(f"{server.name()}: {error}")
        ids, want = one.ids, truth[server.model.name]
        found["wrong"] += sum(a != b for a, b in zip(ids, want, strict=False)) + abs(len(ids) - count)
        found["gap"] = max([found["gap"], *(b - a for a, b in zip(one.times, one.times[1:], strict=False) if b > at)])
    victim.end()
    return found


def kill_rows(run, done, survivors, gap):
    wrong, told = sum(one["wrong"] for one in done), [one for one in done if one["at"] is not None]
    words = "; ".join(f"{one['name']} at {one['at']}" for one in told)
    return [
        results.row("sglang.kill.wrong_tokens", wrong, "tokens", target="<= 0",
                    note=f"of {len(survivors)} survivors ({', '.join(s.model.name for s in survivors)}), {run.sizes.kill_tokens} tokens each at each kill"),
        results.row("sglang.kill.killed", len(told), "schedulers", target=f">= {run.arguments.kills}", note=f"in mid-decode, at their token: {words or 'none'}"),
        results.row("sglang.kill.longest_gap_ms", 1e3 * max((one["gap"] for one in done), default=0.0), "ms", peer=1e3 * gap,
                    note="between two tokens of a survivor after a kill, as a client sees them; peer: without any kill, other servers starting"),
    ]


def wait_for_survivors(run, fleet):
    """Two Instances with graphs, when all of these are there or have had twice their time."""
    first = [m.name for m in fleet.models if m.mode == run.modes()[0]]
    while True:
        advance(run, fleet)
        found = [s for name in first if (s := fleet.instances.get(name)) and s.ready_after is not None]
        patience = not found or time.monotonic() - fleet.began < 2 * WAVE * run.host.start_s
        if not (patience and any(s.model.name in first for s in fleet.starting())):
            return found[: 1 if run.arguments.rehearse else 2]
        run.need(END_S + 30, "the first servers")
        time.sleep(0.2)


def step_kill(run):
    """Survivors stream while one victim after the other is killed; each stream is compared with the same
    without a kill."""
    if not kills_left(run):
        return
    fleet = small_fleet(run)
    survivors = wait_for_survivors(run, fleet)
    harness.check(survivors, f"no Instance with graphs serves: {', '.join(fleet.lost) or 'none was started'}")
    prompts = {s.name: prompts_of(run, s.path)[0] for s in fleet.models}
    truth, took, gap = without_kill(run, survivors, prompts)
    chance, done, asked = random.Random(f"kill {os.getpid()}"), [], {s.model.name for s in survivors}
    while sum(one["at"] is not None for one in done) < run.arguments.kills and run.left() > took + END_S + 10:
        advance(run, fleet)
        victim = next((s for name, s in fleet.instances.items() if s.ready_after is not None and name not in asked), None)
        if victim is None and not fleet.starting():
            break
        if victim is None:
            time.sleep(0.2)
            continue
        asked.add(victim.model.name)
        try:
            one = kill_one(run, victim, survivors, prompts, truth, chance.uniform(0, 0.3 * took))
        except EXPECTED as error:
            run.fails(f"kill of {victim.name()}", error)
            continue
        done.append({**one, "name": victim.model.name})
        run.book.add(*kill_rows(run, done, survivors, gap))
        if one["ended"]:
            run.failures.append(f"{victim.name()} was killed and {'; '.join(one['ended'])}")
            break
    told = sum(one["at"] is not None for one in done)
    if told < run.arguments.kills or sum(one["wrong"] for one in done):
        run.failures.append(f"kill: {told} of {run.arguments.kills} schedulers were killed in mid-decode, {sum(one['wrong'] for one in done)} wrong tokens")
    kill_everything(run, fleet)


def kill_everything(run, fleet):
    """All at once; the Fleet is no longer one."""
    run.fleet = None
    try:
        left_over, before = fleet.kill_all()
    finally:
        if run.arguments.keep_logs:
            run.keep_logs(fleet)
    run.book.add(results.row("sglang.kill.left_mib", run.memory_left(fleet), "MiB", target="<= 64",
                             note=f"of GPU memory after kill -9 of every process; of MPS: {', '.join(before) or 'nothing'}, "
                             f"after the next daemon's start and end: {', '.join(left_over) or 'nothing'}"))
    if left_over:
        run.failures.append(f"kill -9 of everything left {left_over}")
