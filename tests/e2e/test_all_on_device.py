# SPDX-License-Identifier: MIT
"""What runs the steps on a machine with GPUs (tests/cuda/all_on_device): steps that fail, hang, leave processes
behind or lack what they need; results that are taken into a folder; and what packs the build for it (sglang_bundle). The
steps here need no GPU."""

import contextlib
import importlib.machinery
import importlib.util
import io
import json
import pathlib
import shutil
import signal
import subprocess
import sys
import tarfile
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
    "'failures': {'a step': ['it was slow']}}, open(sys.argv[2] + '/y.json', 'w')); [open(sys.argv[2] + f'/sglang_{kind}.samples', 'w').write('{}') for kind in ('tokens', 'latency_plain', 'memory_plain')]; "
    "open(sys.argv[2] + '/sglang_other.samples', 'w').write('{}'); raise SystemExit(1)",
    "orphan": "import subprocess; subprocess.Popen(['setsid', 'sleep', '77'])",
}


def load(script=SCRIPT):
    loader = importlib.machinery.SourceFileLoader(script.name, str(script))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader(script.name, loader))
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
        check(data["failures"] == {"a step": ["it was slow"], "step partial": ["exit code 1"]} and data["rows"][0]["value"] == 1, data)
        kept = sorted(path.name for path in (module.RESULTS / "samples").iterdir())
        check(kept == ["sglang_latency_plain.samples", "sglang_memory_plain.samples", "sglang_tokens.samples", "x.txt"], kept)


def a_step_that_begins_has_time_for_a_measurement():
    """What is left of the least that it is started with: a start, warming up, and what one rate needs."""
    needs = {"kv-static": 105 + 10 + 55}
    for name, seconds in needs.items():
        check(load().STEPS[name].seconds * 0.9 * 0.93 >= seconds, f"{name} is started with too little")


def an_end_from_outside_leaves_an_archive():
    """After each step, and of the one that runs."""
    with tempfile.TemporaryDirectory() as folder:
        folder = pathlib.Path(folder)
        (folder / "good.py").write_text(SCRIPTS["good"] + "\n")
        (folder / "hang.py").write_text(f"{SCRIPTS['good']}; {SCRIPTS['hang']}\n")
        (folder / "main.py").write_text(
            f"import importlib.machinery, importlib.util, sys\nloader = importlib.machinery.SourceFileLoader('m', {str(SCRIPT)!r})\n"
            "m = importlib.util.module_from_spec(importlib.util.spec_from_loader('m', loader)); loader.exec_module(m)\n"
            "m.ask_gpus = lambda what: ['0'] if what == 'memory.used' else ['a GPU']\n"
            f"m.STEPS = {{name: m.Step(1, 1, 20, 'x', f'{folder}/{{name}}.py --out OUT') for name in ('good', 'hang')}}\nm.main()\n"
        )
        archive, out = folder / "far" / "l0.tgz", folder / "out"
        archive.parent.mkdir()
        words = ["run", "--build", str(folder), "--steps", "good,hang", "--out", str(out), "--archive", str(archive)]
        process = subprocess.Popen([sys.executable, str(folder / "main.py"), *words], stdout=subprocess.DEVNULL)

        def names():
            with tarfile.open(archive) as packed:
                return packed.getnames(), json.load(packed.extractfile("summary.json"))

        harness.wait_until((out / "steps" / "hang" / "x.json").exists, 20 * harness.SLOW, "the second step runs")
        check("steps/good/x.json" in names()[0], "the first step is not in the archive")
        process.send_signal(signal.SIGTERM)
        process.wait(timeout=20 * harness.SLOW)
        found, summary = names()
        check("steps/hang/x.json" in found, found)
        check([(entry["step"], entry["failed"]) for entry in summary] == [("good", []), ("hang", ["ended by signal 15"])], summary)


