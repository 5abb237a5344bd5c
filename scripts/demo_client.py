# SPDX-License-Identifier: MIT
"""Runs the demo's system and asks its models; started by scripts/demo. Standard library only.

Owns the child `xpool up`: whatever happens here (Ctrl-C, an error, the terminal's end), the child gets
SIGINT, and what is left after its time limit is killed and reported.
"""

import argparse
import ctypes
import http.client
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
XPOOL = ROOT / "build" / "bin" / "xpool"
CONFIG = "configs/demo.toml"
LOG = ROOT / ".xpool-cache" / "demo.log"
READY_LIMIT_S = 300
STOP_LIMIT_S = 30
PROMPTS = {
    "smollm2": "Why is the sky blue?",
    "tales-qwen3-moe": "Tell me a story about a robot named Leo and a red balloon.",
}
SAMPLING = {
    "smollm2": {"temperature": 0.3, "seed": 1},
    "tales-qwen3-moe": {"temperature": 0.6, "seed": 3},
}
TTY = sys.stdout.isatty()


def bold(text):
    return f"\033[1m{text}\033[0m" if TTY else text


def say(text):
    print(f"xpool: {text}", flush=True)


def mib(size):
    return f"{size / (1 << 20):.1f} MiB"


def request(address, method, path, body=None, timeout=60):
    connection = http.client.HTTPConnection(address, timeout=timeout)
    data = None if body is None else json.dumps(body)
    connection.request(method, path, data, {"Content-Type": "application/json"} if data else {})
    return connection.getresponse()


def get(address, path):
    answer = request(address, "GET", path, timeout=5)
    return answer.status, json.load(answer)


# --- the system ------------------------------------------------------------------------------------
def free_address(address, given):
    """The address itself, or one with a free port when something listens there or it is among those given."""
    host, _, port = address.rpartition(":")
    with socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            if address not in given:
                s.bind((host, int(port)))
                return address
        except OSError:
            pass
    other = address
    while other == address or other in given:
        with socket.socket() as s:
            s.bind((host, 0))
            other = f"{host}:{s.getsockname()[1]}"
    say(f"{address} is taken; using {other}")
    return other


