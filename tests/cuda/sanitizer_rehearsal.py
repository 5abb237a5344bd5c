#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""What tests/cuda/run_on_device makes of compute-sanitizer's word on the stage kernels, without either: the program runs
over the libcuda of the tests, and a script stands for the tool. Clean, with findings, blind, silent, and a program
that does not come to its end.

usage: tests/cuda/sanitizer_rehearsal.py --build BUILD
"""

import argparse
import contextlib
import importlib.machinery
import importlib.util
import io
import json
import os
import pathlib
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
STEPS = "memcheck-stage,racecheck-stage,racecheck-scheduler"
TOOL = """#!/usr/bin/env python3
import os, subprocess, sys
tool, program = sys.argv[sys.argv.index("--tool") + 1], sys.argv[sys.argv.index("--tool") + 2 :]
how, planted = os.environ["REHEARSED"], program[-1].startswith("planted")
code = subprocess.run(["false"] if how == "broken" and not planted else program).returncode
errors = how != "blind" if planted else 3 * (how == tool)
if planted and errors:
    print({"memcheck": "Invalid __global__ write of size " + ("4" if program[-1] == "planted" else "16"),
           "racecheck": "Error: Race reported between Write access"}[tool], "at stage_test_planted+0x10")
if how != "silent":
    print(f"RACECHECK SUMMARY: {errors} hazards displayed ({errors:d} errors, 0 warnings)" if tool == "racecheck"
          else f"ERROR SUMMARY: {errors:d} errors")
sys.exit(1 if errors and "--error-exitcode" in sys.argv else code)
"""


def load():
    path = ROOT / "tests" / "cuda" / "run_on_device"
    loader = importlib.machinery.SourceFileLoader(path.name, str(path))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(path.name, loader))
    loader.exec_module(module)
    module.left_over = lambda: []  # of other tests
    module.time.sleep = lambda seconds: None
    return module


def rehearse(module, build, how):
    """Exit code, what failed, values and targets of the rows."""
    with tempfile.TemporaryDirectory() as folder:
        tool = pathlib.Path(folder) / "compute-sanitizer"
        tool.write_text(TOOL)
        tool.chmod(0o755)
        os.environ |= {"REHEARSED": how, "PATH": f"{folder}:{PATH}"}
        sys.argv = ["run_on_device", "--build", str(build), "--out", folder, "--only", STEPS]
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            code = module.main()
        rows = json.loads((pathlib.Path(folder) / "transport_cuda.json").read_text())["rows"]
        last = said.getvalue().strip().splitlines()[-1]
        return code, last, {row["metric"].removeprefix("stage.sanitizer."): (row["value"], row["target"]) for row in rows}


PATH = os.environ["PATH"]
CLEAN = {"memcheck": (0, "0"), "racecheck": (0, "0"), "scheduler.racecheck": (0, None)}
SAYS_NOTHING, DOES_NOT_SEE = " (it or the program says nothing)", " (does not see what is planted)"
EXPECTED = {
    "clean": (0, "all passed", CLEAN),
    "memcheck": (1, "failed: memcheck-stage (1)", CLEAN | {"memcheck": (3, "0")}),
    # The scheduler's are told and not judged.
    "racecheck": (1, "failed: racecheck-stage (1)", CLEAN | {"racecheck": (3, "0"), "scheduler.racecheck": (3, None)}),
    "blind": (1, "failed: " + ", ".join(step + DOES_NOT_SEE for step in STEPS.split(",")), CLEAN),
    "silent": (1, "failed: " + ", ".join(step + SAYS_NOTHING for step in STEPS.split(",")), {}),
    "broken": (1, "failed: " + ", ".join(f"{step} (1)" for step in STEPS.split(",")), {}),
}


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--build", type=pathlib.Path, required=True)
    build = parser.parse_args().build.resolve()
    os.environ |= {"LD_LIBRARY_PATH": str(build / "tests" / "fake-cuda"), "XPOOL_FAKE_STEPS": "1", "XPOOL_COMMIT": "rehearsed"}
    if subprocess.run([build / "tests" / "cuda_stage_sanitize", "launches"], capture_output=True, timeout=60).returncode == 77:
        print("skipped: built without nvcc")
        return 77
    module, wrong = load(), 0
    for how, expected in EXPECTED.items():
        got = rehearse(module, build, how)
        if got != expected:
            wrong += 1
            print(f"{how}: {got}, not {expected}")
    print(f"{len(EXPECTED)} ways, {wrong} wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
