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
    for how in ("map", "open"):
        name = f"xpool-test-{os.getpid()}-{how}"
        ours, others = harness.Names(), harness.Names(ours=lambda pid: False)
        late = harness.Names(ours=lambda pid: False)  # it looks when nobody holds the name any more
        holder = subprocess.Popen(
            [sys.executable, "-c", HOLD, str(harness.SHM / name), how], stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        try:
            harness.check(holder.stdout.readline() == b"there\n", "the holder")
            harness.check(harness.holders(name) == {holder.pid}, f"held by {harness.holders(name)}")
            harness.check(name in ours.left(0.1), "a name of a live process of ours")
            harness.check(name not in others.left(0.1), "a name in use by others")
            holder.kill()
            holder.wait(10)
            harness.check(name in ours.left(0.1), "a name that a dead process of ours has left")
            harness.check(name not in others.left(0.1), "a name that was in use by others")
            harness.check(name in late.left(0.1), "a name of which nobody knows whose it is")
        finally:
            holder.kill()
            holder.wait(10)
            (harness.SHM / name).unlink(missing_ok=True)
        harness.check(name not in ours.left(0.1), "a name that is gone")


class Counter(harness.Repeated):
    def __init__(self, wrong_at):
        super().__init__(0.001)
        self.count, self.wrong_at = 0, wrong_at

    def once(self):
        self.count += 1
        if self.count == self.wrong_at:
            raise ValueError("it broke")


def raised(wrong_at, block=lambda: None):
    """(what the block came to, how often it was called)"""
    with_it = Counter(wrong_at)
    try:
        with with_it:
            harness.wait_until(lambda: with_it.count >= 3, 10, "three calls")
            block()
    except (ValueError, KeyError) as error:
        return error, with_it.count
    return None, with_it.count


def repeated():
    error, count = raised(0)
    harness.check(error is None and count >= 3, f"{error}, {count} calls")
    error, count = raised(3)
    harness.check(str(error) == "it broke" and count == 3, f"{error}, {count} calls")
    error, _ = raised(3, lambda: {}["own"])
    harness.check(isinstance(error, KeyError), f"the block's own error comes first: {error}")


if __name__ == "__main__":
    harness.main(names, repeated)
