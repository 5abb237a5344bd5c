# SPDX-License-Identifier: MIT
"""The harness's own judgement: which names in /dev/shm a test has left behind."""

import os
import subprocess
import sys

import harness

HOLD = (
    "import mmap, os, sys\n"
    "fd = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT, 0o600)\n"
    "os.ftruncate(fd, 4096)\n"
    "keep = mmap.mmap(fd, 4096) if sys.argv[2] == 'map' else fd\n"
    "if sys.argv[2] == 'map': os.close(fd)\n"
    "print('there', flush=True)\n"
    "sys.stdin.read()\n"
)


def names():
    if not harness.SHM.is_dir():
        print("skipped: no /dev/shm")
        sys.exit(harness.SKIPPED)
    before = harness.shm_names()
    for how in ("map", "open"):
        name = f"xpool-test-{os.getpid()}-{how}"
        holder = subprocess.Popen(
            [sys.executable, "-c", HOLD, str(harness.SHM / name), how], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        try:
            harness.check(holder.stdout.readline() == b"there\n", "the holder")
            harness.check(harness.holders(name) == {holder.pid}, f"held by {harness.holders(name)}")
            # Another tree's server uses it, or a process that a test has left does.
            others = harness.names_left(before, ours=lambda pid: False, patience=0.1)
            harness.check(name not in others, f"a name in use by others: {others}")
            harness.check(name in harness.names_left(before, patience=0.1), "a name of a live process of ours")
            holder.kill()
            holder.wait(10)
            # What a dead process leaves is nobody else's.
            left = harness.names_left(before, ours=lambda pid: False, patience=0.1)
            harness.check(name in left, f"a name that a dead process has left: {left}")
        finally:
            holder.kill()
            holder.wait(10)
            (harness.SHM / name).unlink(missing_ok=True)
        harness.check(name not in harness.names_left(before, patience=0.1), "a name that is gone")


if __name__ == "__main__":
    harness.main(names)
