# SPDX-License-Identifier: MIT
"""The peer of bench_serving.py: llama.cpp through llama-cpp-python, in process, so that no server
around it costs it anything. Prints one JSON line (speed) or "ready" and waits (hold).

usage: llama_peer.py GGUF THREADS CONTEXT speed REPEATS | hold
"""

import json
import statistics
import sys
import time

import llama_cpp

PROMPT = (
    "The history of the garden is long. First there were only stones, then somebody brought soil, and "
    "with the soil came seeds, and with the seeds came birds that nobody had invited. "
)


def load(path, threads, context):
    # The AMX buffers of this version crash with a second thread where the processor has AMX; they are
    # among the "extra" buffer types. 4-bit types with an offset are not repacked in any case.
    defaults = llama_cpp.llama_cpp.llama_model_default_params

    def without_extra_buffers():
        params = defaults()
        params.use_extra_bufts = False
        return params

    llama_cpp.llama_cpp.llama_model_default_params = without_extra_buffers
    return llama_cpp.Llama(
        model_path=path, n_threads=threads, n_threads_batch=threads, n_ctx=context, n_batch=512, verbose=False
    )


def speed(model, repeats):
    ids = model.tokenize((PROMPT * 40).encode())[:512]
    prefill, decode = [], []
    for _ in range(repeats + 1):
        model.reset()
        began = time.monotonic()
        model.eval(ids)
        prefill.append(len(ids) / (time.monotonic() - began))
        model.reset()
        model.eval(ids[:8])
        token = ids[8]
        began = time.monotonic()
        for _ in range(128):
            model.eval([token])
            token = model.sample(temp=0.0)
        decode.append(128 / (time.monotonic() - began))
    return {
        "version": llama_cpp.__version__,
        "prefill": statistics.median(prefill[1:]),
        "decode": statistics.median(decode[1:]),
    }


def main():
    path, threads, context, what = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    model = load(path, threads, context)
    if what == "speed":
        print(json.dumps(speed(model, int(sys.argv[5]))))
        return
    model.eval(model.tokenize((PROMPT * 40).encode())[:544])
    print("ready", flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
