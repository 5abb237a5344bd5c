# SPDX-License-Identifier: MIT
"""Tensors over memory that torch does not own: strided, without a look at the memory itself, which may be
missing in part. Each tensor is a storage of its own, so nobody takes two layers for views of one tensor.

By DLPack, since only there the device and the strides are said and not asked of the memory. What torch
reads stays for the life of the process: there are a few hundred views, made once.
"""

import ctypes

import torch
from torch.utils import dlpack

_CPU, _CUDA = 1, 2
_CODES = {torch.uint8: 1, torch.int64: 0, torch.bfloat16: 4}  # floating point otherwise: 2
_NAME = b"dltensor"


class _Tensor(ctypes.Structure):
    _fields_ = [
        ("data", ctypes.c_void_p),
        ("device_type", ctypes.c_int32),
        ("device_id", ctypes.c_int32),
        ("dimensions", ctypes.c_int32),
        ("code", ctypes.c_uint8),
        ("bits", ctypes.c_uint8),
        ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)),
        ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("offset", ctypes.c_uint64),
    ]


class _Managed(ctypes.Structure):
    """Without a function that frees it."""

    _fields_ = [("tensor", _Tensor), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


_kept = []
_capsule = ctypes.pythonapi.PyCapsule_New
_capsule.restype = ctypes.py_object
_capsule.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]


def strided(address, shape, strides, dtype, device):
    """The tensor at `address`; strides are counted in elements. `device`: a torch.device, whose memory it
    is; the memory must outlive every use."""
    numbers = ctypes.c_int64 * len(shape)
    managed = _Managed()
    managed.tensor = _Tensor(
        address,
        _CUDA if device.type == "cuda" else _CPU,
        device.index or 0,
        len(shape),
        _CODES.get(dtype, 2),
        dtype.itemsize * 8,
        1,
        numbers(*shape),
        numbers(*strides),
        0,
    )
    _kept.append(managed)
    return dlpack.from_dlpack(_capsule(ctypes.addressof(managed), _NAME, None))
