# SPDX-License-Identifier: MIT
"""What SGLang needs to compute right answers for MLA models on a CPU.

- The `torch_native` attention backend computes the expanded form of MLA against the latents in the
  KV pool, which is wrong. The absorbed form is right, so it is always taken.
- The CPU path of the rotary embedding knows YaRN only; without scaling the ordinary one serves.
"""

from xpool.sglang import patch


def _absorbed(attention, batch):
    from sglang.srt.models.deepseek_common.attention_backend_handler import AttnForwardMethod

    return AttnForwardMethod.MLA


def _rope(
    original,
    head_size,
    rotary_dim,
    max_position,
    base,
    is_neox_style=True,
    rope_scaling=None,
    dtype=None,
    partial_rotary_factor=1.0,
    device=None,
):
    from sglang.srt.layers.rotary_embedding.factory import get_rope

    sizes = (head_size, rotary_dim, max_position, base, is_neox_style)
    if rope_scaling is None:
        return get_rope(*sizes, None, dtype, partial_rotary_factor)
    return original(*sizes, rope_scaling, dtype, partial_rotary_factor, device)


def hook():
    _, _, registry = patch.resolve(
        "sglang.srt.models.deepseek_common.attention_backend_handler", "AttentionBackendRegistry"
    )
    registry.register("torch_native", _absorbed)
    patch.around("sglang.srt.layers.rotary_embedding.factory", "get_rope_cpu", _rope)
