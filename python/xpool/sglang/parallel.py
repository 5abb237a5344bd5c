# SPDX-License-Identifier: MIT
"""Parallel attention around an FFN that is elsewhere.

Tensor parallel: every rank hands in the same rows and gets the complete sum, so SGLang must not
reduce it again, neither at once nor fused into the next layer's norm.

Data parallel attention: SGLang gathers the rows of all ranks before an FFN and scatters them after
it. Here each rank hands in its own rows, together with the counts of all ranks, and gets its own
rows back: no gather, and no padding to a common length.
"""

import dataclasses

from xpool import ops
from xpool.sglang import patch

_COMMUNICATOR = "sglang.srt.layers.communicator"
_DP = "sglang.srt.layers.dp_attention"
_BATCH = "sglang.srt.model_executor.forward_batch_info"


def _own_rows(original, cls, **options):
    from sglang.srt.layers.communicator import ScatterMode

    modes = original(cls, **options)
    own = {field.name: ScatterMode.TP_ATTN_FULL for field in dataclasses.fields(modes)}
    return dataclasses.replace(modes, **own)


def _never(original, *arguments, **options):
    return False


def _no_padding(original, cls, *arguments, **options):
    return cls.SUM_LEN


def _row_counts(original, batch, *arguments, **options):
    result = original(batch, *arguments, **options)
    rank = ops.attached()
    if rank is not None:
        rank.set_dp_rows(batch.global_num_tokens_cpu)
    return result


def hook():
    patch.around(_COMMUNICATOR, "LayerCommunicator.should_fuse_mlp_allreduce_with_next_layer", _never)
    patch.around(_COMMUNICATOR, "LayerCommunicator.should_use_reduce_scatter", _never)
    patch.around(_COMMUNICATOR, "LayerScatterModes.init_new", _own_rows)
    patch.around(_DP, "DpPaddingMode.get_dp_padding_mode", _no_padding)
    patch.around(_BATCH, "ForwardBatch.prepare_mlp_sync_batch", _row_counts)
