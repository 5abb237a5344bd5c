# SPDX-License-Identifier: MIT
"""Which kind of step the calls of one forward pass belong to, by when it should be done, and on a GPU how
many of its rows are live and how the pass ended.

On a GPU a pass may be a replayed graph, whose tensors are as long as when it was captured, and it is
queued, not done, when SGLang's function returns. So before each pass the count of live rows is written
on the stream that the pass will run on: by value, so that the next pass may be prepared while this one
runs (overlap). Behind each pass a mark is put on the same stream; it is looked at where SGLang has
waited for the pass's tokens anyway, and before it hands them out.

Passes that SGLang makes up for warming up and capturing do not come by ModelRunner.forward: they are
given all their rows here. What is captured reads the record of its replay.
"""

import time

import torch

from xpool import ops, rank as ranks
from xpool.sglang import failure, patch

_RUNNER = "sglang.srt.model_executor.model_runner"
_DECODE = "sglang.srt.model_executor.cuda_graph_runner"
_PREFILL = "sglang.srt.model_executor.piecewise_cuda_graph_runner"
_SCHEDULER = "sglang.srt.managers.scheduler"

_mark = None  # of the last pass, and its stream, until the result takes it


def kind_of(batch):
    """The kind of `batch`. Under data parallel attention all ranks go through a step together, one
    of them idle perhaps: they say the same, what the step is as a whole."""
    if batch.global_num_tokens_cpu is not None:
        return ranks.PREFILL if batch.is_extend_in_batch else ranks.DECODE
    if batch.forward_mode.is_mixed():
        return ranks.MIXED
    return ranks.DECODE if batch.forward_mode.is_decode_or_idle() else ranks.PREFILL


def _stream(rank):
    return torch.cuda.current_stream(rank.device).cuda_stream


def _on_gpu():
    """The Instance Rank of this process if it is on a GPU, else None."""
    rank = ops.attached()
    return None if rank is None or rank.device is None else rank


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


def _run_by_deadline(original, scheduler, batch, *arguments, **options):
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


@failure.fatal
def _begin(rank, batch):
    counts = batch.global_num_tokens_cpu if rank.dp_size > 1 else None
    if counts is not None:
        rows = counts[rank.dp_rank]
    else:
        rows = 0 if batch.input_ids is None else batch.input_ids.shape[0]
    rank.begin_step(kind_of(batch), rows=rows, stream=_stream(rank), dp_rows=counts, deadline_ns=_deadline_ns)


@failure.fatal
def _put_mark(rank):
    global _mark
    stream = torch.cuda.current_stream(rank.device)
    _mark = rank.mark(stream.cuda_stream), stream


def _forward(original, runner, batch, *arguments, **options):
    rank = ops.attached()
    if rank is None:
        return original(runner, batch, *arguments, **options)
    if rank.device is None:
        rank.begin_step(kind_of(batch), deadline_ns=_deadline_ns)
        return original(runner, batch, *arguments, **options)
    _begin(rank, batch)
    output = original(runner, batch, *arguments, **options)
    _put_mark(rank)
    return output


# --- how a pass ended -----------------------------------------------------------------------------------


def _run_batch(original, scheduler, *arguments, **options):
    global _mark
    _mark = None
    result = original(scheduler, *arguments, **options)
    if _mark is not None:
        result.xpool_mark, _mark = _mark, None
    return result


@failure.fatal
def _look(rank, result):
    mark, stream = result.xpool_mark
    done = getattr(result, "copy_done", None)
    # Without overlap SGLang waits for the tokens a moment later.
    (stream if done is None else done).synchronize()
    rank.look(mark)


def _process(original, scheduler, batch, result, *arguments, **options):
    rank = _on_gpu()
    if rank is not None and getattr(result, "xpool_mark", None) is not None:
        _look(rank, result)
    return original(scheduler, batch, result, *arguments, **options)


# --- warming up and capturing ---------------------------------------------------------------------------


@failure.fatal
def _all_rows(kind, execution, rows):
    rank = _on_gpu()
    if rank is not None:
        counts = [rows] * rank.dp_size if rank.dp_size > 1 else None
        rank.begin_step(kind, execution, rows=rows, stream=_stream(rank), dp_rows=counts)


def _capture_decode(original, graphs, bs, *arguments, **options):
    _all_rows(ranks.DECODE, ranks.DECODE_GRAPH, bs * graphs.num_tokens_per_bs)
    return original(graphs, bs, *arguments, **options)


def _capture_prefill(original, graphs, num_tokens):
    _all_rows(ranks.PREFILL, ranks.PREFILL_GRAPH, num_tokens)
    return original(graphs, num_tokens)


def _dummy_run(original, runner, batch_size, *arguments, **options):
    _all_rows(ranks.DECODE, ranks.EAGER, batch_size)
    return original(runner, batch_size, *arguments, **options)


def hook():
    patch.around(_RUNNER, "ModelRunner.forward", _forward)
    patch.around(_RUNNER, "ModelRunner._dummy_run", _dummy_run)
    patch.around(_DECODE, "CudaGraphRunner.capture_one_batch_size", _capture_decode)
    patch.around(_PREFILL, "PiecewiseCudaGraphRunner.warmup_compile", _capture_prefill)
    patch.around(_PREFILL, "PiecewiseCudaGraphRunner.capture_one_batch_size", _capture_prefill)
    patch.around(_SCHEDULER, "Scheduler._add_request_to_queue", _queued)
    patch.around(_SCHEDULER, "Scheduler.run_batch", _run_batch)
    patch.around(_SCHEDULER, "Scheduler.run_batch", _run_by_deadline)
    patch.around(_SCHEDULER, "Scheduler.process_batch_result", _process)
