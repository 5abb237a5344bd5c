# SPDX-License-Identifier: MIT
"""The probe: greedy tokens of fixed prompts through `/generate`, and how two such results compare.

It takes any address with SGLang's native interface: a vanilla server, one with CrossPool, or the gateway
in front of it (`model` is sent along then). Prompts are seeded token ids, all different from their first
token on except where a prefix is to be reused. Standard library only.
"""

import http.client
import json
import pathlib
import urllib.parse

NEW_TOKENS = 24
TOP = 8
TIMEOUT_S = 300
FIRST_ID = 3  # below are the special tokens of synthetic checkpoints

ALONE = (1, 2, 3, 5, 17, 64, 127, 128, 129, 200, 300)
BATCH = (4, 31, 70, 150, 260)
PREFIX, SUFFIX = 220, 21
STREAM = 48


def vocabulary(checkpoint):
    return json.loads((pathlib.Path(checkpoint) / "config.json").read_text())["vocab_size"]


def prompt(seed, length, vocab):
    """`length` token ids by a linear congruence; the first one is the seed's own."""
    ids = [FIRST_ID + seed % (vocab - FIRST_ID)]
    state = seed
    while len(ids) < length:
        state = (state * 6364136223846793005 + 1442695040888963407) % 2**64
        ids.append(FIRST_ID + (state >> 33) % (vocab - FIRST_ID))
    return ids


class Target:
    """A server with `/generate`."""

    def __init__(self, url, model=None):
        self.address = urllib.parse.urlsplit(url)
        self.model = model

    def connect(self, path, body):
        """An open answer to a POST; the caller reads it and closes the connection."""
        connection = http.client.HTTPConnection(self.address.hostname, self.address.port, timeout=TIMEOUT_S)
        if self.model is not None:
            body = {"model": self.model, **body}
        connection.request("POST", path, json.dumps(body).encode(), {"Content-Type": "application/json"})
        answer = connection.getresponse()
        if answer.status != 200:
            text = answer.read()[:400].decode(errors="replace")
            connection.close()
            raise RuntimeError(f"{path} answered {answer.status}: {text}")
        return connection, answer

    def post(self, path, body):
        connection, answer = self.connect(path, body)
        try:
            return json.loads(answer.read())
        finally:
            connection.close()

    def generate(self, input_ids, **more):
        sampling = {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True}
        return {"input_ids": input_ids, "sampling_params": sampling, "return_logprob": True,
                "top_logprobs_num": TOP, **more}

    def stream(self, input_ids):
        """The last event of a streamed answer, and how many events there were."""
        connection, answer = self.connect("/generate", self.generate(input_ids, stream=True))
        events, last = 0, None
        try:
            for line in answer:
                if line.startswith(b"data: ") and line.strip() != b"data: [DONE]":
                    events, last = events + 1, json.loads(line[len(b"data: "):])
        finally:
            connection.close()
        if last is None:
            raise RuntimeError("a stream of /generate had no event")
        return last, events


def record(answer):
    """What is kept of one answer: tokens, the first step's best tokens, and the gap of the best two at
    each step, which says how much a rounding may change."""
    meta = answer["meta_info"]
    tops = meta["output_top_logprobs"]
    return {
        "tokens": answer["output_ids"],
        "first": [[entry[1], round(entry[0], 6)] for entry in tops[0]],
        "gaps": [round(top[0][0] - top[1][0], 6) for top in tops],
        "cached": meta.get("cached_tokens", 0),
    }


def prompts(vocab):
    """{case: token ids}."""
    prefix, suffix = prompt(7, PREFIX, vocab), prompt(8, SUFFIX, vocab)
    return {
        **{f"alone-{length}": prompt(100 + length, length, vocab) for length in ALONE},
        **{f"batch-{length}": prompt(20 + length, length, vocab) for length in BATCH},
        "prefix-first": prefix + suffix,
        "prefix-reused": prefix + prompt(9, SUFFIX, vocab),
        "prefix-again": prefix + suffix,
        "stream": prompt(15, STREAM, vocab),
    }


def probe(url, vocab, model=None):
    """All cases, as {case: record}: one after the other, but those of the batch together."""
    target = Target(url, model)
    cases = prompts(vocab)
    batch = [name for name in cases if name.startswith("batch-")]
    answers = target.post("/generate", target.generate([cases[name] for name in batch]))
    found = {name: record(answer) for name, answer in zip(batch, answers, strict=True)}
    for name, ids in cases.items():
        if name == "stream":
            last, events = target.stream(ids)
            found[name] = {**record(last), "events": events}
        elif name not in found:
            found[name] = record(target.post("/generate", target.generate(ids)))
    return found


def check_probe(found, one_cache=True):
    """What must hold of one result by itself; a list of complaints. With data parallel attention every rank
    has a prefix cache of its own, and which one a request meets is chance."""
    wrong = [f"{name}: {len(one['tokens'])} tokens instead of {NEW_TOKENS}"
             for name, one in found.items() if len(one["tokens"]) != NEW_TOKENS]
    for name in ("prefix-reused", "prefix-again"):
        if one_cache and found[name]["cached"] < PREFIX:
            wrong.append(f"{name}: only {found[name]['cached']} tokens came from the prefix cache")
    if found["stream"]["events"] < 2:
        wrong.append("stream: all tokens came in one event")
    return wrong


def compare(vanilla, other, tolerance=1e-3):
    """Where `other` differs from `vanilla`: a list of complaints. `tolerance` is on log-probabilities."""
    wrong = []
    for name, expected in vanilla.items():
        got = other.get(name)
        if got is None:
            wrong.append(f"{name}: missing")
            continue
        for step, (a, b) in enumerate(zip(expected["tokens"], got["tokens"], strict=False)):
            if a != b:
                wrong.append(f"{name}: token {step} is {b} instead of {a} (gap of the best two there "
                             f"{expected['gaps'][step]:g})")
                break
        else:
            if len(expected["tokens"]) != len(got["tokens"]):
                wrong.append(f"{name}: {len(got['tokens'])} tokens instead of {len(expected['tokens'])}")
        theirs = dict(map(tuple, got["first"]))
        # The last of the best may change places with one that is not listed.
        error = max(abs(value - theirs.get(token, float("inf"))) for token, value in expected["first"][:TOP - 1])
        if error > tolerance:
            wrong.append(f"{name}: a log-probability of the first step differs by {error:.3g}")
    return wrong


def agreement(one, other):
    """The share of tokens that are the same at the same place."""
    pairs = [(a, b) for name in one for a, b in zip(one[name]["tokens"], other[name]["tokens"], strict=True)]
    return sum(a == b for a, b in pairs) / len(pairs)


def smallest_gap(found):
    return min(min(one["gaps"]) for one in found.values())
