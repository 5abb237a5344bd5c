# SPDX-License-Identifier: MIT
"""SGLang servers for benches/sglang_gpu.py: alone, and as Instances of a CrossPool system, with the same
command line; and what their logs, the daemon and nvidia-smi tell of them.

A Host says what differs between two GPUs and the rehearsal on CPU devices. A Fleet is what is started and
ended together. Every process of a Fleet dies with this one.
"""

import ctypes
import glob
import json
import math
import os
import pathlib
import re
import signal
import socket
import subprocess
import sys
import tarfile
import time

import results
import sglang_models
from mps_control import find_control

sys.path.insert(0, str(results.ROOT / "tests" / "e2e"))
import harness  # noqa: E402

PR_SET_PDEATHSIG = 1
PORTS = range(10500, 32000, 300)  # a server uses the next ones too
BROKEN_PLUGIN = ("Failed to load plugin", "Failed to execute general plugin", "Failed to apply hooks")
LOG_TAIL = 2500
NO_PREFILL_GRAPHS = "--disable-piecewise-cuda-graph"
CACHES = pathlib.Path("/tmp/xpool-sglang-caches")
CACHES_MOST_MIB = 15.5
STANDINS = results.ROOT / "tests" / "cuda" / "sglang_site"  # its sitecustomize.py brings a peer in
TRUSTED = {"filter": "fully_trusted"} if hasattr(tarfile, "fully_trusted_filter") else {}
_GRAPHS = re.compile(r"Capture (cuda graph|piecewise CUDA graph) end\. Time elapsed: ([\d.]+) s")
_BATCH = re.compile(r"(Decode|Prefill) batch.*cuda graph: (True|False)")
KVCACHED_PTH = "kvcached_autopatch.pth"
_PATCHED, _UNPATCHED = re.compile(r"Successfully patched sglang: (.+)"), re.compile(r"Failed to patch sglang: (.+)")
_next_port = iter(())


def free_port():
    """A port whose next 300 are free of other servers of this run."""
    global _next_port
    for _ in range(2 * len(PORTS)):
        port = next(_next_port, None)
        if port is None:
            _next_port = iter(PORTS)
            continue
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
                return port
            except OSError:
                pass
    raise harness.Failed("no free port")


def die_with_parent():
    os.setsid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


