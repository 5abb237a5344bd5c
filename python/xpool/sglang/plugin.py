# SPDX-License-Identifier: MIT
"""The entry point that SGLang calls in its main process and in every scheduler.

SGLang logs and forgets what a plugin raises, and would come up as plain SGLang. So `install` ends
the process when it fails, and the scheduler verifies after the model is built.
"""

from importlib import import_module

from xpool import native
from xpool.sglang import failure, release

# The main process has no model: importing SGLang's there, before its arguments are parsed, would
# only fix settings too early.
MAIN_HOOKS = ("options", "shared")
SCHEDULER_HOOKS = ("shared", "weights", "parallel", "step", "cpu", "cuda", "kv", "rank")


@failure.fatal
def install():
    failure.watch()
    release.check()
    native.load()
    for name in MAIN_HOOKS if failure.is_main() else SCHEDULER_HOOKS:
        import_module(f"xpool.sglang.{name}").hook()
