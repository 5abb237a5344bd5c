# SPDX-License-Identifier: MIT
"""Starts a whole CrossPool system of real processes and looks at it from outside.

Standard library only. A System writes its configuration into a folder of its own, runs `xpool up` in
a session of its own, and finds the processes of that session in /proc, also when their parent is gone.
Whatever happens, leaving the `with` block kills what is left of the session and reports it.
"""

import contextlib
import ctypes
import http.client
import json
import os
import pathlib
import random
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
XPOOL = pathlib.Path(os.environ.get("XPOOL_BIN", ROOT / "build" / "bin" / "xpool"))
TALES = ROOT / "models" / "tales" / "qwen3-moe"
SMOLLM = ROOT / ".xpool-cache" / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf"
# For tests that write a configuration without a System.
TWO_DEVICES = """\
[atn]
devices = ["cpu:0"]
[ffn]
devices = ["cpu:1"]
[devices."cpu:0"]
threads = 1
memory = "1GiB"
[devices."cpu:1"]
threads = 1
memory = "1GiB"
"""
# Sanitizer builds and loaded machines: every limit below is multiplied by this.
SLOW = float(os.environ.get("XPOOL_SLOW", "1"))
SKIPPED = 77
TOGETHER_S = 300  # calls that run at the same time

PR_SET_CHILD_SUBREAPER = 36


class Failed(Exception):
    """A statement of a test that is not so."""


def check(condition, text):
    if not condition:
        raise Failed(text)


# Below the ports that Linux gives to connections (from 32768), so that none of those takes it
# meanwhile; SGLang takes no port above 55535, since it wants the one 10000 above too.
FREE_PORTS = range(20000, 32000)
_given_ports = set()


def free_port():
    """A port that nothing listens on and that this process was not given before: whoever gets it binds it
    later only, so a second draw could find it free again."""
    left = [p for p in FREE_PORTS if p not in _given_ports]
    for port in random.sample(left, min(len(left), 200)):
        with socket.socket() as s:
            try:
                s.bind(("127.0.0.1", port))
            except OSError:
                continue
            _given_ports.add(port)
            return port
    raise Failed(f"no free port in {FREE_PORTS}")


def wait_until(condition, seconds, what, interval=0.02):
    """Polls condition() until it is true; returns its value. The limit is a failure, with `what`."""
    end = time.monotonic() + seconds * SLOW
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() > end:
            raise Failed(f"not within {seconds * SLOW:g} s: {what}")
        time.sleep(interval)


def http_request(url, method="GET", body=None, timeout=60.0, headers=None):
    """(status, headers, bytes). Proxies of the environment are not used: all servers are local."""
    host, _, path = url.removeprefix("http://").partition("/")
    connection = http.client.HTTPConnection(host, timeout=timeout * SLOW)
    try:
        data = None if body is None else json.dumps(body).encode()
        sent = {"Content-Type": "application/json"} if data is not None else {}
        connection.request(method, "/" + path, data, {**sent, **(headers or {})})
        answer = connection.getresponse()
        return answer.status, dict(answer.getheaders()), answer.read()
    finally:
        connection.close()


def golden(path=TALES):
    return json.loads((path / "golden.json").read_text())["prompts"]


def model(identifier, path=TALES, **settings):
    """A [[models]] entry."""
    return {"id": identifier, "path": str(path), **settings}


def toml(value):
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{k} = {toml(v)}" for k, v in value.items()) + " }"
    return json.dumps(value)


def process_table():
    """pid -> (parent, session, state, command line) of every process."""
    table = {}
    for entry in os.listdir("/proc"):
        if not entry.isdigit():
            continue
        try:
            text = pathlib.Path("/proc", entry, "stat").read_text()
            command = pathlib.Path("/proc", entry, "cmdline").read_bytes().split(b"\0")[:-1]
        except OSError:
            continue
        fields = text[text.rindex(")") + 2 :].split()
        table[int(entry)] = (
            int(fields[1]),
            int(fields[3]),
            fields[0],
            [part.decode(errors="replace") for part in command],
        )
    return table


