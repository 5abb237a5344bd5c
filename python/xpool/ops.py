# SPDX-License-Identifier: MIT
"""The torch operator `xpool::ffn_shim`: rows of hidden states in, the layer's FFN output out.

    xpool.ops.ffn_shim(hidden_states, layer)   # rows x hidden, f32, f16 or bf16

It allocates the output and calls libxpool; it computes nothing. `attach` says which Instance Rank
answers. The fake implementation lets torch trace the operator without a rank.

On a CUDA device (bf16 or f16) the call is queued on the current stream and returns at once, also while
that stream captures a graph. Which rows count when a graph is replayed is what the rank's `live` wrote
last before it, on the same stream.
"""

import torch

from xpool import rank as _ranks

_DTYPES = {torch.float32: _ranks.F32, torch.float16: _ranks.F16, torch.bfloat16: _ranks.BF16}

_rank = None
_failed = None


def attach(rank, failed=None):
    """Makes `rank` the one that answers in this process (None: nobody). `failed(status, text)` is
    called when it cannot, before the exception is raised."""
    global _rank, _failed
    _rank, _failed = rank, failed


def attached():
    """The Instance Rank that answers in this process, or None."""
    return _rank


def _refuse(text):
    if _failed is not None:
        _failed(_ranks.INVALID, text)
    raise RuntimeError(text)


def _checked(hidden_states, device):
    """The rows as the C call takes them; `device`: where the tensor is, as Rank.device says it."""
    if _rank is None:
        raise RuntimeError("xpool::ffn_shim: no Instance Rank is attached in this process")
    own = getattr(_rank, "device", None)
    if device != own:
        _refuse(
            f"xpool::ffn_shim: the tensor is on {hidden_states.device}, the Instance Rank on"
            f" {'the CPU' if own is None else f'cuda:{own}'}"
        )
    # The C call knows addresses and row counts only.
    if hidden_states.dim() != 2 or hidden_states.shape[1] != _rank.hidden:
        _refuse(
            f"xpool::ffn_shim takes rows x {_rank.hidden}, not a tensor of shape"
            f" {tuple(hidden_states.shape)}"
        )
    if hidden_states.dtype not in _DTYPES:
        _refuse(f"xpool::ffn_shim takes float32, float16 or bfloat16, not {hidden_states.dtype}")
    return hidden_states.contiguous()


def _answered(status, output):
    if status != _ranks.OK:
        error = _rank.error(status)
        if _failed is not None:
            _failed(status, str(error))
        raise error
    return output


def _ffn_shim(hidden_states, layer):
    rows_in = _checked(hidden_states, None)
    output = torch.empty_like(rows_in)
    status = _rank.ffn(
        layer,
        rows_in.shape[0],
        _DTYPES[rows_in.dtype],
        rows_in.data_ptr(),
        output.data_ptr(),
    )
    return _answered(status, output)


def _ffn_shim_cuda(hidden_states, layer):
    rows_in = _checked(hidden_states, hidden_states.device.index)
    output = torch.empty_like(rows_in)
    status = _rank.queue_ffn(
        layer,
        rows_in.shape[0],
        _DTYPES[rows_in.dtype],
        rows_in.data_ptr(),
        output.data_ptr(),
        torch.cuda.current_stream(rows_in.device).cuda_stream,
    )
    return _answered(status, output)


_library = torch.library.Library("xpool", "DEF")
_library.define(
    "ffn_shim(Tensor hidden_states, int layer) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,)
)
_library.impl("ffn_shim", _ffn_shim, "CPU")
_library.impl("ffn_shim", _ffn_shim_cuda, "CUDA")


@torch.library.register_fake("xpool::ffn_shim", lib=_library)
def _ffn_shim_fake(hidden_states, layer):
    return torch.empty_like(hidden_states, memory_format=torch.contiguous_format)


ffn_shim = torch.ops.xpool.ffn_shim.default
