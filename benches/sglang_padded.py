# SPDX-License-Identifier: MIT
"""Padded rows of a captured batch load no extra experts: three streams decode on servers whose only captured
batch is 4, 8, 16 or 32, all Instances of one MoE model with one weight set on the FFN side. What the FFN side's
routers chose is counted there, by the kernels that choose ("What routers choose" in docs/designs/cuda.md); the
difference of two bursts with the same prompts is decoding alone. Prefill graphs, which would be most of these servers'
start, are left out.

At the end as many prompt tokens as `spread` asks for: how they spread over experts, by the same counters.
"""

import statistics

import results
from sglang_servers import NO_PREFILL_GRAPHS, Model, harness
from sglang_tokens import EXPECTED

BATCHES = (4, 8, 16, 32)
LIVE = 3
PADDED_ROWS = 3.1  # of a layer's execution: a padded batch would give 4 or more
EDGES = ("0", "0.25", "0.5", "0.75", "1", "1.25", "1.5", "2")


def planned():
    each = [f"sglang.padded.{b}.{word}" for b in BATCHES for word in ("rows_per_layer", "experts_per_layer", "execution_us", "tbt_p50_ms")]
    return [*each, "sglang.padded.live.experts_per_layer", "sglang.padded.rows_per_layer", "sglang.spread.ffn.chosen_fraction"]


def models(run, name):
    """An Instance for each captured batch."""
    base = run.real(name)
    found = []
    for batch in BATCHES[:2] if run.arguments.rehearse else BATCHES:
        model = Model(f"{name}-batch{batch}", base.path, dummy=base.dummy, kv_tokens=2048 if run.arguments.rehearse else 40960,
                      context=512 if run.arguments.rehearse else 1280, rows=64 if run.arguments.rehearse else 512)
        model.more = ["--cuda-graph-bs", str(batch), NO_PREFILL_GRAPHS] if run.host.kind == "cuda" else []
        found.append((batch, model))
    return found


def delta(after, before):
    return {key: after[key] - before[key] for key in ("executions", "rows", "experts_read")}


def decoding(run, server, burst, streams, length, count):
    """{"rows", "experts"} of a layer's execution while `streams` decode, its time, and the streams' answers."""
    fleet, name = run.fleet, server.model.name
    spent = []
    for tokens in (2, count + 2):
        counters = fleet.counters(name)
        experts = fleet.experts(settled=True)
        answers = burst(server, streams, length, tokens, "padded")
        told = fleet.counters(name)
        after = fleet.experts(settled=True)
        spent.append((delta(after, experts), {key: told[key] - counters[key] for key in ("invocations", "busy_ns")}))
    (few, few_time), (many, many_time) = spent
    executions = max(many["executions"] - few["executions"], 1)
    return {
        "rows": (many["rows"] - few["rows"]) / executions,
        "experts": (many["experts_read"] - few["experts_read"]) / executions,
        "executions": executions,
        "us": (many_time["busy_ns"] - few_time["busy_ns"]) / max(many_time["invocations"] - few_time["invocations"], 1) / 1e3,
        "answers": answers,
    }


def cell_rows(batch, name, found, first, gaps):
    """`first`: what the smallest captured batch gave, the peer of all of them."""
    words = f"{LIVE} streams of {name}, dummy weights, batch captured for {batch}; mean of {found['executions']} executions of a layer of experts, decoding alone"
    peers = first or {}
    return [
        results.row(f"sglang.padded.{batch}.rows_per_layer", found["rows"], "rows", target=f"<= {PADDED_ROWS:g}", note=words),
        results.row(f"sglang.padded.{batch}.experts_per_layer", found["experts"], "experts", peer=peers.get("experts"),
                    note=f"distinct experts read; {words}; peer: captured for {BATCHES[0]}"),
        results.row(f"sglang.padded.{batch}.execution_us", found["us"], "us", peer=peers.get("us"),
                    note=f"of a layer on the FFN side, by the device's clock; {words}; peer: captured for {BATCHES[0]}"),
        results.row(f"sglang.padded.{batch}.tbt_p50_ms", statistics.median(gaps) * 1e3, "ms", peer=peers.get("tbt"),
                    note=f"of {len(gaps)}; {words}; peer: captured for {BATCHES[0]}"),
    ]


