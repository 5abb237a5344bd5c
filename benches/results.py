# SPDX-License-Identifier: MIT
"""Writes docs/results/<bench>.json: machine, date, commit, command and rows of metric, value, unit,
floor, peer, target, note. scripts/render-results makes the pages from these files."""

import datetime
import json
import os
import pathlib
import platform
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parent.parent


def machine():
    name = platform.machine()
    for line in pathlib.Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            name = line.split(":", 1)[1].strip()
            break
    memory = 0
    for line in pathlib.Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemTotal:"):
            memory = int(line.split()[1]) >> 20
    return f"{name}, {len(os.sched_getaffinity(0))} CPUs, {memory} GiB"


def commit():
    # A copy of the tree whose history is another's or none is told which commit it is.
    if os.environ.get("XPOOL_COMMIT"):
        return os.environ["XPOOL_COMMIT"]
    out = git("describe", "--always")
    # What benchmarks write themselves makes no other program of it.
    changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!docs", ":!README.md")
    if out is None or changed is None:
        return "unknown"
    return out + ("-dirty" if changed else "")


def git(*words):
    """Its output, stripped; None where it fails."""
    out = subprocess.run(["git", *words], capture_output=True, text=True, cwd=ROOT, timeout=120)
    return out.stdout.strip() if out.returncode == 0 else None


def here():
    """What is measured now is of this commit and day."""
    return [commit(), datetime.date.today().isoformat()]


def kept(**sides):
    """Words for a note: which of the sides, {who: [commit, day]}, are of another commit or day than this run's;
    None where that is not known."""
    now = here()
    return "".join(f"; {who} of {at[1]}, commit {at[0]}" for who, at in sides.items() if at and list(at) != now)


def few(*counts):
    """Words for a note on a P99: of a hundred values or less it is the largest."""
    words = [f"the largest of {count}" if count <= 100 else f"of {count}" for count in counts]
    return f" ({' and '.join(words)})" if min(counts) <= 100 else ""


def command(words=None):
    """How this program was called, for the file of its results: a whole path, which is this machine's own
    business, becomes the name of its option."""
    words = sys.argv if words is None else words
    told, option = [os.path.relpath(words[0], ROOT)], "PATH"
    for word in words[1:]:
        name, equals, value = word.partition("=")
        if word.startswith("/"):
            word = option
        elif equals and value.startswith("/"):
            word = f"{name}={name.lstrip('-').upper()}"
        option = name.lstrip("-").upper() if word.startswith("--") and not equals else "PATH"
        told.append(word)
    return " ".join(told)


def row(metric, value, unit, floor=None, peer=None, target=None, note=""):
    return {
        "metric": metric,
        "value": round(value, 4),
        "unit": unit,
        "floor": None if floor is None else round(floor, 4),
        "peer": None if peer is None else round(peer, 4),
        "target": target,
        "note": note,
    }


def sanitizer_rows(prefix, tool, text, note, ran=r"(\d+) cases, \d+ failed"):
    """What compute-sanitizer found, by its and the program's output. No clean run, so None: without the tool's summary,
    or without the program's own last line, `ran`, whose group is how much it did and not 0."""
    if tool == "racecheck":
        found = re.search(r"RACECHECK SUMMARY: .*\((\d+) errors?, (\d+) warnings?\)", text)
    else:
        found = re.search(r"ERROR SUMMARY: (\d+) errors?", text)
    did = re.search(f"^{ran}", text, re.MULTILINE)
    if not found or not did or did[1] == "0":
        return None
    return [row(f"{prefix}.{tool}", sum(map(int, found.groups())), "errors", target="0", note=note)]


def sanitizer_sees(tool, text):
    """Whether compute-sanitizer reported the planted error of its kind (tests/cuda/ffn_device.cu: test_planted)."""
    kind = {"memcheck": "Invalid __global__ write of size 4", "racecheck": "Race reported between"}[tool]
    return kind in text and "test_planted" in text


def sanitizer_output(command, what, say):
    """What compute-sanitizer says of a program, `command`, told by the word `what` to make errors. Each line goes to `say`."""
    command = ["timeout", "-k", "5", "40", *command, what]
    text = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=60).stdout
    for line in text.splitlines():
        say(f"{what}: {line}")
    return text


def keep_samples(folder):
    """The environment in which device programs keep their samples (tests/cuda/samples.h)."""
    folder = pathlib.Path(folder).resolve() / "samples"
    folder.mkdir(parents=True, exist_ok=True)
    return {"XPOOL_TEST_SAMPLES": str(folder)}


def pack_samples(folder, path):
    """Makes one file of them, `metric value*times ...` a line, ascending, ns; series without a row are left out."""
    folder = pathlib.Path(folder) / "samples"
    lines = []
    for file in sorted(folder.glob("*")):
        if not re.fullmatch(r"\d+-\d+", file.name):
            pairs = (line.split() for line in file.read_text().splitlines())
            lines.append(" ".join([file.name, *(f"{value}*{times}" for value, times in pairs)]))
        file.unlink()
    folder.rmdir()
    if lines:
        pathlib.Path(path).write_text("\n".join(lines) + "\n")


def show(rows):
    for entry in rows:
        extra = "".join(
            f"  {key} {entry[key]}" for key in ("floor", "peer", "target") if entry.get(key) not in (None, "")
        )
        print(f"{entry['metric']:40} {entry['value']:>12} {entry['unit']}{extra}  {entry['note']}", flush=True)


def write(bench, rows, plots=(), folder=ROOT / "docs" / "results"):
    folder.mkdir(parents=True, exist_ok=True)
    data = {
        "bench": bench,
        "machine": machine(),
        "date": datetime.date.today().isoformat(),
        "commit": commit(),
        "command": command(),
        "rows": rows,
    }
    if plots:
        data["plots"] = list(plots)  # files beside this one
    path = folder / f"{bench}.json"
    path.write_text(json.dumps(data, indent=1) + "\n")
    print(f"wrote {os.path.relpath(path)}")
