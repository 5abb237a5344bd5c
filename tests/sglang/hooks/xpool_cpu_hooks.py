# SPDX-License-Identifier: MIT
"""What SGLang 0.5.13.post1 lacks on a plain CPU, supplied for tests only; never part of the product.

Loaded by SGLang as the plugin `xpool_cpu_hooks` when this folder is on PYTHONPATH. It changes nothing of
the FFN, so vanilla SGLang and SGLang with CrossPool run under the same hooks.

- MLA: the torch_native attention computes the expanded form of prefill against the latents in the KV pool,
  which is wrong; the absorbed form, which decode takes anyway, is right.
- Rotary embedding: the CPU factory of MLA models knows YaRN only; without scaling the general one serves.
- Attention data parallelism: a Triton copy, pinned memory, two collectives that are registered for CUDA
  only, and one method that this attention back end does not have.
"""
import torch
from sglang.srt.plugins.hook_registry import HookRegistry, HookType

SRT = "sglang.srt."
# A padded sequence of a decode batch counts as this many tokens, as in SGLang's other back ends.
PADDED_LENGTH = 1


def padded_length(_backend):
    return PADDED_LENGTH


def copy_rows(dst, src, dim, offset, sz, offset_src):
    """Copies sz rows from src[offset:] to dst, or from src to dst[offset:]; offset and sz are tensors."""
    if dim != 0:
        raise NotImplementedError("only rows are copied")
    first, count = int(offset), int(sz)
    if offset_src:
        dst[:count] = src[first:first + count]
    else:
        dst[first:first + count] = src[:count]


def rope_without_scaling(original, head_size, rotary_dim, max_position, base, is_neox_style=True,
                         rope_scaling=None, dtype=None, partial_rotary_factor=1.0, device=None):
    if rope_scaling is not None:
        return original(head_size, rotary_dim, max_position, base, is_neox_style, rope_scaling, dtype,
                        partial_rotary_factor, device)
    from sglang.srt.layers.rotary_embedding.factory import get_rope
    return get_rope(head_size, rotary_dim, max_position, base, is_neox_style, None, dtype,
                    partial_rotary_factor)


def all_gather(group, output, input):
    torch.distributed.all_gather_into_tensor(output, input, group=group.device_group)


def reduce_scatter(group, output, input):
    """By a sum on every rank: not every version of gloo has a reduce-scatter."""
    total = input.clone()
    torch.distributed.all_reduce(total, group=group.device_group)
    rows = output.shape[0]
    output.copy_(total[group.rank_in_group * rows:(group.rank_in_group + 1) * rows])


def without_pinned_memory(original, *args, **kwargs):
    """Runs `original` with torch.tensor() ignoring pin_memory, which needs a CUDA driver."""
    tensor = torch.tensor

    def pageable(*values, pin_memory=False, **options):
        return tensor(*values, **options)

    torch.tensor = pageable
    try:
        return original(*args, **kwargs)
    finally:
        torch.tensor = tensor


def install():
    from sglang.srt.models.deepseek_common import attention_backend_handler as handler
    handler.AttentionBackendRegistry.register(
        "torch_native", lambda _attention, _batch: handler.AttnForwardMethod.MLA)
    backend = SRT + "layers.attention.torch_native_backend.TorchNativeAttnBackend."
    group = SRT + "distributed.parallel_state.GroupCoordinator."
    for target, hook, kind in (
        (backend + "get_cuda_graph_seq_len_fill_value", padded_length, HookType.REPLACE),
        (group + "all_gather_into_tensor", all_gather, HookType.REPLACE),
        (group + "reduce_scatter_tensor", reduce_scatter, HookType.REPLACE),
        (SRT + "layers.dp_attention.memcpy_triton", copy_rows, HookType.REPLACE),
        (SRT + "layers.rotary_embedding.factory.get_rope_cpu", rope_without_scaling, HookType.AROUND),
        (SRT + "model_executor.forward_batch_info.ForwardBatch.prepare_mlp_sync_batch",
         without_pinned_memory, HookType.AROUND),
    ):
        HookRegistry.register(target, hook, kind)