def role_of(command):
    """The role and its name, as in ffnagent cpu:1, of a command line; None for another program."""
    if not command or pathlib.Path(command[0]).name != "xpool" or len(command) < 2:
        return None
    if command[1] == "daemon":
        return "daemon"
    if command[1] in ("up", "gateway"):
        return command[1]
    if command[1] in ("serve", "atnagent", "ffnagent"):
        words = command[2:]
        names = []
        while words:
            word = words.pop(0)
            if word in ("--config", "--set"):
                words = words[1:]
            elif word == "--device":
                names.append(words.pop(0))
            elif not word.startswith("-"):
                names.append(word)
        return " ".join([command[1], *names[:1]])
    return command[1]


class System:
    """One system. Attributes: gateway and daemon (base URLs), folder, config (path), up (Popen)."""

    def __init__(self, models, atn=1, ffn=1, threads=1, memory="1GiB", settings="", env=None, arguments=()):
        self.temporary = tempfile.TemporaryDirectory(prefix="xpool-e2e-")
        self.folder = pathlib.Path(self.temporary.name)
        self.models = [m["id"] for m in models]
        self.gateway_port, self.daemon_port = free_port(), free_port()
        self.gateway = f"http://127.0.0.1:{self.gateway_port}"
        self.daemon = f"http://127.0.0.1:{self.daemon_port}"
        self.config = self.folder / "system.toml"
        self.log_path = self.folder / "log"
        self.env = {**os.environ, **(env or {})}
        self.env.pop("XPOOL_CONFIG", None)
        self.arguments = list(arguments)
        self.atn = [f"cpu:{i}" for i in range(atn)]
        self.ffn = [f"cpu:{atn + i}" for i in range(ffn)]
        lines = [
            "[daemon]",
            f"socket = {toml(str(self.folder / 'daemon.sock'))}",
            f'http = "127.0.0.1:{self.daemon_port}"',
            "[gateway]",
            f'http = "127.0.0.1:{self.gateway_port}"',
            "[cache]",
            f"root = {toml(str(self.folder / 'cache'))}",
            "[atn]",
            f"devices = {toml(self.atn)}",
            "[ffn]",
            f"devices = {toml(self.ffn)}",
        ]
        for device in self.atn + self.ffn:
            lines += [f'[devices."{device}"]', f"threads = {threads}", f"memory = {toml(memory)}"]
        if settings:
            lines.append(settings)
        for entry in models:
            lines.append("[[models]]")
            lines += [f"{key} = {toml(value)}" for key, value in entry.items()]
        self.config.write_text("\n".join(lines) + "\n")
        self.up = None
        self.sessions = set()
        self.hand = []

    # --- life ---------------------------------------------------------------------------------------
    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        left = self.processes()
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
                os.kill(pid, signal.SIGKILL)
        for process in [self.up, *self.hand]:
            if process:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(10)
        if kind is not None:
            print(f"--- the last lines of {self.log_path.name}:")
            print(self.log()[-4000:])
        self.temporary.cleanup()
        return False

    def launch(self, *arguments, log=None):
        """Starts `xpool ARGUMENT...` with this system's configuration, in a session of its own."""
        output = open(log or self.log_path, "ab")
        with output:
            process = subprocess.Popen(
                [str(XPOOL), *arguments, "--config", str(self.config)],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env=self.env,
                cwd=ROOT,
            )
        self.sessions.add(process.pid)
        return process

    def run(self, *arguments, timeout=60):
        """Runs `xpool ARGUMENT...` to its end: (exit code, stdout, stderr)."""
        result = subprocess.run(
            [str(XPOOL), *arguments, "--config", str(self.config)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            env=self.env,
            cwd=ROOT,
            timeout=timeout * SLOW,
        )
        return result.returncode, result.stdout, result.stderr

    def start(self, timeout=60):
        said = self.log().count("ready in")
        self.up = self.launch("up", *self.arguments)
        self.wait_ready(timeout)
        # `up` asks the daemon now and then; until it has seen READY, an Instance's end ends the start.
        wait_until(lambda: self.log().count("ready in") > said, 10, "xpool up says that it is ready")
        return self

    def start_by_hand(self, timeout=60):
        """Each role as a process of its own, in a session of its own, as a person would in terminals."""
        commands = [["daemon", "serve"]]
        commands += [["atnagent", "--device", device] for device in self.atn]
        commands += [["ffnagent", "--device", device] for device in self.ffn]
        commands += [["serve", identifier] for identifier in self.models]
        commands += [["gateway"]]
        self.hand = [self.launch(*command) for command in commands]
        self.wait_ready(timeout)
        return self

    def log(self):
        try:
            return self.log_path.read_text(errors="replace")
        except OSError:
            return ""

    def is_ready(self):
        for process in [self.up, *self.hand]:
            if process and process.poll() is not None:
                raise Failed(f"{process.args[1]} ended with {process.returncode} before the system was ready")
        try:
            status, _, _ = http_request(self.daemon + "/ready", timeout=2)
            if status != 200:
                return False
            # The daemon's verdict says nothing of the gateway, which lists models in every state.
            return set(self.models) <= set(self.list_models())
        except OSError:
            return False

    def wait_ready(self, timeout=60):
        wait_until(self.is_ready, timeout, "the system is ready", 0.05)

    def interrupt(self):
        """Ctrl-C: SIGINT to the whole foreground group of `up`."""
        os.killpg(self.up.pid, signal.SIGINT)

    def stop(self, timeout=20):
        """Ctrl-C, and checks the exit code and that nothing is left."""
        self.interrupt()
        self.expect_end(0, timeout)

    def expect_end(self, code, timeout=20):
        """`up` ends with this exit code (None: any but 0) and leaves no process."""
        try:
            got = self.up.wait(timeout * SLOW)
        except subprocess.TimeoutExpired:
            raise Failed(f"xpool up has not ended after {timeout * SLOW:g} s; left: {self.roles()}") from None
        if code is None:
            check(got != 0, "xpool up ended with 0 after a failure")
        else:
            check(got == code, f"xpool up ended with {got}, not {code}")
        self.expect_nothing_left()

    def expect_nothing_left(self, timeout=1.0):
        wait_until(lambda: not self.processes(), timeout, f"no process is left (left: {self.roles()})")

    # --- processes -----------------------------------------------------------------------------------
    def processes(self):
        """pid -> command line of the live processes of this system (zombies are dead)."""
        return {
            pid: command
            for pid, (_, session, state, command) in process_table().items()
            if state not in "ZX" and (session in self.sessions or str(self.config) in command)
        }

    def roles(self):
        """role -> pid."""
        return {role_of(command): pid for pid, command in self.processes().items() if role_of(command)}

    def pid(self, role):
        roles = self.roles()
        found = [pid for name, pid in roles.items() if name == role or name.startswith(role + " ")]
        check(len(found) == 1, f"one process with role {role!r}: {roles}")
        return found[0]

    # --- requests ------------------------------------------------------------------------------------
    def get(self, url, timeout=10):
        status, _, data = http_request(url, timeout=timeout)
        check(status == 200, f"{url}: {status} {data[:300]!r}")
        return json.loads(data)

    def post(self, path, body, timeout=60, expect=200):
        status, headers, data = http_request(self.gateway + path, "POST", body, timeout)
        check(status == expect, f"{path}: {status} {data[:300]!r}")
        return json.loads(data)

    def list_models(self):
        """The ids of the models that the gateway says are up."""
        listed = self.get(self.gateway + "/v1/models")["data"]
        return [entry["id"] for entry in listed if entry["state"] == "up"]

    def state(self):
        return self.get(self.daemon + "/v1/state")

    def generate(self, identifier, ids, count, timeout=60, **parameters):
        """The ids of `count` greedy tokens."""
        return self.generate_full(identifier, ids, count, timeout, **parameters)["output_ids"]

    def generate_full(self, identifier, ids, count, timeout=60, top=0, **parameters):
        sampling = {"temperature": 0, "max_new_tokens": count, "ignore_eos": True, **parameters}
        body = {"model": identifier, "input_ids": ids, "sampling_params": sampling}
        if top:
            body |= {"return_logprob": True, "top_logprobs_num": top}
        answer = self.post("/generate", body, timeout)
        return answer[0] if isinstance(answer, list) else answer

    def stream(self, identifier, ids, count, timeout=60, **parameters):
        """A Stream of greedy tokens (SGLang's form: each event carries all output ids so far)."""
        sampling = {"temperature": 0, "max_new_tokens": count, "ignore_eos": True, **parameters}
        body = {"model": identifier, "input_ids": ids, "sampling_params": sampling, "stream": True}
        return Stream(self.gateway_port, "/generate", body, timeout * SLOW)

    def hold(self, begin):
        """What `begin()` gives, a list of Streams, all certainly open since the FfnAgents stand still. Streams
        that were over sooner, as they are on a busy machine, are begun anew."""
        agents = [pid for name, pid in self.roles().items() if name.startswith("ffnagent")]
        for _ in range(10):
            streams = begin()
            for pid in agents:
                os.kill(pid, signal.SIGSTOP)
            before, now = None, []
            while now != before:  # what was on its way to us
                before, now = now, [(len(stream.ids), stream.done) for stream in streams]
                time.sleep(0.3)
            if not any(stream.done or stream.error for stream in streams):
                return streams
            self.go_on()
            for stream in streams:
                stream.result()
        raise Failed("a stream was always over before the FfnAgents were stopped")

    def go_on(self):
        """Those of the FfnAgents that live and were held."""
        for name, pid in self.roles().items():
            if name.startswith("ffnagent"):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGCONT)

    # --- metrics -------------------------------------------------------------------------------------
    def metrics(self, base=None):
        """name{labels} -> value of a Prometheus page."""
        status, _, data = http_request((base or self.daemon) + "/metrics")
        check(status == 200, f"/metrics: {status}")
        values = {}
        for line in data.decode().splitlines():
            if line and not line.startswith("#"):
                name, _, value = line.rpartition(" ")
                values[name] = float(value)
        return values