# ---- the host ---------------------------------------------------------------------------------------------
class Gpus:
    """Two GPUs: attention and vanilla servers on cuda:0, the FFN side on cuda:1."""

    kind, atn, ffn = "cuda", ["cuda:0"], ["cuda:1"]
    both = ["cuda:0", "cuda:1"], ["cuda:0", "cuda:1"]  # with two attention ranks
    dtype, start_s = "bfloat16", 330
    peer = None  # folder of kvcached
    flags = (
        "--attention-backend triton --sampling-backend pytorch --grammar-backend none --moe-runner-backend triton "
        "--disable-custom-all-reduce --skip-server-warmup --disable-radix-cache --random-seed 1 "
        "--mem-fraction-static 0.95 --device cuda --log-level info --log-level-http warning"
    ).split()

    def __init__(self, site=None, caches=None):
        self.site, self.caches = site, caches and Caches(caches)
        find_control()

    def environment(self):
        more = {
            "SGLANG_IS_FLASHINFER_AVAILABLE": "false",
            "SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK": "1",
            "SGLANG_ENABLE_JIT_DEEPGEMM": "0",
            "SGLANG_TF_EXIST_OK": "1",
            # Read by NCCL and torch: multicast is not to be used.
            "NCCL_NVLS_ENABLE": "0",
            "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
            "NVSHMEM_DISABLE_NVLS": "1",
        }
        if self.caches:
            more["TVM_FFI_CACHE_DIR"] = str(CACHES / "tvm-ffi")
            more["TRITON_CACHE_DIR"] = str(CACHES / "triton")
        if self.site:
            more["PYTHONPATH"] = str(self.site)
            more["LD_LIBRARY_PATH"] = os.pathsep.join(filter(None, (f"{self.site}/lib", os.environ.get("LD_LIBRARY_PATH"))))
        return more

    def arguments(self, mode, tokens):
        """Of `mode`: "graphs" or "eager"; `tokens` are the sizes of prefill graphs."""
        if mode == "eager":
            return ["--disable-cuda-graph", "--disable-piecewise-cuda-graph"]
        return ["--cuda-graph-max-bs", "32", "--piecewise-cuda-graph-tokens", *map(str, tokens)]

    def vanilla_environment(self, device):
        return {"CUDA_VISIBLE_DEVICES": ",".join(d.partition(":")[2] for d in device)}

    def kvcached_environment(self, name):
        """The settings that kvcached's own page names; `peer` is where it was installed. Its hooks come in by its .pth
        file, which the tree's sitecustomize.py reads: that of `site` may be as old as the archive."""
        absent = [what for what in ("kvcached", KVCACHED_PTH) if not self.peer or not (self.peer / what).exists()]
        if absent:
            raise harness.Failed(f"kvcached is not here (no {absent[0]}): --peer names the folder it was installed in")
        segment = "xpool_peer_" + re.sub(r"[^\w-]", "-", name)
        for left in glob.glob(f"/dev/shm/{segment}*"):  # of a server that was killed: a limit would be read there
            os.unlink(left)
        return {
            "ENABLE_KVCACHED": "true",
            "KVCACHED_AUTOPATCH": "1",
            "KVCACHED_IPC_NAME": segment,
            "XPOOL_PEER_SITE": str(self.peer),
            "PYTHONPATH": os.pathsep.join(map(str, filter(None, (STANDINS, self.site)))),
        }

    def role_environment(self, python):
        """cuBLASLt is looked for by its name: a toolkit's, else that of torch's wheels."""
        folders = glob.glob("/usr/local/cuda/lib64") + glob.glob("/usr/local/cuda/targets/x86_64-linux/lib")
        for package in ("nvidia.cublas", "nvidia.cu13"):
            code = f"import {package} as p; print('\\n'.join(f'{{at}}/lib' for at in p.__path__))"
            out = subprocess.run([python, "-c", code], capture_output=True, text=True, timeout=30)
            folders += out.stdout.split() if out.returncode == 0 else []
        before = os.environ.get("LD_LIBRARY_PATH")
        return {"LD_LIBRARY_PATH": os.pathsep.join([*folders, before] if before else folders)}

    def settings(self, devices, memory=None):
        return [f"[devices.'{device}']\nmemory = {size}" for device, size in (memory or {}).items()]

    def used(self):
        """Memory in use on each GPU, MiB."""
        return query("memory.used")

    def describe(self):
        return f"{', '.join(query('name', str))}, driver {query('driver_version', str)[0]}; {results.machine()}"

    def left_over(self):
        """What a system that has ended may not leave: processes and folders of MPS."""
        found = [f"{pid}: {' '.join(command)[:80]}" for pid, (*_, state, command) in harness.process_table().items()
                 if state not in "ZX" and command and os.path.basename(command[0]).startswith("nvidia-cuda-mps")]
        return found + glob.glob(f"/tmp/xpool-mps-{os.getuid()}/*")


class Caches:
    """What SGLang and Triton compile at their first start, brought to a machine that starts bare and taken from
    it. The folder has one place, since its files name each other."""

    def __init__(self, archive):
        if archive.exists() and not CACHES.exists():
            with tarfile.open(archive) as packed:
                packed.extractall(CACHES, **TRUSTED)
        CACHES.mkdir(exist_ok=True)

    def keep(self, archive):
        with tarfile.open(archive, "w:gz", compresslevel=6) as packed:
            packed.add(CACHES, ".")
        size = archive.stat().st_size / 2**20
        print(f"compiled kernels: {archive.name}, {size:.1f} MiB", flush=True)
        if size > CACHES_MOST_MIB:
            archive.unlink()


