# SPDX-License-Identifier: MIT
"""Which classes of SGLang are the FFN of each architecture.

A site is a name in a model's module, where its decoder layer looks the class up: replacing the name
there leaves the class itself alone for other models. A new family is a new row.
"""

from collections import namedtuple

from xpool.native import XpoolError

Adapter = namedtuple("Adapter", "module sites attention_dp")

_MODELS = "sglang.srt.models."

ADAPTERS = {
    # The decoder layers of Qwen2 and Llama have no communicator: SGLang gives them no DP attention.
    # That of Qwen3 has one, but SGLang does not promise it.
    "Qwen2ForCausalLM": Adapter(_MODELS + "qwen2", ("Qwen2MLP",), False),
    "LlamaForCausalLM": Adapter(_MODELS + "llama", ("LlamaMLP",), False),
    "Qwen3ForCausalLM": Adapter(_MODELS + "qwen3", ("Qwen3MLP",), False),
    "Qwen3MoeForCausalLM": Adapter(
        _MODELS + "qwen3_moe", ("Qwen3MoeSparseMoeBlock", "Qwen3MoeMLP"), True
    ),
    "DeepseekV2ForCausalLM": Adapter(
        _MODELS + "deepseek_v2", ("DeepseekV2MoE", "DeepseekV2MLP"), True
    ),
    "Glm4MoeLiteForCausalLM": Adapter(
        _MODELS + "glm4_moe_lite", ("Glm4MoeLiteSparseMoeBlock", "Glm4MoeLiteMLP"), True
    ),
}


def of(architecture):
    adapter = ADAPTERS.get(architecture)
    if adapter is None:
        raise XpoolError(
            f"the SGLang plugin has no adapter for {architecture}"
            f" (supported: {', '.join(sorted(ADAPTERS))})"
        )
    return adapter
