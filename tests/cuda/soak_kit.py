# SPDX-License-Identifier: MIT
"""What tests/cuda/soak_on_device stands on: a system of real programs whose Instances are cuda_instance,
their boards, what a GPU holds, and what processes are left."""

import ctypes
import glob
import json
import mmap
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time
import uuid

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
sys.path.insert(0, str(ROOT / "benches"))
from mps_control import find_control  # noqa: E402, F401

TALES = ROOT / "models" / "tales"
MARK = "XPOOL_SOAK"  # in the environment of whatever we start
STARTING, OPEN, EXECUTABLE, SERVING, ENDED = range(5)
MIXED, DECODE, PREFILL, REST = range(4)
END_FAILED = 1
EXIT_FAILED, EXIT_WRONG = 3, 4
START_LIMIT_S = 60


class Broken(RuntimeError):
    """A scene cannot go on."""


class Board(ctypes.Structure):
    """tests/cuda/instance_board.h"""

    MAGIC = 0x0144524142505801
    _fields_ = [
        ("magic", ctypes.c_uint64),
        ("pid", ctypes.c_uint32),
        ("state", ctypes.c_uint32),
        *[(f"{what}_ns", ctypes.c_uint64) for what in ("began", "open", "executable", "serving")],
        *[(f"{what}_ns", ctypes.c_uint64) for what in ("beat", "ended", "told", "closed")],
        *[(f"{what}passes", ctypes.c_uint64) for what in ("", "graph_", "eager_", "prefill_")],
        *[(what, ctypes.c_uint64) for what in ("calls", "rows", "wrong", "apart", "dirty", "unchecked")],
        ("longest_pass_ns", ctypes.c_uint64),
        *[(what, ctypes.c_uint32) for what in ("told_kind", "ended_status", "kernel_after", "late", "gpu", "mps")],
        ("order", ctypes.c_uint32),
        ("order_rows", ctypes.c_uint32),
        ("told_text", ctypes.c_char * 512),
        ("ended_text", ctypes.c_char * 512),
        ("fault", ctypes.c_char * 256),
    ]


def map_board(path):
    with open(path, "w+b") as file:
        file.truncate(ctypes.sizeof(Board))
        return Board.from_buffer(mmap.mmap(file.fileno(), ctypes.sizeof(Board)))


# ---- the machine ------------------------------------------------------------------------------------------
class Gpus:
    """Memory in use, by NVML; no GPU or no NVML: none."""

    class Memory(ctypes.Structure):
        _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]

    def __init__(self, wanted):
        self.handles = []
        if not wanted:
            return
        try:
            self.library = ctypes.CDLL("libnvidia-ml.so.1")
        except OSError:
            return
        count = ctypes.c_uint()
        if self.library.nvmlInit_v2() or self.library.nvmlDeviceGetCount_v2(ctypes.byref(count)):
            return
        for index in range(count.value):
            handle = ctypes.c_void_p()
            if not self.library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(handle)):
                self.handles.append(handle)

    def name(self):
        if not self.handles:
            return "no GPU"
        name, driver = ctypes.create_string_buffer(96), ctypes.create_string_buffer(96)
        self.library.nvmlDeviceGetName(self.handles[0], name, 96)
        self.library.nvmlSystemGetDriverVersion(driver, 96)
        return f"{len(self.handles)} x {name.value.decode()}, driver {driver.value.decode()}"

    def used_mib(self):
        used = []
        for handle in self.handles:
            memory = self.Memory()
            if self.library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)):
                raise Broken("NVML does not tell what memory is in use")
            used.append(memory.used >> 20)
        return used

    def settle(self, limit, seconds=3.0):
        """Until no GPU holds more than `limit` MiB (a list), at most so long; what they hold then."""
        until = time.monotonic() + seconds
        while True:
            used = self.used_mib()
            if all(a <= b for a, b in zip(used, limit)) or time.monotonic() > until:
                return used
            time.sleep(0.02)


