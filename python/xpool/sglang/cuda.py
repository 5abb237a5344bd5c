# SPDX-License-Identifier: MIT
"""What is different on a GPU.

- Where the daemon keeps no account of the KV Cache, SGLang's own pools and allocator of slots are
  used, which never wait for the device between two steps.
- Server arguments: nothing may be captured that the plan has no room for.
"""

from xpool import ops
from xpool.native import XpoolError
from xpool.sglang import failure, kv, patch

_MIXIN = "sglang.srt.model_executor.model_runner_kv_cache_mixin"

_REFUSED = (
    ("enable_breakable_cuda_graph", (False,), "it is not tested with the plugin"),
    ("debug_cuda_graph", (False,), "it is not tested with the plugin"),
)


def check_arguments(arguments, info, attention_dp):
    """Completes and checks the arguments of a server whose ranks are on GPUs."""
    for name, allowed, reason in _REFUSED:
        if getattr(arguments, name) not in allowed:
            flag = "--" + name.replace("_", "-")
            raise XpoolError(f"{flag} cannot be used with the xpool plugin: {reason}")
    if arguments.max_total_tokens is None:
        # SGLang would take what is free on the GPU, which is not this Instance's alone.
        arguments.max_total_tokens = info.kv_tokens
    if arguments.disable_piecewise_cuda_graph:
        return
    if attention_dp > 1:
        raise XpoolError(
            "--enforce-piecewise-cuda-graph cannot be used with the xpool plugin under data parallel"
            " attention: the ranks of a prefill step have different lengths"
        )
    largest = max(arguments.piecewise_cuda_graph_tokens or (0,))
    if largest > info.prefill_rows:
        raise XpoolError(
            f"--piecewise-cuda-graph-max-tokens gives prefill graphs of {largest} rows, the plan has room"
            f" for {info.prefill_rows}: lower it, or raise prefill_rows of the model and restart the daemon"
        )


@failure.fatal
def _choose_pools(rank):
    if rank is None or rank.device is None or kv.mapped_bytes() is not None:
        return
    from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool

    for own in (TokenToKVPoolAllocator, MHATokenToKVPool, MLATokenToKVPool):
        patch.replace(_MIXIN, own.__name__, own)


def _init_pools(original, runner, *arguments, **options):
    _choose_pools(ops.attached())
    return original(runner, *arguments, **options)


def hook():
    patch.around(_MIXIN, "ModelRunnerKVCacheMixin._init_pools", _init_pools)
