#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""Whole models on two GPUs: transformers' own models, with every layer's `.mlp` replaced by the shim, give
the same 64 greedy tokens as the unmodified ones.

    tests/cuda/two_gpu.py --build BUILD [--scene NAME ...] [--models NAME,...] [--out FOLDER] [--rehearse]

For each scene a daemon and its agents are started, and four Instances at once, each a process of its own
under `xpool exec`: Qwen3 (seeded), Qwen3-MoE, DeepSeek-V2 and GLM (the small trained models of this
repository). Each first computes its own reference, then the same through CrossPool: eagerly, and by
replaying a captured graph of one decode step that has one more row than are live. In 16 bits a router
decides many near ties by rounding alone; the prompts are those of a fixed set on which the unmodified model
gives the same tokens in 16 bits, in 32, and with each FFN's output a rounding or two off, so that their
tokens say something.

    one      attention on cuda:0, one FfnAgent on cuda:1
    tensor   attention on cuda:0, two FfnAgents (cuda:0 shares its roles, cuda:1), each with half of every
             expert
    relay    as one, rows by way of the AtnAgent
    mesh     two AtnAgents, two FfnAgents, both roles on each GPU (all under MPS); Instances on both, each
             with half of every expert on each
    mesh-relay  the same, rows by way of the two AtnAgents
    ranks    as mesh, each Instance two ranks (attention TP): a process on each GPU, both with the whole model and
             the same rows, of which the FfnAgents take the first one's and answer both
    kill     as one; one Instance is killed in the middle, the others go on unharmed
    reform   as one; while all four decode, eagerly and then by replaying graphs, the FfnAgent gets SIGKILL, and
             then the AtnAgent. Agents are started again, the weights taken over without reading. The Instances
             stay the processes they were, their requests open, and give the same tokens. Printed: how long each
             Instance's decoding paused, until the Fabric executed again, and what was adopted and read
    reform-relay  the same, rows by way of the AtnAgent
    reform-shared the same, both roles on cuda:0 under MPS
    reform-ranks-relay  as ranks by way of the AtnAgents, with the kills of reform: what one rank has its answer to and the
             other does not, the next AtnAgents hand on
    reform-anew   with fabric.keep_requests = false: the FfnAgent is killed before the run, Instances end and are
             started anew
    nvshmem, nvshmem-mesh (two of each role, shared GPUs), nvshmem-far: over NVSHMEM; run only when they are named

`--rehearse` runs the scenes `one`, `mesh`, `ranks`, `reform` and `reform-ranks-relay` (which has no relay there) on CPU devices, without graphs: it tries everything of this script but
the GPU. What the interpreter needs: torch, transformers, cffi. Exit code 77: no GPUs here.
"""

import argparse
import importlib.util
import json
import os
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "benches"))
import results  # noqa: E402

TALES = ROOT / "models" / "tales"
SKIPPED = 77
CANDIDATES = 48  # prompts tried, all in one batch
BLURRED = 4  # times, with other noise
MAX_LOGIT_ERROR = 0.05  # the median over all tokens: a tie of a router that falls the other way is an outlier
LIVE, PADDED = 3, 4  # rows of a decode step that count, and that the captured graph has
PROMPT = 12
WAIT_S = 150
SCENES = {
    "one": dict(atn=["cuda:0"], ffn=["cuda:1"], tp=1),
    "tensor": dict(atn=["cuda:0"], ffn=["cuda:0", "cuda:1"], tp=2, shared=True),
    "relay": dict(atn=["cuda:0"], ffn=["cuda:1"], tp=1, provider="p2p-relay"),
    "mesh": dict(atn=["cuda:0", "cuda:1"], ffn=["cuda:0", "cuda:1"], tp=2, shared=True),
    "mesh-relay": dict(
        atn=["cuda:0", "cuda:1"], ffn=["cuda:0", "cuda:1"], tp=2, shared=True, provider="p2p-relay"
    ),
    "ranks": dict(atn=["cuda:0", "cuda:1"], ffn=["cuda:0", "cuda:1"], tp=2, shared=True, attention_tp=2),
    "kill": dict(atn=["cuda:0"], ffn=["cuda:1"], tp=1, kill="qwen3"),
    "reform": dict(atn=["cuda:0"], ffn=["cuda:1"], tp=1, reform=120),
    "reform-relay": dict(atn=["cuda:0"], ffn=["cuda:1"], tp=1, reform=120, provider="p2p-relay"),
    "reform-shared": dict(atn=["cuda:0"], ffn=["cuda:0"], tp=1, reform=120, shared=True),
    "reform-ranks-relay": dict(
        atn=["cuda:0", "cuda:1"],
        ffn=["cuda:0", "cuda:1"],
        tp=2,
        shared=True,
        attention_tp=2,
        reform=120,
        provider="p2p-relay",
    ),
    "reform-anew": dict(atn=["cuda:0"], ffn=["cuda:1"], tp=1, reform=120, anew=True),
}
# By name only: they need the plug-in and the wheel of NVSHMEM.
HEAP_SCENES = {
    "nvshmem": dict(atn=["cuda:0"], ffn=["cuda:1"], tp=1, provider="nvshmem"),
    "nvshmem-mesh": dict(
        atn=["cuda:0", "cuda:1"], ffn=["cuda:0", "cuda:1"], tp=2, shared=True, provider="nvshmem"
    ),
    "nvshmem-far": dict(atn=["cuda:0"], ffn=["cuda:1"], tp=1, provider="nvshmem-far"),
}
REHEARSAL = dict(atn=["cpu:0"], ffn=["cpu:1"], tp=1)


# ---- an Instance ---------------------------------------------------------------------------------------
class FixedCache:
    """Keys and values of a fixed number of tokens, written where a device tensor says: a captured step
    works at every position. Made by `of` as a subclass of transformers' Cache."""

    def update(self, keys, values, layer, *arguments, **options):
        import torch

        if layer not in self.tensors:
            shapes = (keys.shape[:2] + (self.limit, x.shape[-1]) for x in (keys, values))
            self.tensors[layer] = tuple(torch.zeros(s, dtype=keys.dtype, device=keys.device) for s in shapes)
        for held, new in zip(self.tensors[layer], (keys, values)):
            held.index_copy_(2, self.positions, new)
        return self.tensors[layer]

    def get_seq_length(self, *arguments, **options):
        return 0

    def get_max_cache_shape(self, *arguments, **options):
        return self.limit

    @staticmethod
    def of(limit):
        import transformers

        made = type("Fixed", (FixedCache, transformers.Cache), {"__init__": lambda self: None})()
        made.limit, made.tensors, made.positions = limit, {}, None
        return made


