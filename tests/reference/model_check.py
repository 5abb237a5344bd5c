#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""src/model against independent code.

1. Fixtures written by the gguf and safetensors packages (make_gguf.py), read by the C tests, bit for bit.
2. Checkpoints of `xpool model synth`: transformers loads each family with no missing and no unexpected
   tensor, the logits are finite, and without the FFN other tokens win.
3. The same model as GGUF: its tensors, read by the gguf package, equal the safetensors ones once Llama's
   q and k rows are put back; Llama 3's rotary divisors equal those of transformers.
4. Configurations: what `xpool model inspect --json` says equals what transformers' classes say.
"""
import json
import pathlib
import subprocess
import sys
import tempfile

import numpy
import safetensors.torch
import torch
import transformers
from gguf import GGUFReader, quants
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import common
import make_gguf

FAMILIES = ["llama", "qwen2", "qwen3", "qwen3-moe", "deepseek-v2", "glm4-moe-lite"]
failures = []


def check(condition, text):
    print(("ok      " if condition else "FAILED  ") + text)
    if not condition:
        failures.append(text)


def check_fixtures(scratch):
    folder = scratch / "fixtures"
    make_gguf.write(folder)
    binary = common.BUILD / "tests" / "unit_model_test_fixtures"
    if not binary.exists():
        print(f"skipped the fixtures: {binary.name} was not built")
        return
    result = subprocess.run([str(binary)], capture_output=True, text=True,
                            env={"XPOOL_TEST_FIXTURES": str(folder), "PATH": "/usr/bin:/bin"}, timeout=600)
    check(result.returncode == 0 and "SKIPPED" not in result.stdout, "fixtures of gguf and safetensors")
    if result.returncode != 0:
        print(result.stdout, result.stderr)


def inspect(path):
    command = [str(common.XPOOL), "model", "inspect", str(path), "--json"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if result.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: {result.stderr}")
    return json.loads(result.stdout)


def greedy(model, ids, count):
    for _ in range(count):
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, -1]
        ids = ids + [int(logits.argmax())]
    return ids[-count:]


def check_family(family, folder):
    model, info = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32,
                                                       output_loading_info=True)
    common.mend_transformers(model)
    wrong = {key: value for key, value in info.items() if value}
    check(not wrong, f"{family}: transformers loads it with nothing missing or unexpected {wrong or ''}")
    report = inspect(folder)
    check(report["parameters"] == sum(p.numel() for p in model.parameters())
          + sum(b.numel() for n, b in model.named_buffers() if n.endswith("correction_bias")),
          f"{family}: as many parameters as transformers counts")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "Once upon a time, 3 foxes said \"hé\"."
    ids = tokenizer.encode(text)
    check(tokenizer.decode(ids) == text and len(tokenizer) == report["vocab"], f"{family}: tokenizer")
    whole = greedy(model, ids, 24)
    for layer in model.model.layers:
        layer.mlp.forward = torch.zeros_like
    without = greedy(model, ids, 24)
    agree = sum(a == b for a, b in zip(whole, without))
    check(agree < 5, f"{family}: {agree} of 24 tokens agree without the FFN")
    check(len(set(whole)) > 6, f"{family}: the tokens vary")


def hf_name(name):
    """An HF name for each GGUF name that is no expert stack."""
    fixed = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight",
             "output.weight": "lm_head.weight"}
    if name in fixed:
        return fixed[name]
    _, layer, rest = name.split(".", 2)
    part, kind = rest.rsplit(".", 1)
    parts = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm",
             "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
             "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm",
             "attn_k_norm": "self_attn.k_norm", "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj",
             "ffn_down": "mlp.down_proj", "ffn_gate_inp": "mlp.gate"}
    return f"model.layers.{layer}.{parts[part]}.{kind}"


def check_gguf(family, plain, folder, dtype, tolerance):
    wanted = safetensors.torch.load_file(plain / "model.safetensors")
    reader = GGUFReader(folder / "model.gguf")
    heads = int(reader.fields[f"{family.replace('-', '')}.attention.head_count"].contents())
    kv_heads = int(reader.fields[f"{family.replace('-', '')}.attention.head_count_kv"].contents())
    worst, seen = 0.0, 0
    for tensor in reader.tensors:
        values = quants.dequantize(tensor.data, tensor.tensor_type)
        if tensor.name.endswith("_exps.weight"):
            _, layer, part, _ = tensor.name.split(".")
            short = part.removeprefix("ffn_").removesuffix("_exps")
            for e, one in enumerate(values):
                name = f"model.layers.{layer}.mlp.experts.{e}.{short}_proj.weight"
                worst = max(worst, numpy.abs(one - wanted[name].numpy()).max())
                seen += 1
            continue
        if family == "llama" and ".attn_q." in tensor.name:
            values = make_gguf.unpermute(values, heads)
        if family == "llama" and ".attn_k." in tensor.name:
            values = make_gguf.unpermute(values, kv_heads)
        worst = max(worst, numpy.abs(values - wanted[hf_name(tensor.name)].numpy()).max())
        seen += 1
    check(seen == len(wanted) and worst <= tolerance,
          f"{family} as GGUF {dtype}: {seen} of {len(wanted)} tensors, largest difference {worst:.3g}")


def check_llama3(scratch):
    plain = common.synth("llama", scratch / "l3", 3, rope="llama3")
    common.synth("llama", scratch / "l3-gguf", 3, rope="llama3", format="gguf")
    model = AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float32)
    scaled = model.model.rotary_emb.inv_freq.numpy()
    dim = 2 * scaled.size
    base = 1.0 / 10000.0 ** (numpy.arange(0, dim, 2) / dim)
    reader = GGUFReader(scratch / "l3-gguf" / "model.gguf")
    divisors = next(t.data for t in reader.tensors if t.name == "rope_freqs.weight")
    check(numpy.allclose(base / divisors, scaled, rtol=1e-5) and divisors.max() > 7,
          "Llama 3's rotary divisors")
    report = inspect(scratch / "l3-gguf")
    check(report["rope_scaling"] == "llama3", "Llama 3's rotary scaling is recognised in GGUF")


def check_config(path, scratch):
    """`path` is a config.json; transformers and we read the same folder."""
    folder = scratch / "config" / path.stem
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(path.read_text())
    theirs, ours = AutoConfig.from_pretrained(folder), inspect(folder)
    pairs = [("hidden_size", "hidden"), ("num_hidden_layers", "layers"), ("vocab_size", "vocab"),
             ("num_attention_heads", "heads"), ("rms_norm_eps", "norm_epsilon"),
             ("tie_word_embeddings", "tied_embeddings"),
             ("max_position_embeddings", "max_positions")]
    if ours["architecture"].startswith(("Deepseek", "Glm")):
        pairs += [("kv_lora_rank", "kv_lora_rank"), ("qk_rope_head_dim", "qk_rope_head_dim"),
                  ("v_head_dim", "v_head_dim"), ("qk_nope_head_dim", "qk_nope_head_dim")]
    else:
        pairs += [("num_key_value_heads", "kv_heads")]
    wrong = [(a, getattr(theirs, a), ours[b]) for a, b in pairs if getattr(theirs, a) != ours[b]]
    rope = theirs.rope_parameters
    if rope["rope_theta"] != ours["rope_theta"]:
        wrong.append(("rope_theta", rope["rope_theta"], ours["rope_theta"]))
    if rope["rope_type"].replace("default", "none") != ours["rope_scaling"]:
        wrong.append(("rope_type", rope["rope_type"], ours["rope_scaling"]))
    last = ours["ffn"][-1]
    if last["kind"] == "moe":
        experts = getattr(theirs, "n_routed_experts", None) or theirs.num_experts
        for name, a, b in [("experts", experts, last["experts"]),
                           ("top_k", theirs.num_experts_per_tok, last["top_k"]),
                           ("width", theirs.moe_intermediate_size, last["intermediate"]),
                           ("normalise", bool(theirs.norm_topk_prob), last["normalize_top_k"])]:
            if a != b:
                wrong.append((name, a, b))
    check(not wrong, f"configuration of {path.parent.name}/{path.stem} {wrong or ''}")
    # What transformers 5 writes again must read the same.
    theirs.save_pretrained(scratch / "saved" / path.stem)
    again = inspect(scratch / "saved" / path.stem)
    for report in (ours, again):
        # Where transformers writes a default out, it may spell "none" in another way.
        for key in ("path", "dtype", "bos_token", "eos_tokens", "pad_token"):
            report.pop(key)
    check(ours == again, f"the same configuration saved by transformers {transformers.__version__}")
    if ours != again:
        print({k: (ours[k], again[k]) for k in ours if ours[k] != again[k]})


def main():
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="xpool-model-") as name:
        scratch = pathlib.Path(name)
        check_fixtures(scratch)
        for seed, family in enumerate(FAMILIES):
            check_family(family, common.synth(family, scratch / family, seed + 20))
        common.synth("qwen3-moe", scratch / "shards", 5, shards=3, dtype="bf16", dense_layers=2)
        check_family("qwen3-moe", scratch / "shards")
        for family in FAMILIES[:4]:
            for dtype, tolerance in (("f32", 0), ("q8_0", 0.01), ("q4_1", 0.1), ("q6_k", 0.05),
                                     ("q4_k", 0.1)):
                sizes = dict(hidden=256, head_dim=64, moe_intermediate=256)
                plain = scratch / f"{family}-plain"
                if not plain.exists():
                    common.synth(family, plain, 9, **sizes)
                options = dict(sizes, format="gguf")
                if dtype != "f32":
                    options["quant"] = dtype
                folder = common.synth(family, scratch / f"{family}-{dtype}", 9, **options)
                check_gguf(family, plain, folder, dtype, tolerance)
        check_llama3(scratch)
        configs = sorted(common.TALES.glob("*/config.json"))
        configs += sorted((common.SHARED / "data" / "model-configs").glob("*.json"))
        for path in configs:
            check_config(path, scratch / path.parent.name)
    if failures:
        sys.exit(f"{len(failures)} checks failed")


if __name__ == "__main__":
    main()
