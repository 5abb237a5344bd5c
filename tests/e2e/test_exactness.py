# SPDX-License-Identifier: MIT
"""One request gives the same tokens whatever else runs: alone, among 16, with and without the prefix
cache, with one or two FfnAgents, with any lane policy; greedy and sampled with a seed."""

import harness

# Chosen by hand to differ in length, so that prompts meet decodes and chunks of other prompts.
TEXTS = [
    "Once upon a time, there was a little fox named Tim.",
    "The sun was warm and the garden was full of flowers. " * 6,
    "What sound does a cow make?",
    "A robot named Leo found a red balloon in the park, and he wanted to give it to his friend. " * 12,
]
COUNT = 40


def requests(system):
    """16 requests: golden prompts (greedy) and texts (sampled, seeded). [(ids, sampling, golden or None)]"""
    prompts = harness.golden()
    made = [(p["ids"], {"temperature": 0}, p["greedy_ids"][:COUNT]) for p in prompts]
    for number, text in enumerate(TEXTS):
        ids = system.post("/tokenize", {"model": system.models[0], "text": text})["tokens"]
        made.append((ids, {"temperature": 0}, None))
        made.append((ids, {"temperature": 0.8, "top_p": 0.9, "seed": 100 + number}, None))
        made.append((ids + prompts[0]["ids"], {"temperature": 1.0, "top_k": 40, "seed": 7 + number}, None))
    return made


def run(system, request, identifier):
    ids, sampling, _ = request
    return system.generate(identifier, ids, COUNT, 180, **sampling)


def flush(system, identifier):
    status, _, data = harness.http_request(system.gateway + "/flush_cache", "POST", {"model": identifier})
    harness.check(status == 200, f"/flush_cache: {status} {data[:200]!r}")


def compare(got, want, what):
    for number, (a, b) in enumerate(zip(got, want)):
        harness.check(a == b, f"request {number}: {what}: {a} instead of {b}")


def alone_and_together():
    with harness.System([harness.model("tales", dtype="float32")]) as system:
        system.start(120)
        made = requests(system)
        alone = []
        for request in made:
            flush(system, "tales")
            alone.append(run(system, request, "tales"))
        flush(system, "tales")
        hits = system.generate_full("tales", made[-1][0], 1)["meta_info"].get("cached_tokens", 0)
        harness.check(hits == 0, f"{hits} tokens come from the prefix cache after a flush")
        for number, (request, got) in enumerate(zip(made, alone)):
            harness.check(request[2] in (None, got), f"request {number} is not golden")
        cached = [run(system, request, "tales") for request in made]
        compare(cached, alone, "with the prefix cache")
        hits = system.generate_full("tales", made[-1][0], 1)["meta_info"].get("cached_tokens", 0)
        harness.check(hits > 0, "the prefix cache gave nothing, so the comparison says nothing")
        for _ in range(2):
            flush(system, "tales")
            among = harness.together([lambda r=r: run(system, r, "tales") for r in made])
            compare(among, alone, "among 16")
        among = harness.together([lambda r=r: run(system, r, "tales") for r in made])
        compare(among, alone, "among 16, with the prefix cache")
        system.stop()
    # The same requests where the FFN side is made of two FfnAgents, with two Instances at work.
    for settings in (
        '[scheduler]\nffn_policy = "fifo"\nffn_concurrency = 2',
        '[scheduler]\nffn_policy = "deadline"',
        '[scheduler]\nffn_policy = "random"',
    ):
        models = [harness.model("tales", dtype="float32"), harness.model("other", dtype="float32")]
        with harness.System(models, ffn=2, settings=settings) as system:
            system.start(120)
            calls = [lambda r=r, m=m: run(system, r, m) for r in made for m in ("tales", "other")]
            among = harness.together(calls)
            compare(among[0::2], alone, f"two FfnAgents, {settings!r}")
            compare(among[1::2], alone, f"the other model, two FfnAgents, {settings!r}")
            system.stop()


def small_cache():
    """A KV Cache that cannot hold all 16: requests wait or are put back, tokens stay."""
    with harness.System([harness.model("tales", dtype="float32")]) as system:
        system.start(120)
        made = requests(system)
        alone = [run(system, request, "tales") for request in made]
        system.stop()
    ceiling = max(len(ids) for ids, _, _ in made) + COUNT + 64
    models = [harness.model("tales", dtype="float32", kv_ceiling_tokens=ceiling)]
    with harness.System(models) as system:
        system.start(120)
        compare(harness.together([lambda r=r: run(system, r, "tales") for r in made]), alone, "small KV Cache")
        system.stop()


if __name__ == "__main__":
    harness.main(alone_and_together, small_cache)
