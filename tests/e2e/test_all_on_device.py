# SPDX-License-Identifier: MIT
"""What runs the steps on a machine with GPUs (tests/cuda/all_on_device): steps that fail, hang, leave processes
behind or lack what they need; results that are taken into a folder. The steps here need no GPU."""

import contextlib
import importlib.machinery
import importlib.util
import io
import json
import pathlib
import sys
import tempfile
import time
import types

import harness
from harness import check

ROOT = pathlib.Path(__file__).resolve().parent.parent.parent
SCRIPT = ROOT / "tests" / "cuda" / "all_on_device"
SCRIPTS = {
    "good": "import sys; open(sys.argv[2] + '/x.samples.txt', 'w').write('m 5*2 7*1\\n'); open(sys.argv[2] + '/x.json', 'w').write("
    "'{\"bench\": \"x\", \"rows\": [{\"metric\": \"m\", \"value\": 2, \"unit\": \"us\"}]}')",
    "bad": "print('FAILED something'); raise SystemExit(3)",
    "hang": "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)",
    "partial": "import json, sys; json.dump({'bench': 'y', 'rows': [{'metric': 'p', 'value': 1, 'unit': 'us'}, {'metric': 'q', 'value': None, 'unit': ''}], "
    "'failures': {'a step': ['it was slow']}}, open(sys.argv[2] + '/y.json', 'w')); open(sys.argv[2] + '/sglang_tokens.samples', 'w').write('{}'); "
    "open(sys.argv[2] + '/sglang_other.samples', 'w').write('{}'); raise SystemExit(1)",
    "orphan": "import subprocess; subprocess.Popen(['setsid', 'sleep', '77'])",
}


def load():
    loader = importlib.machinery.SourceFileLoader("all_on_device", str(SCRIPT))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("all_on_device", loader))
    loader.exec_module(module)
    return module


def call(module, *words):
    said, before = io.StringIO(), sys.argv
    sys.argv = ["all_on_device", *words]
    try:
        with contextlib.redirect_stdout(said):
            code = module.main()
    finally:
        sys.argv = before
    return code, said.getvalue()


def steps():
    module = load()
    module.END_S = 1.0
    module.ask_gpus = lambda what: ["0"] if what == "memory.used" else ["a GPU"]
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        for name, text in SCRIPTS.items():
            (folder / f"{name}.py").write_text(text + "\n")
        module.STEPS = {name: module.Step(1, 1, 20, "x", f"{folder}/{name}.py --out OUT") for name in SCRIPTS}
        module.STEPS["partial"] = module.STEPS["partial"]._replace(result="y")
        module.CHECKED = ("y",)
        module.STEPS["hang"] = module.STEPS["hang"]._replace(limit=1)
        module.STEPS["two"] = module.STEPS["good"]._replace(gpus=2)
        module.STEPS["long"] = module.STEPS["good"]._replace(seconds=1000)
        began = time.monotonic()
        code, said = call(module, "run", "--build", str(folder), "--out", str(folder / "out"), "--seconds", "60")
        check(time.monotonic() - began < 40 * harness.SLOW, "it took too long")
        check(code == 1 and "failed: bad, hang, partial, orphan" in said, said)
        check("two: left out, needs 2 GPUs" in said and "long: left out, takes 1000 s" in said, said)
        check("exit code 3" in said and "limit of 1 s" in said and "left sleep" in said, said)
        check(not module.descendants(), "processes are left")
        summary = {entry["step"]: entry for entry in json.loads((folder / "out" / "summary.json").read_text())}
        check(list(summary) == list(module.STEPS), list(summary))

        module.RESULTS = folder / "results"
        module.RESULTS.mkdir()
        (module.RESULTS / "x.json").write_text('{"rows": [{"metric": "m", "value": 3}, {"metric": "n", "value": 1}]}')
        module.subprocess = type("Quiet", (), {"run": staticmethod(lambda *_, **__: type("R", (), {"returncode": 0}))})
        code, said = call(module, "take", str(folder / "out" / "on_device.tar.gz"))
        check(code == 0 and "3 -> 2 us" in said and "no longer there: n" in said, said)
        check((module.RESULTS / "samples" / "x.txt").read_text() == "m 5*2 7*1\n", "the samples are not there")
        check(json.loads((module.RESULTS / "x.json").read_text())["rows"][0]["value"] == 2, "the row is not there")
        # A step that checks each row keeps what it has, and what failed stands with it.
        check("partial: FAILED, a step: it was slow" in said and "bad: nothing" in said, said)
        data = json.loads((module.RESULTS / "y.json").read_text())
        check(data["failures"] == {"a step": ["it was slow"]} and data["rows"][0]["value"] == 1, data)
        kept = sorted(path.name for path in (module.RESULTS / "samples").iterdir())
        check(kept == ["sglang_tokens.samples", "x.txt"], kept)


def unknown_step_and_no_gpu():
    module = load()
    module.ask_gpus = lambda what: []
    code, said = call(module, "run", "--build", "/nowhere")
    check(code == module.SKIPPED and "no GPU" in said, said)
    module.ask_gpus = lambda what: ["a GPU"]
    try:
        call(module, "run", "--build", "/nowhere", "--steps", "kernel")
    except SystemExit as end:
        check("no step kernel; there are kernels" in str(end.code), end.code)
    else:
        raise harness.Failed("an unknown step was taken")


def what_another_step_measured():
    """In this run, else in an earlier one, else in docs/results."""
    module = load()
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        step = module.Step(1, 1, 20, "x", "x.py --resume PRIOR --trace TRACE")
        a = types.SimpleNamespace(out=folder / "out", prior=None, build=folder, site=None, trace=None, peer=None)

        def prior():
            words = module.command_of(step, a, folder / "out" / "steps" / "now", 10)
            check(words[-2] == "--resume", words)
            return words[-1]

        check(prior() == str(module.RESULTS), prior())
        a.prior = folder / "before"
        check(prior() == str(module.RESULTS), prior())
        for place in ("before/steps/one", "out/steps/two"):
            (folder / place).mkdir(parents=True)
            (folder / place / "x.json").write_text("{}")
            check(prior() == str((folder / place).resolve()), prior())
        # Of several the one that has what the others went on from.
        for place, rows in (("out/steps/a", 2), ("out/steps/three", 1)):
            (folder / place).mkdir(parents=True)
            (folder / place / "x.json").write_text(json.dumps({"rows": [{"metric": str(n), "value": n} for n in range(rows)]}))
        check(prior() == str((folder / "out/steps/a").resolve()), prior())


if __name__ == "__main__":
    harness.main(steps, unknown_step_and_no_gpu, what_another_step_measured)
