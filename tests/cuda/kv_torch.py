#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""SGLang's KV pools over a range of a GPU of which only a prefix has memory, without a server: the random
histories of tests/sglang/test_kv_units.py, then the geometries of Qwen3-30B-A3B and DeepSeek-V2-Lite with
SGLang's own stores and Triton attention, beside SGLang's own contiguous pools: every answer has to be the same
bit by bit, eagerly and in a graph that was captured before the range shrank and grew.

    tests/cuda/kv_torch.py --build BUILD [--site FOLDER] [--out FOLDER] [--part histories,mha,mla] [--limit SECONDS]

Needs torch and SGLang on a machine with a GPU (--site: a folder with SGLang, as sglang_bundle makes it); rows go
to FOLDER/kv_torch_cuda.json. With --rehearse it runs
on a CPU: memory by the driver without a GPU, small sizes, sums in place of attention, no graphs, no times.
"""

import argparse
import datetime
import json
import os
import pathlib
import signal
import subprocess
import sys
import types

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path[:0] = [str(ROOT / "tests" / "sglang"), str(ROOT / "benches")]


def parse():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=pathlib.Path, required=True)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path(os.environ.get("OUT", ".")))
    parser.add_argument("--site", type=pathlib.Path)
    parser.add_argument("--part", default="histories,mha,mla")
    parser.add_argument("--limit", type=int, default=240)
    parser.add_argument("--rehearse", action="store_true")
    return parser.parse_args()


ARGUMENTS = parse()
REHEARSED = ARGUMENTS.rehearse
os.environ["XPOOL_BUILD"] = str(ARGUMENTS.build.resolve())
os.environ["XPOOL_KV_TEST_DEVICE"] = "fake" if REHEARSED else "cuda"
if ARGUMENTS.site and "XPOOL_KV_TORCH_SITE" not in os.environ:
    os.environ.update(
        XPOOL_KV_TORCH_SITE="1", PYTHONPATH=str(ARGUMENTS.site), SGLANG_IS_FLASHINFER_AVAILABLE="false",
        SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK="1", SGLANG_ENABLE_JIT_DEEPGEMM="0", SGLANG_TF_EXIST_OK="1",
        LD_LIBRARY_PATH=f"{ARGUMENTS.site}/lib:" + os.environ.get("LD_LIBRARY_PATH", ""),
    )  # fmt: skip
    os.execv(sys.executable, [sys.executable, *sys.argv])
signal.alarm(ARGUMENTS.limit)
if REHEARSED:
    fake = str(ARGUMENTS.build.resolve() / "tests" / "fake-cuda")
    if fake not in os.environ.get("LD_LIBRARY_PATH", ""):
        os.environ["LD_LIBRARY_PATH"] = fake
        os.execv(sys.executable, [sys.executable, *sys.argv])

import kv_model  # noqa: E402
import results  # noqa: E402
import torch  # noqa: E402
from sglang.srt.layers.attention.triton_ops.decode_attention import decode_attention_fwd  # noqa: E402
from sglang.srt.layers.attention.triton_ops.extend_attention import extend_attention_fwd  # noqa: E402
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool  # noqa: E402

from xpool.sglang import kv_pool  # noqa: E402

DEVICE = torch.device(kv_model.DEVICE, 0) if not REHEARSED else torch.device("cpu")
SPLITS = 8
ROWS = []


def row(metric, value, unit, target=None, note="", floor=None):
    one = dict(metric=metric, value=round(value, 4), unit=unit, floor=floor, peer=None, target=target, note=note)
    ROWS.append(one)
    print(json.dumps(one), flush=True)
    gpu = "rehearsal" if REHEARSED else torch.cuda.get_device_name()
    data = {
        "bench": "kv_torch_cuda",
        "machine": f"{gpu}; {results.machine()}",
        "date": datetime.date.today().isoformat(),
        "commit": results.commit(),
        "command": results.command(),
        "rows": ROWS,
    }
    (ARGUMENTS.out / "kv_torch_cuda.json").write_text(json.dumps(data, indent=1) + "\n")


class Range:
    """What a pool asks of xpool.kv.Kv."""

    device = 0

    def __init__(self, token_bytes, bundle_tokens, bundles):
        self.token_bytes, self.bundle_tokens = token_bytes, bundle_tokens
        self.reserved_tokens = bundle_tokens * bundles
        self.vmm = kv_model.Vmm(bundles, bundle_tokens * token_bytes)
        self.address = self.vmm.address

    def resize(self, bundles):
        if not REHEARSED:
            torch.cuda.synchronize()
        self.vmm.resize(bundles)
        self.mapped_tokens = bundles * self.bundle_tokens


class Mha:
    """Qwen3-30B-A3B: 48 layers, 4 KV heads and 32 query heads of 128."""

    name = "mha"
    layers, heads, groups, dim = (48, 4, 8, 128) if not REHEARSED else (2, 2, 2, 16)
    value = key = dim
    token_bytes = layers * heads * 2 * dim * 2
    sizes = (256, 68, 100)  # bundles: reserved, mapped at first, later

    def pool(self, kind, size):
        return kind(
            size=size, page_size=1, dtype=torch.bfloat16, head_num=self.heads, head_dim=self.dim,
            layer_num=self.layers, device=DEVICE.type, enable_memory_saver=False,
        )  # fmt: skip

    def rows(self, count, seed):
        torch.manual_seed(seed)
        shape = (2, count, self.heads, self.dim)
        return torch.randn(shape, device=DEVICE).to(torch.bfloat16).unbind(0)

    def store(self, pool, layer, slots, rows):
        pool.set_kv_buffer(layer, slots, *rows)


class Mla:
    """DeepSeek-V2-Lite: 27 layers, latents of 512 and 64, 16 query heads; tokens have padding."""

    name = "mla"
    layers, heads, groups = (27, 1, 16) if not REHEARSED else (2, 1, 4)
    value, rope = (512, 64) if not REHEARSED else (16, 16)
    key = value + rope
    token_bytes = layers * key * 2
    sizes = (16, 4, 8)

    def pool(self, kind, size):
        return kind(
            size=size, page_size=1, dtype=torch.bfloat16, kv_lora_rank=self.value, qk_rope_head_dim=self.rope,
            layer_num=self.layers, device=DEVICE.type, enable_memory_saver=False,
        )  # fmt: skip

    def rows(self, count, seed):
        torch.manual_seed(seed)
        both = torch.randn((count, 1, self.key), device=DEVICE).to(torch.bfloat16)
        return both[..., : self.value].contiguous(), both[..., self.value :].contiguous()

    def store(self, pool, layer, slots, rows):
        if REHEARSED:  # the store needs a GPU
            pool.set_kv_buffer(layer, slots, torch.cat(rows, -1), None)
        else:
            pool.set_mla_kv_buffer(layer, slots, *rows)


class Attention:
    """Decode and extend attention over `slots`, the tokens of some requests one after the other."""

    def __init__(self, shape, slots, lengths):
        self.shape, self.slots = shape, slots
        count = len(lengths)
        heads = shape.heads * shape.groups
        kind = dict(device=DEVICE, dtype=torch.float32)
        self.starts = torch.tensor([0, *lengths], device=DEVICE).cumsum(0).to(torch.int32)
        self.logits = torch.zeros((count, heads, SPLITS, shape.value), **kind)
        self.lse = torch.zeros((count, heads, SPLITS), **kind)
        self.splits = torch.full((count,), SPLITS, dtype=torch.int32, device=DEVICE)
        torch.manual_seed(5)
        self.query = torch.randn((count, heads, shape.key), device=DEVICE).to(torch.bfloat16)
        self.answer = torch.zeros((count, heads, shape.value), device=DEVICE, dtype=torch.bfloat16)

    def sums(self, pool, layer):
        for index, (begin, end) in enumerate(zip(self.starts, self.starts[1:], strict=False)):
            rows = self.slots[begin:end]
            key = pool.get_key_buffer(layer)[rows].sum((0, 1)).sum()
            self.answer[index] = pool.get_value_buffer(layer)[rows].sum((0, 1)) + key
        return self.answer

    def decode(self, pool, layer):
        if REHEARSED:
            return self.sums(pool, layer)
        decode_attention_fwd(
            self.query, pool.get_key_buffer(layer), pool.get_value_buffer(layer), self.answer, self.starts,
            self.slots, self.logits, self.lse, self.splits, SPLITS, self.shape.key**-0.5, 1.0, 1.0,
        )  # fmt: skip
        return self.answer

    def extend(self, pool, layer, rows):
        """A row more for each request, with what lies in `slots` before it."""
        if REHEARSED:
            return self.sums(pool, layer).clone()
        count = len(self.query)
        k = rows[0] if self.shape.name == "mha" else torch.cat(rows, -1)
        v = rows[1] if self.shape.name == "mha" else rows[0]
        answer = torch.zeros_like(self.answer)
        ends = torch.arange(count + 1, dtype=torch.int32, device=DEVICE)
        extend_attention_fwd(
            self.query, k[:count].contiguous(), v[:count].contiguous(), answer, pool.get_key_buffer(layer),
            pool.get_value_buffer(layer), ends, self.starts, self.slots, None, True, None, 1, 1.0, 1.0,
            self.shape.key**-0.5,
        )  # fmt: skip
        return answer


def time_us(call, rounds=20):
    if REHEARSED:
        return 0.0
    call()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    times = []
    for _ in range(rounds):
        begin.record()
        call()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return sorted(times)[rounds // 2]


def differing(a, b):
    return int((a.view(torch.int16) != b.view(torch.int16)).sum())


def compare(shape):
    stride = shape.token_bytes
    if REHEARSED:
        stride += 64 - stride % 64
    elif shape.name == "mla":
        stride = 31744  # as kv_token_stride() has it
    bundle_tokens = (2 << 20) // (stride & -stride)
    if REHEARSED:
        shape.sizes = (6, 3, 4)
    bundles, mapped, _ = shape.sizes
    kv = Range(stride, bundle_tokens, bundles)
    kv.resize(mapped)
    cls = kv_pool.MhaPool if shape.name == "mha" else kv_pool.MlaPool
    cls.range = kv
    pool = shape.pool(cls, kv.reserved_tokens - 1)
    plain = shape.pool(MHATokenToKVPool if shape.name == "mha" else MLATokenToKVPool, kv.reserved_tokens - 1)
    lengths = [1, 7, 300, 1024, 2048] if not REHEARSED else [1, 5, 20]
    count = sum(lengths)
    if count > kv.mapped_tokens - 1:
        raise RuntimeError(f"{kv.mapped_tokens} tokens have memory, the test wants {count}")
    torch.manual_seed(1)
    slots = (torch.randperm(kv.mapped_tokens - 1, device=DEVICE)[:count] + 1).to(torch.int64)
    slots[0] = kv.mapped_tokens - 1
    slots = slots.unique()[torch.randperm(len(slots.unique()), device=DEVICE)]
    lengths[-1] -= count - len(slots)
    wrong = bits = 0
    attention = Attention(shape, slots, lengths)
    layers = sorted({0, 1, shape.layers // 2, shape.layers - 1})
    for number in layers:
        layer, rows = types.SimpleNamespace(layer_id=number), shape.rows(len(slots), number)
        few = 300 if not REHEARSED else 3  # SGLang stores few rows by another kernel than many
        for part in (slice(0, few), slice(few, None)):
            for one in (pool, plain):
                shape.store(one, layer, slots[part].contiguous(), [r[part].contiguous() for r in rows])
    for number in layers:
        for buffer in ("get_key_buffer", "get_value_buffer"):
            ours, theirs = (getattr(one, buffer)(number)[slots] for one in (pool, plain))
            wrong, bits = wrong + differing(ours, theirs), bits + ours.numel()
        ours, theirs = attention.decode(pool, number).clone(), attention.decode(plain, number).clone()
        wrong, bits = wrong + differing(ours, theirs), bits + ours.numel()
        rows = shape.rows(16, 77)
        ours, theirs = attention.extend(pool, number, rows), attention.extend(plain, number, rows)
        wrong, bits = wrong + differing(ours, theirs), bits + ours.numel()
        if not ours.float().abs().sum() > 0:
            raise RuntimeError("attention computed nothing")
    row(f"kv.cuda.torch_{shape.name}_wrong", wrong, "elements", "0",
        f"of {bits}: rows stored by SGLang, decode and extend attention, against a contiguous pool")  # fmt: skip
    wrong += graph(shape, kv, pool, attention, layers)
    if not REHEARSED:
        speed(shape, kv, pool, plain, attention)
    cls.range = None
    return wrong


def graph(shape, kv, pool, attention, layers):
    """A step of some layers captured, stores and decode attention; replayed while the range has another size."""
    slots, lengths = attention.slots, len(attention.query)
    rows = [shape.rows(lengths, 900 + layer) for layer in layers]
    out = torch.zeros(lengths, dtype=torch.int64, device=DEVICE)
    answers = torch.zeros((len(layers), *attention.answer.shape), device=DEVICE, dtype=torch.bfloat16)

    def step():
        for index, number in enumerate(layers):
            shape.store(pool, types.SimpleNamespace(layer_id=number), out, rows[index])
            answers[index] = attention.decode(pool, number)

    captured = types.SimpleNamespace(replay=step)
    if not REHEARSED:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                step()
        torch.cuda.current_stream().wait_stream(stream)
        captured = torch.cuda.CUDAGraph()
        with torch.cuda.graph(captured):
            step()
    few, wrong, bits = len(slots) // kv.bundle_tokens + 2, 0, 0
    _, mapped, more = shape.sizes
    original, first = slots.clone(), None
    for bundles in (mapped, few, more, few, mapped):
        before = kv.mapped_tokens
        kept = min(before, bundles * kv.bundle_tokens)
        # As a shrink does: what lies above moves below first.
        free = torch.ones(kept, dtype=torch.bool, device=DEVICE)
        free[0] = False
        free[slots[slots < kept]] = False
        free[:16] = False
        above = slots >= kept
        to = free.nonzero().view(-1)[: int(above.sum())]
        pool.move_kv_cache(to, slots[above])
        slots[above] = to
        kv.resize(bundles)
        out.copy_(torch.arange(1, lengths + 1, device=DEVICE))
        # The captured step writes the first slots: nobody else's.
        taken = slots <= lengths
        spare = free.nonzero().view(-1)[len(free.nonzero()) - int(taken.sum()) :]
        pool.move_kv_cache(spare, slots[taken])
        slots[taken] = spare
        step()
        eager = answers.clone()
        first = eager if first is None else first
        answers.zero_()
        captured.replay()
        if not REHEARSED:
            torch.cuda.synchronize()
        wrong += differing(eager, answers) + differing(first, eager)
        bits += 2 * eager.numel()
    slots.copy_(original)
    row(f"kv.cuda.torch_{shape.name}_replay_wrong", wrong, "elements", "0",
        f"of {bits}: a captured step against the eager one, and that against the first, at five sizes of the range")  # fmt: skip
    return wrong


def speed(shape, kv, pool, plain, attention):
    pace = [time_us(lambda one=one: attention.decode(one, 1)) for one in (pool, plain)]
    row(f"kv.cuda.torch_{shape.name}_decode_ratio", pace[0] / pace[1], "ratio", None,
        f"decode attention at the stride of a token over that in a contiguous layer, {pace[0]:.1f} and"
        f" {pace[1]:.1f} us, 5 requests of up to 2048 tokens")  # fmt: skip
    moved = min(2000, kv.mapped_tokens // 2)
    of = torch.arange(moved, device=DEVICE)
    took = time_us(lambda: pool.move_kv_cache(of + moved, of), 5)
    row(f"kv.cuda.torch_{shape.name}_move_gbps", moved * kv.token_bytes / took / 1e3, "GB/s", None,
        f"{moved} tokens moved within the range, {took / 1e3:.2f} ms")  # fmt: skip


def main():
    failed = []
    parts = ARGUMENTS.part.split(",")
    if "histories" in parts:
        steps = "60" if REHEARSED else "100"
        command = [sys.executable, "-m", "unittest", "test_kv_units.Histories", "test_kv_units.Emptying"]
        environment = {**os.environ, "XPOOL_KV_HISTORY_STEPS": steps}
        code = subprocess.run(command, cwd=ROOT / "tests" / "sglang", env=environment, timeout=240).returncode
        row("kv.cuda.torch_histories_failed", int(code != 0), "runs", "0", "random histories over memory that goes")
        failed += ["histories"] if code else []
    for shape in (Mha(), Mla()):
        if shape.name in parts and compare(shape):
            failed.append(shape.name)
    print(f"failed: {', '.join(failed)}" if failed else "ok kv_torch", flush=True)
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
