# SPDX-License-Identifier: MIT
"""`xpool exec`: the same process becomes another program, in the environment of an engine."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time

import harness

REPORT = (
    "import json, os, signal, sys\n"
    "print(json.dumps({'argv': [os.fsencode(a).hex() for a in sys.argv], 'pid': os.getpid(),\n"
    "  'group': os.getpgrp(), 'session': os.getsid(0), 'env': dict(os.environ), 'cwd': os.getcwd(),\n"
    "  'fds': sorted(os.listdir('/proc/self/fd')),\n"
    "  'blocked': sorted(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, []))),\n"
    "  'affinity': sorted(os.sched_getaffinity(0)), 'stdin': sys.stdin.read()}))\n"
)
ENVIRONMENT = ("XPOOL_CONFIG", "XPOOL_SET", "XPOOL_MODEL_ID", "SGLANG_PLUGINS", "PYTHONPATH", "OMP_NUM_THREADS")


def clean(**more):
    """This environment without what exec sets, so that the test sees exec's own doing."""
    env = {k: v for k, v in os.environ.items() if k not in ENVIRONMENT and not k.startswith(("SGLANG_", "XPOOL_"))}
    env.pop("TORCHDYNAMO_DISABLE", None)
    env.pop("CUDA_VISIBLE_DEVICES", None)
    return {**env, **more}


def execute(*words, env=None, **settings):
    return subprocess.run(
        [str(harness.XPOOL), "exec", *words],
        capture_output=True,
        env=clean() if env is None else env,
        timeout=30 * harness.SLOW,
        **{"stdin": subprocess.DEVNULL, **settings},
    )


def report(*words, program=(), env=None, **settings):
    """What a program sees that `xpool exec WORDS -- python -c REPORT PROGRAM...` becomes."""
    result = execute(*words, "--", sys.executable, "-c", REPORT, *program, env=env, **settings)
    harness.check(result.returncode == 0, f"{result.returncode} {result.stderr!r}")
    return json.loads(result.stdout)


def write_config(folder, text):
    path = pathlib.Path(folder, "c.toml")
    path.write_text(text)
    return str(path)


def models(*entries):
    return "".join(
        f'[[models]]\nid = "{name}"\npath = "{harness.TALES}"\nengine = "{engine}"\n{more}' for name, engine, more in entries
    )


def arguments_are_byte_identical():
    words = ["", " ", "--config", "--help", "--set", "a=b", "--", "-h", "*", "$HOME", "a\nb", "\\", "'\"", "ä€𝄞", b"\xff\xfe\x01"]
    words.append("x" * 100000)
    seen = report(program=words)["argv"]
    wanted = [os.fsencode(w).hex() for w in ["-c", *words]]
    harness.check(seen == wanted, f"arguments changed: {seen[:20]}")


def same_process_and_group():
    for session in (False, True):
        process = subprocess.Popen(
            [str(harness.XPOOL), "exec", "--", sys.executable, "-c", REPORT],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=clean(),
            start_new_session=session,
        )
        group = os.getpgid(process.pid)
        out, error = process.communicate(b"handed on", timeout=30 * harness.SLOW)
        harness.check(process.returncode == 0, f"{error!r}")
        seen = json.loads(out)
        harness.check(seen["pid"] == process.pid, f"pid {seen['pid']}, not {process.pid}")
        harness.check(seen["group"] == group, f"group {seen['group']}, not {group}")
        harness.check(seen["stdin"] == "handed on", "stdin is not the program's")
        harness.check(seen["blocked"] == [], f"signals are blocked: {seen['blocked']}")
        harness.check(seen["affinity"] == sorted(os.sched_getaffinity(0)), "the processors changed")
        # 0, 1, 2 and the folder that listdir itself has open.
        harness.check(len(seen["fds"]) == 4, f"descriptors leak: {seen['fds']}")


def exit_codes():
    with tempfile.TemporaryDirectory() as folder:
        plain = pathlib.Path(folder, "plain")
        plain.write_text("no program")
        for words, code, text in [
            (["sh", "-c", "exit 0"], 0, ""),
            (["sh", "-c", "exit 7"], 7, ""),
            (["sh", "-c", "exit 255"], 255, ""),
            (["no-such-program-of-ours"], 127, "no program of this name in PATH"),
            ([f"{folder}/missing"], 127, "No such file"),
            ([str(plain)], 126, "Permission denied"),
            ([folder], 126, "Permission denied"),
        ]:
            result = execute("--", *words)
            error = result.stderr.decode()
            harness.check(result.returncode == code, f"{words}: {result.returncode}, not {code}: {error}")
            harness.check(text in error, f"{words}: {error}")
        result = execute("--", "sh", "-c", "kill -9 $$")
        harness.check(result.returncode == -signal.SIGKILL, f"a killed program: {result.returncode}")