def stand_ins_are_the_tree_s():
    """Those of an archive are as old as it is."""
    bundle = load(SCRIPT.with_name("sglang_bundle"))
    with tempfile.TemporaryDirectory() as folder:
        site = pathlib.Path(folder) / "site"
        site.mkdir()
        (site / "sitecustomize.py").write_text("old")
        (site / "kept.py").write_text("")
        done = bundle.install(types.SimpleNamespace(source=pathlib.Path(folder), to=site, build_to=site / "build", python=sys.executable))
        check(done == 0 and (site / "kept.py").exists(), done)
        check((site / "sitecustomize.py").read_bytes() == (bundle.STANDINS / "sitecustomize.py").read_bytes(), "sitecustomize.py is the old one")


def a_packed_build_is_current():
    """Whatever the build folder has is made from its sources first; else nothing is packed."""
    missing = [name for name in ("ninja", "xz") if not shutil.which(name)]
    if missing:
        print(f"     not looked at: {', '.join(missing)} is not here")
        return
    bundle = load(SCRIPT.with_name("sglang_bundle"))
    with tempfile.TemporaryDirectory() as folder:
        tree = pathlib.Path(folder).resolve() / "tree"
        build, archive = tree / "build", tree / "build.tar.xz"
        for name in ("build/bin", "build/lib", "build/python", "build/tests"):
            (tree / name).mkdir(parents=True)
        bundle.ROOT = tree

        def refused(words, *programs):
            try:
                bundle.pack_build(build, tree / "place", archive, programs)
            except SystemExit as end:
                check(words in str(end.code), end.code)
            else:
                raise harness.Failed(f"it was packed: {words}")
            check(not archive.exists(), "an archive is there")

        refused("no build folder")
        (build / "build.ninja").write_text(
            "rule cp\n  command = cp $in $out\nbuild bin/xpool: cp ../new\nbuild lib/l.so.1: cp ../new\nbuild python/p.py: cp ../new\n"
            "build xpool_python: phony python/p.py\nbuild tests/t: cp ../new\nbuild tests/bad: cp ../none\n"
        )
        made = ("bin/xpool", "lib/l.so.1", "python/p.py", "tests/t")
        for name in made:
            (build / name).write_text("old")
        cache = build / "CMakeCache.txt"
        cache.write_text("CMAKE_HOME_DIRECTORY:INTERNAL=/elsewhere\n")
        refused("a build of another tree")
        cache.write_text(f"CMAKE_HOME_DIRECTORY:INTERNAL={tree}\n")
        (tree / "new").write_text("new")
        refused("does not make tests/unknown", "tests/unknown")
        refused("nothing is packed", "tests/bad")
        bundle.pack_build(build, tree / "place", archive, ["tests/t"])
        with tarfile.open(archive) as packed:
            found = {name: packed.extractfile(name).read() for name in (*made, "commit")}
        check(all(found[name] == b"new" for name in made) and found["commit"].strip(), found)


def failures_stand_until_the_step_ends_well():
    module = load()

    def found(failed, own=None, old=None, result=module.CHECKED[0]):
        entry = {"step": "s", "result": result, "failed": failed}
        return module.failures_of("s", entry, {"failures": own or {}}, {"failures": old or {}})

    old = {"cold": ["old"], "step s": ["exit code 1"], "step other": ["left sleep"]}
    check(found([], {"cold": ["old"]}, old) == {"cold": ["old"], "step other": ["left sleep"]}, "it ended well")
    # A traceback of this run beside an old failure of another step.
    check(found(["exit code 1"], {"cold": ["old"]}, old) == {"cold": ["old"], "step other": ["left sleep"], "step s": ["exit code 1"]}, "it ended badly")
    check(found([], {"step s": ["exit code 1"], "step other": ["ended well since"], "cold": ["new"]}) == {"cold": ["new"]}, "the step's own file began with the old one")
    check(found([], {}, old, "x") == {}, "a file of one step alone")


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
    harness.main(steps, a_packed_build_is_current, stand_ins_are_the_tree_s, an_end_from_outside_leaves_an_archive, failures_stand_until_the_step_ends_well, a_step_that_begins_has_time_for_a_measurement, unknown_step_and_no_gpu, what_another_step_measured)