def socket_is_taken(path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as s:
        try:
            s.connect(path)
            return True
        except OSError as error:
            return not isinstance(error, (FileNotFoundError, ConnectionRefusedError))


def resolve(folder):
    """Addresses to use, and the settings that say so where they differ from the configuration."""
    dump = subprocess.run(
        [XPOOL, "config", "dump", "--json", "--config", CONFIG], capture_output=True, text=True, cwd=ROOT, timeout=120
    )
    if dump.returncode:
        sys.exit(dump.stderr.strip() or "xpool config dump failed")
    values = json.loads(dump.stdout)
    found, extra = {}, []
    for key in ("gateway.http", "daemon.http", "daemon.socket"):
        value = setting(values, key)
        if key == "daemon.socket":
            used = value
            if socket_is_taken(value):
                used = str(pathlib.Path(folder) / "daemon.sock")
                say(f"{value} is taken by another system; using {used}")
        else:
            used = free_address(value, found.values())
        if used != value:
            extra += ["--set", f"{key}={used}"]
        found[key] = used
    return found, extra


def setting(values, key):
    """The value of a key in the output of `config dump --json`."""
    value = values["values"]
    for part in key.split("."):
        value = value[part]
    return value


def die_with_parent():
    ctypes.CDLL(None).prctl(1, signal.SIGINT, 0, 0, 0)  # PR_SET_PDEATHSIG


def session_processes(session):
    """pid -> command line of the live processes of a session."""
    found = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                stat = pathlib.Path("/proc", entry, "stat").read_text()
                fields = stat[stat.rindex(")") + 2 :].split()
                if int(fields[3]) == session and fields[0] not in "ZX":
                    command = pathlib.Path("/proc", entry, "cmdline").read_bytes()
                    found[int(entry)] = command.replace(b"\0", b" ").decode(errors="replace").strip()
            except (OSError, ValueError):
                continue
    return found


def wait_ready(up, address, models):
    began, shown = time.monotonic(), None
    while True:
        if up.poll() is not None:
            print(LOG.read_text(errors="replace")[-3000:])
            sys.exit(f"xpool up ended with exit code {up.returncode} before it was ready; log: {LOG}")
        text = "starting"
        try:
            status, verdict = get(address["daemon.http"], "/ready")
            if status == 200:
                _, listing = get(address["gateway.http"], "/v1/models")
                if models <= {m["id"] for m in listing["data"]}:
                    break
            elif verdict.get("reasons"):
                text = verdict["reasons"][0]
        except (OSError, ValueError, http.client.HTTPException):
            pass
        if time.monotonic() - began > READY_LIMIT_S:
            sys.exit(f"not ready within {READY_LIMIT_S} s: {text}; log: {LOG}")
        line = f"waiting, {time.monotonic() - began:.0f} s: {text}"
        if TTY:
            print(f"\r\033[K{line[:150]}", end="", flush=True)
        elif text != shown:
            say(line)
        shown = text
        time.sleep(0.1)
    if TTY:
        print("\r\033[K", end="")
    say(f"System Ready after {time.monotonic() - began:.1f} s")


def stop(up):
    """Ctrl-C for the system; returns whether it ended by itself with 0 and left nothing."""
    say("stopping")
    if up.poll() is None:
        os.killpg(up.pid, signal.SIGINT)
    try:
        code = up.wait(STOP_LIMIT_S)
    except subprocess.TimeoutExpired:
        code = None
    left = session_processes(up.pid)
    deadline = time.monotonic() + 1
    while left and time.monotonic() < deadline:
        time.sleep(0.02)
        left = session_processes(up.pid)
    for pid, command in left.items():
        say(f"still running, killed: {pid} {command}")
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
    if code != 0:
        say(f"xpool up ended with {'no' if code is None else code} exit code; log: {LOG}")
    if code == 0 and not left:
        say("stopped in order; no process is left")
        return True
    return False


# --- asking ----------------------------------------------------------------------------------------
def ask(address, model, prompt):
    """Streams a chat answer to the terminal; (tokens, seconds to the first, tokens a second)."""
    print(f"\n{bold(model)}: {prompt}\n", flush=True)
    body = {
        "model": model,
        "messages": [{"role": "user", "content": prompt}],
        "top_p": 0.9,
        "max_tokens": 220,
        **SAMPLING[model],
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    began = time.monotonic()
    answer = request(address, "POST", "/v1/chat/completions", body, 120)
    if answer.status != 200:
        sys.exit(f"{model}: HTTP {answer.status}: {answer.read().decode(errors='replace')}")
    first = last = None
    usage, finished = None, False
    for line in answer:
        line = line.strip()
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            finished = True
            break
        event = json.loads(data)
        if "error" in event:
            sys.exit(f"\n{model}: {event['error'].get('message', event['error'])}")
        for choice in event.get("choices", []):
            text = choice.get("delta", {}).get("content")
            if text:
                last = time.monotonic()
                first = first or last
                print(text, end="", flush=True)
        usage = event.get("usage") or usage
    print(flush=True)
    if not finished or not usage or not first:
        sys.exit(f"{model}: the answer is not complete")
    tokens = usage["completion_tokens"]
    rate = tokens / (last - began)
    return tokens, first - began, rate


def pss(pid):
    for line in pathlib.Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) << 10
    return 0


def table(rows, left=(0,)):
    """Columns are aligned to the right but those in `left`."""
    widths = [max(len(row[c]) for row in rows) for c in range(len(rows[0]))]
    for number, row in enumerate(rows):
        cells = [cell.ljust(w) if c in left else cell.rjust(w) for c, (cell, w) in enumerate(zip(row, widths))]
        print("  " + "  ".join(cells).rstrip())
        if number == 0:
            print("  " + "  ".join("-" * w for w in widths))


def report(state, session, results):
    rows = [["model", "tokens", "TTFT", "tokens/s", "attention side", "of it KV in use", "FFN side"]]
    separate = 0
    for model in state["models"]:
        tokens, ttft, rate = results[model["id"]]
        kv = model["kv"]
        page_bytes = kv["reserved_bytes"] / kv["pages"] if kv["pages"] else 0
        touched = (kv["pages_used"] + kv["pages_cached"]) * page_bytes
        rows.append([
            model["id"],
            str(tokens),
            f"{ttft * 1000:.0f} ms",
            f"{rate:.1f}",
            mib(model["attention_weight_bytes"] + touched),
            mib(touched),
            mib(model["ffn_weight_bytes"]),
        ])
        # A server of its own keeps all of its model's weights and the same KV Cache.
        separate += model["attention_weight_bytes"] + model["ffn_weight_bytes"] + touched
    print()
    table(rows)
    processes = session_processes(session)
    measured = sum(pss(pid) for pid in processes)
    print()
    table([
        ["memory of the whole", "", ""],
        [f"CrossPool, {len(processes)} processes", mib(measured), "measured (sum of PSS, everything included)"],
        ["two separate servers", mib(separate), "*computed*: weights and the same KV, without the servers' own programs"],
    ], left=(0, 2))


def main():
    parser = argparse.ArgumentParser(prog="scripts/demo")
    parser.add_argument("--keep", action="store_true")
    parser.add_argument("--prompt")
    arguments = parser.parse_args()
    LOG.parent.mkdir(parents=True, exist_ok=True)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: sys.exit(143))
    good = False
    with tempfile.TemporaryDirectory(prefix="xpool-demo-") as folder:
        address, extra = resolve(folder)
        command = [str(XPOOL.relative_to(ROOT)), "up", "--config", CONFIG, *extra]
        say("running " + " ".join(command))
        with open(LOG, "wb") as log:
            up = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=die_with_parent,
                cwd=ROOT,
            )
        code = 0
        try:
            wait_ready(up, address, set(PROMPTS))
            results = {m: ask(address["gateway.http"], m, arguments.prompt or p) for m, p in PROMPTS.items()}
            # The Instances report once a second.
            time.sleep(1.1)
            _, state = get(address["daemon.http"], "/v1/state")
            report(state, up.pid, results)
            print()
            if arguments.keep:
                say(f"serving at http://{address['gateway.http']}/v1 until Ctrl-C")
                up.wait()
        except KeyboardInterrupt:
            print()
            code = 0 if arguments.keep else 130
        except SystemExit as error:
            if isinstance(error.code, str):
                print(error.code, file=sys.stderr)
            code = error.code if isinstance(error.code, int) else 1
        finally:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            good = stop(up)
    return code or (0 if good else 1)


if __name__ == "__main__":
    sys.exit(main())
