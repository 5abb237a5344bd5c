#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""What SGLang alone answers to the probe, made once and kept.

usage: vanilla.py [--family NAME] [--layout tp1|tp2|dp2]

Results lie in .xpool-cache/sglang-vanilla, named by a hash of the pinned packages, the checkpoint and
everything that decides what is asked and how SGLang is started; absent ones are made by starting a server.
"""

import argparse
import fcntl
import hashlib
import json
import os
import sys
import time

import checkpoints
import probe
import server
from harness import ROOT, SKIPPED, Failed

FOLDER = ROOT / ".xpool-cache" / "sglang-vanilla"
SOURCES = (ROOT / "tests" / "reference" / "requirements.txt", server.HERE / "probe.py",
           server.HOOKS / "xpool_cpu_hooks.py")


def place(checkpoint, layout):
    state = hashlib.sha256(json.dumps(server.identity(layout)).encode())
    for source in SOURCES:
        state.update(hashlib.sha256(source.read_bytes()).digest())
    state.update(checkpoints.digest(checkpoint).encode())
    return FOLDER / f"{checkpoint.name.rsplit('-', 1)[0]}-{layout}-{state.hexdigest()[:16]}.json"


def make(checkpoint, layout):
    started = time.monotonic()
    with server.Server(checkpoint, layout) as running:
        up = time.monotonic()
        found = probe.probe(running.url, probe.vocabulary(checkpoint))
        print(f"{checkpoint.name} {layout}: SGLang alone, up in {up - started:.0f} s, probe "
              f"{time.monotonic() - up:.1f} s, smallest gap {probe.smallest_gap(found):.2g}", flush=True)
    wrong = probe.check_probe(found, one_cache=layout != "dp2")
    if wrong:
        raise Failed(f"SGLang alone on {checkpoint.name} ({layout}): " + "; ".join(wrong))
    return found


def results(checkpoint, layout="tp1"):
    """The probe's result of SGLang alone on this checkpoint, {case: record}."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    path = place(checkpoint, layout)
    with open(FOLDER / "lock", "w", encoding="utf-8") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not path.exists():
            found = make(checkpoint, layout)
            part = path.with_suffix(".part")
            part.write_text(json.dumps(found))
            os.replace(part, path)
    return json.loads(path.read_text())


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--family", choices=checkpoints.FAMILIES, action="append")
    parser.add_argument("--layout", choices=server.LAYOUTS, default="tp1")
    arguments = parser.parse_args()
    if not server.PYTHON.exists():
        print("skipped: the Python environment is missing; scripts/test-venv makes it")
        sys.exit(SKIPPED)
    for family in arguments.family or checkpoints.FAMILIES:
        found = results(checkpoints.checkpoint(family), arguments.layout)
        print(f"{family} {arguments.layout}: {len(found)} cases, smallest gap {probe.smallest_gap(found):.2g}")


if __name__ == "__main__":
    try:
        main()
    except Failed as error:
        sys.exit(f"FAILED: {error}")
