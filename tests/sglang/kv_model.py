# SPDX-License-Identifier: MIT
"""A KV range that shows who touches what was given away, and pools over it. For tests without a server.

XPOOL_KV_TEST_DEVICE says where: "cpu"; "cuda", in a GPU's memory by the driver's calls, as libxpool's range is,
where a touch of what was given away is a fault; or "fake", the same in the host's memory by the driver without
a GPU (LD_LIBRARY_PATH=BUILD/tests/fake-cuda).
"""

import ctypes
import os
import pathlib
import sys
import types

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
BUILD = pathlib.Path(os.environ.get("XPOOL_BUILD", ROOT / "build"))
sys.path.insert(0, str(BUILD / "python"))
WHERE = os.environ.get("XPOOL_KV_TEST_DEVICE", "cpu")
DEVICE = "cuda" if WHERE == "cuda" else "cpu"
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
if DEVICE == "cpu":
    os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

import torch  # noqa: E402

from xpool import kv as kvs  # noqa: E402
from xpool.sglang import kv_pool  # noqa: E402

LAYERS, HEADS, DIM, V_DIM = 3, 2, 4, 3
BUNDLE = 16
SLOTS = 16 * BUNDLE
FORBIDDEN = 0xA5
ROW = (DIM + V_DIM) * HEADS * 4


class Range:
    """Stands for xpool.kv.Kv: memory that shows who touches what was given away. With `padding` the pools are
    made as over a GPU's range, in memory of the CPU."""

    elastic = leader = True
    reserved_tokens, bundle_tokens = SLOTS, BUNDLE
    padding = 0  # bytes behind each token

    def __init__(self, mapped, token_bytes=LAYERS * ROW):
        self.token_bytes = token_bytes + self.padding
        self.device = 0 if self.padding else -1
        self.has_captured = False
        self.busy = 0  # so many releases find the device at work
        self.buffer = bytearray(SLOTS * self.token_bytes)
        self.bytes = torch.frombuffer(self.buffer, dtype=torch.uint8).view(SLOTS, self.token_bytes)
        self.bytes[mapped:] = FORBIDDEN
        self.address = self.bytes.data_ptr()
        self.mapped = self.ceiling = self.goal = mapped
        self.admit = 2**32 - 1
        self.commands, self.reports, self.released, self.was_refused = [], [], [], False

    def memory(self, size):
        return memoryview(self.buffer)[:size]

    def info(self):
        return types.SimpleNamespace(
            ceiling_tokens=self.ceiling, mapped_tokens=self.mapped, admit_tokens=self.admit, goal_tokens=self.goal
        )

    def poll(self, step, least):
        if not self.commands:
            return None
        command = self.commands.pop(0)
        self.goal = command.tokens
        if command.kind == kvs.GROW and command.tokens > self.mapped:
            self.grow(command.tokens)
        if command.tokens < self.mapped:
            command = command._replace(kind=kvs.SHRINK)
        return command

    def grow(self, slots):
        self.untouched()
        self.bytes[self.mapped : slots] = 0
        self.mapped = slots

    def captured(self):
        self.has_captured = True

    def release(self, slots, stream=0):
        self.untouched()
        self.released.append(slots)
        if self.busy:
            self.busy -= 1
            return False
        slots = -(-slots // BUNDLE) * BUNDLE
        assert slots <= self.mapped
        self.bytes[slots:] = FORBIDDEN
        self.mapped = slots
        return True

    def report(self, **values):
        self.reports.append(values)

    def refused(self):
        return self.was_refused

    def untouched(self):
        assert bool((self.bytes[self.mapped :] == FORBIDDEN).all()), "memory was touched that is given away"


class _Location(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int32), ("id", ctypes.c_int32)]


class _Properties(ctypes.Structure):
    _fields_ = [
        ("type", ctypes.c_int32),
        ("handle_types", ctypes.c_int32),
        ("location", _Location),
        ("windows_only", ctypes.c_void_p),
        ("flags", ctypes.c_uint8 * 8),
    ]


class _Access(ctypes.Structure):
    _fields_ = [("location", _Location), ("flags", ctypes.c_int32)]