def wrong_use():
    for words, code, text in [
        ([], 2, "behind --"),
        (["sh"], 2, "behind --"),
        (["--"], 127, "no command behind --"),
        (["--model", "x", "--", "true"], 2, "x"),
        (["--config", "/no/such.toml", "--", "true"], 2, "/no/such.toml"),
        (["--set", "nothing=1", "--", "true"], 2, "nothing"),
    ]:
        result = execute(*words)
        error = result.stderr.decode()
        harness.check(result.returncode == code, f"{words}: {result.returncode}, not {code}: {error}")
        harness.check(text in error, f"{words}: {error}")
    result = execute("--help")
    harness.check(result.returncode == 0 and b"XPOOL_MODEL_ID" in result.stdout, f"--help: {result.stdout!r}")


def signals_reach_the_program():
    for number, wanted in ((signal.SIGTERM, 42), (signal.SIGINT, 43), (signal.SIGUSR1, 44)):
        script = f"trap 'exit {wanted}' {int(number)}; echo up; while :; do sleep 0.05; done"
        process = subprocess.Popen(
            [str(harness.XPOOL), "exec", "--", "sh", "-c", script],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=clean(),
        )
        process.stdout.readline()
        process.send_signal(number)
        harness.check(process.wait(10 * harness.SLOW) == wanted, f"signal {number}: {process.returncode}")


def environment_of_an_engine():
    with tempfile.TemporaryDirectory() as folder:
        config = write_config(folder, models(("a", "sglang", "")) + '[devices."cpu:0"]\nthreads = 3\n')
        env = report("--config", config)["env"]
        wanted = {
            "XPOOL_CONFIG": config,
            "XPOOL_MODEL_ID": "a",
            "SGLANG_PLUGINS": "xpool",
            "SGLANG_USE_CPU_ENGINE": "1",
            "TORCHDYNAMO_DISABLE": "1",
            "OMP_NUM_THREADS": "3",
            "CUDA_VISIBLE_DEVICES": "",
            "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
        }
        for name, value in wanted.items():
            harness.check(env.get(name) == value, f"{name} is {env.get(name)!r}, not {value!r}")
        for name in ("XPOOL_SET", "XPOOL_UNDER_UP", "SGLANG_CPU_OMP_THREADS_BIND"):
            harness.check(name not in env, f"{name} is set: {env.get(name)}")
        # A relative name is made absolute; the environment names a configuration as well as --config.
        os.chdir(folder)
        env = report("--config", "c.toml")["env"]
        harness.check(env["XPOOL_CONFIG"] == config, env["XPOOL_CONFIG"])
        env = report(env=clean(XPOOL_CONFIG="c.toml"))["env"]
        harness.check(env["XPOOL_CONFIG"] == config, env["XPOOL_CONFIG"])
        os.chdir("/")


def what_the_user_set_stays():
    with tempfile.TemporaryDirectory() as folder:
        config = write_config(folder, models(("a", "sglang", "")))
        own = {
            "SGLANG_PLUGINS": "mine,other",
            "OMP_NUM_THREADS": "5",
            "CUDA_VISIBLE_DEVICES": "3",
            "SGLANG_USE_CPU_ENGINE": "0",
            "TORCHDYNAMO_DISABLE": "0",
            "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "1",
            "PYTHONPATH": "/somewhere:/else",
            "UNRELATED": "as it was",
        }
        env = report("--config", config, env=clean(**own))["env"]
        harness.check(env["SGLANG_PLUGINS"] == "mine,other,xpool", env["SGLANG_PLUGINS"])
        harness.check(env["PYTHONPATH"].endswith("/somewhere:/else"), env["PYTHONPATH"])
        blank = report("--config", config, env=clean(SGLANG_PLUGINS=" xpool , mine"))["env"]["SGLANG_PLUGINS"]
        harness.check(blank == " xpool , mine", blank)
        for name in own.keys() - {"SGLANG_PLUGINS", "PYTHONPATH"}:
            harness.check(env[name] == own[name], f"{name} was changed to {env[name]!r}")
        # exec within exec adds nothing a second time.
        again = execute("--config", config, "--", str(harness.XPOOL), "exec", "--", "env", env=clean(**own))
        lines = dict(l.split("=", 1) for l in again.stdout.decode().splitlines() if "=" in l)
        harness.check(lines["SGLANG_PLUGINS"] == "mine,other,xpool", lines["SGLANG_PLUGINS"])
        harness.check(lines["PYTHONPATH"] == env["PYTHONPATH"], lines["PYTHONPATH"])


