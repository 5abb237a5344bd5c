# SPDX-License-Identifier: MIT
"""The Instance Rank's life along the scheduler's.

    before the model is built   open: registers with the daemon, so that a missing one is found early
    after the weights are read  verify what was built, wait until the FFN side can execute
    when the scheduler is up    serving: SGLang opens its HTTP door only after all ranks got here

It ends with the process: SGLang kills its schedulers, and the daemon takes the leases back.
"""

import logging

import torch

from xpool import ops, rank as ranks
from xpool.native import XpoolError
from xpool.sglang import failure, ffn, kv, options, patch, release, weights

log = logging.getLogger("xpool")

_DTYPES = {torch.float32: ranks.F32, torch.float16: ranks.F16, torch.bfloat16: ranks.BF16}
_ANY_HOST = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}

_deployment = None


def _ended(kind, seconds, text):
    if kind == ranks.END_DRAIN:
        log.warning("ordered end: open requests have %s s (%s)", seconds, text)
        failure.drain()
    else:
        failure.end(text)


def _unanswered(status, text):
    failure.end(f"an FFN call failed: {text}")


@failure.fatal
def _open(runner):
    global _deployment
    found = options.deployment(runner.server_args)
    if runner.is_draft_worker:
        raise XpoolError("a draft model cannot be served")
    model = runner.model_config
    if model.dtype not in _DTYPES:
        raise XpoolError(f"--dtype {model.dtype} is not supported: float32, float16 or bfloat16")
    workload = ranks.Workload(
        engine=f"sglang {release.found()}",
        checkpoint=runner.server_args.model_path,
        hidden=model.hidden_size,
        layers=model.num_hidden_layers,
        attention_tp=found.attention_tp,
        attention_dp=found.attention_dp,
        decode_rows=runner.server_args.max_running_requests // found.attention_dp,
        prefill_rows=runner.server_args.chunked_prefill_size,
        dtype=_DTYPES[model.dtype],
    )
    ffn.replace(found.info.architecture)
    device = runner.gpu_id if found.info.device.startswith("cuda:") else None
    rank = ranks.Rank(found.config, found.model_id, runner.tp_rank, workload, _ended, device)
    ops.attach(rank, _unanswered)
    _deployment = found
    log.info("model %s, rank %d: admitted by the daemon", found.model_id, runner.tp_rank)
    return rank


@failure.fatal
def _ready(runner, rank, counts):
    patch.check()
    info = _deployment.info
    ffn.verify(runner.model, info.architecture, info.layers)
    log.info(
        "%d FFN modules replaced; %d tensors read, %d FFN tensors left to the FfnAgents",
        info.layers,
        counts.read,
        counts.skipped,
    )
    rank.wait_executable()


def _load_model(original, runner):
    rank = _open(runner)
    model_id, config = _deployment.model_id, _deployment.config
    try:
        with weights.without_ffn(lambda name: config.is_ffn_tensor(model_id, name)) as counts:
            original(runner)
    except XpoolError as error:
        failure.end(str(error))
    _ready(runner, rank, counts)


def _weight_bytes(model):
    return sum(p.numel() * p.element_size() for p in model.parameters())


def slo():
    """Milliseconds that the configuration promises: to the first token, between tokens; 0: nothing."""
    return _deployment.info.slo_ttft_ms, _deployment.info.slo_tbt_ms


def _kv_bytes(pool):
    mapped = kv.mapped_bytes()
    if mapped is not None:
        return mapped
    size = pool.get_kv_size_bytes()
    return int(sum(size)) if isinstance(size, (tuple, list)) else int(size)


@failure.fatal
def _serving(scheduler):
    arguments = scheduler.server_args
    runner = scheduler.tp_worker.model_runner
    plan = _deployment.info
    if scheduler.max_running_requests > plan.decode_rows:
        raise XpoolError(
            f"SGLang runs up to {scheduler.max_running_requests} requests, the plan has room for"
            f" {plan.decode_rows}: pass --max-running-requests"
        )
    if scheduler.max_total_num_tokens > plan.kv_tokens:
        raise XpoolError(
            f"SGLang's KV Cache holds {scheduler.max_total_num_tokens} tokens, the plan admitted"
            f" {plan.kv_tokens}: pass --max-total-tokens {plan.kv_tokens}"
        )
    ops.attached().serving(
        host=_ANY_HOST.get(arguments.host, arguments.host),
        port=arguments.port,
        weight_bytes=_weight_bytes(runner.model),
        kv_bytes=_kv_bytes(runner.token_to_kv_pool),
        kv_tokens=scheduler.max_total_num_tokens,
        max_context=scheduler.model_config.context_len,
    )


def _init_info(original, scheduler):
    _serving(scheduler)
    rank = ops.attached()
    if rank.device is not None:
        log.info("%d FFN calls are in captured graphs", rank.state().captured_calls)
    return original(scheduler)


def hook():
    patch.around("sglang.srt.model_executor.model_runner", "ModelRunner.load_model", _load_model)
    patch.around("sglang.srt.managers.scheduler", "Scheduler.get_init_info", _init_info)
