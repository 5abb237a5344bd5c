# SPDX-License-Identifier: MIT
"""Runs a C benchmark that prints JSON rows (hop) and writes docs/results."""

import json
import os
import pathlib
import subprocess
import sys

import results


def rows_of(name, *arguments):
    """The rows that build/bin/bench_NAME prints."""
    program = pathlib.Path(os.environ.get("XPOOL_BUILD", results.ROOT / "build")) / "bin" / f"bench_{name}"
    output = subprocess.run([str(program), *arguments], stdout=subprocess.PIPE, text=True, check=True, timeout=3600).stdout
    rows = []
    for line in output.splitlines():
        line = line.strip().rstrip(",")
        if line.startswith("{"):
            entry = json.loads(line)
            rows.append({key: entry.get(key) for key in
                         ("metric", "value", "unit", "floor", "peer", "target", "note")})
            rows[-1]["note"] = rows[-1]["note"] or ""
    if not rows:
        sys.exit(f"{program.name} printed no rows:\n{output}")
    return rows


def main():
    name = sys.argv[1]
    rows = rows_of(name, *sys.argv[2:])
    results.show(rows)
    results.write(name, rows)


if __name__ == "__main__":
    main()
