# SPDX-License-Identifier: MIT
"""Ending SGLang with a reason.

SGLang's plugin loader and hook registry log an exception and go on, as plain SGLang: a model that
should be served through CrossPool would be served without it. So nothing here relies on exceptions:
the process that finds a reason says it, tells SGLang's main process, and ends.
"""

import functools
import logging
import os
import signal
import sys
import threading
import time

from xpool.native import XpoolError

log = logging.getLogger("xpool")

EXIT_CODE = 1
MAIN = "XPOOL_SGLANG_MAIN"  # pid of SGLang's main process, for its schedulers
_SIGNAL = signal.SIGUSR2
DRAIN = "XPOOL_SGLANG_DRAIN"  # the signal by which schedulers tell main to end in order
_MAIN_SECONDS = 2.0  # how long main may take to end its tree before it is killed

_lock = threading.Lock()
_told = False


def is_main():
    """Whether this is SGLang's main process, not one that it spawned."""
    import multiprocessing

    return multiprocessing.parent_process() is None


def watch():
    """Prepares this process: main ends its tree when a scheduler asks for it; a scheduler dies with
    its parent from the first moment on (SGLang itself asks for that only after the plugins)."""
    if not is_main():
        import ctypes
        import multiprocessing

        pr_set_pdeathsig = 1
        ctypes.CDLL(None, use_errno=True).prctl(pr_set_pdeathsig, signal.SIGKILL, 0, 0, 0)
        if os.getppid() != multiprocessing.parent_process().pid:  # it died before that
            os._exit(EXIT_CODE)
        return
    os.environ[MAIN] = str(os.getpid())
    os.environ[DRAIN] = str(int(signal.SIGTERM))
    if threading.current_thread() is threading.main_thread():
        signal.signal(_SIGNAL, _end_tree)
        signal.signal(signal.SIGUSR1, _drain)
        os.environ[DRAIN] = str(int(signal.SIGUSR1))


def _drain(signum, frame):
    global _told
    _told = True
    os.kill(os.getpid(), signal.SIGTERM)


def told_to_drain():
    """Whether a scheduler has told this main process to end in order."""
    return _told


def _end_tree(signum, frame):
    from sglang.srt.utils import kill_process_tree

    print("xpool: a scheduler of this server has ended (its reason is above)", file=sys.stderr)
    sys.stderr.flush()
    kill_process_tree(os.getpid(), include_parent=False)
    os._exit(EXIT_CODE)


def main_pid():
    """The main process of this SGLang server, or None in the main process itself."""
    pid = int(os.environ.get(MAIN, "0"))
    return pid if pid and pid != os.getpid() else None


def end(reason):
    """Says `reason`, ends SGLang's main process and this one. Never returns."""
    with _lock:  # a second reason waits here until the first has ended the process
        log.error("%s", reason)
        print(f"xpool: {reason}", file=sys.stderr, flush=True)
        logging.shutdown()
        pid = main_pid()
        if pid is None:
            from sglang.srt.utils import kill_process_tree

            kill_process_tree(os.getpid(), include_parent=False)
        else:
            try:
                os.kill(pid, _SIGNAL)
                time.sleep(_MAIN_SECONDS)  # main ends this process meanwhile
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
        os._exit(EXIT_CODE)


def drain():
    """Tells main to finish open requests and to end its processes, as SGLang does on SIGTERM."""
    try:
        os.kill(main_pid() or os.getpid(), int(os.environ.get(DRAIN, signal.SIGTERM)))
    except ProcessLookupError:
        pass


def fatal(function):
    """A hook whose errors end the server."""

    @functools.wraps(function)
    def wrapped(*arguments, **options):
        try:
            return function(*arguments, **options)
        except XpoolError as error:
            end(str(error))
        except Exception as error:
            log.exception("unexpected error in the xpool plugin")
            end(f"{type(error).__name__}: {error}")

    return wrapped