class Cpus:
    """The rehearsal: the same flow with small checkpoints on CPU devices, no graphs."""

    kind, atn, ffn = "cpu", ["cpu:0"], ["cpu:1"]
    both = ["cpu:0", "cpu:1"], ["cpu:2"]
    dtype, start_s = "float32", 300
    caches = peer = None
    flags = (
        "--device cpu --attention-backend torch_native --sampling-backend pytorch --grammar-backend none "
        "--disable-cuda-graph --skip-server-warmup --disable-overlap-schedule --disable-radix-cache "
        "--mem-fraction-static 0.3 --random-seed 1 --log-level info --log-level-http warning"
    ).split()

    def environment(self):
        return {
            "SGLANG_USE_CPU_ENGINE": "1",
            "TORCHDYNAMO_DISABLE": "1",
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": str(results.ROOT / "tests" / "sglang" / "hooks"),
        }

    def arguments(self, mode, tokens):
        return []

    def vanilla_environment(self, device):
        cores = sorted(os.sched_getaffinity(0))
        two = {"SGLANG_CPU_OMP_THREADS_BIND": f"{cores[0]}|{cores[-1]}", "SGLANG_NCCL_SO_PATH": "/nonexistent"}
        return {"SGLANG_PLUGINS": "xpool_cpu_hooks", **(two if len(device) > 1 else {})}

    def kvcached_environment(self, name):
        raise harness.Failed("kvcached works on GPUs only")

    def role_environment(self, python):
        return {}

    def settings(self, devices, memory=None):
        sizes = {**dict.fromkeys(devices, 1 << 30), **(memory or {})}
        return [f"[devices.'{device}']\nthreads = 1\nmemory = {sizes[device]}" for device in devices]

    def used(self):
        return [0]

    def describe(self):
        return f"rehearsal on CPU devices; {results.machine()}"

    def left_over(self):
        return []


def query(what, kind=int):
    command = ["nvidia-smi", f"--query-gpu={what}", "--format=csv,noheader,nounits"]
    out = subprocess.run(command, capture_output=True, text=True, timeout=30)
    if out.returncode:
        raise harness.Failed(f"nvidia-smi: {out.stderr or out.stdout}")
    return [kind(line.strip()) for line in out.stdout.splitlines() if line.strip()]


# ---- one server -------------------------------------------------------------------------------------------
class Model:
    """What is served: a checkpoint, under which name, how large."""

    def __init__(self, name, path, mode="graphs", tp=1, dp=1, dummy=False, kv_tokens=16384, context=1024, rows=512, requests=32):
        self.name, self.path, self.mode, self.tp, self.dp, self.dummy = name, path, mode, tp, dp, dummy
        self.kv_tokens, self.context, self.rows, self.requests = kv_tokens, context, rows, requests
        self.more = []  # arguments of this one alone
        self.variables = {}  # of the environment of its servers
        self.more_settings = {}  # of its [[models]] entry
        self.failpoints = ""  # of the Instance, as XPOOL_FAILPOINTS has them

    def arguments(self, host, port, side="vanilla"):
        """SGLang's arguments, the same with CrossPool and without it. kvcached says that it needs no limits of
        memory; without piecewise graphs it is known to serve."""
        # SGLang's own list is longer and costs most of a start; for MLA it ends at 2048 too.
        most = min(self.rows, 2048) if "kv_lora_rank" in sglang_models.facts(self.path) else self.rows
        graphs = [n for n in (128, 512, 1024, 2048, 4096) if n <= most]
        words = ["--model-path", str(self.path), "--served-model-name", self.name, "--host", "127.0.0.1"]
        words += ["--port", str(port), "--nccl-port", str(port + 1), "--dtype", host.dtype]
        words += ["--load-format", "dummy"] if self.dummy else []
        # SGLang divides these two by its attention DP ranks.
        words += ["--max-running-requests", str(self.requests * self.dp), "--chunked-prefill-size", str(self.rows * self.dp)]
        words += ["--context-length", str(self.context)]
        words += ["--max-total-tokens", str(self.kv_tokens)] if side != "kvcached" else []
        words += ["--tp-size", str(self.tp * self.dp), "--dp-size", str(self.dp)]
        words += ["--enable-dp-attention"] if self.dp > 1 else []
        words += ["--disable-custom-all-reduce"] if host.kind == "cpu" and self.tp * self.dp > 1 else []
        words += host.flags + host.arguments(self.mode, graphs) + self.more
        return for_kvcached(words) if side == "kvcached" else words

    def settings(self, host):
        words = {
            "id": self.name,
            "path": str(self.path),
            "engine": "sglang",
            "dtype": host.dtype,
            "decode_rows": self.requests,
            "prefill_rows": self.rows,
            "max_context": self.context,
            "kv_ceiling_tokens": self.kv_tokens,
            "attention_tp": self.tp,
            "attention_dp": self.dp,
        }
        if self.dummy:
            words["load_format"] = "dummy"
        words.update(self.more_settings)
        return ["[[models]]", *(f"{key} = {harness.toml(value)}" for key, value in words.items())]


