# SPDX-License-Identifier: MIT
"""Ctrl-C ends a server in order.

A terminal sends SIGINT to the whole process group. The main process and the daemon know what to do;
a scheduler or detokenizer would fall over in the middle of it, and main would call that a crash. So
they are started with SIGINT ignored, which a new process inherits.
"""

import signal
import threading

from xpool.sglang import patch

_ENGINE = "sglang.srt.entrypoints.engine"


def _ignoring(original, *arguments, **options):
    if threading.current_thread() is not threading.main_thread():
        return original(*arguments, **options)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        return original(*arguments, **options)
    finally:
        signal.signal(signal.SIGINT, before)


def hook():
    for name in ("_launch_scheduler_processes", "_launch_detokenizer_subprocesses"):
        patch.around(_ENGINE, f"Engine.{name}", _ignoring)
