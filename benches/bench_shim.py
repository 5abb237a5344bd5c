# SPDX-License-Identifier: MIT
"""Runs build/bin/bench_shim beside a daemon, an AtnAgent and an FfnAgent, and writes
docs/results/shim.json: what one FFN call through libxpool costs over the same layer in process."""

import json
import pathlib
import signal
import subprocess
import sys
import tempfile

import results

sys.path.insert(0, str(results.ROOT / "tests" / "e2e"))
import harness  # noqa: E402

BUILD = harness.XPOOL.parent.parent


def main():
    # A run that is cut off takes its processes along.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(f"ended by signal {number}"))
    with tempfile.TemporaryDirectory(prefix="xpool-shim-") as folder:
        dense = pathlib.Path(folder) / "dense"
        command = [harness.XPOOL, "model", "synth", "--arch", "qwen3", "--out", dense, "--layers", "8"]
        command += ["--hidden", "1024", "--intermediate", "3072", "--heads", "16", "--head-dim", "64"]
        subprocess.run([*map(str, command), "--dtype", "bf16"], check=True, stdout=subprocess.DEVNULL, timeout=120)
        models = [
            harness.model("moe", engine="sglang", prefill_rows=128),
            harness.model("dense", dense, engine="sglang", prefill_rows=128),
        ]
        with harness.System(models) as system:
            commands = [["daemon", "serve"], ["atnagent", "--device", "cpu:0"], ["ffnagent", "--device", "cpu:1"]]
            system.hand = [system.launch(*command) for command in commands]
            program = [str(BUILD / "bin" / "bench_shim"), str(system.config)]
            program += ["tales-qwen3-moe", "moe", "dense-1024x3072", "dense"]
            output = subprocess.run(program, stdout=subprocess.PIPE, text=True, check=True, timeout=1200).stdout
            code, out, error = system.run("down")
            harness.check(code == 0, f"xpool down: {out}{error}")
    rows = [json.loads(line) for line in output.splitlines()]
    results.show(rows)
    results.write("shim", rows)


if __name__ == "__main__":
    main()
