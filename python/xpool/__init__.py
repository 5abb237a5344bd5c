# SPDX-License-Identifier: MIT
"""CrossPool for Python programs: configuration, Instance Ranks and the SGLang plugin.

Nothing is loaded by importing this package: libxpool is opened by the first use of it, and torch
only by `xpool.ops`.
"""

from importlib import import_module

_PLACES = {
    "XpoolConfig": "xpool.config",
    "XpoolError": "xpool.native",
    "Rank": "xpool.rank",
}

__all__ = ["Rank", "XpoolConfig", "XpoolError", "__version__"]


def __getattr__(name):
    if name == "__version__":
        from xpool import native

        return native.version()
    if name in _PLACES:
        return getattr(import_module(_PLACES[name]), name)
    if name == "ops":
        return import_module("xpool.ops")
    raise AttributeError(f"module 'xpool' has no attribute {name!r}")
