# SPDX-License-Identifier: MIT
"""How the main process tells `xpool up` who stopped it.

On SIGTERM SGLang finishes open requests, then kills its processes and itself. Its user sends that
signal, and so does a scheduler that the daemon told to end (failure.drain). A server that its
user stopped stays so and ends with exit code 0; one that had to end with its Generation ends as
SGLang does, by SIGKILL, and is started again. Whichever came first counts.
"""

import contextvars
import os
import sys

from xpool.sglang import failure, patch

_MANAGER = "sglang.srt.managers.tokenizer_manager"

_by_user = False
_in_order = contextvars.ContextVar("in_order", default=False)  # of the task that ends the server


def _sigterm(original, *arguments, **options):
    global _by_user
    _by_user = _by_user or not failure.told_to_drain()
    return original(*arguments, **options)


async def _watchdog(original, manager):
    mark = _in_order.set(True)
    try:
        await original(manager)
    finally:
        _in_order.reset(mark)


def _kill_process_tree(original, pid, *arguments, **options):
    if not (_in_order.get() and _by_user):  # it fell, or had to end
        return original(pid, *arguments, **options)
    original(pid, include_parent=False)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def hook():
    patch.around(_MANAGER, "SignalHandler.sigterm_handler", _sigterm)
    patch.around(_MANAGER, "TokenizerManager.sigterm_watchdog", _watchdog)
    patch.around(_MANAGER, "kill_process_tree", _kill_process_tree)