class Generator:
    """Greedy decoding of PADDED rows, of which LIVE count; one captured decode step, or every step eager."""

    def __init__(self, model, device, tokens, prompt, begin_step=None):
        import torch

        self.torch, self.model, self.device = torch, model, device
        self.begin_step = begin_step or (lambda rows, prefill: None)
        self.limit = PROMPT + tokens
        self.tokens, self.prompt = tokens, prompt.to(device)

    def forward(self, ids, positions, cache):
        torch = self.torch
        cache.positions = positions
        # A column for every place of the cache: seen when it is not later than the row's own.
        seen = torch.arange(self.limit, device=self.device)[None, :] <= positions[:, None]
        mask = torch.zeros(seen.shape, dtype=self.model.dtype, device=self.device)
        mask = mask.masked_fill(~seen, torch.finfo(self.model.dtype).min)[None, None]
        result = self.model(
            input_ids=ids,
            attention_mask=mask.expand(ids.shape[0], 1, -1, -1),
            position_ids=positions[None].expand(ids.shape[0], -1),
            past_key_values=cache,
            use_cache=True,
        )
        return result.logits[:, -1].float()

    def capture(self, cache, ids, positions):
        torch = self.torch
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):  # allocations and handles of libraries are made here; rewrites one place
                self.forward(ids, positions, cache)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = self.forward(ids, positions, cache)
        return graph, logits

    def run(self, graphs, after=None, forced=None, live=LIVE):
        """The greedy tokens of the live rows, the logits that chose them, and each row's smallest distance
        of a choice to the next one. `forced`: these tokens are taken, whatever is chosen."""
        torch = self.torch
        with torch.no_grad():
            cache = FixedCache.of(self.limit)
            places = torch.arange(PROMPT, device=self.device)
            self.begin_step(len(self.prompt) * PROMPT, True)
            logits = self.forward(self.prompt, places, cache)
            ids = logits.argmax(-1, keepdim=True)
            positions = torch.tensor([PROMPT], device=self.device)
            tokens, kept = [ids[:live].clone()], [logits[:live].clone()]
            if forced is not None:
                ids[:live].copy_(forced[:, :1])
            graph = None
            if graphs:
                self.begin_step(len(self.prompt), False)
                graph, captured = self.capture(cache, ids, positions)
            for step in range(1, self.tokens):
                self.begin_step(live if graphs else len(self.prompt), False)
                if graph is None:
                    logits = self.forward(ids, positions, cache)
                else:
                    graph.replay()
                    logits = captured
                kept.append(logits[:live].clone())
                tokens.append(kept[-1].argmax(-1, keepdim=True))
                # In place: the graph reads these. A padding row's logits may be anything.
                ids[:live].copy_(tokens[-1] if forced is None else forced[:, step : step + 1])
                positions += 1
                if after is not None:
                    after(step)
            every = torch.stack(kept, 1)
            best = every.topk(2, dim=-1).values
            return torch.cat(tokens, 1).cpu(), every, (best[..., 0] - best[..., 1]).amin(1).cpu()


