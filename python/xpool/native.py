# SPDX-License-Identifier: MIT
"""libxpool, called through cffi's ABI mode: no compiler and no tie to torch's C++ ABI.

The declarations are read from the public header that is shipped beside the library, so that they
cannot differ from it. A header of another ABI than the library's is refused.
"""

import os
import re
import threading
from pathlib import Path

FOLDER = Path(__file__).parent
LIBRARY = FOLDER / "libxpool.so"
HEADER = FOLDER / "xpool.h"


class XpoolError(Exception):
    """An error of libxpool, or one found on its behalf. `status` is an xpool_status_t, or None."""

    def __init__(self, text, status=None):
        super().__init__(text)
        self.status = status


def declarations(header_text):
    """The header as cffi reads it: C declarations, without anything of the preprocessor."""
    text = re.sub(r"#ifdef __cplusplus.*?#endif", "", header_text, flags=re.S)
    text = re.sub(r"^[ \t]*#(?:[^\n]*\\\n)*[^\n]*$", "", text, flags=re.M)
    return re.sub(r"\bXPOOL_API\b", "", text)


class _Native:
    """The opened library: `ffi` and `lib`."""

    def __init__(self):
        try:
            import cffi
        except ImportError as error:
            raise XpoolError(f"xpool needs the Python package cffi: {error}") from error
        try:
            header = HEADER.read_text(encoding="utf-8")
        except OSError as error:
            raise XpoolError(f"xpool's header is missing beside its Python package: {error}") from error
        self.ffi = cffi.FFI()
        self.ffi.cdef(declarations(header))
        try:
            self.lib = self.ffi.dlopen(os.fspath(LIBRARY))
        except OSError as error:
            raise XpoolError(f"libxpool cannot be loaded: {error}") from error
        expected = int(re.search(r"^#define XPOOL_ABI (\d+)$", header, re.M).group(1))
        found = self.lib.xpool_abi()
        if found != expected:
            raise XpoolError(
                f"{LIBRARY} has ABI {found}, its header {expected}: they come from different builds"
            )

    def string(self, pointer):
        return None if pointer == self.ffi.NULL else self.ffi.string(pointer).decode("utf-8", "replace")

    def error(self, status, doing):
        text = self.string(self.lib.xpool_error()) or f"status {int(status)}"
        return XpoolError(f"{doing}: {text}" if doing else text, int(status))

    def check(self, status, doing=""):
        if status != self.lib.XPOOL_OK:
            raise self.error(status, doing)


_lock = threading.Lock()
_native = None


def load():
    """Opens libxpool once and returns it; raises XpoolError with the reason otherwise."""
    global _native
    with _lock:
        if _native is None:
            _native = _Native()
        return _native


def version():
    native = load()
    return native.string(native.lib.xpool_version())