def settings_of_the_command_line_are_handed_on():
    """A process below resolves the same configuration: its digest is the daemon's."""
    with tempfile.TemporaryDirectory() as folder:
        config = write_config(folder, models(("a", "sglang", "")))
        words = ["--config", config, "--set", "scheduler.ffn_concurrency=3", "--set", "cache.root = '/tmp/a = b'"]
        result = execute(*words[:4], "--", str(harness.XPOOL), "config", "dump", "--json")
        dump = result.stdout.decode()
        harness.check(result.returncode == 0, result.stderr.decode())
        plain = subprocess.run(
            [str(harness.XPOOL), "config", "dump", "--json", *words[:4]], capture_output=True, text=True, env=clean(), timeout=120
        ).stdout
        harness.check(dump == plain, "the configuration below exec is another one")
        # The program's own words are above those handed on.
        result = execute(
            *words[:4], "--", str(harness.XPOOL), "config", "dump", "--json", "--set", "scheduler.ffn_concurrency=4"
        )
        harness.check(result.returncode == 0, result.stderr.decode())
        below = [l for l in result.stdout.decode().splitlines() if "ffn_concurrency" in l or '"value": 4' in l]
        harness.check(below, f"the program's own --set has no effect: {result.stdout.decode()[:400]}")
        result = execute("--set", "cache.root='a\nb'", "--", "true")
        harness.check(result.returncode == 1 and b"line break" in result.stderr, f"{result.stderr!r}")


def ranks_and_models():
    with tempfile.TemporaryDirectory() as folder:
        text = 'atn.devices = ["cpu:0", "cpu:1"]\nffn.devices = ["cpu:2"]\n'
        text += '[devices."cpu:0"]\ncpus = [0]\n[devices."cpu:1"]\ncpus = [0]\nthreads = 2\n'
        text += models(("a", "native", ""), ("b", "sglang", "attention_tp = 2\n"))
        config = write_config(folder, text)
        env = report("--config", config)["env"]
        harness.check("XPOOL_MODEL_ID" not in env, "a model was chosen among several")
        env = report("--config", config, "--model", "b")["env"]
        harness.check(env["XPOOL_MODEL_ID"] == "b", env)
        harness.check(env["SGLANG_CPU_OMP_THREADS_BIND"] == "0|0", env["SGLANG_CPU_OMP_THREADS_BIND"])
        harness.check(env["OMP_NUM_THREADS"] == "2", "the threads are those of the first rank's device, cpu:1")
        harness.check(env["SGLANG_NCCL_SO_PATH"] == "/nonexistent", env)


def serve_says_what_it_lacks():
    """`xpool serve` of an SGLang model looks before it becomes a server that would do without us."""
    with tempfile.TemporaryDirectory() as folder:
        fakes = {"none": "exit 3", "bare": "exit 4", "broken": "exit 1"}
        for name, body in fakes.items():
            path = pathlib.Path(folder, name)
            path.write_text(f"#!/bin/sh\n{body}\n")
            path.chmod(0o755)
        for python, text in [
            (f"{folder}/missing", "models[a].python"),
            (f"{folder}/none", "has no SGLang"),
            (f"{folder}/bare", "does not find the plugin xpool"),
            (f"{folder}/broken", "exit code 1"),
        ]:
            for env, more in ((clean(XPOOL_PYTHON=python), ""), (clean(), f'python = "{python}"\n')):
                path = write_config(folder, models(("a", "sglang", more)))
                result = subprocess.run(
                    [str(harness.XPOOL), "serve", "a", "--config", path], capture_output=True, text=True, env=env, timeout=120
                )
                harness.check(result.returncode == 1, f"{python}: {result.returncode} {result.stderr}")
                harness.check(text in result.stderr, f"{python}: {result.stderr}")