def off_by_rounding(model, numbers):
    """Each FFN's output becomes off by up to two roundings of 16 bits, at random; returns how to end it."""
    import torch

    def blur(module, given, output):
        rows = output[0] if isinstance(output, tuple) else output
        noise = torch.rand(rows.shape, generator=numbers, device=rows.device) * 2 - 1
        blurred = (rows.float() * (1 + noise * 2.0**-10)).to(rows.dtype)
        return (blurred, *output[1:]) if isinstance(output, tuple) else blurred

    hooks = [layer.mlp.register_forward_hook(blur) for layer in model.model.layers]
    return lambda: [hook.remove() for hook in hooks]


def choose_prompt(model, path, device, tokens):
    """PADDED prompts, the LIVE first of which are decided by more than rounding; how many of all were."""
    import torch
    import transformers

    numbers = torch.Generator().manual_seed(1)
    every = torch.randint(10, model.config.vocab_size, (CANDIDATES, PROMPT), generator=numbers)
    if device.type == "cpu":
        return every[:PADDED], CANDIDATES
    run = Generator(model, device, tokens, every).run
    half, _, gaps = run(graphs=False, live=CANDIDATES)
    exact = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32, attn_implementation="eager")
    exact = mend(exact).eval().to(device)
    whole, _, _ = Generator(exact, device, tokens, every).run(graphs=False, live=CANDIDATES)
    same = (half == whole).all(1)
    noise = torch.Generator(device).manual_seed(2)
    for _ in range(BLURRED):
        end = off_by_rounding(model, noise)
        off, _, _ = run(graphs=False, live=CANDIDATES)
        end()
        same &= (half == off).all(1)
    if int(same.sum()) < LIVE:
        raise SystemExit(f"rounding decides tokens of all but {int(same.sum())} of {CANDIDATES} prompts")
    order = torch.where(same, gaps, torch.full_like(gaps, -1)).argsort(descending=True)
    return every[order[:PADDED]], int(same.sum())


def replace_mlp(model, device):
    """Every layer's FFN becomes the shim; nothing of the original stays reachable."""
    import torch

    from xpool import ops

    class Shim(torch.nn.Module):
        def __init__(self, layer, parts):
            super().__init__()
            self.layer, self.parts = layer, parts

        def forward(self, hidden, *arguments, **options):
            rows = hidden.reshape(-1, hidden.shape[-1])
            out = ops.ffn_shim(rows, self.layer).view(hidden.shape)
            return out if self.parts is None else (out,) + (None,) * (self.parts - 1)

    probe = torch.zeros((1, 1, model.config.hidden_size), dtype=model.dtype, device=device)
    with torch.no_grad():
        for index, layer in enumerate(model.model.layers):
            answer = layer.mlp(probe)
            layer.mlp = Shim(index, len(answer) if isinstance(answer, tuple) else None)


def mend(model):
    """DeepSeek-V2 of transformers misses a number where groups limit the choice of experts."""
    if model.config.model_type == "deepseek_v2":
        for layer in model.model.layers:
            if not hasattr(layer.mlp, "num_experts"):
                layer.mlp.num_experts = model.config.n_routed_experts
    return model


def part_name(model, rank):
    return f"{model}.{rank}" if rank else model


def wait_for(there, why, pause=0.005):
    """Until `there` says so; ends this process with `why` after WAIT_S."""
    limit = time.monotonic() + WAIT_S
    while not there():
        if time.monotonic() > limit:
            raise SystemExit(why)
        time.sleep(pause)


def shared_prompt(file, rank, choose):
    """All ranks of an Instance take the first one's."""
    import torch

    if rank == 0:
        chosen = choose()
        torch.save(chosen, file.with_suffix(".new"))
        file.with_suffix(".new").rename(file)
        return chosen
    wait_for(file.exists, "the first rank chose no prompt", 0.02)
    return torch.load(file)


def wait_for_ranks(folder, model, rank, count):
    """Until all ranks of the Instance have their last answer, as where ranks gather each step's logits: the first
    one that closes ends the Instance for all."""
    (folder / f"{part_name(model, rank)}.last").touch()
    files = [folder / f"{part_name(model, one)}.last" for one in range(count)]
    wait_for(lambda: all(file.exists() for file in files), "the Instance's other ranks had no end")


