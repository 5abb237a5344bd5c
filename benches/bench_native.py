# SPDX-License-Identifier: MIT
"""Runs a C benchmark that prints JSON rows (hop, kv) and writes docs/results."""

import json
import subprocess
import sys

import results


def main():
    name = sys.argv[1]
    program = results.ROOT / "build" / "bin" / f"bench_{name}"
    output = subprocess.run([str(program), *sys.argv[2:]], stdout=subprocess.PIPE, text=True, check=True).stdout
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
    results.show(rows)
    results.write(name, rows)


if __name__ == "__main__":
    main()
