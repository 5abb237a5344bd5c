# SPDX-License-Identifier: MIT
"""A KV range that shows who touches what was given away, and pools over it. For tests without a server."""

import os
import pathlib
import sys
import types

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
BUILD = pathlib.Path(os.environ.get("XPOOL_BUILD", ROOT / "build"))
sys.path.insert(0, str(BUILD / "python"))
os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
os.environ["CUDA_VISIBLE_DEVICES"] = ""

import torch  # noqa: E402

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
        self.mapped = self.ceiling = mapped
        self.admit = 2**32 - 1
        self.commands, self.reports, self.was_refused = [], [], False

    def memory(self, size):
        return memoryview(self.buffer)[:size]

    def info(self):
        return types.SimpleNamespace(
            ceiling_tokens=self.ceiling, mapped_tokens=self.mapped, admit_tokens=self.admit
        )

    def poll(self, step, least):
        return self.commands.pop(0) if self.commands else None

    def grow(self, slots):
        self.untouched()
        self.bytes[self.mapped : slots] = 0
        self.mapped = slots

    def captured(self):
        self.has_captured = True

    def release(self, slots, stream=0):
        self.untouched()
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


def make_pool(kv, kind="mha", size=SLOTS - 1):
    common = dict(
        size=size, page_size=1, dtype=torch.float32, layer_num=LAYERS, device="cpu", enable_memory_saver=False
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
