# SPDX-License-Identifier: MIT
"""The one SGLang release that the hooks were written for and tested with."""

from xpool.native import XpoolError

SUPPORTED = "0.5.13.post1"


def found():
    import sglang

    return sglang.__version__


def check():
    version = found()
    if version != SUPPORTED:
        raise XpoolError(
            f"SGLang {version} is not supported: this plugin is for SGLang {SUPPORTED}"
            " (docs/sglang.md says how to move to another release)"
        )
