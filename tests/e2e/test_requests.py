# SPDX-License-Identifier: MIT
"""What clients do to a system: go away in mid-stream, come too many, ask for too much or for nothing
known, through the gateway."""

import http.client
import json
import select

import harness
import views


def answered(connection):
    return bool(select.select([connection.sock], [], [], 0)[0])


def disconnect_frees_kv():
    """A client that goes away frees its KV at once; the log stays quiet about it."""
    prompt = harness.golden()[0]
    with harness.System([harness.model("tales", dtype="float32")]) as system:
        system.start(120)

        def begin():
            streams = [system.stream("tales", prompt["ids"], 900) for _ in range(4)]
            for stream in streams:
                stream.wait(5)
            return streams

        for _ in range(3):
            streams = system.hold(begin)
            harness.wait_until(lambda: views.kv_pages_used(system) > 0, 10, "the requests' KV is seen")
            for stream in streams:
                stream.close()
            system.go_on()
            harness.wait_until(lambda: views.kv_pages_used(system) == 0, 10, "the KV of the requests is free again")
            harness.check(max(len(s.ids) for s in streams) < 900, "a request ended before its client went away")
        # The same for a client that waits for the whole answer. Such an answer may come before anybody has
        # looked: then once more.
        body = {
            "model": "tales",
            "input_ids": prompt["ids"],
            "sampling_params": {"max_new_tokens": 1000, "ignore_eos": True},
        }
        for _ in range(20):
            connection = http.client.HTTPConnection("127.0.0.1", system.gateway_port)
            connection.request("POST", "/generate", json.dumps(body), {"Content-Type": "application/json"})
            seen = harness.wait_until(
                lambda: (views.kv_pages_used(system) > 0 and "used") or (answered(connection) and "answered"),
                10,
                "the request's KV is seen, or its answer",
            )
            connection.sock.close()
            connection.close()
            if seen == "used":
                break
        harness.check(seen == "used", "20 requests were answered and none was seen")
        harness.wait_until(lambda: views.kv_pages_used(system) == 0, 10, "the KV of the request is free again")
        harness.check(system.generate("tales", prompt["ids"], 48) == prompt["greedy_ids"], "not exact afterwards")
        system.stop()


def too_many():
    """More requests than the queue takes: 429 with Retry-After, the others are served, exact."""
    prompt = harness.golden()[0]
    body = {
        "model": "tales",
        "input_ids": prompt["ids"],
        "sampling_params": {"temperature": 0, "max_new_tokens": 48, "ignore_eos": True},
    }
    with harness.System([harness.model("tales", dtype="float32", decode_rows=2)]) as system:
        system.start(120)

        def ask():
            return harness.http_request(system.gateway + "/generate", "POST", body, 300)

        answers = harness.together([ask] * 400)
        statuses = [status for status, _, _ in answers]
        print(f"     {statuses.count(200)} served, {statuses.count(429)} refused")
        harness.check(set(statuses) <= {200, 429}, f"other statuses: {set(statuses)}")
        harness.check(statuses.count(429) > 0, "400 requests at once were all taken")
        harness.check(statuses.count(200) > 0, "no request was served")
        for status, headers, data in answers:
            if status == 429:
                names = {name.lower() for name in headers}
                harness.check("retry-after" in names, f"429 without Retry-After: {headers}")
                harness.check("error" in json.loads(data), f"429 without an error object: {data!r}")
            else:
                harness.check(json.loads(data)["output_ids"] == prompt["greedy_ids"], "a served request is not exact")
        harness.check(system.generate("tales", prompt["ids"], 48) == prompt["greedy_ids"], "not exact afterwards")
        system.stop()


def errors():
    """Wrong requests: the right status and OpenAI's form of an error."""
    prompt = harness.golden()[0]
    chat = {"model": "tales", "messages": [{"role": "user", "content": "Hello"}], "max_tokens": 4}
    with harness.System([harness.model("tales"), harness.model("other")]) as system:
        system.start(120)
        cases = [
            (404, "/v1/chat/completions", {**chat, "model": "nobody"}),
            (400, "/v1/chat/completions", {k: v for k, v in chat.items() if k != "model"}),
            (400, "/v1/chat/completions", {**chat, "messages": []}),
            (400, "/v1/chat/completions", {**chat, "messages": "hello"}),
            (400, "/v1/chat/completions", {**chat, "temperature": -1}),
            (400, "/v1/chat/completions", {**chat, "max_tokens": 1 << 40}),
            (400, "/v1/completions", {"model": "tales", "prompt": [5] * 5000}),
            (400, "/v1/completions", {"model": "tales", "prompt": [99999999]}),
            (400, "/generate", {"model": "tales", "input_ids": []}),
            (404, "/v1/nothing", {}),
        ]
        for status, path, body in cases:
            got, _, data = harness.http_request(system.gateway + path, "POST", body)
            harness.check(got == status, f"{path} {str(body)[:80]}: {got} instead of {status}: {data[:200]!r}")
            error = json.loads(data)["error"]
            harness.check({"message", "type"} <= set(error), f"{path}: {error}")
        harness.check(set(system.list_models()) == {"tales", "other"}, "not both models are listed")
        entry = system.get(system.gateway + "/v1/models/other")
        harness.check(entry["id"] == "other" and entry["object"] == "model", f"/v1/models/other: {entry}")
        # Text in, text out, on both models.
        for m in ("tales", "other"):
            answer = system.post("/v1/completions", {
                "model": m, "prompt": prompt["text"], "max_tokens": 48, "temperature": 0, "ignore_eos": True})
            harness.check(answer["choices"][0]["text"] == prompt["greedy_text"], f"{m}: {answer}")
            harness.check(answer["usage"]["completion_tokens"] == 48, f"{m}: {answer['usage']}")
        system.stop()


if __name__ == "__main__":
    harness.main(disconnect_frees_kv, too_many, errors)