class Stream:
    """A server-sent event stream, read by a thread; `ids` and `times` grow while it runs."""

    def __init__(self, port, path, body, timeout):
        self.ids, self.times, self.events = [], [], []
        self.error, self.done = None, False
        self.connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout)
        self.connection.request("POST", path, json.dumps(body).encode(), {"Content-Type": "application/json"})
        self.thread = threading.Thread(target=self.read, daemon=True)
        self.thread.start()

    def read(self):
        try:
            answer = self.connection.getresponse()
            if answer.status != 200:
                raise Failed(f"{answer.status} {answer.read()[:300]!r}")
            for line in answer:
                line = line.strip()
                if not line.startswith(b"data:"):
                    continue
                data = line[5:].strip()
                if data == b"[DONE]":
                    self.done = True
                    continue
                event = json.loads(data)
                if "error" in event:
                    raise Failed(f"error event: {event['error']}")
                self.events.append(event)
                ids = event.get("output_ids")
                if ids is not None and len(ids) > len(self.ids):
                    self.ids = ids
                    self.times.append(time.monotonic())
        except Exception as error:  # the reader's failure is the test's to judge
            self.error = error

    def wait(self, count, timeout=30):
        """At least `count` tokens are there."""
        wait_until(lambda: len(self.ids) >= count or self.error or self.done, timeout, f"{count} streamed tokens")
        check(len(self.ids) >= count, f"the stream ended with {len(self.ids)} tokens: {self.error}")

    def result(self, timeout=60):
        self.thread.join(timeout * SLOW)
        check(not self.thread.is_alive(), "the stream has not ended")
        if self.error:
            raise self.error
        return self.ids

    def close(self):
        """Disconnects in mid-stream, as a client that goes away."""
        with contextlib.suppress(OSError, AttributeError):
            self.connection.sock.shutdown(socket.SHUT_RDWR)
        self.connection.close()