def for_kvcached(words):
    """The same arguments without a limit of memory and without piecewise graphs."""
    kept, skip = [], False
    for word in words:
        if word.startswith("--"):
            skip = word in ("--mem-fraction-static", "--piecewise-cuda-graph-tokens")
        if not skip:
            kept.append(word)
    return kept + ([] if "--disable-piecewise-cuda-graph" in kept else ["--disable-piecewise-cuda-graph"])


def kvcached_patches(text):
    """(names of the patches applied, of those that failed) as kvcached says in a server's log."""
    return tuple(sorted({name.strip() for names in one.findall(text) for name in names.split(",") if name.strip()}) for one in (_PATCHED, _UNPATCHED))


def kvcached_fault(text, ready=False):
    """Why what a server's log says is not SGLang with kvcached; None: it says nothing against it so far. `ready`: it serves.
    Each process of SGLang is patched when it imports SGLang, a scheduler long before it loads weights; with kvcached its
    KV Cache is a virtual one."""
    done, failed = kvcached_patches(text)
    if failed:
        return f"kvcached did not patch SGLang: {', '.join(failed)} failed, {len(done)} were applied"
    if not done and (ready or "Load weight begin" in text):
        return "kvcached did not patch SGLang: its hooks are not in SGLang's processes, the log has no word of it"
    if ready and "VirtualKV Cache is allocated" not in text:
        return "kvcached did not patch SGLang: the scheduler's KV Cache is not kvcached's"
    return None


