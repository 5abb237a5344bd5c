# SPDX-License-Identifier: MIT
"""Which kind of step the calls of one forward pass belong to, and on a GPU how many of its rows are
live. Set once a step, not per layer: captured graphs read it on the device."""

import torch

from xpool import ops, rank as ranks
from xpool.sglang import patch


def kind_of(batch):
    """The kind of `batch`. Under data parallel attention all ranks go through a step together, one
    of them idle perhaps: they say the same, what the step is as a whole."""
    if batch.global_num_tokens_cpu is not None:
        return ranks.PREFILL if batch.is_extend_in_batch else ranks.DECODE
    if batch.forward_mode.is_mixed():
        return ranks.MIXED
    return ranks.DECODE if batch.forward_mode.is_decode_or_idle() else ranks.PREFILL


def _rows(batch):
    """Rows of this rank in the step, before a graph pads them."""
    return 0 if batch.input_ids is None else batch.input_ids.shape[0]


def _begin(original, runner, batch, *arguments, **options):
    rank = ops.attached()
    if rank is not None and rank.device is None:
        rank.begin_step(kind_of(batch))
    elif rank is not None:
        stream = torch.cuda.current_stream(rank.device).cuda_stream
        rank.begin_step(kind_of(batch), rows=_rows(batch), stream=stream)
    return original(runner, batch, *arguments, **options)


def hook():
    patch.around("sglang.srt.model_executor.model_runner", "ModelRunner.forward", _begin)
