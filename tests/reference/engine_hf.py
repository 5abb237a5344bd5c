#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""The native engine against Hugging Face transformers in float32: logits and greedy tokens.

usage: engine_hf.py [--only WORD] [--ffn runtime|reference] [--tool PATH]

Checkpoints: seeded ones of the four families from `xpool model synth`, seeded ones made by transformers
itself for each RoPE scaling, models/tales/qwen3-moe, and, where they lie beside or in the checkout,
tinystories-656k and the SmolLM2 GGUF. Every logit of every prompt position has to be within the stated
error, and each of 32 greedy tokens has to be the reference's argmax after the same tokens, alone and
with all prompts in one batch. Exits 0 when everything agrees.
"""

import argparse
import json
import os
import pathlib
import random
import subprocess
import sys
import tempfile

import common

os.environ.setdefault("TQDM_DISABLE", "1")
try:
    import numpy
    import torch
    import transformers
except ImportError as error:
    common.skip(f"{error}; scripts/test-venv makes the environment")

NEW_TOKENS = 32
MAX_ERROR = 1e-4
FAMILIES = ("llama", "qwen2", "qwen3", "qwen3-moe")
ROPES = {
    "linear": {"rope_type": "linear", "factor": 2.5},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 64},
    "yarn": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    "yarn-tuned": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64,
                   "beta_fast": 16.0, "beta_slow": 2.0, "attention_factor": 1.25},
}


def make_rope_model(name, folder):
    """A small Llama with one RoPE scaling, written by transformers."""
    torch.manual_seed(7)
    config = transformers.LlamaConfig(
        vocab_size=320, hidden_size=64, intermediate_size=96, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=24, max_position_embeddings=256, tie_word_embeddings=True,
        initializer_range=0.15, rope_parameters={"rope_theta": 10000.0, **ROPES[name]})
    model = transformers.LlamaForCausalLM(config).float()
    model.save_pretrained(folder)
    return folder


def cases(scratch, only):
    """Yields (name, path, largest logit error)."""
    def wanted(name):
        return only is None or only in name
    for seed, family in enumerate(FAMILIES):
        name = f"synth-{family}"
        if wanted(name):
            options = {"layers": 4, "dtype": "f32"}
            if family == "qwen3-moe":
                options["experts"] = 8
            yield name, common.synth(family, scratch / name, 11 + seed, **options), MAX_ERROR
    for rope in ROPES:
        name = f"rope-{rope}"
        if wanted(name):
            yield name, make_rope_model(rope, scratch / name), MAX_ERROR
    if wanted("tales-qwen3-moe"):
        yield "tales-qwen3-moe", common.TALES / "qwen3-moe", MAX_ERROR
    stories = common.SHARED / "data" / "tinystories-656k"
    if wanted("tinystories-656k") and stories.is_dir():
        yield "tinystories-656k", stories, MAX_ERROR
    if wanted("smollm2") and common.SMOLLM.is_file():
        # Quantised weights: transformers dequantises them to float32, the engine computes on them as
        # they are, so the order of roundings differs more.
        yield "smollm2", common.SMOLLM, 1e-3


def make_prompts(vocab, context):
    """Lengths around a page and a chunk border, and one that takes several chunks."""
    generator = random.Random(5)
    lengths = [n for n in (1, 2, 15, 16, 17, 33, 100, 150) if n + NEW_TOKENS < context]
    return [[generator.randrange(3, vocab) for _ in range(n)] for n in lengths]


def run_engine(tool, path, prompts, logits, options, concurrent):
    command = [str(tool), str(path), *options]
    if logits:
        command += ["--logits", str(logits)]
    request = {"prompts": prompts, "new_tokens": NEW_TOKENS, "concurrent": concurrent}
    done = subprocess.run(command, input=json.dumps(request), capture_output=True, text=True, timeout=600)
    if done.returncode != 0:
        raise RuntimeError(done.stderr.strip()[-400:])
    return json.loads(done.stdout)


def load_gguf(path):
    """The model with dequantised float32 weights, as transformers reads GGUF (from_pretrained() itself would
    want one more package)."""
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
    config = transformers.AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    model = transformers.AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager")
    tensors = load_gguf_checkpoint(str(path), return_tensors=True, model_to_load=model)["tensors"]
    lost = model.load_state_dict(tensors, strict=False)
    if set(lost.missing_keys) - {"lm_head.weight"} or lost.unexpected_keys:
        raise RuntimeError(f"{path.name}: {lost}")
    model.tie_weights()
    return model.eval()


def check(tool, ffn, scratch, name, path, limit):
    model = load_gguf(path) if path.suffix == ".gguf" else transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager").eval()
    text = model.config.get_text_config()
    context = min(text.max_position_embeddings, 1024)
    prompts = make_prompts(text.vocab_size, context)
    file = scratch / f"{name}.logits"
    options = ["--ffn", ffn, "--prefill-rows", "48"]
    alone = run_engine(tool, path, prompts, file, options, False)
    together = run_engine(tool, path, prompts, None, options + ["--threads", "2"], True)
    ours = numpy.fromfile(file, dtype=numpy.float32).reshape(-1, alone["vocab"])
    file.unlink()

    worst, at, wrong, gap, logprob_error = 0.0, 0, [], float("inf"), 0.0
    with torch.no_grad():
        for index, prompt in enumerate(prompts):
            tokens = alone["greedy"][index]
            logits = model(torch.tensor([prompt + tokens])).logits[0].numpy()
            worst = max(worst, float(numpy.abs(logits[:len(prompt)] - ours[at:at + len(prompt)]).max()))
            at += len(prompt)
            steps = logits[len(prompt) - 1:-1]
            best = numpy.sort(steps, axis=1)[:, -2:]
            gap = min(gap, float((best[:, 1] - best[:, 0]).min()))
            if len(tokens) != NEW_TOKENS or (steps.argmax(axis=1) != numpy.array(tokens)).any():
                wrong.append(f"prompt {index} (length {len(prompt)}) differs from the reference")
            if together["greedy"][index] != tokens or together["logprobs"][index] != alone["logprobs"][index]:
                wrong.append(f"prompt {index} differs between alone and in a batch")
            reference = torch.log_softmax(torch.tensor(steps), dim=1).numpy()
            chosen = reference[numpy.arange(len(tokens)), tokens]
            logprob_error = max(logprob_error, float(numpy.abs(chosen - alone["logprobs"][index]).max()))
    if worst > limit or logprob_error > limit:
        wrong.append(f"error above {limit:g}")
    print(f"{name}: {len(prompts)} prompts, largest logit error {worst:.2e}, log-probability error "
          f"{logprob_error:.2e}, smallest gap of the best two {gap:.2e}: "
          f"{'FAILS: ' + '; '.join(wrong) if wrong else 'exact'}", flush=True)
    return not wrong


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only")
    parser.add_argument("--ffn", default="runtime")
    parser.add_argument("--tool", default=common.BUILD / "bin" / "engine_forward", type=pathlib.Path)
    arguments = parser.parse_args()
    torch.set_num_threads(2)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    good, count = True, 0
    with tempfile.TemporaryDirectory() as folder:
        scratch = pathlib.Path(folder)
        for name, path, limit in cases(scratch, arguments.only):
            good &= check(arguments.tool, arguments.ffn, scratch, name, path, limit)
            count += 1
    if count == 0:
        common.skip("no checkpoint matches")
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    main()
