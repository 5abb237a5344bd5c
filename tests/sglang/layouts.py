#!/usr/bin/env python3
# SPDX-License-Identifier: MIT
"""SGLang alone gives the same tokens whatever its attention's layout: tensor parallel over two ranks, data
parallel over two ranks. So a difference under CrossPool is CrossPool's.

usage: layouts.py [FAMILY LAYOUT]     (two minutes; not in the test command)
"""

import sys

import checkpoints
import probe
import server
import vanilla

CASES = (("qwen3-moe", "tp2"), ("qwen3-moe", "dp2"))


def main():
    if not server.PYTHON.exists():
        print("skipped: the Python environment is missing; scripts/test-venv makes it")
        sys.exit(server.SKIPPED)
    good = True
    for family, layout in [tuple(sys.argv[1:3])] if len(sys.argv) > 2 else CASES:
        path = checkpoints.checkpoint(family)
        wrong = probe.compare(vanilla.results(path), vanilla.results(path, layout))
        print(f"{family} {layout}: {'FAILS: ' + '; '.join(wrong) if wrong else 'the tokens of one rank'}", flush=True)
        good &= not wrong
    sys.exit(0 if good else 1)


if __name__ == "__main__":
    try:
        main()
    except server.Failed as failure:
        sys.exit(f"FAILED: {failure}")