def instance(arguments):
    """One Instance Rank: reference, then through CrossPool. Its result is a file; a barrier by files."""
    import torch
    import transformers

    from xpool import XpoolConfig, Rank, ops, rank as ranks

    folder = pathlib.Path(arguments.folder)
    device = torch.device(arguments.device)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    config = XpoolConfig()
    info = config.model_info(arguments.instance)
    path = config.model_path_of(arguments.instance)
    dtype = torch.float16 if device.type == "cuda" else torch.float32
    model = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="eager")
    model = mend(model).eval().to(device)
    name = part_name(arguments.instance, arguments.rank)
    prompt, stable = shared_prompt(
        folder / f"{arguments.instance}.prompt", arguments.rank,
        lambda: choose_prompt(model, path, device, arguments.tokens),
    )  # fmt: skip
    wanted, logits, gaps = Generator(model, device, arguments.tokens, prompt).run(graphs=False)

    told = []

    def ended(kind, seconds, text):
        print(f"{arguments.instance}: told to end: {text}", file=sys.stderr, flush=True)
        told.append(kind)

    workload = ranks.Workload(
        engine=f"transformers {transformers.__version__}",
        checkpoint=path,
        hidden=info.hidden,
        layers=info.layers,
        attention_tp=info.attention_tp,
        attention_dp=1,
        decode_rows=PADDED,
        prefill_rows=PADDED * PROMPT,
        dtype=ranks.F16 if device.type == "cuda" else ranks.F32,
    )
    ordinal = None if device.type == "cpu" else device.index or 0
    rank = Rank(config, arguments.instance, arguments.rank, workload, ended, ordinal)
    ops.attach(rank)
    replace_mlp(model, device)
    rank.wait_executable()

    def begin_step(rows, prefill):
        step = ranks.PREFILL if prefill else ranks.DECODE
        if ordinal is None:
            rank.begin_step(step)
        else:
            rank.begin_step(step, rows=rows, stream=torch.cuda.current_stream().cuda_stream)

    generator = Generator(model, device, arguments.tokens, prompt, begin_step)
    # The same tokens given to both: how far each token's logits are apart, in units of their spread.
    _, own, _ = generator.run(graphs=False, forced=wanted.to(device))
    errors = ((own - logits).abs().amax(-1) / logits.std()).flatten()
    result = {
        "model": arguments.instance,
        "stable_prompts": stable,
        "margin": float(gaps.min()),
        "logit_error": float(errors.median()),
        "logit_error_max": float(errors.max()),
        "modes": {},
    }
    rank.serving("", 0, 0, 0, 0, info.max_context)
    (folder / f"{name}.ready").touch()
    limit = time.monotonic() + WAIT_S
    while not (folder / "go").exists():  # all four at once
        if time.monotonic() > limit or told:
            raise SystemExit("told to end" if told else "the other Instances did not come")
        time.sleep(0.005)

    at = folder / f"{name}.at"
    told_at = [time.monotonic()]
    longest = [0.0]

    def after(step):
        if step == arguments.tokens // 2:
            (folder / f"{name}.half").touch()
        if arguments.kills:
            if ordinal is not None:
                torch.cuda.synchronize()
            now = time.monotonic()
            longest[0], told_at[0] = max(longest[0], now - told_at[0]), now
            at.with_suffix(".new").write_text(f"{mode} {repeat} {step}")
            at.with_suffix(".new").rename(at)

    def goes_on(mode, repeat):
        """With kills, until the script has done all of them in this mode; all ranks stop after the same run."""
        done, last = folder / f"{mode}.done", folder / f"{arguments.instance}.{mode}.last"
        if not arguments.kills:
            return repeat + 1 < arguments.repeats
        if arguments.rank == 0 and done.exists() and not last.exists():
            last.with_suffix(".new").write_text(str(max(repeat + 1, arguments.repeats - 1)))
            last.with_suffix(".new").rename(last)
        return not last.exists() or repeat < int(last.read_text())

    modes = ("eager",) if ordinal is None else ("eager", "graph")
    for mode in modes:
        told_at[0], longest[0] = time.monotonic(), 0.0
        limit, repeat = time.monotonic() + WAIT_S, -1
        while goes_on(mode, repeat):
            repeat += 1
            if time.monotonic() > limit or told:
                raise SystemExit("told to end" if told else f"no end of {mode} within {WAIT_S} s")
            began = time.monotonic()
            got, _, _ = generator.run(graphs=mode == "graph", after=after)
            took = time.monotonic() - began
            if ordinal is not None:
                torch.cuda.synchronize()
                rank.finish()
            wrong = int((got != wanted).sum())
            seen = result["modes"].setdefault(mode, {"runs": 0, "wrong_tokens": 0, "seconds": took})
            seen["runs"] += 1
            seen["wrong_tokens"] += wrong
            seen["longest_step_s"] = longest[0]
            told_at[0] = time.monotonic()
            if wrong and "first" not in seen:
                at = (got != wanted).any(0).nonzero()[0].item()
                seen["first"] = {"step": at, "wanted": wanted[:, at].tolist(), "got": got[:, at].tolist()}
    result["ffn_calls"] = rank.state().ffn_calls
    if ordinal is not None:
        torch.cuda.synchronize()
    wait_for_ranks(folder, arguments.instance, arguments.rank, info.attention_tp)
    rank.close()
    (folder / f"{name}.json").write_text(json.dumps(result))