def histogram(usage):
    shares = [f"{edge}{'+' if edge == EDGES[-1] else '-' + EDGES[n + 1]}: {count}" for n, (edge, count) in enumerate(zip(EDGES, usage["bins"], strict=True)) if count]
    return f"experts by rows over their layer's mean: {', '.join(shares)}; the idlest of any layer got {usage['least']} rows, the busiest {usage['most']}"


def spread_row(name, usage, before, prompt_tokens):
    rows = usage["rows"] - before["rows"]
    note = (f"of {usage['places']} experts over all layers, chosen at least once since the start; {prompt_tokens} prompt tokens of random ids in "
            f"this burst ({rows} rows over all layers, {before['rows']} before it: warm-ups, captures, decoding); {name}, counted on the FFN side; {histogram(usage)}")
    return results.row("sglang.spread.ffn.chosen_fraction", usage["chosen"] / max(usage["places"], 1), "fraction", target=">= 1", note=note)


def missing(run):
    return not all(run.book.has(metric) for metric in planned())


def serving(fleet, model):
    """The Instance of this model; Failed, with the reason, where it did not start."""
    harness.check(model.name in fleet.instances, fleet.lost.get(f"crosspool {model.name}", f"{model.name} does not serve"))
    return fleet.instances[model.name]


def measure_batch(run, batch, server, first, count, how):
    """Adds the rows of one captured batch; what it found."""
    burst, steady_gaps, replayed = how
    burst(server, LIVE, 16, 4, "warm")
    with replayed(run, server.model.name) as counted:
        found = decoding(run, server, burst, LIVE, 16, count)
    counted.check(count)
    gaps = steady_gaps(found["answers"])
    harness.check(gaps, f"{server.name()}: {LIVE} streams never decoded all at once")
    run.book.add(*cell_rows(batch, server.model.name, found, first, gaps))
    return {**found, "tbt": statistics.median(gaps) * 1e3}


def measure(run, name, tokens, fleet, served, check_graphs, how):
    """Adds the rows. `served`: of models(), what `fleet` serves; `tokens`: prompt tokens of the histogram; `how`: how
    sglang_gpu.py asks (burst, steady_gaps) and counts (Replayed). A server that did not start costs its own rows."""
    book, burst = run.book, how[0]
    count = 24 if run.arguments.rehearse else 128
    check_graphs(run, fleet.instances.values())
    by = {}
    for batch, model in served:
        run.need(8, f"padded rows of {batch}")
        try:
            by[batch] = measure_batch(run, batch, serving(fleet, model), by.get(BATCHES[0]), count, how)
        except EXPECTED as error:
            run.fails(f"padded rows of {batch}", error)
    harness.check(by, "no server for padded rows")
    most, first = max(found["rows"] for found in by.values()), by.get(BATCHES[0])
    if len(by) == len(served):
        book.add(results.row("sglang.padded.rows_per_layer", most, "rows", target=f"<= {PADDED_ROWS:g}",
                             note=f"the largest of captured batches {', '.join(str(b) for b in by)}, {LIVE} live rows each"))
    if most > PADDED_ROWS:
        run.fails("padded rows", harness.Failed(f"{most:.2f} rows a layer were routed for {LIVE} live ones: padded rows were"))
    # As many live rows as are captured: what the padded ones would have cost.
    batch, model = served[-1]
    server = serving(fleet, model)
    run.need(8, "live rows")
    found = decoding(run, server, burst, batch, 16, count)
    book.add(results.row("sglang.padded.live.experts_per_layer", found["experts"], "experts", peer=first and first["experts"],
                         note=f"distinct experts read with {batch} live rows in a batch captured for {batch} ({found['rows']:.1f} rows an execution, {found['us']:.1f} us); "
                         f"peer: {LIVE} live ones captured for {BATCHES[0]}"))
    before, asked = fleet.experts(), 0
    length = 40 if run.arguments.rehearse else 1000
    while asked < (400 if run.arguments.rehearse else tokens):
        burst(server, 1, length, 1, f"spread {asked}")
        asked += length
    usage = fleet.experts()
    print(f"    {histogram(usage)}", flush=True)
    book.add(spread_row(name, usage, before, asked))
    check_graphs(run, fleet.instances.values())