class Server:
    """One SGLang server. `side`: "vanilla", "kvcached" or "crosspool"."""

    def __init__(self, fleet, model, side, prefix, device):
        self.fleet, self.model, self.side, self.host = fleet, model, side, fleet.host
        self.port = free_port()
        self.arguments = model.arguments(self.host, self.port, side)
        self.command = [*prefix, fleet.python, "-m", "sglang.launch_server", *self.arguments]
        self.log = fleet.folder / f"{side}-{model.name}.log"
        base = {
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "TRANSFORMERS_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "SGLANG_GRPC_PORT": "1",  # unused; its default may lie above the last port
            "PYTHONUNBUFFERED": "1",
            "SGLANG_PLUGINS": "none",
            "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
            **self.host.environment(),
        }
        base.pop("PYTHONDONTWRITEBYTECODE", None)  # worth a minute at each start
        base.pop("XPOOL_CONFIG", None)
        if side == "kvcached":
            base.update(self.host.kvcached_environment(model.name))
        if side != "crosspool":
            base.update(self.host.vanilla_environment(device))
        elif self.host.kind == "cpu":
            base["SGLANG_PLUGINS"] = "xpool_cpu_hooks"
        else:
            base.pop("SGLANG_PLUGINS")  # `xpool exec` sets it
        base.update(model.variables)
        if model.failpoints:
            base["XPOOL_FAILPOINTS"] = model.failpoints
        self.began = time.monotonic()
        self.ready_after = None
        self.environment = base
        self.process = fleet.spawn(self.command, self.log, base)

    def name(self):
        return f"{self.side} {self.model.name}"

    def text(self):
        return self.log.read_text(errors="replace")

    def healthy(self):
        if self.ready_after is not None:
            return True
        fault = self.side == "kvcached" and kvcached_fault(self.text())
        if self.process.poll() is not None:
            why = f": {fault}" if fault else ""
            raise harness.Failed(f"{self.name()} ended with {self.process.returncode} before it was ready{why}\n{self.tail()}")
        if fault:
            raise harness.Failed(f"{self.name()}: {fault}")
        try:
            if harness.http_request(f"http://127.0.0.1:{self.port}/health", timeout=2)[0] != 200:
                return False
        except OSError:
            return False
        fault = self.side == "kvcached" and kvcached_fault(self.text(), ready=True)
        if fault:
            raise harness.Failed(f"{self.name()}: {fault}")
        self.ready_after = time.monotonic() - self.began
        broken = [line for line in self.text().splitlines() if any(words in line for words in BROKEN_PLUGIN)]
        if broken:
            raise harness.Failed(f"SGLang went on without a plugin: {broken[0]}")
        print(f"    {self.name()}: up after {self.ready_after:.0f} s", flush=True)
        return True

    def tail(self):
        return self.text()[-LOG_TAIL:]

    def captured(self):
        """{kind of graph: seconds its capture took}, as SGLang's log says."""
        return {kind.split()[0]: float(seconds) for kind, seconds in _GRAPHS.findall(self.text())}

    def batches(self):
        """{(Decode|Prefill, replayed): lines of the log}; SGLang writes a line for every 40th decode step."""
        found = {}
        for kind, graph in _BATCH.findall(self.text()):
            found[kind, graph == "True"] = found.get((kind, graph == "True"), 0) + 1
        return found

    def loaded_gb(self):
        """What SGLang says that loading the weights took of the device; None: it did not say."""
        found = re.findall(r"Load weight end\..*mem usage=(-?[\d.]+) GB", self.text())
        return float(found[0]) if found else None

    def get(self, path, timeout=30):
        status, _, data = harness.http_request(f"http://127.0.0.1:{self.port}{path}", timeout=timeout)
        if status != 200:
            raise harness.Failed(f"{self.name()} {path}: {status} {data[:300]!r}")
        return json.loads(data)

    def post(self, path, body, timeout=120):
        status, _, data = harness.http_request(f"http://127.0.0.1:{self.port}{path}", "POST", body, timeout)
        if status != 200:
            raise harness.Failed(f"{self.name()} {path}: {status} {data[:300]!r}")
        return json.loads(data) if data[:1] in (b"{", b"[") else data

    def schedulers(self):
        """The pids of SGLang's ranks: children of its main process that say so in their names."""
        table = harness.process_table()
        tree = [self.process.pid]
        for pid in tree:
            tree += [child for child, (parent, *_) in table.items() if parent == pid]
        return [pid for pid in tree if table.get(pid) and "sglang::scheduler" in " ".join(table[pid][3])]

    def set_log_aside(self):
        """What a later server of this name says begins a new one."""
        self.log.rename(self.log.with_suffix(".first.log"))

    def end(self):
        """SIGKILL to all its processes."""
        kill_group(self.process)


def kill_group(process):
    for target in (process.pid, -process.pid):
        try:
            os.kill(target, signal.SIGKILL)
        except ProcessLookupError:
            pass
    process.wait(timeout=30)


def memory_for(device, memory, pool):
    """Bytes of an attention device's memory that leave `pool` bytes to KV Caches; `device` is what `xpool plan`
    says of it when it has `memory` bytes."""
    taken = sum(device[key] for key in ("weight_bytes", "workspace_bytes", "arena_bytes"))
    return math.ceil((taken + pool) * memory / device["budget_bytes"])