# ---- scenes --------------------------------------------------------------------------------------------
def models_of(scene, scratch, xpool):
    seeded = scratch / "qwen3"
    if not seeded.exists():
        command = [xpool, "model", "synth", "--arch", "qwen3", "--out", seeded, "--seed", "11", "--dtype"]
        subprocess.run([str(c) for c in command + ["bf16", "--hidden", "256"]], check=True, stdout=subprocess.DEVNULL, timeout=120)
    return {
        "qwen3": seeded,
        "qwen3-moe": TALES / "qwen3-moe",
        "deepseek-v2": TALES / "deepseek-v2",
        "glm4-moe-lite": TALES / "glm4-moe-lite",
    }


def write_config(scene, folder, models):
    kind = scene["atn"][0].partition(":")[0]
    lines = [
        f"daemon.socket = '{folder}/d.sock'",
        "daemon.http = '127.0.0.1:0'",
        f"cache.root = '{folder}'",
        f"atn.devices = {json.dumps(scene['atn'])}",
        f"ffn.devices = {json.dumps(scene['ffn'])}",
        f"fabric.provider = '{scene.get('provider', 'auto')}'",
        f"devices.allow_shared_roles = {str(scene.get('shared', False)).lower()}",
        "deadlines.registration = 60",
        f"deadlines.reform = {scene.get('reform', 0)}",
        f"fabric.keep_requests = {str(not scene.get('anew', False)).lower()}",
    ]
    if kind == "cpu":
        lines += [f"devices.'{name}'.memory = '512MiB'" for name in scene["atn"] + scene["ffn"]]
    for name, path in models.items():
        lines += ["[[models]]", f"id = '{name}'", f"path = '{path}'", "engine = 'sglang'"]
        lines += [f"ffn_tp_size = {scene['tp']}", f"attention_tp = {scene.get('attention_tp', 1)}"]
        lines += ["kv_ceiling_tokens = 4096"]
        lines += [f"decode_rows = {PADDED}", f"prefill_rows = {PADDED * PROMPT}"]
        lines += [f"dtype = '{'float32' if kind == 'cpu' else 'float16'}'"]
    config = folder / "scene.toml"
    config.write_text("\n".join(lines) + "\n")
    return config


def nvshmem_root():
    """Where this interpreter has the wheel of NVSHMEM, for the programs."""
    spec = importlib.util.find_spec("nvidia")
    for folder in spec.submodule_search_locations if spec else []:
        if (pathlib.Path(folder) / "nvshmem/lib/libnvshmem_host.so.3").exists():
            return {"XPOOL_NVSHMEM_ROOT": f"{folder}/nvshmem"}
    return {}


class System:
    """Daemon, agents and Instances of one scene; all of them end with it."""

    def __init__(self, folder, config, xpool, build):
        self.folder, self.config, self.xpool = folder, config, str(xpool)
        self.processes = {}
        self.environment = dict(os.environ, PYTHONUNBUFFERED="1", PYTHONPATH=str(build / "python"))
        self.environment.pop("XPOOL_CONFIG", None)
        self.environment |= nvshmem_root()
        if os.environ.get("PYTHONPATH"):
            self.environment["PYTHONPATH"] += os.pathsep + os.environ["PYTHONPATH"]

    def start(self, name, *command):
        log = open(self.folder / f"{name.replace(':', '-').replace(' ', '-')}.log", "wb")
        self.processes[name] = subprocess.Popen(
            [str(c) for c in command], stdout=log, stderr=subprocess.STDOUT, env=self.environment
        )

    def role(self, name, *words):
        self.start(name, self.xpool, *words, "--config", self.config)

    def wait(self, condition, what, names):
        limit = time.monotonic() + WAIT_S
        while not condition():
            for name in names:
                code = self.processes[name].poll()
                if code is not None:
                    raise RuntimeError(f"{name} ended with {code} while waiting for {what}\n{self.tails()}")
            if time.monotonic() > limit:
                raise RuntimeError(f"{what} did not come within {WAIT_S} s\n{self.tails()}")
            time.sleep(0.02)

    def tail(self, name):
        text = (self.folder / f"{name.replace(':', '-').replace(' ', '-')}.log").read_text(errors="replace")
        return text[-1500:].strip()

    def tails(self):
        return "\n".join(f"--- {name}: {self.tail(name)}" for name in self.processes)

    def down(self):
        done = subprocess.run(
            [self.xpool, "down", "--config", str(self.config)], capture_output=True, text=True, env=self.environment, timeout=120
        )
        return done.returncode == 0, (done.stdout + done.stderr).strip()

    def end(self):
        for process in self.processes.values():
            if process.poll() is None:
                process.kill()
        for process in self.processes.values():
            process.wait(30)


