# SPDX-License-Identifier: MIT
"""SGLang's server arguments: which model they are for, what the plan allows, what is refused.

Checked in the main process before anything is spawned, and again by every scheduler.
"""

import os
from collections import namedtuple

from xpool.config import XpoolConfig
from xpool.native import XpoolError
from xpool.sglang import adapters, interrupt, patch, stop, tokens

# (argument, allowed values, why another one is refused)
_FFN = "the FFN is computed by the FfnAgents"
_REFUSED = (
    ("model_impl", ("auto", "sglang"), "the FFN is replaced in SGLang's own model classes"),
    ("load_format", ("auto", "safetensors", "dummy"), "FFN tensors are left out when safetensors are read"),
    ("weight_loader_disable_mmap", (False,), "it reads whole files, FFN tensors included"),
    ("weight_loader_prefetch_checkpoints", (False,), "it reads whole files, FFN tensors included"),
    ("custom_weight_loader", (None, []), "FFN tensors are left out when safetensors are read"),
    ("delete_ckpt_after_loading", (False,), "the FfnAgents read the same checkpoint"),
    ("json_model_override_args", ("{}",), "the plan comes from the checkpoint's config.json as it is"),
    ("quantization", (None,), "the checkpoint's weights are served as they are"),
    ("torchao_config", ("", None), "the checkpoint's weights are served as they are"),
    ("pp_size", (1,), "layers cannot be split over pipeline stages"),
    ("nnodes", (1,), "an Instance lives on one host"),
    ("use_ray", (False,), "an Instance lives on one host"),
    ("attn_cp_size", (1,), "context parallel attention is not supported"),
    ("ep_size", (1,), _FFN),
    ("moe_dp_size", (1,), _FFN),
    ("moe_a2a_backend", ("none",), _FFN),
    ("moe_dense_tp_size", (None,), _FFN),
    ("ep_num_redundant_experts", (0,), _FFN),
    ("enable_eplb", (False,), _FFN),
    ("elastic_ep_backend", (None,), _FFN),
    ("kt_weight_path", (None,), _FFN),
    ("cpu_offload_gb", (0,), _FFN),
    ("offload_group_size", (-1, 0), _FFN),
    ("enable_lora", (None, False), "an adapter would need the FFN's weights"),
    ("lora_paths", (None, []), "an adapter would need the FFN's weights"),
    ("speculative_algorithm", (None,), "speculative decoding is not supported"),
    ("dllm_algorithm", (None,), "diffusion decoding is not supported"),
    ("enable_mixed_chunk", (False,), "the plan has room for a prefill step or a decode step, not their sum"),
    ("enable_two_batch_overlap", (False,), "it cuts the FFN of a layer into pieces"),
    ("enable_single_batch_overlap", (False,), "it cuts the FFN of a layer into pieces"),
    ("enable_pdmux", (False,), "FFN calls come from one stream"),
    ("enable_attn_tp_input_scattered", (False,), "every rank hands the same rows to the FFN"),
    ("enable_torch_compile", (False,), "it is not tested with the plugin"),
    ("disaggregation_mode", ("null",), "prefill and decode stay in one Instance"),
    ("grpc_mode", (False,), "daemon and gateway speak HTTP with it"),
    ("ssl_certfile", (None,), "daemon and gateway speak plain HTTP with it"),
    ("encoder_only", (False,), "only causal language models are supported"),
    ("rl_on_policy_target", (None,), "the FFN's arithmetic is fixed"),
)

Deployment = namedtuple("Deployment", "config model_id info attention_tp attention_dp")


def refuse_unsupported(arguments):
    for name, allowed, reason in _REFUSED:
        value = getattr(arguments, name)
        if value not in allowed:
            flag = "--" + name.replace("_", "-")
            raise XpoolError(f"{flag} {value} cannot be used with the xpool plugin: {reason}")


