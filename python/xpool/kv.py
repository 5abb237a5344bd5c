# SPDX-License-Identifier: MIT
"""The elastic KV Cache of an Instance Rank: its address range, and the daemon's commands for it.

One thread uses a Kv. See xpool.h for what the numbers mean; tokens are slots of the range here.
"""

from collections import namedtuple

from xpool import native

UNSUPPORTED = 6  # xpool_status_t: the daemon keeps no account of the KV Cache
GROW, SHRINK = 1, 2
PREFILL, DECODE = 1, 2
NO_DEADLINE = 2**64 - 1

Command = namedtuple("Command", "kind tokens trim")


class Kv:
    """Opens the KV range of `rank`, for tokens of `token_bytes` each; the first `mapped_tokens` slots have
    memory then."""

    def __init__(self, rank, token_bytes):
        self._native = native.load()
        ffi, lib = self._native.ffi, self._native.lib
        self._rank = rank  # must stay open as long
        options = ffi.new(
            "xpool_kv_options_t *",
            {"struct_bytes": ffi.sizeof("xpool_kv_options_t"), "token_bytes": token_bytes},
        )
        handle = ffi.new("xpool_kv_t **")
        self._native.check(lib.xpool_kv_open(rank.handle, options, handle))
        self.handle = handle[0]
        self._info = ffi.new("xpool_kv_info_t *", {"struct_bytes": ffi.sizeof("xpool_kv_info_t")})
        self._command = ffi.new(
            "xpool_kv_command_t *", {"struct_bytes": ffi.sizeof("xpool_kv_command_t")}
        )
        self._report = ffi.new(
            "xpool_kv_report_t *", {"struct_bytes": ffi.sizeof("xpool_kv_report_t")}
        )
        self._poll = lib.xpool_kv_poll
        info = self.info()
        self.elastic = bool(info.elastic)
        self.token_bytes = info.token_bytes
        self.bundle_tokens = info.bundle_tokens
        self.reserved_tokens = info.reserved_tokens
        self.leader = bool(info.leader)
        self.device = info.device  # ordinal of the GPU in this process; -1: a CPU
        self.address = int(ffi.cast("uintptr_t", info.address))

    def info(self):
        """The library's xpool_kv_info_t; what changes with commands is of now."""
        self._native.check(self._native.lib.xpool_kv_info(self.handle, self._info))
        return self._info

    def memory(self, size):
        """CPU: the first `size` bytes of the range as a writable buffer. What has no memory there must not be
        touched."""
        return self._native.ffi.buffer(self._info.address, size)

    def poll(self, step, least_tokens):
        """The command that is due at scheduler step `step`, or None. `least_tokens`: slots that all live
        requests need."""
        status = self._poll(self.handle, step, least_tokens, self._command)
        if status == self._native.lib.XPOOL_RETRY:
            return None
        self._native.check(status)
        command = self._command
        return Command(command.order, command.tokens, bool(command.trim))

    def refused(self):
        """Whether the daemon has said that the demand reported last cannot be met now."""
        return bool(self._native.lib.xpool_kv_refused(self.handle))

    def captured(self):
        """The engine has captured its graphs and takes no more memory of its own."""
        self._native.check(self._native.lib.xpool_kv_captured(self.handle))

    def release(self, tokens, stream=0):
        """Slots from `tokens` on are in nobody's use any more, on a GPU once what was queued on `stream`
        has ended: their memory goes back. False: it has not ended yet, try again."""
        lib = self._native.lib
        status = lib.xpool_kv_release_after(self.handle, tokens, self._native.ffi.cast("void *", stream))
        if status == lib.XPOOL_RETRY:
            return False
        self._native.check(status)
        return True

    def report(self, **values):
        """What this group needs and holds; fields of xpool_kv_report_t, those not given are 0."""
        report = self._report
        for field in _REPORT:
            setattr(report, field, values.get(field, 0))
        self._native.check(self._native.lib.xpool_kv_report(self.handle, report))

    def close(self):
        if self.handle is not None:
            self._native.lib.xpool_kv_close(self.handle)
            self.handle = None


_REPORT = (
    "demand",
    "demand_tokens",
    "demand_deadline_ns",
    "demand_since_ns",
    "live_tokens",
    "cached_tokens",
    "running",
    "waiting",
    "last_activity_ns",
    "earliest_deadline_ns",
)
