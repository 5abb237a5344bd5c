#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""The wheel: what is in it, exactly, and that it works where it is installed.

Built and installed without an index and without build isolation, by the environment of the tests.
"""

import json
import os
import pathlib
import subprocess
import sys
import tempfile
import zipfile

from harness import ROOT, SKIPPED, TALES, TWO_DEVICES, Failed, check

VENV = ROOT / ".xpool-cache" / "venv-test" / "bin" / "python"
CONFIG = """
[daemon]
socket = "{folder}/daemon.sock"
{devices}[[models]]
id = "tale"
path = "{model}"
engine = "sglang"
"""
PROGRAM = """
import importlib.metadata, json, sys, xpool
entry, = importlib.metadata.entry_points(group="sglang.srt.plugins", name="xpool")
config = xpool.XpoolConfig(sys.argv[1])
print(json.dumps({
    "place": xpool.__file__,
    "version": [xpool.__version__, importlib.metadata.version("xpool")],
    "entry": [entry.value, callable(entry.load())],
    "path": config.model_path_of("tale"),
    "architecture": config.model_info("tale").architecture,
}))
"""


def run(*command, **options):
    done = subprocess.run([str(c) for c in command], capture_output=True, text=True, timeout=580, **options)
    check(
        done.returncode == 0,
        f"{' '.join(str(c) for c in command)} ended with {done.returncode}:"
        f"\n{done.stdout[-3000:]}{done.stderr[-3000:]}",
    )
    return done.stdout


def pip(*arguments, **options):
    return run(VENV, "-m", "pip", "--disable-pip-version-check", "--no-input", *arguments, **options)


def build(folder):
    # The device code is not Python's business, and takes minutes to compile.
    environment = {**os.environ, "CMAKE_ARGS": "-DXPOOL_CUDA=OFF"}
    pip("wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", folder, ROOT, env=environment)
    wheels = list(folder.glob("*.whl"))
    check(len(wheels) == 1, f"one wheel was expected: {wheels}")
    return wheels[0]


def expected_content(name):
    info = "-".join(name.split("-")[:2])
    files = {str(p.relative_to(ROOT / "python")) for p in (ROOT / "python").rglob("*.py")}
    files |= {"xpool/libxpool.so", "xpool/xpool.h", f"{info}.data/scripts/xpool"}
    files |= {
        f"{info}.dist-info/{part}"
        for part in ("METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE", "licenses/THIRD_PARTY.md")
    }
    return files


def content_is_exact(wheel):
    _, version, *tag = wheel.stem.split("-")
    check(tag[:2] == ["py3", "none"] and tag[2].startswith("linux_"), f"the wheel's tag is {tag}")
    with zipfile.ZipFile(wheel) as archive:
        found = {entry for entry in archive.namelist() if not entry.endswith("/")}
        wanted = expected_content(wheel.stem)
        check(
            found == wanted,
            f"content: unexpected {sorted(found - wanted)}, missing {sorted(wanted - found)}",
        )
        header = archive.read("xpool/xpool.h")
        metadata = archive.read(f"xpool-{version}.dist-info/METADATA").decode()
    check(header == (ROOT / "include" / "xpool" / "xpool.h").read_bytes(), "the header is not the public one")
    for line in ("Name: xpool", "License-Expression: MIT", "Requires-Python: >=3.11", "Requires-Dist: cffi>="):
        check(line in metadata, f"METADATA has no {line!r}")
    print(f"wheel: {wheel.name}, {wheel.stat().st_size >> 10} KiB, {len(found)} files")


def works_installed(wheel, folder):
    place = folder / "site"
    pip("install", "--no-deps", "--no-index", "--target", place, wheel)
    config = folder / "xpool.toml"
    config.write_text(CONFIG.format(folder=folder, devices=TWO_DEVICES, model=TALES))
    environment = {k: v for k, v in os.environ.items() if k not in ("XPOOL_CONFIG", "XPOOL_MODEL_ID")}
    environment["PYTHONPATH"] = str(place)
    said = json.loads(run(VENV, "-c", PROGRAM, config, env=environment, cwd=folder))
    check(said["place"].startswith(str(place)), f"xpool was imported from {said['place']}")
    check(said["version"][0] == said["version"][1], f"library and wheel: {said['version']}")
    check(said["entry"] == ["xpool.sglang.plugin:install", True], f"entry point: {said['entry']}")
    check(said["path"] == str(TALES), f"model_path_of: {said['path']}")
    check(said["architecture"] == "Qwen3MoeForCausalLM", f"architecture: {said['architecture']}")
    run(place / "bin" / "xpool", "config", "check", "--config", config, env=environment, cwd=folder)
    for line in run("ldd", place / "xpool" / "libxpool.so").splitlines():
        check("not found" not in line, f"libxpool.so: {line.strip()}")


def main():
    if not VENV.exists():
        print("skipped: the environment of the tests is missing; scripts/test-venv makes it")
        return SKIPPED
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        try:
            wheel = build(folder)
            content_is_exact(wheel)
            works_installed(wheel, folder)
        except Failed as error:
            print(f"FAILED: {error}")
            return 1
    print("the installed wheel imports, reads a configuration and runs its program")
    return 0


if __name__ == "__main__":
    sys.exit(main())
