# SPDX-License-Identifier: MIT
"""Which kind of step the calls of one forward pass belong to, by when it should be done, and on a GPU how
many of its rows are live. Set once a step, not per layer: captured graphs read it on the device."""

import time

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


_SCHEDULER = "sglang.srt.managers.scheduler"

_deadline_ns = 0  # of the batch that runs; 0: none


def deadline_of(batch, ttft_ns, tbt_ns):
    """The earliest of the batch's requests: arrival + `ttft_ns` until the first token, then the last token +
    `tbt_ns`; targets of 0 promise nothing. CLOCK_MONOTONIC; 0 when there is none."""
    earliest = 0
    decode = batch.forward_mode.is_decode()
    for request in batch.reqs or ():
        begun = decode or len(request.output_ids) > 0
        since = getattr(request, "xpool_token_ns" if begun else "xpool_arrived_ns", 0)
        target = tbt_ns if begun else ttft_ns
        if since and target and not 0 < earliest <= since + target:
            earliest = since + target
    return earliest


def _queued(original, scheduler, request, *arguments, **options):
    if not hasattr(request, "xpool_arrived_ns"):  # else it comes back to the queue
        request.xpool_arrived_ns = time.monotonic_ns()
    return original(scheduler, request, *arguments, **options)


def _run(original, scheduler, batch, *arguments, **options):
    global _deadline_ns
    from xpool.sglang import rank as deployment

    ttft_ns, tbt_ns = (int(ms * 1e6) for ms in deployment.slo())
    if not ttft_ns and not tbt_ns:
        return original(scheduler, batch, *arguments, **options)
    _deadline_ns = deadline_of(batch, ttft_ns, tbt_ns)
    try:
        return original(scheduler, batch, *arguments, **options)
    finally:
        _deadline_ns = 0
        now = time.monotonic_ns()
        for request in batch.reqs or ():
            request.xpool_token_ns = now


def _begin(original, runner, batch, *arguments, **options):
    rank = ops.attached()
    if rank is not None and rank.device is None:
        rank.begin_step(kind_of(batch), deadline_ns=_deadline_ns)
    elif rank is not None:
        stream = torch.cuda.current_stream(rank.device).cuda_stream
        rank.begin_step(kind_of(batch), rows=_rows(batch), stream=stream, deadline_ns=_deadline_ns)
    return original(runner, batch, *arguments, **options)


def hook():
    patch.around("sglang.srt.model_executor.model_runner", "ModelRunner.forward", _begin)
    patch.around(_SCHEDULER, "Scheduler._add_request_to_queue", _queued)
    patch.around(_SCHEDULER, "Scheduler.run_batch", _run)
