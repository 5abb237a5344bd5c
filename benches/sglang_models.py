# SPDX-License-Identifier: MIT
"""Checkpoints for benches/sglang_gpu.py: folders of real size without weights (config.json and a tokenizer,
served with dummy weights), and small ones with real weights for exactness."""

import json
import subprocess

import results

TALES = results.ROOT / "models" / "tales"

_COMMON = {
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
    "use_cache": True,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_QWEN3 = {
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "rope_scaling": None,
    "sliding_window": None,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
_MLA = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1}

# Sizes of published models.
SIZES = {
    "Qwen3-30B-A3B": {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "hidden_size": 2048,
        "intermediate_size": 6144,
        "moe_intermediate_size": 768,
        "num_hidden_layers": 48,
        "max_window_layers": 48,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "output_router_logits": False,
        "router_aux_loss_coef": 0.001,
        **_QWEN3,
    },
    "Qwen3-14B": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": 5120,
        "intermediate_size": 17408,
        "num_hidden_layers": 40,
        "max_window_layers": 40,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
        **_QWEN3,
    },
    "DeepSeek-V2-Lite": {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "hidden_size": 2048,
        "intermediate_size": 10944,
        "moe_intermediate_size": 1408,
        "num_hidden_layers": 27,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "n_routed_experts": 64,
        "n_shared_experts": 2,
        "num_experts_per_tok": 6,
        "moe_layer_freq": 1,
        "norm_topk_prob": False,
        "q_lora_rank": None,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "max_position_embeddings": 163840,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000,
        "rope_scaling": {
            "type": "yarn",
            "factor": 40,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 0.707,
            "mscale_all_dim": 0.707,
            "original_max_position_embeddings": 4096,
        },
        "routed_scaling_factor": 1.0,
        "scoring_func": "softmax",
        "topk_method": "greedy",
        "seq_aux": True,
        "aux_loss_alpha": 0.001,
        "vocab_size": 102400,
        **_MLA,
    },
    "GLM-4.7-Flash": {
        "architectures": ["Glm4MoeLiteForCausalLM"],
        "model_type": "glm4_moe_lite",
        "hidden_size": 2048,
        "intermediate_size": 10240,
        "moe_intermediate_size": 1536,
        "num_hidden_layers": 47,
        "num_attention_heads": 20,
        "num_key_value_heads": 20,
        "n_routed_experts": 64,
        "n_shared_experts": 1,
        "num_experts_per_tok": 4,
        "norm_topk_prob": True,
        "num_nextn_predict_layers": 0,
        "partial_rotary_factor": 1.0,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 192,
        "v_head_dim": 256,
        "max_position_embeddings": 202752,
        "rms_norm_eps": 1e-5,
        "rope_theta": 1000000,
        "rope_scaling": None,
        "routed_scaling_factor": 1.8,
        "topk_method": "noaux_tc",
        "vocab_size": 154880,
        **_MLA,
    },
}

# Options of `xpool model synth`: at least 4 layers, a routed scale, a first dense layer where the family has them.
#
# SGLang's Triton kernels on GPUs limit the shapes of attention. MLA's decode kernel takes the values from the tile of
# the keys: the latents and the rotary part together have to fit into the power of two that holds the latents, or be
# 576 or 288. The models of data/tales (64 and 16) do not, and no server of theirs starts there; these have the
# published models' 512 and 64, and their choice of experts without groups. Without YaRN: transformers' DeepSeek-V2
# does not scale attention by it as SGLang does.
_MOE = {"experts": 16, "top-k": 4}
_LATENT_SHAPE = {"hidden": 2048, "head-dim": 128, "groups": 1, "top-groups": 1}
SEEDED = {
    "qwen3": {"seed": 33, "head-dim": 64},
    "qwen3-moe": {"seed": 40, "head-dim": 64, **_MOE},
    "deepseek-v2": {"seed": 49, **_LATENT_SHAPE, **_MOE},
    "glm4-moe-lite": {"seed": 36, **_LATENT_SHAPE, **_MOE},
}


def _tokenizer(vocab):
    """Byte-level BPE without merges: 256 bytes, then names that only a decoder meets."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    letters, more = {}, 0
    for byte in range(256):
        letters[byte] = chr(byte) if byte in printable else chr(256 + more)
        more += byte not in printable
    words = {letters[byte]: byte for byte in range(256)}
    words.update({f"<{number}>": number for number in range(256, vocab)})
    level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    model = {"type": "BPE", "dropout": None, "unk_token": None, "fuse_unk": False, "vocab": words, "merges": []}
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": level,
        "post_processor": None,
        "decoder": level,
        "model": model,
    }


def real_size(name, folder):
    """The folder of a model of real size, made below `folder`; it has no weights."""
    place = folder / name
    if not (place / "tokenizer_config.json").exists():
        place.mkdir(parents=True, exist_ok=True)
        config = {**_COMMON, **SIZES[name]}
        (place / "config.json").write_text(json.dumps(config, indent=1) + "\n")
        (place / "tokenizer.json").write_text(json.dumps(_tokenizer(config["vocab_size"])))
        words = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": config["max_position_embeddings"]}
        (place / "tokenizer_config.json").write_text(json.dumps(words))
    return place


def seeded(family, folder, xpool, dtype="bf16"):
    """The folder of a seeded small checkpoint of the family, made below `folder`."""
    place = folder / f"seeded-{family}"
    if not place.exists():
        command = [str(xpool), "model", "synth", "--arch", family, "--out", str(place), "--dtype", dtype]
        for name, value in {"layers": 4, "vocab": 512, "context": 2048, **SEEDED[family]}.items():
            command += [f"--{name}", str(value)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, timeout=120)
    return place


def facts(path):
    """config.json of a checkpoint."""
    return json.loads((path / "config.json").read_text())


def triton_decodes(config):
    """Whether SGLang's Triton kernels can decode with this shape of attention; see SEEDED."""
    latents = config.get("kv_lora_rank")
    if not latents:
        return True
    width = latents + config["qk_rope_head_dim"]
    return width in (576, 288) or (width - 1).bit_length() == (latents - 1).bit_length()
