# SPDX-License-Identifier: MIT
"""Serving on this machine: tokens a second of one and of 16 streams, beside a busy neighbour on every
core, and, where asked, speed and memory beside llama.cpp on the same GGUF and threads.

    benches/run serving [--llama] [--quick]

Everything of one call is measured in one run on one machine. Standard library only; --llama needs
the environment of benches/llama.sh, which builds llama.cpp.
"""

import argparse
import json
import os
import pathlib
import statistics
import subprocess
import sys
import time

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parent.parent / "tests" / "e2e"))
import harness  # noqa: E402
import load_client  # noqa: E402
import results  # noqa: E402

PROMPT = (
    "The history of the garden is long. First there were only stones, then somebody brought soil, and "
    "with the soil came seeds, and with the seeds came birds that nobody had invited. "
)
LLAMA = results.ROOT / ".xpool-cache" / "venv-llama" / "bin" / "python"
THREADS = len(os.sched_getaffinity(0))


def system(models, **more):
    return harness.System(models, threads=THREADS, memory="2GiB", **more).start(300)


def text_ids(running, identifier, count):
    ids = running.post("/tokenize", {"model": identifier, "text": PROMPT * (count // 16 + 1)})["tokens"]
    harness.check(len(ids) >= count, f"only {len(ids)} tokens in the prompt")
    return ids[:count]


def flush(running, identifier):
    status, _, data = harness.http_request(running.gateway + "/flush_cache", "POST", {"model": identifier})
    harness.check(status == 200, f"/flush_cache: {status} {data[:200]!r}")


def streams(running, identifier, prompts, count, seconds):
    """Tokens a second of all streams together. Each stream asks again as soon as it is answered, until the
    time is over, so that all of them are busy throughout. The answers come whole: at thousands of tokens a
    second a Python client reading events would be what is measured."""
    sampling = {"temperature": 0, "max_new_tokens": count, "ignore_eos": True}
    bodies = [{"model": identifier, "input_ids": ids, "sampling_params": sampling} for ids in prompts]
    return load_client.rate(running.gateway_port, bodies, seconds)


def decode_rate(running, identifier, prompts, count, repeats, seconds=2.0):
    flush(running, identifier)
    streams(running, identifier, prompts, min(count, 16), 0.1)
    return statistics.median(streams(running, identifier, prompts, count, seconds) for _ in range(repeats))


def prefill_rate(running, identifier, length, repeats):
    """Prompt tokens a second: a prompt of this length, nothing cached, one token out."""
    ids = text_ids(running, identifier, length)
    rates = []
    for _ in range(repeats + 1):
        flush(running, identifier)
        began = time.monotonic()
        running.generate(identifier, ids, 1, 600)
        rates.append(length / (time.monotonic() - began))
    return statistics.median(rates[1:])


def pss(pids):
    total = 0
    for pid in pids:
        for line in pathlib.Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                total += int(line.split()[1]) << 10
    return total


def one_and_sixteen(name, entry, count, target, repeats):
    rows = []
    with system([entry]) as running:
        m = entry["id"]
        prompts = [text_ids(running, m, 8 + i) for i in range(16)]
        one = decode_rate(running, m, prompts[:1], count, repeats)
        time.sleep(1.3)  # the Instance reports once a second
        before = running.state()["models"][0]["engine"]
        sixteen = decode_rate(running, m, prompts, count, repeats)
        time.sleep(1.3)
        after = running.state()["models"][0]["engine"]
        mean = (after["ffn_rows"] - before["ffn_rows"]) / max(after["ffn_calls"] - before["ffn_calls"], 1)
        rows.append(results.row(f"serving.{name}.decode1", one, "tokens/s", note=f"one stream, {count} tokens; median of {repeats}"))
        rows.append(results.row(f"serving.{name}.decode16", sixteen, "tokens/s", note=f"16 streams together, {count} tokens each"))
        rows.append(results.row(
            f"serving.{name}.batch_gain", sixteen / one, "ratio", target=f">= {target}",
            note=f"16 streams over one; mean rows per Invocation {mean:.1f}"))
        running.stop()
    return rows


def neighbour(name, entry, count):
    """Throughput of 16 streams with a busy loop on every core, against alone."""
    burn = "while True: pass"
    with system([entry]) as running:
        m = entry["id"]
        prompts = [text_ids(running, m, 8 + i) for i in range(16)]
        alone = decode_rate(running, m, prompts, count, 1)
        burners = [subprocess.Popen([sys.executable, "-c", burn]) for _ in range(THREADS)]
        try:
            time.sleep(0.5)

            def used():
                ticks = 0
                for burner in burners:
                    fields = pathlib.Path(f"/proc/{burner.pid}/stat").read_text().rpartition(")")[2].split()
                    ticks += int(fields[11]) + int(fields[12])
                return ticks / os.sysconf("SC_CLK_TCK")

            cpu, began = used(), time.monotonic()
            beside = decode_rate(running, m, prompts, count, 1)
            share = (used() - cpu) / ((time.monotonic() - began) * THREADS)
        finally:
            for burner in burners:
                burner.kill()
                burner.wait(30)
        running.stop()
    fall = 1 - beside / alone
    return [results.row(
        f"serving.{name}.neighbour_fall", fall, "fraction", floor=share, target="<= floor + 0.3",
        note=f"16 streams: {alone:.0f} tokens/s alone, {beside:.0f} with a busy loop on each of {THREADS} CPUs; "
        "floor is the neighbour's measured share of the CPUs")]


def llama(repeats):
    """Decode, prefill and memory beside llama.cpp: the same GGUF, threads and context."""
    harness.check(LLAMA.exists(), "llama.cpp is not there: run benches/llama.sh first")
    program = str(pathlib.Path(__file__).with_name("llama_peer.py"))
    context = 2048

    def peer(*arguments):
        return subprocess.Popen(
            [str(LLAMA), program, str(harness.SMOLLM), str(THREADS), str(context), *arguments],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    with peer("speed", str(repeats)) as process:
        speed = json.loads(process.communicate(timeout=600)[0].splitlines()[-1])
    rows = []
    entry = harness.model("smollm2", harness.SMOLLM, max_context=context, prefill_rows=256)
    with system([entry]) as running:
        prompts = [text_ids(running, "smollm2", 8)]
        decode = decode_rate(running, "smollm2", prompts, 128, repeats)
        prefill = prefill_rate(running, "smollm2", 512, repeats)
        running.stop()
    note = f"{THREADS} threads, SmolLM2-135M Q4_1, llama.cpp of llama-cpp-python {speed['version']} in process"
    rows.append(results.row("cpu.decode.llamacpp_ratio", decode / speed["decode"], "ratio",
                            peer=speed["decode"], target=">= 1.3", note=f"ours {decode:.1f} tokens/s over HTTP; {note}"))
    rows.append(results.row("cpu.prefill.llamacpp_ratio", prefill / speed["prefill"], "ratio",
                            peer=speed["prefill"], target=">= 1.0", note=f"ours {prefill:.1f} tokens/s, 512 tokens; {note}"))
    models = [harness.model(i, harness.SMOLLM, max_context=context) for i in ("first", "second")]
    with system(models) as running:
        ids = text_ids(running, "first", 512)
        for m in ("first", "second"):
            running.generate(m, ids, 32, 600)
        ours = pss(running.processes())
        running.stop()
    servers = [peer("hold"), peer("hold")]
    try:
        for server in servers:
            harness.check(server.stdout.readline().strip() == "ready", "llama.cpp did not start")
        theirs = pss([server.pid for server in servers])
    finally:
        for server in servers:
            server.kill()
            server.wait(30)
    rows.append(results.row(
        "cpu.memory.llamacpp_ratio", ours / theirs, "ratio", peer=theirs / (1 << 20), target="< 1.0",
        note=f"sum of PSS of all our processes with two ids of the GGUF, {ours / (1 << 20):.0f} MiB, over two "
        f"llama.cpp processes without a server around them (peer, MiB); context {context}, 544 tokens used each"))
    return rows


def main():
    parser = argparse.ArgumentParser(prog="benches/run serving")
    parser.add_argument("--llama", action="store_true", help="also beside llama.cpp")
    parser.add_argument("--quick", action="store_true", help="shorter runs; not written to docs/results")
    arguments = parser.parse_args()
    repeats, count = (1, 64) if arguments.quick else (5, 128)
    tales = harness.model("tales-qwen3-moe", harness.TALES)
    smollm = harness.model("smollm2", harness.SMOLLM, max_context=2048)
    rows = one_and_sixteen("tales-qwen3-moe", tales, count, 3, repeats)
    results.show(rows)
    if harness.SMOLLM.exists():
        more = one_and_sixteen("smollm2", smollm, count // 2, 2, min(repeats, 3))
        results.show(more)
        rows += more
    else:
        print("SmolLM2 is not there (scripts/fetch-model): left out")
    more = neighbour("tales-qwen3-moe", tales, count)
    results.show(more)
    rows += more
    if arguments.llama:
        more = llama(repeats)
        results.show(more)
        rows += more
    if not arguments.quick:
        results.write("serving", rows)
        if not arguments.llama:
            print("the comparison with llama.cpp is left out; it needs --llama")


if __name__ == "__main__":
    main()