def executable(system):
    """Whether the daemon waits for no agent any more."""
    command = [system.xpool, "daemon", "check", "--config", str(system.config)]
    done = subprocess.run(command, capture_output=True, text=True, env=system.environment, timeout=120)
    said = done.stdout + done.stderr
    return "agent" not in said and "the next one forms" not in said


def replace_agents(system, scene, models, start_model, result):
    """The FfnAgent dies; all agents, and on GPUs the Instances, are replaced."""
    agents = [name for name in system.processes if "agent" in name]
    victim = f"ffnagent {scene['ffn'][0]}"
    gpu = not scene["ffn"][0].startswith("cpu")
    began = time.monotonic()
    system.processes[victim].send_signal(signal.SIGKILL)
    for name in agents + (list(models) if gpu else []):
        system.processes[name].wait(timeout=30)
    result["ended_s"] = time.monotonic() - began
    for model in models if gpu else ():
        (system.folder / f"{model}.ready").unlink()
    began = time.monotonic()
    for name in agents:
        kind, device = name.split()
        system.role(name, kind, "--device", device)
    system.wait(lambda: executable(system), "the next Generation", agents)
    result["executable_s"] = time.monotonic() - began
    said = (system.folder / f"{victim.replace(':', '-').replace(' ', '-')}.log").read_text(errors="replace")
    result["weights"] = [list(map(int, pair)) for pair in re.findall(r"(\d+) bytes adopted, (\d+) read", said)]
    for model in models if gpu else ():
        start_model(model)


def progress(system, model):
    """(mode, run, step) that the Instance has told last."""
    try:
        mode, run, step = (system.folder / f"{model}.at").read_text().split()
    except FileNotFoundError:
        return ("", -1, -1)
    return (mode, int(run), int(step))


def kill_agents_in_runs(system, scene, models, modes, result):
    """In each mode the FfnAgent dies while all decode, then the AtnAgent; how long each Instance paused."""
    agents = [name for name in system.processes if "agent" in name]
    result["kills"], result["weights"], result["handed_on"] = [], [], 0
    for mode in modes:
        for victim in (f"ffnagent {scene['ffn'][0]}", f"atnagent {scene['atn'][0]}"):
            runs = {model: progress(system, model)[1] for model in models}

            def decoding():
                at = [progress(system, model) for model in models]
                return all(a[0] == mode and a[2] > 2 for a in at) and all(
                    a[1] > runs[model] or runs[model] < 0 for a, model in zip(at, models)
                )

            system.wait(decoding, f"all Instances in a run of {mode}", list(models))
            before = {model: progress(system, model) for model in models}
            began = time.monotonic()
            system.processes[victim].send_signal(signal.SIGKILL)
            for name in agents:
                system.processes[name].wait(timeout=30)
            ended = time.monotonic() - began
            stood = {model: progress(system, model) for model in models}
            for name in agents:
                kind, device = name.split()
                system.role(name, kind, "--device", device)
            system.wait(lambda: executable(system), "the next Generation", agents + list(models))
            executes = time.monotonic() - began
            went_on = {}

            def all_went_on():
                for model in models:
                    if model not in went_on and progress(system, model) != stood[model]:
                        went_on[model] = time.monotonic() - began
                return len(went_on) == len(models)

            system.wait(all_went_on, "every Instance's next token", agents + list(models))
            said = (system.folder / f"ffnagent-{scene['ffn'][0].replace(':', '-')}.log").read_text(errors="replace")
            result["weights"] += [list(map(int, pair)) for pair in re.findall(r"(\d+) bytes adopted, (\d+) read", said)]
            logs = [system.folder / f"atnagent-{device.replace(':', '-')}.log" for device in scene["atn"]]
            result["handed_on"] += sum(log.read_text(errors="replace").count("got its last answer from") for log in logs)
            result["kills"].append(
                {
                    "mode": mode,
                    "victim": victim,
                    "at": before,
                    "agents_ended_s": ended,
                    "executable_s": executes,
                    "paused_s": went_on,
                }
            )
            print(
                f"{result['scene']:8} {mode:6} killed {victim} at {before}; agents gone after {ended:.2f} s, the Fabric"
                f" executed after {executes:.2f} s, the next token came after"
                f" {', '.join(f'{m} {s:.2f} s' for m, s in went_on.items())}",
                flush=True,
            )
        (system.folder / f"{mode}.done").touch()


