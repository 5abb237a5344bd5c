#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Peers of the `ffn.*` prefill rows: torch's products for a dense layer, and for a MoE layer SGLang's own
`fused_experts` where SGLang is installed (with the choices given, and with its router), a Triton kernel of
the usual fused-MoE form (rows gathered by expert, padded to tiles; the best of several tile shapes) and
torch's own grouped product. Random inputs, several layers in turn, medians.

Prints lines of JSON: {"peer": NAME, "us": MICROSECONDS, "note": TEXT}. Needs torch and triton.
"""

import argparse
import ctypes
import json
import os
import pathlib
import statistics

import torch
import triton
import triton.language as tl


@triton.jit
def moe_product(
    a_at, b_at, c_at, ids_at, expert_at, weight_at, n, k, valid, fan,
    SCALE: tl.constexpr, BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, GROUP: tl.constexpr, tiles,
):  # fmt: skip
    pid = tl.program_id(0)
    columns = tl.cdiv(n, BN)
    in_group = GROUP * columns
    first = pid // in_group * GROUP
    size = min(tiles - first, GROUP)
    tile = first + pid % in_group % size
    column = pid % in_group // size
    expert = tl.load(expert_at + tile)
    if expert < 0:
        return
    ids = tl.load(ids_at + tile * BM + tl.arange(0, BM)).to(tl.int64)
    live = ids < valid
    cols = (column * BN + tl.arange(0, BN)).to(tl.int64) % n
    inner = tl.arange(0, BK)
    a = a_at + (ids[:, None] // fan * k + inner[None, :])
    b = b_at + expert.to(tl.int64) * n * k + cols[None, :] * k + inner[:, None]
    total = tl.zeros((BM, BN), dtype=tl.float32)
    for _ in range(0, tl.cdiv(k, BK)):
        total = tl.dot(tl.load(a, mask=live[:, None], other=0.0), tl.load(b), total)
        a += BK
        b += BK
    if SCALE:
        total *= tl.load(weight_at + ids, mask=live, other=0.0)[:, None]
    out = (column * BN + tl.arange(0, BN)).to(tl.int64)
    tl.store(c_at + ids[:, None] * n + out[None, :], total.to(tl.bfloat16), mask=live[:, None] & (out < n)[None, :])


@triton.jit
def silu_mul(x_at, y_at, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = at < width
    gate = tl.load(x_at + row * 2 * width + at, mask=mask).to(tl.float32)
    up = tl.load(x_at + row * 2 * width + width + at, mask=mask).to(tl.float32)
    tl.store(y_at + row * width + at, (gate * tl.sigmoid(gate) * up).to(tl.bfloat16), mask=mask)


def measure(run, count, repeats):
    for i in range(2):
        run(i % count)
    torch.cuda.synchronize()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for layer in range(count):
            run(layer)
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / count)
    return statistics.median(times)


def say(peer, us, note):
    print(json.dumps({"peer": peer, "us": round(us, 2), "note": note}), flush=True)


def random(*shape, scale=1.0):
    return (torch.rand(*shape, device="cuda", dtype=torch.float32) * 2 - 1).mul_(scale).to(torch.bfloat16)


def dense(rows, repeats):
    hidden, width, layers = 5120, 17408, 2
    x = random(rows, hidden)
    weights = [
        (random(width, hidden, scale=0.02), random(width, hidden, scale=0.02), random(hidden, width, scale=0.02))
        for _ in range(layers)
    ]
    act = random(rows, width)

    def products(i):
        gate, up, down = weights[i]
        torch.nn.functional.linear(x, gate)
        torch.nn.functional.linear(x, up)
        torch.nn.functional.linear(act, down)

    us = measure(products, layers, repeats)
    say(f"torch.dense{rows}", us, f"three products alone, {6 * rows * hidden * width / us / 1e6:.0f} TFLOP/s")
    if rows <= 16:
        return

    def whole(i):
        gate, up, down = weights[i]
        return torch.nn.functional.linear(
            torch.nn.functional.silu(torch.nn.functional.linear(x, gate)) * torch.nn.functional.linear(x, up), down
        )

    say(f"torch.dense{rows}.whole", measure(whole, layers, repeats), "with torch's activation")


def align(chosen, experts, block):
    """Pairs in expert order, each expert padded to a multiple of `block`."""
    flat = chosen.flatten()
    order = torch.argsort(flat, stable=True)
    counts = torch.bincount(flat, minlength=experts)
    padded = (counts + block - 1) // block * block
    total = int(padded.sum())
    ids = torch.full((total,), flat.numel(), dtype=torch.int32, device="cuda")
    begin = torch.cumsum(padded, 0) - padded
    source = torch.cumsum(counts, 0) - counts
    place = begin[flat[order]] + torch.arange(flat.numel(), device="cuda") - source[flat[order]]
    ids[place] = order.to(torch.int32)
    owner = torch.repeat_interleave(torch.arange(experts, device="cuda", dtype=torch.int32), padded // block)
    return ids, owner


def sglang_moe(x, both, down, router, top_k, repeats):
    """SGLang's layer with its own choice of tiles, captured: `fused_experts` groups the pairs by itself, and
    computes products, activation and sum; its router is a linear and a kernel for softmax and choice."""
    for name, value in {
        "SGLANG_IS_FLASHINFER_AVAILABLE": "false",
        "SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK": "1",
        "SGLANG_ENABLE_JIT_DEEPGEMM": "0",
        "SGLANG_PLUGINS": "none",
    }.items():
        os.environ.setdefault(name, value)
    import sglang

    library = pathlib.Path(sglang.__file__).resolve().parents[1] / "lib" / "libnuma.so.1"
    if library.exists():  # where tests/cuda/sglang_bundle has put it
        ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)
    from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler

    set_global_server_args_for_scheduler(ServerArgs(model_path="dummy"))
    from sglang.srt.layers.moe.moe_runner import MoeRunnerConfig
    from sglang.srt.layers.moe.moe_runner.triton_utils import fused_moe
    from sglang.srt.layers.moe.topk import StandardTopKOutput, fused_topk

    experts, rows = router.shape[0], x.shape[0]
    config = MoeRunnerConfig(num_experts=experts, num_local_experts=experts, inplace=False)

    def choose():
        logits = torch.nn.functional.linear(x, router)
        return StandardTopKOutput(*fused_topk(x, logits, top_k, True)[:2], logits)

    def given(i, choice):
        return fused_moe.fused_experts(x, both[i], down[i], choice, config)

    fixed = choose()
    plain, whole = given(0, fixed), given(0, choose())
    if (plain - whole).abs().max() > 0.01 * plain.abs().max():
        raise RuntimeError("two runs of the same layer differ")
    # Beside float32 for a few rows: a peer that computes something else is none.
    for row in (0, rows // 2, rows - 1):
        want = 0
        for weight, expert in zip(fixed.topk_weights[row], fixed.topk_ids[row].tolist(), strict=True):
            gate, up = (both[0][expert].float() @ x[row].float()).chunk(2)
            want = want + weight * (down[0][expert].float() @ (torch.nn.functional.silu(gate) * up))
        error = ((plain[row].float() - want).norm() / want.norm()).item()
        if error > 0.02:
            raise RuntimeError(f"row {row} is off by {error:.3f}")

    def captured(run):
        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            for _ in range(2):
                run(0)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for i in range(len(both)):
                run(i)
        return measure(lambda _: graph.replay(), 1, repeats) / len(both)

    return {
        "given": captured(lambda i: given(i, fixed)),
        "whole": captured(lambda i: given(i, choose())),
        "version": sglang.__version__,
    }


def moe(rows, repeats):
    hidden, width, experts, top_k, layers = 2048, 768, 128, 8, 3
    x = random(rows, hidden)
    both = [random(experts, 2 * width, hidden, scale=0.03) for _ in range(layers)]
    down = [random(experts, hidden, width, scale=0.03) for _ in range(layers)]
    router = random(experts, hidden, scale=0.05)
    weight, chosen = torch.softmax((x @ router.T).float(), -1).topk(top_k, -1)
    weight = (weight / weight.sum(-1, keepdim=True)).flatten().contiguous()
    pairs = rows * top_k
    mid = torch.empty(pairs, 2 * width, device="cuda", dtype=torch.bfloat16)
    act = torch.empty(pairs, width, device="cuda", dtype=torch.bfloat16)
    out = torch.empty(pairs, hidden, device="cuda", dtype=torch.bfloat16)
    shapes = [(128, 256, 64, 8, 4, 16), (128, 256, 64, 8, 3, 1), (128, 128, 64, 8, 4, 16), (64, 256, 64, 8, 4, 16), (64, 128, 64, 4, 4, 16)]
    if rows <= 128:  # a tile of few rows, as such kernels take for decoding
        shapes = [(16, 128, 128, 4, 4, 1), (16, 128, 64, 4, 5, 1), (16, 64, 128, 4, 4, 1), (16, 64, 128, 4, 5, 8), (32, 128, 128, 4, 3, 1)]
    best = {}
    for bm, bn, bk, warps, stages, group in shapes:
        ids, owner = align(chosen, experts, bm)
        tiles = owner.numel()
        for name, a, b, c, n, k, fan, scale in (
            ("gate", x, both, mid, 2 * width, hidden, top_k, False),
            ("down", act, down, out, hidden, width, 1, True),
        ):

            def run(i):
                moe_product[(tiles * triton.cdiv(n, bn),)](
                    a, b[i], c, ids, owner, weight, n, k, pairs, fan, scale, bm, bn, bk, group, tiles,
                    num_warps=warps, num_stages=stages,
                )  # fmt: skip

            try:
                us = measure(run, layers, repeats)
            except Exception as error:  # a shape that does not fit is no peer
                print(f"# {name} {bm}x{bn}: {str(error)[:100]}", flush=True)
                continue
            if name not in best or us < best[name][0]:
                best[name] = (us, (bm, bn, bk, warps, stages, group))
    rest = {
        "activation": measure(lambda i: silu_mul[(pairs, 1)](mid, act, width, 1024), layers, repeats),
        "sum": measure(lambda i: torch.sum(out.view(rows, top_k, hidden), 1), layers, repeats),
    }
    us = best["gate"][0] + best["down"][0] + sum(rest.values())
    say(
        f"triton.moe{rows}",
        us,
        f"gate {best['gate'][0]:.1f} {best['gate'][1]}, down {best['down'][0]:.1f} {best['down'][1]}, "
        f"activation {rest['activation']:.1f}, sum {rest['sum']:.1f}; router and grouping left out",
    )
    try:
        us = sglang_moe(x, both, down, router, top_k, repeats)
        say(f"sglang.moe{rows}", us["given"], f"fused_experts of SGLang {us['version']}, captured; the choice of experts is given")
        say(f"sglang.moe{rows}.whole", us["whole"], f"with the router of SGLang {us['version']}, captured")
    except Exception as error:
        print(f"# SGLang's fused_experts: {type(error).__name__}: {str(error)[:300]}", flush=True)
    try:
        counts = torch.bincount(chosen.flatten(), minlength=experts)
        ends = torch.cumsum(counts, 0).to(torch.int32)
        sorted_x = x[torch.argsort(chosen.flatten(), stable=True) // top_k].contiguous()
        first = [b.transpose(1, 2) for b in both]
        second = [b.transpose(1, 2) for b in down]
        gate = measure(lambda i: torch._grouped_mm(sorted_x, first[i], offs=ends), layers, repeats)
        back = measure(lambda i: torch._grouped_mm(act, second[i], offs=ends), layers, repeats)
        say(f"torch.grouped{rows}", gate + back, f"the two grouped products alone: {gate:.1f} + {back:.1f}")
    except Exception as error:
        print(f"# torch grouped product: {str(error)[:200]}", flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", default="4096")
    parser.add_argument("--only", choices=("dense", "moe"))
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    torch.manual_seed(1)
    for rows in map(int, arguments.rows.split(",")):
        if arguments.only != "moe":
            dense(rows, arguments.repeats)
        if arguments.only != "dense":
            moe(rows, arguments.repeats)
    if arguments.only != "moe":
        dense(1, arguments.repeats)


main()