_NONE = ctypes.c_uint64(0)


class Vmm:
    """`chunks` pieces of addresses, of which a prefix has memory."""

    CHUNK = 2 << 20

    def __init__(self, chunks, chunk_bytes=CHUNK):
        self.chunk_bytes = chunk_bytes
        self.lib = ctypes.CDLL("libcuda.so.1")
        device, context, address = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
        self.call("cuInit", 0)
        self.call("cuDeviceGet", ctypes.byref(device), 0)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self.call("cuCtxSetCurrent", context)
        size = ctypes.c_size_t(chunks * chunk_bytes)
        self.call("cuMemAddressReserve", ctypes.byref(address), size, ctypes.c_size_t(0), _NONE, _NONE)
        self.address, self.location = address.value, _Location(1, device.value)
        self.handles = []

    def call(self, name, *arguments):
        code = getattr(self.lib, name)(*arguments)
        if code:
            raise RuntimeError(f"{name} says {code}")

    def resize(self, chunks):
        size = ctypes.c_size_t(self.chunk_bytes)
        while len(self.handles) > chunks:
            self.call("cuMemUnmap", self._at(len(self.handles) - 1), size)
            self.call("cuMemRelease", self.handles.pop())
        before = len(self.handles)
        while len(self.handles) < chunks:
            handle, properties = ctypes.c_uint64(), _Properties(1, 1, self.location)
            self.call("cuMemCreate", ctypes.byref(handle), size, ctypes.byref(properties), _NONE)
            self.call("cuMemMap", self._at(len(self.handles)), size, ctypes.c_size_t(0), handle, _NONE)
            self.handles.append(handle)
        if chunks > before:
            bytes_in_all = ctypes.c_size_t((chunks - before) * self.chunk_bytes)
            access = _Access(self.location, 3)
            self.call("cuMemSetAccess", self._at(before), bytes_in_all, ctypes.byref(access), ctypes.c_size_t(1))
            self.call("cuMemsetD8Async", self._at(before), ctypes.c_ubyte(0), bytes_in_all, None)
            self.call("cuCtxSynchronize")

    def _at(self, chunk):
        return ctypes.c_uint64(self.address + chunk * self.chunk_bytes)


class GpuRange(Range):
    """The same in memory that is really taken away."""

    def __init__(self, mapped, token_bytes=LAYERS * ROW):
        # A bundle is a chunk.
        self.token_bytes = Vmm.CHUNK // BUNDLE
        self.device, self.has_captured, self.busy = 0, False, 0
        self.vmm = Vmm(SLOTS // BUNDLE)
        self.vmm.resize(mapped // BUNDLE)
        self.address = self.vmm.address
        self.mapped = self.ceiling = self.goal = mapped
        self.admit = 2**32 - 1
        self.commands, self.reports, self.released, self.was_refused = [], [], [], False

    def memory(self, size):
        raise AssertionError("a GPU's memory is no buffer")

    def _resize(self, slots):
        if DEVICE == "cuda":
            torch.cuda.synchronize()
        self.vmm.resize(slots // BUNDLE)
        self.mapped = slots

    def grow(self, slots):
        self._resize(slots)

    def release(self, slots, stream=0):
        self._resize(-(-slots // BUNDLE) * BUNDLE)
        return True

    def untouched(self):
        pass  # who touches it ends


MadeRange = Range if WHERE == "cpu" else GpuRange


def make_pool(kv, kind="mha", size=SLOTS - 1):
    common = dict(
        size=size, page_size=1, dtype=torch.float32, layer_num=LAYERS, device=DEVICE, enable_memory_saver=False
    )
    cls = kv_pool.MhaPool if kind == "mha" else kv_pool.MlaPool
    cls.range = kv
    try:
        if kind == "mha":
            pool = cls(head_num=HEADS, head_dim=DIM, v_head_dim=V_DIM, **common)
        else:
            pool = cls(kv_lora_rank=9, qk_rope_head_dim=5, **common)
    finally:
        cls.range = None
    pool.range = kv  # the class forgets it, this pool does not
    return pool
