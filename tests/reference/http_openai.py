#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""The official `openai` client against a running gateway or Instance.

usage: http_openai.py BASE_URL --model ID [--no-chat]

BASE_URL is the server's root, e.g. http://127.0.0.1:8100. Needs openai 2.6.1 and httpx 0.28.1. Every check
uses the client unchanged and looks at the objects it parsed; answers are compared with each other (whole
against streamed, one seed twice, echo against prompt), never with stored output of ours. Prints one line a
check and exits 0 only if all hold.
"""
import argparse
import json
import math
import sys
import threading
import traceback

import httpx
import openai

CHECKS = []


def check(function):
    CHECKS.append(function)
    return function


def need(condition, text):
    if not condition:
        raise AssertionError(text)


class Context:
    def __init__(self, url, model, chat):
        self.url, self.model, self.chat = url.rstrip("/"), model, chat
        # The server is local: no proxy, and no hidden retries.
        self.http = httpx.Client(trust_env=False, timeout=120)
        self.client = openai.OpenAI(base_url=self.url + "/v1", api_key="none", max_retries=0,
                                    http_client=self.http)

    def ask(self, **more):
        fields = dict(model=self.model, max_tokens=24, temperature=0,
                      messages=[{"role": "user", "content": "Tell me about a dog."}])
        fields.update(more)
        return self.client.chat.completions.create(**fields)

    def complete(self, **more):
        fields = dict(model=self.model, prompt="Once upon a time", max_tokens=16, temperature=0)
        fields.update(more)
        return self.client.completions.create(**fields)


def check_usage(usage, where):
    need(usage is not None, f"{where}: no usage")
    need(usage.prompt_tokens > 0, f"{where}: prompt_tokens {usage.prompt_tokens}")
    need(usage.total_tokens == usage.prompt_tokens + usage.completion_tokens, f"{where}: total")
    need(usage.prompt_tokens_details.cached_tokens is not None, f"{where}: cached_tokens")


@check
def models_list_and_retrieve(c):
    ids = [m.id for m in c.client.models.list()]
    need(c.model in ids, f"{c.model} is not in {ids}")
    need(len(ids) == len(set(ids)), f"a model is listed twice: {ids}")
    model = c.client.models.retrieve(c.model)
    need(model.id == c.model and model.object == "model" and model.created > 0, str(model))
    need(isinstance(model.owned_by, str), "owned_by")


@check
def chat(c):
    answer = c.ask()
    need(answer.id.startswith("chatcmpl-") and answer.object == "chat.completion", str(answer))
    need(answer.model == c.model and answer.created > 1_600_000_000, str(answer))
    choice = answer.choices[0]
    need(choice.index == 0 and choice.message.role == "assistant", str(choice))
    need(isinstance(choice.message.content, str), "content is no text")
    need(choice.message.refusal is None and not choice.message.tool_calls, str(choice.message))
    need(choice.finish_reason in ("stop", "length"), choice.finish_reason)
    need(choice.logprobs is None, "logprobs were not asked for")
    check_usage(answer.usage, "chat")
    need(answer.usage.completion_tokens <= 24, "max_tokens")


@check
def chat_streamed_equals_whole(c):
    whole = c.ask()
    for include in (True, False):
        more = {"stream_options": {"include_usage": True}} if include else {}
        chunks = list(c.ask(stream=True, **more))
        need(all(x.object == "chat.completion.chunk" for x in chunks), "object")
        need(len({x.id for x in chunks}) == 1, "the id changes within a stream")
        first = chunks[0].choices[0].delta
        need(first.role == "assistant" and first.content == "", f"first delta {first}")
        need(all(d.choices[0].delta.role is None for d in chunks[1:] if d.choices), "role repeated")
        text = "".join(x.choices[0].delta.content or "" for x in chunks if x.choices)
        need(text == whole.choices[0].message.content, f"streamed {text!r}, whole {whole!r}")
        ends = [x.choices[0].finish_reason for x in chunks if x.choices and x.choices[0].finish_reason]
        need(ends == [whole.choices[0].finish_reason], f"finish reasons {ends}")
        if include:
            need(chunks[-1].choices == [], "the last chunk has choices")
            check_usage(chunks[-1].usage, "stream")
            need(chunks[-1].usage.completion_tokens == whole.usage.completion_tokens, "usage differs")
            need(all(x.usage is None for x in chunks[:-1]), "usage before the end")
        else:
            need(all(x.usage is None for x in chunks), "usage was not asked for")


@check
def chat_stream_helper(c):
    with c.client.chat.completions.stream(
            model=c.model, max_tokens=12, temperature=0,
            messages=[{"role": "user", "content": "Hi"}]) as stream:
        need(sum(1 for _ in stream) > 0, "no events")
        try:
            final = stream.get_final_completion()
        except openai.LengthFinishReasonError as e:  # how the helper reports max_tokens
            final = e.completion
    need(final.choices[0].message.role == "assistant", str(final))
    need(isinstance(final.choices[0].message.content, str), str(final))


@check
def chat_raw_stream(c):
    """What the wire carries, beside what the client makes of it."""
    body = {"model": c.model, "stream": True, "max_tokens": 4, "temperature": 0,
            "messages": [{"role": "user", "content": "Hi"}]}
    with c.http.stream("POST", c.url + "/v1/chat/completions", json=body) as r:
        need(r.headers["content-type"].startswith("text/event-stream"), str(r.headers))
        lines = [x for x in r.iter_lines() if x]
    need(all(x.startswith("data: ") for x in lines), "a line is no data")
    need(lines[-1] == "data: [DONE]", lines[-1])
    for line in lines[:-1]:
        for choice in json.loads(line[6:])["choices"]:
            need(choice["delta"].get("role", "assistant") == "assistant", line)


@check
def chat_logprobs(c):
    answer = c.ask(logprobs=True, top_logprobs=4, max_tokens=6)
    content = answer.choices[0].logprobs.content
    need(len(content) > 0, "no tokens")
    for token in content:
        need(token.logprob <= 0 and math.isfinite(token.logprob), str(token))
        need(len(token.top_logprobs) == 4, str(token))
        need(abs(token.logprob - max(t.logprob for t in token.top_logprobs)) < 1e-4,
             "greedy did not choose the likeliest token")
        order = [t.logprob for t in token.top_logprobs]
        need(order == sorted(order, reverse=True), "top_logprobs are not in order")
        need(sum(math.exp(t) for t in order) <= 1 + 1e-4, "probabilities above 1")
    joined = b"".join(bytes(t.bytes) for t in content)
    text = answer.choices[0].message.content
    need(joined.decode(errors="replace").strip().startswith(text.strip()[:4]), (joined, text))
    streamed = [t for x in c.ask(logprobs=True, top_logprobs=4, max_tokens=6, stream=True)
                if x.choices and x.choices[0].logprobs for t in x.choices[0].logprobs.content]
    need([t.token for t in streamed] == [t.token for t in content], "streamed tokens differ")


@check
def chat_message_forms(c):
    parts = c.ask(messages=[{"role": "user", "content": [{"type": "text", "text": "Tell me about a dog."}]}])
    need(parts.choices[0].message.content == c.ask().choices[0].message.content, "text parts")
    c.ask(messages=[{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"},
                    {"role": "assistant", "content": "Hello"}, {"role": "user", "content": "Héé 🌍"}])
    c.ask(messages=[{"role": "developer", "content": "x"}, {"role": "user", "content": "y"}])


@check
def completion(c):
    answer = c.complete()
    need(answer.id.startswith("cmpl-") and answer.object == "text_completion", str(answer))
    need(answer.choices[0].logprobs is None and isinstance(answer.choices[0].text, str), str(answer))
    check_usage(answer.usage, "completion")
    chunks = list(c.complete(stream=True, stream_options={"include_usage": True}))
    text = "".join(x.choices[0].text for x in chunks if x.choices)
    need(text == answer.choices[0].text, f"streamed {text!r}, whole {answer.choices[0].text!r}")
    need(chunks[-1].usage.completion_tokens == answer.usage.completion_tokens, "usage differs")


@check
def completion_prompts(c):
    ids = c.http.post(c.url + "/tokenize", json={"model": c.model, "prompt": "Once upon a time"}).json()
    need(ids["count"] == len(ids["tokens"]), str(ids))
    by_ids = c.complete(prompt=ids["tokens"])
    need(by_ids.choices[0].text == c.complete().choices[0].text, "ids and text differ")
    need(by_ids.usage.prompt_tokens == ids["count"], "prompt_tokens")
    batch = c.complete(prompt=["Once upon a time", "The dog"], n=2)
    need([x.index for x in batch.choices] == [0, 1, 2, 3], "indices")
    need(batch.choices[0].text == batch.choices[1].text == by_ids.choices[0].text, "batch")
    need(batch.choices[2].text == c.complete(prompt="The dog").choices[0].text, "batch")
    two = c.complete(prompt=[ids["tokens"], ids["tokens"][:2]])
    need(two.choices[0].text == by_ids.choices[0].text, "lists of ids")
    text = c.http.post(c.url + "/detokenize", json={"model": c.model, "tokens": ids["tokens"]}).json()
    need(text["text"].strip() == "Once upon a time", str(text))


@check
def completion_logprobs_and_echo(c):
    answer = c.complete(logprobs=3, echo=True, max_tokens=4)
    lp, text = answer.choices[0].logprobs, answer.choices[0].text
    n = answer.usage.prompt_tokens + answer.usage.completion_tokens
    need(len(lp.tokens) in (n, n - 1), f"{len(lp.tokens)} tokens of {n}")
    need(len(lp.tokens) == len(lp.token_logprobs) == len(lp.top_logprobs) == len(lp.text_offset), "lengths")
    need(lp.token_logprobs[0] is None, "the first token has a log-probability")
    need(all(x <= 0 for x in lp.token_logprobs[1:]), "positive log-probability")
    need(all(3 <= len(x) <= 4 for x in lp.top_logprobs[1:]), "top_logprobs")
    need(text.startswith("Once upon a time"), f"echo {text!r}")
    need(lp.text_offset == sorted(lp.text_offset), "text_offset")
    for token, at in zip(lp.tokens, lp.text_offset):
        if at and "�" not in token and not token.startswith("bytes:"):
            need(text[at:].startswith(token) or text[at - 1:].startswith(token), f"{token!r} is not at {at}")
    scored = c.complete(logprobs=1, echo=True, max_tokens=0)
    need(scored.choices[0].text == "Once upon a time", scored.choices[0].text)
    m = len(scored.choices[0].logprobs.tokens)
    need(m == scored.usage.prompt_tokens and scored.usage.completion_tokens == 0, "max_tokens 0")
    near = zip(scored.choices[0].logprobs.token_logprobs[1:], lp.token_logprobs[1:m])
    need(all(abs(x - y) < 1e-3 for x, y in near), "the prompt's log-probabilities differ")


@check
def stop(c):
    whole = c.complete(max_tokens=24).choices[0].text
    word = next((w for w in (whole[i:i + 3] for i in range(2, len(whole) - 3)) if "�" not in w), None)
    need(word is not None, f"too short to cut: {whole!r}")
    for form in (word, ["\x01never", word]):
        cut = c.complete(max_tokens=24, stop=form)
        need(cut.choices[0].text == whole[:whole.index(word)], f"{cut.choices[0].text!r} at {word!r}")
        need(cut.choices[0].finish_reason == "stop", cut.choices[0].finish_reason)
    streamed = "".join(x.choices[0].text for x in c.complete(max_tokens=24, stop=word, stream=True))
    need(streamed == whole[:whole.index(word)], f"streamed {streamed!r}")


@check
def seed(c):
    one = dict(temperature=1.0, max_tokens=24, seed=7)
    first = c.complete(**one).choices[0].text
    need(all(c.complete(**one).choices[0].text == first for _ in range(3)), "one seed, two texts")
    others = {c.complete(temperature=1.0, max_tokens=24, seed=s).choices[0].text for s in range(100, 106)}
    need(len(others | {first}) > 1, "every seed gives the same text")
    several = c.complete(n=3, **one)
    need(several.choices[0].text == first, "n changes the first answer")
    need([x.index for x in several.choices] == [0, 1, 2], "indices")
    results = [None] * 8

    def run(i):
        results[i] = c.complete(**one).choices[0].text
    threads = [threading.Thread(target=run, args=(i,)) for i in range(8)]
    [t.start() for t in threads]
    [t.join(120) for t in threads]
    need(not any(t.is_alive() for t in threads), "a completion has not ended after 120 s")
    need(set(results) == {first}, "a seed's text depends on the other requests")


@check
def extra_fields(c):
    answer = c.complete(max_tokens=5, extra_body={"ignore_eos": True, "top_k": 1, "min_p": 0.1,
                                                  "repetition_penalty": 1.0, "min_tokens": 2})
    need(answer.usage.completion_tokens == 5 and answer.choices[0].finish_reason == "length", str(answer))
    c.complete(presence_penalty=0.5, frequency_penalty=0.5, logit_bias={"5": -100}, user="me", top_p=0.9)


def expect(error, status, call, **fields):
    try:
        call()
    except error as e:
        need(e.status_code == status, f"{e.status_code} instead of {status}")
        need(isinstance(e.body, dict) and isinstance(e.body["message"], str) and e.body["type"], str(e.body))
        for key, value in fields.items():
            need(getattr(e, key) == value, f"{key} is {getattr(e, key)!r}, not {value!r}")
        return
    raise AssertionError(f"no {error.__name__}")


@check
def errors(c):
    bad = openai.BadRequestError
    expect(openai.NotFoundError, 404, lambda: c.complete(model="no-such-model"), code="model_not_found",
           param="model")
    expect(openai.NotFoundError, 404, lambda: c.client.models.retrieve("no-such-model"))
    expect(openai.NotFoundError, 404, lambda: c.client.embeddings.create(model=c.model, input="x"))
    expect(bad, 400, lambda: c.complete(temperature=9), param="temperature")
    expect(bad, 400, lambda: c.complete(max_tokens=-1), param="max_tokens")
    expect(bad, 400, lambda: c.complete(suffix="x"), param="suffix")
    expect(bad, 400, lambda: c.complete(prompt="word " * 400000), code="context_length_exceeded")
    expect(bad, 400, lambda: c.complete(prompt=[2**31 - 1]))
    expect(bad, 400, lambda: c.complete(prompt=[-1]), param="prompt")
    if c.chat:
        expect(bad, 400, lambda: c.ask(messages=[]), param="messages")
        expect(bad, 400, lambda: c.ask(messages=[{"role": "robot", "content": "x"}]), param="messages[0].role")
        expect(bad, 400, lambda: c.ask(response_format={"type": "json_object"}), param="response_format")
        expect(bad, 400, lambda: c.ask(n=0), param="n")
        image = [{"type": "image_url", "image_url": {"url": "data:,"}}]
        expect(bad, 400, lambda: c.ask(messages=[{"role": "user", "content": image}]))
    r = c.http.post(c.url + "/v1/completions", content=b"{\"model\": ", headers={"Content-Type": "application/json"})
    need(r.status_code == 400 and "line" in r.json()["error"]["message"], r.text)
    r = c.http.post(c.url + "/v1/completions", content=b"x=1",
                    headers={"Content-Type": "application/x-www-form-urlencoded"})
    need(r.status_code == 400 and "line" in r.json()["error"]["message"], r.text)
    r = c.http.post(c.url + "/v1/completions", content=b"x=1", headers={"Content-Type": "text/csv"})
    need(r.status_code == 415, r.text)
    need(c.http.get(c.url + "/v1/completions").status_code == 405, "GET of a POST path")
    r = c.http.post(c.url + "/v1/completions", content=b" " * (9 << 20), headers={"Content-Type": "application/json"})
    need(r.status_code == 413, str(r.status_code))


@check
def async_client(c):
    import asyncio

    async def run():
        http = httpx.AsyncClient(trust_env=False, timeout=120)
        client = openai.AsyncOpenAI(base_url=c.url + "/v1", api_key="none", max_retries=0, http_client=http)

        async def one():
            stream = await client.completions.create(model=c.model, prompt="Once upon a time", max_tokens=16,
                                                     temperature=0, stream=True)
            return "".join([x.choices[0].text async for x in stream])
        texts = await asyncio.gather(*[one() for _ in range(8)])
        await http.aclose()
        return texts
    texts = asyncio.run(run())
    need(set(texts) == {c.complete().choices[0].text}, f"concurrent streams differ: {set(texts)}")


@check
def leaving_early(c):
    """A stream that is closed early leaves a server that goes on serving."""
    for _ in range(3):
        stream = c.complete(max_tokens=200, stream=True, extra_body={"ignore_eos": True})
        next(iter(stream))
        stream.close()
    need(isinstance(c.complete().choices[0].text, str), "no answer afterwards")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("--model", required=True)
    parser.add_argument("--no-chat", action="store_true", help="the model has no chat template")
    arguments = parser.parse_args()
    context = Context(arguments.url, arguments.model, not arguments.no_chat)
    failed = 0
    for function in CHECKS:
        if arguments.no_chat and function.__name__.startswith("chat"):
            continue
        try:
            function(context)
            print(f"ok      {function.__name__}", flush=True)
        except Exception:
            failed += 1
            print(f"FAILED  {function.__name__}", flush=True)
            traceback.print_exc()
    print(f"openai {openai.__version__}: {'all ok' if not failed else f'{failed} failed'}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