def python_packages():
    code = "import sysconfig, site; print(sysconfig.get_paths()['purelib']); print(*site.getsitepackages(), sep='\\n')"
    told = subprocess.run([shutil.which("python3") or sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    return list(dict.fromkeys(told.stdout.split()))


def find_libraries():
    """Folders of cuBLASLt, and libcupti."""
    folders = ["/usr/local/cuda/lib64", "/usr/local/cuda/targets/x86_64-linux/lib"]
    cupti = glob.glob("/usr/local/cuda*/extras/CUPTI/lib64/libcupti.so.13*") + glob.glob(
        "/usr/local/cuda*/lib*/libcupti.so.13*"
    )
    for package in python_packages():
        folders += glob.glob(f"{package}/nvidia/cu13/lib") + glob.glob(f"{package}/nvidia/cublas/lib")
        cupti += glob.glob(f"{package}/nvidia/*/lib/libcupti.so.13*") + glob.glob(f"{package}/torch/lib/libcupti.so.13*")
    return folders, next(iter(cupti), None)


def marked(token):
    """Live processes that carry the mark, as {pid: command}; zombies are none."""
    found = {}
    for folder in glob.glob("/proc/[0-9]*"):
        try:
            environment = pathlib.Path(folder, "environ").read_bytes()
            if f"{MARK}={token}".encode() in environment.split(b"\0"):
                found[int(folder[6:])] = pathlib.Path(folder, "cmdline").read_bytes().replace(b"\0", b" ").decode()
        except OSError:
            continue
    return found


def mps_processes():
    found = {}
    for path in glob.glob("/proc/[0-9]*/cmdline"):
        try:
            words = pathlib.Path(path).read_bytes().split(b"\0")
        except OSError:
            continue
        if words and words[0].rsplit(b"/", 1)[-1].startswith(b"nvidia-cuda-mps"):
            found[int(path.split("/")[2])] = b" ".join(words).decode(errors="replace")
    return found


# ---- models -----------------------------------------------------------------------------------------------
COMMON = dict(
    vocab_size=1024, max_position_embeddings=1024, rms_norm_eps=1e-6, rope_theta=10000.0, hidden_act="silu",
    torch_dtype="bfloat16", bos_token_id=1, eos_token_id=2,
)  # fmt: skip
LATENT = dict(kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)
# The sizes of one layer are the models' own, the number of layers is not.
REAL = {
    "qwen3-14b": dict(
        architectures=["Qwen3ForCausalLM"], hidden_size=5120, intermediate_size=17408, num_attention_heads=40,
        num_key_value_heads=8, head_dim=128,
    ),
    "qwen3-30b-a3b": dict(
        architectures=["Qwen3MoeForCausalLM"], hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768,
        num_experts=128, num_experts_per_tok=8, norm_topk_prob=True, decoder_sparse_step=1, mlp_only_layers=[],
        num_attention_heads=32, num_key_value_heads=4, head_dim=128,
    ),
    "deepseek-v2-lite": dict(
        architectures=["DeepseekV2ForCausalLM"], hidden_size=2048, intermediate_size=10944,
        moe_intermediate_size=1408, n_routed_experts=64, num_experts_per_tok=6, n_shared_experts=2, n_group=1,
        topk_group=1, topk_method="greedy", scoring_func="softmax", norm_topk_prob=False,
        routed_scaling_factor=1.0, first_k_dense_replace=1, moe_layer_freq=1, q_lora_rank=None,
        num_attention_heads=16, num_key_value_heads=16, **LATENT,
    ),
    "glm-4.7-flash": dict(
        architectures=["Glm4MoeLiteForCausalLM"], hidden_size=2048, intermediate_size=10240,
        moe_intermediate_size=1536, n_routed_experts=64, num_experts_per_tok=4, n_shared_experts=1, n_group=1,
        topk_group=1, topk_method="noaux_tc", norm_topk_prob=True, routed_scaling_factor=1.8,
        first_k_dense_replace=1, q_lora_rank=768, num_attention_heads=20, num_key_value_heads=20, **LATENT,
    ),
}  # fmt: skip


def small_models(scratch, xpool):
    seeded = scratch / "qwen3"
    if not seeded.exists():
        words = [xpool, "model", "synth", "--arch", "qwen3", "--out", seeded, "--seed", "11", "--hidden", "256"]
        subprocess.run([str(w) for w in words] + ["--dtype", "bf16"], check=True, stdout=subprocess.DEVNULL, timeout=120)
    return {"qwen3": seeded} | {name: TALES / name for name in ("qwen3-moe", "deepseek-v2", "glm4-moe-lite")}


def real_models(scratch, layers):
    models = {}
    for name, numbers in REAL.items():
        models[name] = scratch / name
        models[name].mkdir(exist_ok=True)
        text = json.dumps(COMMON | numbers | dict(num_hidden_layers=layers))
        (models[name] / "config.json").write_text(text)
    return models


def make_tables(scratch, program, models, dtype, dummy, rows, threads):
    """The reference's answers, of all checkpoints at once; {path: table}."""
    tables, started = {}, []
    for path in dict.fromkeys(models.values()):
        tables[path] = scratch / f"{path.name}.{dtype}.table"
        if not tables[path].exists():
            words = [program, "table", "--path", path, "--out", tables[path], "--dtype", dtype, "--rows", rows]
            words += ["--threads", threads, "--seed", 3] + (["--dummy"] if dummy else [])
            started.append((path, subprocess.Popen([str(w) for w in words], stderr=subprocess.PIPE, text=True)))
    for path, process in started:
        _, words = process.communicate(timeout=300)
        if process.returncode:
            raise Broken(f"no table of {path.name}: {words.strip()}")
    return tables


# ---- a system ---------------------------------------------------------------------------------------------
class Scene:
    """How a system is configured. `models`: {id: checkpoint}."""

    def __init__(self, models, tables, dtype, **options):
        self.models, self.tables, self.dtype = models, tables, dtype
        self.atn, self.ffn, self.provider, self.dummy = ["cuda:0"], ["cuda:1"], "auto", False
        self.memory, self.decode_rows, self.prefill_rows, self.calls = "16GiB", 32, 200, 48
        self.check, self.environment, self.counted = True, {}, None
        self.observe = False
        self.reform, self.shared = 0, False  # seconds for the next Generation; one GPU with both roles
        for name, value in options.items():
            assert hasattr(self, name), name
            setattr(self, name, value)

    def write(self, folder):
        lines = [
            f"daemon.socket = '{folder}/d.sock'",
            "daemon.http = '127.0.0.1:0'",
            f"cache.root = '{folder}'",
            f"atn.devices = {json.dumps(self.atn)}",
            f"ffn.devices = {json.dumps(self.ffn)}",
            f"fabric.provider = '{self.provider}'",
            "deadlines.registration = 30",
            "deadlines.startup = 60",
            "deadlines.submission = 10",
            f"deadlines.reform = {self.reform}",  # 0: an agent's death is the end
            f"devices.allow_shared_roles = {str(self.shared).lower()}",
        ]
        lines += [f"observe.folder = '{folder}/observe'"] if self.observe else []
        lines += [f"devices.'{name}'.memory = '{self.memory}'" for name in dict.fromkeys(self.atn + self.ffn)]
        if self.atn[0].startswith("cpu"):
            lines += [f"devices.'{name}'.threads = 1" for name in self.atn + self.ffn]
        for name, path in self.models.items():
            lines += ["[[models]]", f"id = '{name}'", f"path = '{path}'", "engine = 'sglang'"]
            lines += [f"dtype = '{self.dtype}'", "kv_ceiling_tokens = 512"]
            lines += [f"decode_rows = {self.decode_rows}", f"prefill_rows = {self.prefill_rows}"]
            lines += ["load_format = 'dummy'"] if self.dummy else []
        path = folder / "soak.toml"
        path.write_text("\n".join(lines) + "\n")
        return path


class System:
    """Daemon, agents and Instances. Whatever happens, `end` leaves none of them."""

    def __init__(self, build, folder, scene):
        self.build, self.folder, self.scene = build, folder, scene
        folder.mkdir(exist_ok=True)
        self.config = scene.write(folder)
        self.token = uuid.uuid4().hex
        self.environment = dict(os.environ, **scene.environment, **{MARK: self.token})
        self.environment.pop("XPOOL_CONFIG", None)
        self.xpool = str(build / "bin" / "xpool")
        self.processes, self.boards = {}, {}
        self.every = []  # boards, those of the killed too

    def log(self, name):
        return self.folder / f"{name.replace(':', '-').replace(' ', '-')}.log"

    def spawn(self, name, words, environment=None):
        with open(self.log(name), "wb") as log:
            self.processes[name] = subprocess.Popen(
                [str(w) for w in words], stdout=log, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL,
                env=self.environment | (environment or {}), start_new_session=True,
            )  # fmt: skip

    def tail(self, name, count=600):
        try:
            return self.log(name).read_text(errors="replace")[-count:].strip()
        except OSError:
            return ""

    def tails(self):
        return "\n".join(f"--- {name}: {self.tail(name)}" for name in self.processes)

    def observed(self, role):
        """Durations, ns, of what the observers of that role recorded (`xpool trace`)."""
        files = sorted((self.folder / "observe").glob("*"))
        if not files:
            return []
        done = subprocess.run([self.xpool, "trace", *map(str, files)], capture_output=True, text=True, timeout=120)
        records = [json.loads(line) for line in done.stdout.splitlines()]
        return [record["ns"] for record in records if record.get("role") == role and "ns" in record]

    @property
    def parts(self):
        return ["daemon"] + [f"atnagent {d}" for d in self.scene.atn] + [f"ffnagent {d}" for d in self.scene.ffn]

    def instance(self, model, order=MIXED, order_rows=1):
        life = len(self.every) + 1
        board = self.folder / f"{model}.{life}.board"
        self.boards[model] = map_board(board)
        self.every.append(self.boards[model])
        self.boards[model].order, self.boards[model].order_rows = order, order_rows
        words = [self.xpool, "exec", "--config", self.config, "--model", model, "--"]
        words += [self.build / "tests" / "cuda_instance", "serve", "--model", model, "--board", board]
        words += ["--table", self.scene.tables[self.scene.models[model]], "--calls", self.scene.calls]
        words += ["--seed", life] + ([] if self.scene.check else ["--no-check"])
        self.spawn(model, words)

    def start(self, order=MIXED, order_rows=1):
        """Everything at once; the seconds until every Instance serves."""
        began = time.monotonic()
        self.spawn("daemon", [self.xpool, "daemon", "serve", "--config", self.config])
        self.start_agents()
        for model in self.scene.models:
            self.instance(model, order, order_rows)
        self.until(
            lambda: all(b.state == SERVING and b.passes for b in self.boards.values()),
            "all Instances", START_LIMIT_S, list(self.processes),
        )  # fmt: skip
        return time.monotonic() - began

    def start_agents(self):
        for kind, devices in (("atnagent", self.scene.atn), ("ffnagent", self.scene.ffn)):
            for device in devices:
                words = [self.xpool, kind, "--device", device, "--config", self.config]
                self.spawn(f"{kind} {device}", words, self.scene.counted)

    def until(self, condition, what, seconds, alive=()):
        limit = time.monotonic() + seconds
        while not condition():
            for name in alive:
                if self.processes[name].poll() is not None:
                    code = self.processes[name].returncode
                    raise Broken(f"{name} ended with {code} while waiting for {what}\n{self.tails()}")
            if time.monotonic() > limit:
                raise Broken(f"{what} did not come within {seconds} s\n{self.tails()}")
            time.sleep(0.002)

    def is_ready(self):
        """Whether the daemon says that the Generation serves."""
        words = [self.xpool, "daemon", "check", "--config", self.config]
        return subprocess.run([str(word) for word in words], capture_output=True, timeout=30, env=self.environment).returncode == 0

    def serving(self, model):
        return self.boards[model].state == SERVING and self.processes[model].poll() is None

    def wait_ends(self, names, since, seconds):
        """{name: seconds from `since` to its end}; those that did not end are killed and have none."""
        ends, limit = {}, time.monotonic() + seconds
        left = set(names)
        while left and time.monotonic() < limit:
            for name in list(left):
                if self.processes[name].poll() is not None:
                    ends[name] = time.monotonic() - since
                    left.discard(name)
            time.sleep(0.001)
        for name in left:
            ends[name] = None
            self.processes[name].kill()
            self.processes[name].wait(30)
        return ends

    def down(self):
        done = subprocess.run(
            [self.xpool, "down", "--config", str(self.config)], capture_output=True, text=True, timeout=60,
            env=self.environment,
        )  # fmt: skip
        ends = self.wait_ends(list(self.processes), time.monotonic(), 20)
        codes = {name: self.processes[name].returncode for name in ends}
        # An Instance that found something wrong says so on its board.
        bad = {n: c for n, c in codes.items() if c != 0 and not (n in self.boards and c == EXIT_WRONG)}
        if done.returncode or bad:
            raise Broken(f"xpool down: {done.returncode}, {bad} {(done.stdout + done.stderr).strip()}\n{self.tails()}")

    def left(self):
        """What of this system lives, besides the processes that we hold ourselves."""
        return marked(self.token)

    def end(self):
        for process in self.processes.values():
            if process.poll() is None:
                process.kill()
        for process in self.processes.values():
            process.wait(30)
        for pid in self.left():  # an MPS controller that outlives its daemon
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass

    def sum(self, *fields):
        return sum(getattr(board, field) for board in self.every for field in fields)


# ---- counts of the profiler -------------------------------------------------------------------------------
def read_counts(path):
    """{call of the driver: times}, of one process."""
    data = path.read_bytes()
    magic, entries, subscribed = (int.from_bytes(data[a:b], "little") for a, b in ((0, 8), (8, 12), (12, 16)))
    if magic != 0x01544E5543505801:
        raise Broken(f"{path} is no file of counts")
    if not subscribed:
        raise Broken(f"the profiler counts nothing: {data[16:128].split(bytes(1))[0].decode()}")
    counts = {}
    for i in range(entries):
        entry = data[128 + i * 64 : 192 + i * 64]
        number = int.from_bytes(entry[56:], "little")
        if number:
            name = entry[:56].split(bytes(1))[0].decode()
            counts[name] = counts.get(name, 0) + number
    return counts


def launches(counts):
    return sum(number for name, number in counts.items() if "Launch" in name)
