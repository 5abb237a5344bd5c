# SPDX-License-Identifier: MIT
"""Names in /dev/shm end with the server.

Python's resource tracker, a child of the main process, removes the names of semaphores and shared
memory when all who use them are gone, however they went. SGLang ends by killing every child of the
main process, the tracker among them, and its names stay for ever. So the tracker is not shown among
the children, and it is told of the one file that SGLang makes without it.
"""

import os
from multiprocessing import resource_tracker

from xpool.sglang import failure, patch

TRACKER = "XPOOL_SGLANG_TRACKER"  # its pid, for the processes that main spawns


def _children(original, process, *arguments, **options):
    tracker = int(os.environ.get(TRACKER, "0"))
    return [child for child in original(process, *arguments, **options) if child.pid != tracker]


def _snapshot(original, writer, path, *arguments, **options):
    original(writer, path, *arguments, **options)
    folder, name = os.path.split(path)
    if folder == "/dev/shm":
        resource_tracker.register("/" + name, "shared_memory")


def hook():
    if failure.is_main():
        resource_tracker.ensure_running()
        os.environ[TRACKER] = str(resource_tracker._resource_tracker._pid)
    else:
        patch.around("sglang.srt.managers.load_snapshot", "ShmLoadSnapshotWriter.__init__", _snapshot)
    patch.around("psutil", "Process.children", _children)