def run_scene(name, scene, scratch, arguments):
    xpool = arguments.build / "bin" / "xpool"
    folder = scratch / name
    folder.mkdir()
    models = models_of(scene, scratch, xpool)
    models = {model: path for model, path in models.items() if model in (arguments.models or model).split(",")}
    config = write_config(scene, folder, models)
    system = System(folder, config, xpool, arguments.build)
    plan = subprocess.run([str(xpool), "plan", "--config", str(config)], capture_output=True, text=True, timeout=120)
    if plan.returncode:
        raise RuntimeError(plan.stderr)
    print(plan.stdout, flush=True)
    device = scene["atn"][0].partition(":")[0]
    ranks = range(scene.get("attention_tp", 1))
    models = {part_name(model, rank): (model, rank) for model in models for rank in ranks}  # all Instance Ranks
    result = {"scene": name, "models": {}}
    victim = scene.get("kill")
    try:
        system.role("daemon", "daemon", "serve")
        system.wait(lambda: (folder / "d.sock").exists(), "the daemon's socket", ["daemon"])
        for kind, devices in (("atnagent", scene["atn"]), ("ffnagent", scene["ffn"])):
            for one in devices:
                system.role(f"{kind} {one}", kind, "--device", one)

        def start_model(name):
            model, rank = models[name]
            own = device if device == "cpu" else f"cuda:{rank}"  # as the Instance sees it: its ranks' devices come first
            words = ["exec", "--config", config, "--model", model, "--", sys.executable, __file__]
            words += ["--build", arguments.build, "--instance", model, "--rank", str(rank), "--folder", folder]
            words += ["--device", own, "--repeats", str(arguments.repeats), "--tokens", str(arguments.tokens)]
            words += ["--kills"] if scene.get("reform") and not scene.get("anew") else []
            system.start(name, xpool, *words)

        def all_there():
            there = [folder / f"{m}.ready" for m in models]
            system.wait(lambda: all(file.exists() for file in there), "all Instances", list(system.processes))

        for model in models:
            start_model(model)
        all_there()
        if scene.get("reform"):
            command = [str(xpool), "daemon", "check", "--config", str(config)]
            system.wait(lambda: not subprocess.run(command, capture_output=True, timeout=120).returncode, "READY", ["daemon"])
        if scene.get("anew"):
            replace_agents(system, scene, models, start_model, result)
            all_there()
        (folder / "go").touch()
        if scene.get("reform") and not scene.get("anew"):
            processes = {model: system.processes[model].pid for model in models}
            kill_agents_in_runs(system, scene, models, ("eager",) if device == "cpu" else ("eager", "graph"), result)
            stayed = all(system.processes[model].pid == pid for model, pid in processes.items())
            result["stayed"] = stayed and not any(system.processes[m].returncode for m in models)
        left = [m for m in models if m != victim]
        if victim:
            system.wait(lambda: (folder / f"{victim}.half").exists(), "the victim's half", [victim])
            system.processes[victim].send_signal(signal.SIGKILL)
            result["killed"] = victim
        agents = [p for p in system.processes if p not in models]
        system.wait(lambda: all(system.processes[m].poll() is not None for m in left), "the Instances' end", agents)
        for model in left:
            path = folder / f"{model}.json"
            if not path.exists():
                raise RuntimeError(f"{model} left no result: {system.tail(model)}")
            result["models"][model] = json.loads(path.read_text())
        result["down_clean"], words = system.down()
        if not result["down_clean"]:
            print(words, flush=True)
        for agent in agents:
            system.processes[agent].wait(timeout=20)
        result["exit_codes"] = {agent: system.processes[agent].returncode for agent in agents}
    finally:
        system.end()
        if arguments.out:
            for log in folder.glob("*.log"):
                (arguments.out / f"{name}-{log.name}").write_bytes(log.read_bytes())
    return result


def report(result):
    good = result["down_clean"] and not any(result["exit_codes"].values())
    for model, one in result["models"].items():
        good = good and one["logit_error"] <= MAX_LOGIT_ERROR
        for mode, seen in one["modes"].items():
            good = good and seen["wrong_tokens"] == 0
            print(
                f"{result['scene']:8} {model:14} {mode:6} {seen['runs']} run(s), {seen['wrong_tokens']} wrong"
                f" token(s), {seen['seconds']:.2f} s, closest choice {one['margin']:.4f}, logits apart by"
                f" {one['logit_error']:.1e} of their spread (median; at most {one['logit_error_max']:.1e}),"
                f" {one['stable_prompts']} of {CANDIDATES} prompts without ties {seen.get('first', '')}",
                flush=True,
            )
    if "weights" in result:
        good = good and bool(result["weights"]) and all(a > 0 and not r for a, r in result["weights"])
        good = good and result.get("stayed", True)
    if "kills" in result:
        longest = max(max(kill["paused_s"].values()) for kill in result["kills"])
        print(
            f"{result['scene']:8} {len(result['kills'])} agents killed while all decoded; the longest pause {longest:.2f} s;"
            f" bytes adopted and read: {result['weights']}; answers handed on to other ranks: {result['handed_on']}"
        )
    elif "weights" in result:
        print(
            f"{result['scene']:8} all ended {result['ended_s']:.2f} s after the FfnAgent's death; the next Generation"
            f" executed {result['executable_s']:.2f} s after its agents' start; bytes adopted and read:"
            f" {result['weights']}"
        )
    if "killed" in result:
        print(f"{result['scene']:8} killed {result['killed']}; the others went on")
    print(f"{result['scene']:8} {'good' if good else 'WRONG'}; exit codes {result['exit_codes']}", flush=True)
    return good


