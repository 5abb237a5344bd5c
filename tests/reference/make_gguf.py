#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Seeded GGUF and safetensors fixtures with reference values, for the C tests of src/model.

usage: make_gguf.py OUT_FOLDER

Needs gguf, safetensors and numpy. Files are written by those packages, and the expected values are
computed by them (gguf's dequantize) and numpy alone, so the C reader is checked against code that is
not ours. OUT_FOLDER gets one folder or file a fixture and manifest.txt, with one line a tensor:

    checkpoint <tab> tensor name <tab> dtype <tab> rows <tab> columns <tab> offset in expected.f32

expected.f32 holds little-endian float32 values in Hugging Face order. A vector has 1 row.
"""
import json
import os
import sys

import numpy as np
import safetensors
from gguf import GGMLQuantizationType as T
from gguf import GGUFWriter
from gguf import quants

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM, VOCAB, LAYERS = 256, 512, 4, 2, 64, 40, 2
EXPERTS, EXPERT_WIDTH = 4, 512
QUANT_TYPES = ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q4_K", "Q6_K"]


class Output:
    def __init__(self, folder):
        self.folder = folder
        self.manifest = open(os.path.join(folder, "manifest.txt"), "w")
        self.expected = open(os.path.join(folder, "expected.f32"), "wb")
        self.at = 0

    def expect(self, checkpoint, name, dtype, values):
        values = np.ascontiguousarray(values, dtype="<f4")
        rows, columns = (1, values.size) if values.ndim == 1 else values.shape
        self.manifest.write(f"{checkpoint}\t{name}\t{dtype}\t{rows}\t{columns}\t{self.at}\n")
        self.expected.write(values.tobytes())
        self.at += values.size

    def close(self):
        self.manifest.close()
        self.expected.close()


def random_blocks(rng, kind, rows, columns):
    """Blocks of a K type that gguf cannot quantise to: any bytes are a valid block, only the f16
    scales must be finite."""
    block, size = {T.Q4_K: (256, 144), T.Q6_K: (256, 210)}[kind]
    data = rng.integers(0, 256, (rows, columns // block, size), dtype=np.uint8)
    scale = rng.uniform(-0.02, 0.02, (rows, columns // block)).astype("<f2")
    if kind == T.Q4_K:
        data[..., 0:2] = scale[..., None].view(np.uint8)
        minimum = rng.uniform(-0.02, 0.02, (rows, columns // block)).astype("<f2")
        data[..., 2:4] = minimum[..., None].view(np.uint8)
    else:
        data[..., 208:210] = scale[..., None].view(np.uint8)
    return data.reshape(rows, -1)


def encode(rng, kind, rows, columns):
    """Stored bytes and the float32 values they stand for."""
    if kind in (T.Q4_K, T.Q6_K):
        stored = random_blocks(rng, kind, rows, columns)
    else:
        values = rng.standard_normal((rows, columns), dtype=np.float32)
        stored = quants.quantize(values, kind)
    return stored, quants.dequantize(stored, kind)


def unpermute(values, heads):
    """Llama's q and k rows from GGUF's order (head, pair, half) to Hugging Face's (head, half, pair)."""
    return (values.reshape(heads, values.shape[0] // heads // 2, 2, -1)
            .swapaxes(1, 2).reshape(values.shape))


class Model:
    def __init__(self, output, name, arch, kind, rng):
        self.output, self.name, self.arch, self.kind, self.rng = output, name, arch, kind, rng
        self.writer = GGUFWriter(os.path.join(output.folder, name), arch)

    def matrix(self, gguf_name, hf_name, rows, columns, heads=0):
        stored, values = encode(self.rng, self.kind, rows, columns)
        self.writer.add_tensor(gguf_name, stored, raw_dtype=self.kind)
        self.output.expect(self.name, hf_name, self.kind.name,
                           unpermute(values, heads) if heads else values)

    def vector(self, gguf_name, hf_name, size):
        values = self.rng.standard_normal(size, dtype=np.float32)
        self.writer.add_tensor(gguf_name, values)
        self.output.expect(self.name, hf_name, "F32", values)

    def experts(self, gguf_name, layer, part, rows, columns):
        stored, values = encode(self.rng, self.kind, EXPERTS * rows, columns)
        self.writer.add_tensor(gguf_name, stored.reshape(EXPERTS, rows, -1), raw_dtype=self.kind)
        for e, one in enumerate(values.reshape(EXPERTS, rows, columns)):
            self.output.expect(self.name, f"model.layers.{layer}.mlp.experts.{e}.{part}.weight",
                               self.kind.name, one)

    def metadata(self, sparse):
        w = self.writer
        w.add_block_count(LAYERS)
        w.add_context_length(1024)
        w.add_embedding_length(HIDDEN)
        w.add_feed_forward_length(INTERMEDIATE)
        w.add_head_count(HEADS)
        w.add_head_count_kv(KV_HEADS)
        w.add_key_length(HEAD_DIM)
        w.add_value_length(HEAD_DIM)
        w.add_layer_norm_rms_eps(1e-5)
        w.add_rope_freq_base(50000.0)
        w.add_rope_dimension_count(HEAD_DIM)
        w.add_vocab_size(VOCAB)
        if sparse:
            w.add_expert_count(EXPERTS)
            w.add_expert_used_count(2)
            w.add_expert_feed_forward_length(EXPERT_WIDTH)
        w.add_tokenizer_model("gpt2")
        w.add_token_list([f"token{i}" for i in range(VOCAB)])
        w.add_token_types([1] * VOCAB)
        w.add_token_merges(["t o", "to k"])
        w.add_bos_token_id(1)
        w.add_eos_token_id(2)
        w.add_eot_token_id(3)

    def write(self, tied, sparse, biases, norms):
        permuted = self.arch == "llama"
        self.metadata(sparse)
        self.matrix("token_embd.weight", "model.embed_tokens.weight", VOCAB, HIDDEN)
        for i in range(LAYERS):
            blk, hf = f"blk.{i}.", f"model.layers.{i}."
            self.vector(blk + "attn_norm.weight", hf + "input_layernorm.weight", HIDDEN)
            self.vector(blk + "ffn_norm.weight", hf + "post_attention_layernorm.weight", HIDDEN)
            for short, heads in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
                swap = heads if permuted and short != "v" else 0
                self.matrix(f"{blk}attn_{short}.weight", f"{hf}self_attn.{short}_proj.weight",
                            heads * HEAD_DIM, HIDDEN, swap)
                if biases:
                    values = self.rng.standard_normal(heads * HEAD_DIM, dtype=np.float32)
                    self.writer.add_tensor(f"{blk}attn_{short}.bias", values)
                    expected = unpermute(values[:, None], swap)[:, 0] if swap else values
                    self.output.expect(self.name, f"{hf}self_attn.{short}_proj.bias", "F32",
                                       expected)
                if norms and short != "v":
                    self.vector(f"{blk}attn_{short}_norm.weight",
                                f"{hf}self_attn.{short}_norm.weight", HEAD_DIM)
            self.matrix(blk + "attn_output.weight", hf + "self_attn.o_proj.weight", HIDDEN,
                        HEADS * HEAD_DIM)
            if sparse:
                router = self.rng.standard_normal((EXPERTS, HIDDEN), dtype=np.float32)
                self.writer.add_tensor(blk + "ffn_gate_inp.weight", router)
                self.output.expect(self.name, hf + "mlp.gate.weight", "F32", router)
                self.experts(blk + "ffn_gate_exps.weight", i, "gate_proj", EXPERT_WIDTH, HIDDEN)
                self.experts(blk + "ffn_up_exps.weight", i, "up_proj", EXPERT_WIDTH, HIDDEN)
                self.experts(blk + "ffn_down_exps.weight", i, "down_proj", HIDDEN, EXPERT_WIDTH)
            else:
                self.matrix(blk + "ffn_gate.weight", hf + "mlp.gate_proj.weight", INTERMEDIATE,
                            HIDDEN)
                self.matrix(blk + "ffn_up.weight", hf + "mlp.up_proj.weight", INTERMEDIATE, HIDDEN)
                self.matrix(blk + "ffn_down.weight", hf + "mlp.down_proj.weight", HIDDEN,
                            INTERMEDIATE)
        self.vector("output_norm.weight", "model.norm.weight", HIDDEN)
        if not tied:
            self.matrix("output.weight", "lm_head.weight", VOCAB, HIDDEN)
        self.writer.write_header_to_file()
        self.writer.write_kv_data_to_file()
        self.writer.write_tensors_to_file()
        self.writer.close()


CONFIG = """{"architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 40,
"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4,
"num_key_value_heads": 2, "rms_norm_eps": 1e-05, "max_position_embeddings": 1024,
"tie_word_embeddings": true}
"""


def bf16(values):
    """Bits of float32 values cut to bfloat16 (the low half dropped)."""
    return (values.view("<u4") >> 16).astype("<u2")


def write_safetensors(output, rng, name, shards):
    """A llama-shaped checkpoint in one file or with an index, its tensors of all three types."""
    folder = os.path.join(output.folder, name)
    os.makedirs(folder, exist_ok=True)
    with open(os.path.join(folder, "config.json"), "w") as file:
        file.write(CONFIG)
    shapes = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
    for i in range(LAYERS):
        hf = f"model.layers.{i}."
        shapes[hf + "input_layernorm.weight"] = (HIDDEN,)
        shapes[hf + "post_attention_layernorm.weight"] = (HIDDEN,)
        shapes[hf + "self_attn.q_proj.weight"] = (HEADS * HEAD_DIM, HIDDEN)
        shapes[hf + "self_attn.k_proj.weight"] = (KV_HEADS * HEAD_DIM, HIDDEN)
        shapes[hf + "self_attn.v_proj.weight"] = (KV_HEADS * HEAD_DIM, HIDDEN)
        shapes[hf + "self_attn.o_proj.weight"] = (HIDDEN, HEADS * HEAD_DIM)
        shapes[hf + "mlp.gate_proj.weight"] = (INTERMEDIATE, HIDDEN)
        shapes[hf + "mlp.up_proj.weight"] = (INTERMEDIATE, HIDDEN)
        shapes[hf + "mlp.down_proj.weight"] = (HIDDEN, INTERMEDIATE)
    files = [{} for _ in range(shards)]
    weight_map = {}
    kept = []  # a TensorSpec holds an address only
    for number, (tensor, shape) in enumerate(shapes.items()):
        values = rng.standard_normal(shape, dtype=np.float32)
        kind = ("float32", "float16", "bfloat16")[number % 3]
        if kind == "float16":
            stored = values.astype("<f2")
            values = stored.astype("<f4")
        elif kind == "bfloat16":
            stored = bf16(values)
            values = (stored.astype("<u4") << 16).view("<f4")
        else:
            stored = values
        kept.append(stored)
        files[number % shards][tensor] = safetensors.TensorSpec(
            dtype=kind, shape=list(shape), data_ptr=stored.ctypes.data, data_len=stored.nbytes)
        short = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}[kind]
        output.expect(name, tensor, short, values)
        shard = f"model-{number % shards + 1:05d}-of-{shards:05d}.safetensors"
        weight_map[tensor] = shard
    for i, tensors in enumerate(files):
        shard = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        path = os.path.join(folder, shard if shards > 1 else "model.safetensors")
        with open(path, "wb") as file:
            file.write(safetensors.serialize(tensors, {"format": "pt"}))
    if shards > 1:
        with open(os.path.join(folder, "model.safetensors.index.json"), "w") as file:
            json.dump({"metadata": {}, "weight_map": weight_map}, file)


def write(folder):
    os.makedirs(folder, exist_ok=True)
    output = Output(folder)
    rng = np.random.default_rng(20251129)
    for kind in QUANT_TYPES:
        Model(output, f"llama-{kind.lower()}.gguf", "llama", T[kind], rng).write(
            tied=True, sparse=False, biases=False, norms=False)
    Model(output, "llama-bias.gguf", "llama", T.Q8_0, rng).write(
        tied=False, sparse=False, biases=True, norms=False)
    Model(output, "qwen2-q4_0.gguf", "qwen2", T.Q4_0, rng).write(
        tied=True, sparse=False, biases=True, norms=False)
    Model(output, "qwen3-f16.gguf", "qwen3", T.F16, rng).write(
        tied=False, sparse=False, biases=False, norms=True)
    Model(output, "qwen3moe-q4_k.gguf", "qwen3moe", T.Q4_K, rng).write(
        tied=False, sparse=True, biases=False, norms=True)
    Model(output, "qwen3moe-q6_k.gguf", "qwen3moe", T.Q6_K, rng).write(
        tied=False, sparse=True, biases=False, norms=True)
    write_safetensors(output, rng, "single", 1)
    write_safetensors(output, rng, "sharded", 3)
    output.close()


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    write(sys.argv[1])
