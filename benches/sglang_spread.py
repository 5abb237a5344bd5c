# SPDX-License-Identifier: MIT
"""How the routers of dummy weights spread tokens over experts: a router that always takes the same ones would
make a MoE model look fast.

SGLang alone: its own recorder, in a server of its own, over prompts of random ids. CrossPool: the routers that
the FFN side fills (src/ffn/dummy.h gives an element by its tensor's name and place), over random rows.
"""

import json
import subprocess

import numpy
import results
import sglang_models
from sglang_servers import harness

LAYERS = 3  # of ours that are looked at
READ = """
import json, sys, torch
data = torch.load(sys.argv[1], weights_only=True, map_location="cpu")
counts = data["logical_count"]
while counts.dim() > 2:
    counts = counts.sum(0)
print(json.dumps(counts.tolist()))
"""


def describe(counts):
    """A histogram in words: experts by their share of the mean."""
    shares = counts / counts.mean()
    edges = (0, 0.25, 0.5, 0.75, 1.0, 1.25, 1.5, 2.0, float("inf"))
    bins, _ = numpy.histogram(shares, edges)
    parts = [f"{a:g}-{b:g}: {n}" for a, b, n in zip(edges, edges[1:], bins, strict=False) if n]
    return f"experts by tokens over the mean: {', '.join(parts)}; the busiest {shares.max():.2f}, the idlest {shares.min():.2f}"


def row(side, counts, tokens, more):
    """Of the layer in which one expert got least."""
    worst = counts[counts.min(1).argmin()]
    return results.row(f"sglang.spread.{side}.least_tokens", float(worst.min()), "tokens", target=">= 1",
                       note=f"of the expert chosen least, {tokens} tokens, {counts.shape[0]} layers of {counts.shape[1]} experts; {describe(worst)}; {more}")


# ---- ours --------------------------------------------------------------------------------------------------
def mix(z):
    z = (z ^ (z >> numpy.uint64(30))) * numpy.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> numpy.uint64(27))) * numpy.uint64(0x94D049BB133111EB)
    return z ^ (z >> numpy.uint64(31))


def dummy(name, rows, columns):
    """The matrix that the FFN side fills under this name."""
    golden = numpy.uint64(0x9E3779B97F4A7C15)
    with numpy.errstate(over="ignore"):
        seed = golden
        for byte in name.encode():
            seed = mix(seed + numpy.uint64(byte))
        words = mix((seed + numpy.arange(rows * columns, dtype=numpy.uint64)) * golden)
    scale = numpy.sqrt(numpy.float32(3) / numpy.float32(columns)) * numpy.float32(2.0**-31)
    return (words.astype(numpy.uint32).view(numpy.int32).astype(numpy.float32) * scale).reshape(rows, columns)


def of_dummy_routers(facts, tokens):
    """Tokens of each expert, layers x experts: the best of softmax or sigmoid, which keep the order."""
    experts = facts.get("num_experts") or facts["n_routed_experts"]
    top, hidden = facts["num_experts_per_tok"], facts["hidden_size"]
    chance = numpy.random.default_rng(1)
    rows = chance.standard_normal((tokens, hidden), dtype=numpy.float32)
    found = []
    for layer in range(facts.get("first_k_dense_replace", 0), facts["num_hidden_layers"])[:LAYERS]:
        logits = rows @ dummy(f"model.layers.{layer}.mlp.gate.weight", experts, hidden).T
        best = numpy.argpartition(logits, experts - top, axis=1)[:, experts - top :]
        found.append(numpy.bincount(best.ravel(), minlength=experts))
    return numpy.stack(found)


# ---- SGLang alone ------------------------------------------------------------------------------------------
def plain_model(run, model):
    """What SGLang alone serves while its recorder counts."""
    model.more = ["--expert-distribution-recorder-mode", "stat"]
    model.mode = "eager"
    model.variables = {"SGLANG_EXPERT_DISTRIBUTION_RECORDER_DIR": str(run.arguments.scratch)}
    return model


def of_sglang(run, server, tokens, burst):
    server.post("/start_expert_distribution_record", {})
    length = min(run.sizes.contexts[-1], run.sizes.context // 2)
    for number in range(-(-tokens // length)):
        burst(server, 1, length, 1, f"spread {number}")
    server.post("/stop_expert_distribution_record", {})
    server.post("/dump_expert_distribution_record", {})
    files = harness.wait_until(lambda: sorted(run.arguments.scratch.glob("expert_distribution_recorder_*.pt")), 30, "the recorder's file")
    out = subprocess.run([run.arguments.python, "-c", READ, str(files[-1])], capture_output=True, text=True,
                         env=server.environment, timeout=120)
    harness.check(out.returncode == 0, f"the recorder's file: {out.stderr[-400:]}")
    counts = numpy.array(json.loads(out.stdout.splitlines()[-1]))
    return counts[counts.sum(1) > 0], -(-tokens // length) * length


def wants_server(run):
    """Whether the recorder is still to be asked; it cannot write its file on a CPU."""
    return not run.book.has("sglang.spread.plain.least_tokens") and (run.host.kind == "cuda" or run.arguments.recorder)


def measure(run, name, tokens, server, burst):
    """Adds the rows of both sides. `server`: SGLang alone, started as plain_model says, or None; `burst` asks it."""
    book = run.book
    facts = sglang_models.facts(run.real(name).path)
    if not book.has("sglang.spread.crosspool.least_tokens"):
        counts = of_dummy_routers(facts, tokens)
        book.add(row("crosspool", counts, tokens, f"{name}, routers as the FFN side fills them, normal random rows"))
    if wants_server(run):
        wanted = tokens if run.host.kind == "cuda" else 400
        harness.check(server, "SGLang alone, with its recorder, does not serve")
        counts, asked = of_sglang(run, server, wanted, burst)
        book.add(row("plain", counts, asked, f"{name}, SGLang's recorder, prompts of random ids"))
    elif not book.has("sglang.spread.plain.least_tokens"):
        print("    left out: SGLang's recorder cannot write its file on a CPU", flush=True)