def rows_of(results_of):
    """In the form of docs/results."""
    rows = []
    for result in results_of:
        scene = result["scene"]
        for model, one in result["models"].items():
            rows.append(
                results.row(
                    f"two_gpu.{scene}.{model}.wrong_tokens",
                    sum(mode["wrong_tokens"] for mode in one["modes"].values()),
                    "tokens",
                    target="0",
                    note=f"{LIVE} rows of greedy tokens against the unmodified model, 16 bits; "
                    + ", ".join(f"{name}: {mode['runs']} run(s)" for name, mode in one["modes"].items())
                    + f"; logits apart by {one['logit_error']:.1e} of their spread (median), at most"
                    f" {one['logit_error_max']:.1e}; {one['stable_prompts']} of {CANDIDATES} prompts without ties",
                )
            )
        if "weights" in result:
            adopted, read = (sum(column) for column in zip(*result["weights"]))
            rows.append(results.row(f"two_gpu.{scene}.read_bytes", read, "bytes", target="0", note=f"{adopted} adopted"))
        if "ended_s" in result:
            rows.append(results.row(f"two_gpu.{scene}.ended_s", result["ended_s"], "s"))
            rows.append(results.row(f"two_gpu.{scene}.executable_s", result["executable_s"], "s"))
        for kill in result.get("kills", ()):
            name = f"two_gpu.{scene}.{kill['mode']}.{kill['victim'].split()[0]}"
            note = f"SIGKILL while four Instances decoded, which stayed; agents gone after {kill['agents_ended_s']:.2f} s"
            rows.append(results.row(f"{name}.pause_s", max(kill["paused_s"].values()), "s", note=note))
            rows.append(results.row(f"{name}.executable_s", kill["executable_s"], "s"))
    return rows


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=pathlib.Path, required=True)
    parser.add_argument("--scene", action="append", choices=list(SCENES | HEAP_SCENES))
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--models", help="only these, with commas between")
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument("--instance", help=argparse.SUPPRESS)
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--device", help=argparse.SUPPRESS)
    parser.add_argument("--kills", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    arguments.build = arguments.build.resolve()
    if arguments.instance:
        instance(arguments)
        return 0
    scenes = {name: (SCENES | HEAP_SCENES)[name] for name in arguments.scene or SCENES}
    if arguments.rehearse:
        mesh = dict(atn=["cpu:0", "cpu:1"], ffn=["cpu:2", "cpu:3"], tp=2)
        scenes = {"one": REHEARSAL, "mesh": mesh, "ranks": dict(mesh, attention_tp=2)}
        scenes |= {"reform": dict(REHEARSAL, reform=60), "reform-ranks-relay": dict(mesh, attention_tp=2, reform=60)}
        arguments.tokens = 12
        scenes = {name: scene for name, scene in scenes.items() if name in (arguments.scene or scenes)}
    else:
        told = subprocess.run([str(arguments.build / "bin" / "xpool"), "devices", "--json"], capture_output=True, timeout=120)
        gpus = [d for d in json.loads(told.stdout)["devices"] if d["device"].startswith("cuda:")]
        if len(gpus) < 2:
            print(f"skipped: two GPUs are needed, {len(gpus)} found")
            return SKIPPED
    if arguments.out:
        arguments.out.mkdir(parents=True, exist_ok=True)
    good, found = True, []
    with tempfile.TemporaryDirectory(prefix="xpool-two-gpu-") as scratch:
        for name, scene in scenes.items():
            try:
                found.append(run_scene(name, scene, pathlib.Path(scratch), arguments))
                good = report(found[-1]) and good
            except RuntimeError as error:
                print(f"{name:8} WRONG: {error}", flush=True)
                good = False
    if arguments.out:
        (arguments.out / "two_gpu.json").write_text(json.dumps(found, indent=1))
        results.write("two_gpu_cuda", rows_of(found), folder=arguments.out)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