def model_id_of(arguments, config):
    """The configured model that these arguments serve."""
    known = config.model_ids()
    named = os.environ.get("XPOOL_MODEL_ID")
    if named:
        if named not in known:
            raise XpoolError(
                f"XPOOL_MODEL_ID={named} is not a configured model (configured: {', '.join(known)})"
            )
        return named
    if arguments.served_model_name in known:
        return arguments.served_model_name
    path = os.path.realpath(arguments.model_path)
    same = [name for name in known if os.path.realpath(config.model_path_of(name)) == path]
    if len(same) == 1:
        return same[0]
    problem = "several configured models have" if same else "no configured model has"
    raise XpoolError(
        f"{problem} the path {arguments.model_path} (configured: {', '.join(known)});"
        " pass --served-model-name or set XPOOL_MODEL_ID to say which one this is"
    )


def _most(flag, value, limit, setting):
    if value > limit:
        raise XpoolError(
            f"{flag} gives {value} rows a step, the plan has room for {limit}:"
            f" lower it, or raise {setting} of the model and restart the daemon"
        )


def deployment(arguments):
    """What these arguments serve; raises XpoolError when the plan does not fit them."""
    refuse_unsupported(arguments)
    if not os.path.isdir(arguments.model_path):
        raise XpoolError(f"--model-path {arguments.model_path} is not a folder on this machine")
    config = XpoolConfig()
    model_id = model_id_of(arguments, config)
    info = config.model_info(model_id)
    adapter = adapters.of(info.architecture)
    if info.engine != "sglang":
        raise XpoolError(
            f'model {model_id} has engine = "{info.engine}" in the configuration, not "sglang"'
        )

    kind = info.device.partition(":")[0]
    if arguments.device != kind:
        raise XpoolError(
            f"--device {arguments.device} cannot be used with the xpool plugin: the plan puts"
            f" {model_id} on {info.device}"
        )
    if arguments.dp_size > 1 and not arguments.enable_dp_attention:
        raise XpoolError(
            "--dp-size without --enable-dp-attention makes whole copies of a model:"
            " configure them as models of their own"
        )
    dp = arguments.dp_size if arguments.enable_dp_attention else 1
    tp = arguments.tp_size // dp
    if (tp, dp) != (info.attention_tp, info.attention_dp):
        raise XpoolError(
            f"--tp-size and --dp-size give attention (TP, DP) = ({tp}, {dp}), the plan of {model_id}"
            f" has ({info.attention_tp}, {info.attention_dp})"
        )
    if dp > 1 and not adapter.attention_dp:
        raise XpoolError(f"data parallel attention is supported for MoE models, not for {info.architecture}")

    if arguments.max_running_requests is None:
        arguments.max_running_requests = info.decode_rows * dp
    if arguments.device == "cuda":
        from xpool.sglang import cuda

        cuda.check_arguments(arguments, info, dp)
    if os.environ.get("XPOOL_TEST_OVERLAP") and arguments.device == "cpu":
        # `xpool serve` turns it off there, where it only costs a step a request.
        arguments.disable_overlap_schedule = False
    # SGLang has divided the chunk by the DP size already, the number of requests not yet.
    _most("--max-running-requests", arguments.max_running_requests // dp, info.decode_rows, "decode_rows")
    chunk = arguments.chunked_prefill_size
    if chunk is None or chunk <= 0:
        raise XpoolError(
            f"chunked prefill must be on: pass --chunked-prefill-size {info.prefill_rows * dp} or less"
        )
    _most("--chunked-prefill-size", chunk, info.prefill_rows, "prefill_rows")
    return Deployment(config, model_id, info, tp, dp)


def _check(original, arguments):
    try:
        deployment(arguments)
    except XpoolError as error:
        # Nothing is spawned yet: an ordinary end of the program, with the reason.
        raise SystemExit(f"xpool: {error}") from None
    stop.hook()
    interrupt.hook()  # SGLang's engine is imported by now; no sooner, see plugin.py
    tokens.hook()
    return original(arguments)


def hook():
    patch.around("sglang.srt.server_args", "ServerArgs.check_server_args", _check)