# ---- what is started together -----------------------------------------------------------------------------
class Fleet:
    """`vanilla`: [(Model, devices)] of plain servers; `models`: what one CrossPool system serves. start() does
    not wait; ready() does.

    `kv_policy`: scheduler.kv_policy. `pool`: bytes of the KV Capacity Pool of each attention device; None: what
    its memory gives. `plain`: the side of the plain servers. `reform`: deadlines.reform, seconds. `later`: names of
    models whose servers start() leaves to launch()."""

    def __init__(self, host, arguments, name, vanilla=(), models=(), atn=None, ffn=None, kv_policy="static", pool=None,
                 plain="vanilla", reform=None, later=()):
        self.host, self.name = host, name
        self.build, self.python = arguments.build, arguments.python
        self.folder = arguments.scratch / name
        self.folder.mkdir(parents=True, exist_ok=True)
        self.vanilla_models, self.models = list(vanilla), list(models)
        self.atn, self.ffn = atn or host.atn, ffn or host.ffn
        self.vanilla, self.instances, self.roles = {}, {}, {}
        self.observe = arguments.observe
        self.kv_policy, self.pool, self.plain, self.reform = kv_policy, pool, plain, reform
        self.later, self.lost, self.dead = set(later), {}, {}

    def spawn(self, command, log, environment):
        with open(log, "ab") as output:
            return subprocess.Popen(
                [str(word) for word in command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                preexec_fn=die_with_parent,
            )

    def start(self):
        self.began = time.monotonic()
        self.before = self.host.used()
        print(f"--- starting {self.name}: {len(self.vanilla_models)} plain, {len(self.models)} with CrossPool", flush=True)
        now = {model.name for model in [*(model for model, _ in self.vanilla_models), *self.models]} - self.later
        self.launch_plain(now)
        if self.models:
            self.start_system()
            self.launch_instances(now)
        self.tell_arguments()
        return self

    def tell_arguments(self):
        """One command line of each mode; both sides have the same."""
        for mode, one in {server.model.mode: server for server in self.servers()}.items():
            print(f"    SGLang's arguments on both sides, {mode}: {' '.join(one.arguments)}", flush=True)

    def launch_plain(self, names):
        for model, device in self.vanilla_models:
            if model.name in names:
                self.vanilla[model.name] = Server(self, model, self.plain, [], device)

    def launch_instances(self, names):
        for model in self.models:
            if model.name in names:
                prefix = [str(self.build / "bin" / "xpool"), "exec", "--config", str(self.config), "--model", model.name, "--"]
                self.instances[model.name] = Server(self, model, "crosspool", prefix, None)

    def launch(self):
        """Starts the servers that start() left."""
        names, self.later = self.later, set()
        print(f"    {self.name}: starts the servers of {len(names)} more after {time.monotonic() - self.began:.0f} s", flush=True)
        self.launch_plain(names)
        self.launch_instances(names)
        self.tell_arguments()

    def configure(self, memory=None):
        """Writes the system's configuration; `memory`: {device: bytes}."""
        shared = bool(set(self.atn) & set(self.ffn))
        lines = ["[daemon]", f"socket = '{self.folder}/d.sock'", f"http = '127.0.0.1:{self.daemon_port}'"]
        lines += ["[cache]", f"root = '{self.folder}/cache'", "[atn]", f"devices = {json.dumps(self.atn)}"]
        lines += ["[ffn]", f"devices = {json.dumps(self.ffn)}", "[scheduler]", f"kv_policy = '{self.kv_policy}'"]
        lines += ["[deadlines]", f"registration = {self.host.start_s}", f"startup = {self.host.start_s}"]
        lines += ["drain = 5", "stop = 10"] + ([f"reform = {self.reform}"] if self.reform is not None else [])
        if self.host.kind == "cuda":
            lines += ["kv = 60"]  # kernels that are compiled at first use hold a step up for seconds
        if shared:
            lines += ["[devices]", "allow_shared_roles = true"]
        if self.observe:
            lines += ["[observe]", f"folder = '{self.folder}/observe'"]
        lines += self.host.settings(self.atn + self.ffn, memory)
        for model in self.models:
            lines += model.settings(self.host)
        self.config.write_text("\n".join(lines) + "\n")

    def ask_xpool(self, *words, limit_s):
        """`xpool WORDS`: what it prints."""
        command = [str(self.build / "bin" / "xpool"), *words, "--config", str(self.config)]
        out = subprocess.run(command, capture_output=True, text=True, env=self.role_variables, timeout=limit_s)
        if out.returncode:
            raise harness.Failed(f"xpool {' '.join(words)}: {(out.stderr or out.stdout).strip()}")
        return out.stdout

    def planned(self, *words):
        """What `xpool plan` prints."""
        return self.ask_xpool("plan", *words, limit_s=60)

    def size_pool(self):
        """Configures as much memory of the attention devices as leaves `pool` bytes to KV Caches. What is taken
        beside them depends a little on what there is, hence the rounds."""
        memory = dict.fromkeys(self.atn, (64 << 30) if self.host.kind == "cuda" else (1 << 30))
        for _ in range(4):
            self.configure(memory)
            devices = {device["device"]: device for device in json.loads(self.planned("--json"))["devices"]}
            if all(devices[name]["kv_bytes"] == self.pool for name in self.atn):
                return
            memory = {name: memory_for(devices[name], memory[name], self.pool) for name in self.atn}

    def prepare(self):
        """Everything up to the plan."""
        self.daemon_port = free_port()
        self.config = self.folder / "system.toml"
        # Roles of ours and SGLang's processes need not have the same libraries in front.
        plain = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1", **self.host.role_environment(self.python)}
        plain.pop("XPOOL_CONFIG", None)
        self.role_variables = plain
        if self.pool:
            self.size_pool()
        else:
            self.configure()

    def plan(self):
        """What the system would be; nothing is started."""
        self.prepare()
        return json.loads(self.planned("--json"))

    def start_system(self):
        self.prepare()
        print(self.planned(), flush=True)
        commands = {"daemon": ["daemon", "serve"]}
        commands |= {f"atnagent {d}": ["atnagent", "--device", d] for d in self.atn}
        commands |= {f"ffnagent {d}": ["ffnagent", "--device", d] for d in self.ffn}
        for name, words in commands.items():
            self.start_role(name, *words)

    def start_role(self, name, *words):
        command = [self.build / "bin" / "xpool", *words, "--config", self.config]
        self.roles[name] = self.spawn(command, self.role_log(name), self.role_variables)

    def kill_all(self):
        """kill -9 of every process at once, then what a next daemon does when it starts and ends: it clears what
        the last one left. Returns what is left then, and what was before."""
        for server in self.servers():
            for pid in (server.process.pid, *server.schedulers()):
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    pass
        for process in self.roles.values():
            process.kill()
        for process in [server.process for server in self.servers()] + list(self.roles.values()):
            kill_group(process)
        before = self.host.left_over()
        self.start_role("daemon", "daemon", "serve")
        daemon = self.roles["daemon"]
        try:
            harness.wait_until(lambda: self.answers("/health"), 20, "the next daemon answers")
            daemon.terminate()
            daemon.wait(timeout=30)
        finally:
            kill_group(daemon)
        return self.host.left_over(), before

    def answers(self, path):
        try:
            return harness.http_request(f"http://127.0.0.1:{self.daemon_port}{path}", timeout=2)[0] == 200
        except OSError:
            return False

    def servers(self):
        return [*self.vanilla.values(), *self.instances.values()]

    def check_roles(self):
        for name, process in self.roles.items():
            if process.poll() is not None:
                raise harness.Failed(f"{name} ended with {process.returncode}\n{self.role_tail(name)}")

    def poll(self):
        """One look at all servers, for who does not wait for all: one that ends before it is ready goes to `lost`,
        with the reason, and the others go on. Failed: a role has ended."""
        self.check_roles()
        for servers in (self.vanilla, self.instances):
            for name, server in list(servers.items()):
                try:
                    server.healthy()
                except harness.Failed as error:
                    print(f"    LOST {error}", flush=True)
                    self.lost[server.name()] = str(error)
                    self.dead[server.name()] = server
                    server.end()
                    del servers[name]

    def without_prefill_graphs(self, name):
        """Starts both servers of a model once more, without prefill graphs, where one of them ended while it captured
        these and has not been started so before. False: nothing was done."""
        dead = [server for side in (self.plain, "crosspool") if (server := self.dead.pop(f"{side} {name}", None))]
        if not any(set(server.captured()) == {"cuda"} and NO_PREFILL_GRAPHS not in server.model.more for server in dead):
            return False
        for servers in (self.vanilla, self.instances):
            if name in servers:
                dead.append(servers.pop(name))
                dead[-1].end()
        for server in dead:
            server.set_log_aside()
        for model in {id(one.model): one.model for one in dead}.values():
            model.more = [*model.more, NO_PREFILL_GRAPHS]
        self.lost = {key: reason for key, reason in self.lost.items() if not key.endswith(f" {name}")}
        self.launch_plain({name})
        self.launch_instances({name})
        return True

    def starting(self):
        return [server for server in self.servers() if server.ready_after is None]

    def ready(self, limit=None):
        end = time.monotonic() + (limit or self.host.start_s)
        while True:
            self.check_roles()
            if all([server.healthy() for server in self.servers()]) and self.system_ready():
                break
            if time.monotonic() > end:
                late = [s.name() for s in self.servers() if s.ready_after is None]
                tails = "\n".join(f"--- {s.name()}\n{s.tail()}" for s in self.servers() if s.ready_after is None)
                tails += "\n".join(f"--- {name}\n{self.role_tail(name)}" for name in self.roles)
                raise harness.Failed(f"{self.name}: not ready in time: {late}\n{tails}")
            time.sleep(0.2)
        print(f"    {self.name}: all ready after {time.monotonic() - self.began:.0f} s; GPU memory {self.host.used()} MiB", flush=True)
        return self

    def settle(self, limit):
        """Waits until every server serves or has ended: those that ended are in `lost`."""
        end = time.monotonic() + limit
        while True:
            self.poll()
            if not self.starting():
                break
            if time.monotonic() > end:
                late = [server.name() for server in self.starting()]
                raise harness.Failed(f"{self.name}: not ready in time: {late}\n" + "\n".join(server.tail() for server in self.starting()))
            time.sleep(0.2)
        print(f"    {self.name}: {len(self.servers())} ready, {len(self.lost)} lost after {time.monotonic() - self.began:.0f} s; GPU memory {self.host.used()} MiB", flush=True)
        return self

    def system_ready(self):
        return not self.models or self.answers("/ready")

    def serves(self):
        """All that was started is there and ready."""
        processes = [*self.roles.values(), *(server.process for server in self.servers())]
        return all(process.poll() is None for process in processes) and self.system_ready()

    def role_log(self, name):
        return self.folder / f"{name.replace(' ', '-').replace(':', '')}.log"

    def role_tail(self, name):
        return self.role_log(name).read_text(errors="replace")[-1000:]

    def kv(self, *words):
        """`xpool kv WORDS`: what it prints."""
        return self.ask_xpool("kv", *words, limit_s=20)

    def books(self):
        """`xpool kv --json`."""
        return json.loads(self.kv("--json"))

    def state(self):
        status, _, data = harness.http_request(f"http://127.0.0.1:{self.daemon_port}/v1/state", timeout=10)
        harness.check(status == 200, f"/v1/state: {status}")
        return json.loads(data)

    def counters(self, name):
        """What the daemon knows of a model's calls and of the FFN side, after all of it has been told."""
        time.sleep(0.8)  # ranks and agents tell twice a second
        state = self.state()
        entry = next(one for one in state["models"] if one["id"] == name)
        ffn = [agent["counters"] for agent in state["agents"] if agent["role"] == "ffn"]
        found = {key: sum(one[key] for one in ffn) for key in ("invocations", "busy_ns", "queue_ns")}
        return {**found, "layers": entry["layers"], **{f"rank_{key}": value for key, value in entry["engine"].items()}}

    def experts(self, settled=False):
        """What routers chose since the start, of the one weight set that this Fleet has, by the first FfnAgent
        that tells. settled: counters() was just asked."""
        if not settled:
            time.sleep(0.8)  # agents tell twice a second
        for agent in self.state()["agents"]:
            if agent.get("experts"):
                return agent["experts"][0]
        raise harness.Failed("no FfnAgent tells of experts")

    def end(self):
        """Instances in order through the daemon, then by force what is left. True: nothing was left to kill."""
        clean = True
        if self.roles:
            done = subprocess.run(
                [str(self.build / "bin" / "xpool"), "down", "--config", str(self.config)],
                capture_output=True, text=True, timeout=90,
            )
            clean = done.returncode == 0
            if not clean:
                print(f"    xpool down: {done.returncode} {(done.stdout + done.stderr).strip()[-400:]}", flush=True)
        for server in self.servers():
            server.end()
        for process in self.roles.values():
            try:
                process.wait(timeout=10 if clean else 1)
            except subprocess.TimeoutExpired:
                clean = False
            kill_group(process)
        return clean