def together(functions, limit_s=TOGETHER_S):
    """Runs functions at the same time; their results in order, or the first exception. `limit_s`: of them all."""
    results, errors = [None] * len(functions), []

    def one(index):
        try:
            results[index] = functions[index]()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=one, args=(i,), daemon=True) for i in range(len(functions))]
    until = time.monotonic() + limit_s * SLOW
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(max(until - time.monotonic(), 0))
    if errors:
        raise errors[0]
    left = sum(thread.is_alive() for thread in threads)
    check(not left, f"{left} of {len(threads)} calls have not ended within {limit_s * SLOW:.0f} s")
    return results


class Repeated:
    """While its block runs, a thread calls `once` every `period` seconds. What that raises ends the calls and is
    raised at the end of the block, unless that raises something itself."""

    LIMIT_S = 120  # of the last call

    def __init__(self, period):
        self.period, self.over, self.raised = period, threading.Event(), None
        self.thread = threading.Thread(target=self.run, daemon=True)

    def once(self):
        raise NotImplementedError

    def run(self):
        try:
            while not self.over.wait(self.period):
                self.once()
        except Exception as error:
            self.raised = error

    def __enter__(self):
        self.thread.start()
        return self

    def __exit__(self, kind, *_):
        self.over.set()
        self.thread.join(self.LIMIT_S * SLOW)
        if kind is None and self.raised:
            raise self.raised
        check(kind or not self.thread.is_alive(), f"{type(self).__name__} has not ended within {self.LIMIT_S * SLOW:.0f} s")