def serve_builds_the_command():
    """The words of the server, as a stand-in for the interpreter sees them."""
    with tempfile.TemporaryDirectory() as folder:
        fake = pathlib.Path(folder, "python")
        fake.write_text('#!/bin/sh\n[ "$1" = -c ] && exit 0\nfor w; do printf "%s\\n" "$w"; done\nenv | sed "s/^/env:/"\n')
        fake.chmod(0o755)
        more = f'python = "{fake}"\ndtype = "float32"\ndecode_rows = 4\nprefill_rows = 32\nmax_context = 256\n'
        more += 'attention_dp = 2\nengine_args = ["--random-seed", "1", "--chunked-prefill-size", "16"]\n'
        text = 'atn.devices = ["cpu:0", "cpu:1"]\nffn.devices = ["cpu:2"]\n'
        config = write_config(folder, text + models(("a", "sglang", more)))
        result = subprocess.run(
            [str(harness.XPOOL), "serve", "a", "--config", config], capture_output=True, text=True, env=clean(), timeout=120
        )
        harness.check(result.returncode == 0, result.stderr)
        lines = result.stdout.splitlines()
        words = [l for l in lines if not l.startswith("env:")]
        env = dict(l[4:].split("=", 1) for l in lines if l.startswith("env:") and "=" in l)
        pairs = dict(zip(words, words[1:]))
        for option, value in {
            "-m": "sglang.launch_server",
            "--model-path": str(harness.TALES),
            "--served-model-name": "a",
            "--host": "127.0.0.1",
            "--dtype": "float32",
            "--context-length": "256",
            "--max-running-requests": "8",
            "--tp-size": "2",
            "--dp-size": "2",
            "--device": "cpu",
            "--attention-backend": "torch_native",
        }.items():
            harness.check(pairs.get(option) == value, f"{option} is {pairs.get(option)}, not {value}: {words}")
        first = words.index("--chunked-prefill-size")
        harness.check(words[first + 1] == "64", f"two ranks of 32 rows: {words[first + 1]}")
        harness.check(words[-4:] == ["--random-seed", "1", "--chunked-prefill-size", "16"], f"{words[-4:]}")
        harness.check("--enable-dp-attention" in words and "--skip-server-warmup" in words, f"{words}")
        harness.check(1024 < int(pairs["--port"]) <= 55535, pairs["--port"])
        harness.check(env["XPOOL_MODEL_ID"] == "a" and env["HF_HUB_OFFLINE"] == "1", "environment")


def up_takes_the_engine_down():
    """An engine under `up` is a process group of its own; whatever ends `up` ends all of it. The
    engine here is a stand-in that starts a child and never registers."""
    with tempfile.TemporaryDirectory() as folder:
        fake = pathlib.Path(folder, "python")
        fake.write_text('#!/bin/sh\n[ "$1" = -c ] && exit 0\nsleep 1000 &\nwait\n')
        fake.chmod(0o755)
        entry = harness.model("m", engine="sglang", python=str(fake))
        for end in ("interrupt", "kill"):
            with harness.System([entry]) as system:
                system.up = system.launch("up")
                mine = lambda: [p for p, c in system.processes().items() if c[:2] == ["sleep", "1000"]]
                child = harness.wait_until(mine, 20, "the engine's child runs")[0]
                group = os.getpgid(child)
                harness.check(group != os.getpgid(system.up.pid), "the engine shares the group of up")
                time.sleep(0.3)
                if end == "interrupt":
                    system.interrupt()
                    system.expect_end(0, 30)
                else:
                    # The stand-in's child asks for no death signal, as SGLang's do; only its main dies.
                    system.up.kill()
                    system.up.wait(10)
                    alive = lambda: os.path.exists(f"/proc/{group}") and group in system.processes()
                    harness.wait_until(lambda: not alive(), 5, "the engine's main process is gone")
                    os.kill(child, signal.SIGKILL)
                    system.expect_nothing_left(5)


def an_engine_that_never_registers_ends_the_start():
    with tempfile.TemporaryDirectory() as folder:
        fake = pathlib.Path(folder, "python")
        fake.write_text('#!/bin/sh\n[ "$1" = -c ] && exit 0\nexec sleep 1000\n')
        fake.chmod(0o755)
        entry = harness.model("m", engine="sglang", python=str(fake))
        with harness.System([entry], settings="[deadlines]\nregistration = 1\nstartup = 0.5") as system:
            system.up = system.launch("up")
            system.expect_end(1, 20)
            log = system.log()
            harness.check("canonical failure" in log and "model m" in log, f"the reason is not given: {log[-800:]}")


def an_engine_that_fails_ends_the_start():
    with tempfile.TemporaryDirectory() as folder:
        fake = pathlib.Path(folder, "python")
        fake.write_text('#!/bin/sh\n[ "$1" = -c ] && exit 0\nsleep 1000 &\nsleep 0.5\nexit 3\n')
        fake.chmod(0o755)
        with harness.System([harness.model("m", engine="sglang", python=str(fake))]) as system:
            system.up = system.launch("up")
            system.expect_end(1, 20)
            log = system.log()
            harness.check("instance m: its process ended with exit code 3" in log, f"{log[-800:]}")


if __name__ == "__main__":
    harness.main(
        arguments_are_byte_identical,
        same_process_and_group,
        exit_codes,
        wrong_use,
        signals_reach_the_program,
        environment_of_an_engine,
        what_the_user_set_stays,
        settings_of_the_command_line_are_handed_on,
        ranks_and_models,
        serve_says_what_it_lacks,
        serve_builds_the_command,
        up_takes_the_engine_down,
        an_engine_that_never_registers_ends_the_start,
        an_engine_that_fails_ends_the_start,
    )
