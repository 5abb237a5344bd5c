# SPDX-License-Identifier: MIT
"""Starts an SGLang server on the CPU and looks after it. Standard library only.

A Server runs in a session of its own; leaving its `with` block kills the session. Arguments and
environment are functions of their own, because `xpool up` wants them in its configuration.
"""

import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent / "e2e"))
from harness import ROOT, SKIPPED, SLOW, Failed, free_port, http_request, wait_until  # noqa: E402

PYTHON = ROOT / ".xpool-cache" / "venv-test" / "bin" / "python"
HOOKS = HERE / "hooks"
HOOKS_PLUGIN = "xpool_cpu_hooks"
START_SECONDS = 300
# Prompts past this are prefilled in chunks.
CHUNK_ROWS = 128

ARGUMENTS = (
    "--device cpu --attention-backend torch_native --sampling-backend pytorch --grammar-backend none "
    "--disable-cuda-graph --skip-server-warmup --disable-overlap-schedule --max-total-tokens 4096 "
    "--max-running-requests 8 --mem-fraction-static 0.3 --dtype float32 --random-seed 1 "
    f"--chunked-prefill-size {CHUNK_ROWS}"
).split()

# Attention (TP, DP) of a server.
LAYOUTS = {
    "tp1": [],
    "tp2": ["--tp", "2", "--disable-custom-all-reduce"],
    "dp2": ["--tp", "2", "--dp", "2", "--enable-dp-attention", "--disable-custom-all-reduce"],
}

# SGLang goes on when a plugin or a hook fails; a test must not.
BROKEN_PLUGIN = ("Failed to load plugin", "Failed to execute general plugin", "Failed to apply hooks")


def arguments(layout="tp1"):
    """What follows model path, host and port on SGLang's command line."""
    return ARGUMENTS + LAYOUTS[layout]


def environment(layout="tp1", plugins=(HOOKS_PLUGIN,)):
    """The variables to add to a server's environment. Only the named plugins are loaded."""
    variables = {
        "SGLANG_USE_CPU_ENGINE": "1",
        "SGLANG_PLUGINS": ",".join(plugins) or "none",
        "PYTHONPATH": str(HOOKS),
        # Tests write no bytecode; SGLang's own is worth a minute at each start.
        "PYTHONDONTWRITEBYTECODE": "",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        # Unused, but it defaults to the port plus 10000, and free ports may be too high for that.
        "SGLANG_GRPC_PORT": "1",
        # The first request of an MLA model would compile for 15 s; with more threads than cores, or with
        # neighbours, OpenMP's spinning costs several times what it brings.
        "TORCHDYNAMO_DISABLE": "1",
        "OMP_NUM_THREADS": "1",
    }
    if layout != "tp1":
        cores = sorted(os.sched_getaffinity(0))
        variables["SGLANG_CPU_OMP_THREADS_BIND"] = f"{cores[0]}|{cores[-1]}"
        # NCCL would look for a CUDA device; without its library gloo serves.
        variables["SGLANG_NCCL_SO_PATH"] = "/nonexistent"
    return variables


def identity(layout):
    """What of arguments and environment decides the answers, as opposed to where things lie."""
    places = ("PYTHONPATH", "SGLANG_CPU_OMP_THREADS_BIND", "SGLANG_GRPC_PORT")
    return [arguments(layout), {k: v for k, v in environment(layout).items() if k not in places}]


class Server:
    """SGLang serving one checkpoint; `url` is its address, `process` its main process."""

    def __init__(self, checkpoint, layout="tp1", plugins=(HOOKS_PLUGIN,), more_arguments=(), variables=None):
        self.checkpoint, self.layout = pathlib.Path(checkpoint), layout
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.command = [str(PYTHON), "-m", "sglang.launch_server", "--model-path", str(checkpoint),
                        "--host", "127.0.0.1", "--port", str(self.port), *arguments(layout), *more_arguments]
        self.environment = {**os.environ, **environment(layout, plugins), **(variables or {})}
        self.process = self.log = None

    def __enter__(self):
        self.log = tempfile.NamedTemporaryFile("w+", prefix="xpool-sglang-", suffix=".log")
        # Killed with the test, also when the test cannot end in an orderly way (ctest's limit).
        command = ["setpriv", "--pdeathsig", "KILL", *self.command]
        self.process = subprocess.Popen(command, env=self.environment, stdin=subprocess.DEVNULL,
                                        stdout=self.log, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            wait_until(self.healthy, START_SECONDS, "SGLang answers /health", 0.2)
            for line in self.lines():
                if any(words in line for words in BROKEN_PLUGIN):
                    raise Failed(f"SGLang went on without a plugin: {line}")
        except BaseException as error:
            print(f"--- the last lines of {' '.join(self.command)}", *self.lines()[-40:], sep="\n",
                  file=sys.stderr)
            self.__exit__(type(error), error, None)
            raise
        return self

    def __exit__(self, *_):
        """SIGKILL: SGLang's own way out takes five to ten seconds, and nothing of it is wanted here. Its
        children die with their parent; the group is for what had not come that far."""
        for target in (self.process.pid, -self.process.pid):
            try:
                os.kill(target, signal.SIGKILL)
            except ProcessLookupError:
                pass
        self.process.wait(30)
        self.log.close()

    def healthy(self):
        if self.process.poll() is not None:
            raise Failed(f"SGLang ended with {self.process.returncode} before it was ready")
        try:
            return http_request(self.url + "/health")[0] == 200
        except OSError:
            return False

    def lines(self):
        return pathlib.Path(self.log.name).read_text(errors="replace").splitlines()

    def terminate(self, seconds=30):
        """Asks as an operator does and returns the exit code: 0, and of SGLang without the plugin -9 even when all
        went well, since it ends by killing itself."""
        self.process.send_signal(signal.SIGTERM)
        try:
            return self.process.wait(seconds * SLOW)
        except subprocess.TimeoutExpired:
            raise Failed(f"SGLang did not end within {seconds} s of SIGTERM") from None


def serve_until_interrupted(checkpoint, layout):
    """For trying things by hand."""
    with Server(checkpoint, layout) as server:
        print(f"serving {checkpoint} ({layout}) at {server.url}, log {server.log.name}; Ctrl-C ends it", flush=True)
        while server.process.poll() is None:
            time.sleep(0.5)


if __name__ == "__main__":
    try:
        serve_until_interrupted(sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "tp1")
    except KeyboardInterrupt:
        pass