SHM = pathlib.Path("/dev/shm")


def shm_names():
    return set(os.listdir(SHM)) if SHM.is_dir() else set()


def descends(pid):
    """Whether a process was started by this one; its orphans come back here (main)."""
    while pid > 1 and pid != os.getpid():
        try:
            pid = int(pathlib.Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            return False
    return pid == os.getpid()


def holders(name):
    """Live processes of this user that have a file of /dev/shm open or mapped."""
    path, found = str(SHM / name), set()
    for entry in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"{path}\n".encode() in (entry / "maps").read_bytes():
                found.add(int(entry.name))
            for fd in os.listdir(entry / "fd"):
                if os.readlink(f"{entry}/fd/{fd}") == path:
                    found.add(int(entry.name))
    return found


class Names(threading.Thread):
    """Names that appear in /dev/shm while a test runs, and which of them are another tree's: those of another
    user, and those that have been seen in the hands of processes that this one did not start alone."""

    def __init__(self, ours=descends):
        super().__init__(daemon=True)
        self.ours, self.before, self.others, self.stop = ours, shm_names(), set(), threading.Event()

    def look(self):
        for name in shm_names() - self.before - self.others:
            with contextlib.suppress(OSError):
                users = holders(name)
                if (SHM / name).stat().st_uid != os.getuid() or (users and not any(map(self.ours, users))):
                    self.others.add(name)

    def run(self):
        while not self.stop.wait(0.5):
            self.look()

    def left(self, patience=1.0):
        """The new ones that are not another tree's, nor go by themselves meanwhile."""
        until = time.monotonic() + patience
        while True:
            self.look()
            left = shm_names() - self.before - self.others
            if not left or time.monotonic() > until:
                return left
            time.sleep(0.05)

    def end(self):
        self.stop.set()
        self.join(10)


def main(*tests):
    """Runs the functions named on the command line, or all; prints a line each; exits 0, 1 or 77."""
    # Orphans come to this process and are reaped here, so that a lingering zombie is never taken for
    # a live process, whatever process 1 of a container does.
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    if not XPOOL.exists():
        print(f"{XPOOL} is missing: run scripts/build")
        sys.exit(1)
    wanted = [word for word in sys.argv[1:] if not word.startswith("-")]
    bad = 0
    for test in tests:
        if wanted and test.__name__ not in wanted:
            continue
        names, began = Names(), time.monotonic()
        names.start()
        try:
            test()
            left = names.left()
            check(not left, f"names left in /dev/shm: {left}")
            print(f"ok   {test.__name__} ({time.monotonic() - began:.1f} s)")
        except Exception as error:
            bad += 1
            if not isinstance(error, Failed):
                import traceback

                traceback.print_exc()
            print(f"FAIL {test.__name__}: {type(error).__name__}: {error}")
        names.end()
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
    sys.exit(1 if bad else 0)
