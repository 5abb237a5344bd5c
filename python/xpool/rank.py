# SPDX-License-Identifier: MIT
"""An Instance Rank: registration with the daemon, and the FFN of a layer as one C call.

One thread at a time may call `ffn`; `on_end` is called on a thread of libxpool.
"""

from collections import namedtuple

from xpool import native

F32, F16, BF16 = range(3)
DECODE, PREFILL, MIXED = range(3)
EAGER, DECODE_GRAPH, PREFILL_GRAPH = range(3)
END_FAILED, END_DRAIN, END_NOW = 1, 2, 3
OK, TIMEOUT, CLOSED, INVALID, FAILED = 0, 2, 3, 4, 9

MAX_DP = 64  # more attention DP ranks than any placement has

State = namedtuple(
    "State",
    "max_rows hidden executable ended ffn_calls ffn_rows ffn_wait_ns failure"
    " eager_decode_calls eager_prefill_calls replayed_calls captured_calls",
)
Workload = namedtuple(
    "Workload",
    "engine checkpoint hidden layers attention_tp attention_dp decode_rows prefill_rows dtype",
)


class Rank:
    """Opens rank `rank` of `model_id`; returns when the daemon has admitted it.

    `device`: None on a CPU; on a GPU its ordinal in this process. `on_end(kind, seconds, text)` is
    called when the rank must end; see xpool.h.
    """

    def __init__(self, config, model_id, rank, workload, on_end=None, device=None):
        self._native = native.load()
        ffi, lib = self._native.ffi, self._native.lib
        self._config = config  # the library keeps using it
        self.hidden = workload.hidden  # width of every row
        self.device = device
        self.dp_size = workload.attention_dp
        self.dp_rank = rank // workload.attention_tp
        self._step_stream = None  # under attention DP: of a step whose row counts are to come
        options = ffi.new(
            "xpool_rank_options_t *", {"struct_bytes": ffi.sizeof("xpool_rank_options_t")}
        )
        strings = {
            "model_id": ffi.new("char[]", model_id.encode()),
            "engine": ffi.new("char[]", workload.engine.encode()),
            "checkpoint": ffi.new("char[]", workload.checkpoint.encode()),
        }
        for name, value in strings.items():
            setattr(options, name, value)
        for name in Workload._fields[2:]:
            setattr(options, name, getattr(workload, name))
        options.rank = rank
        options.device = device or 0
        self._callback = None
        if on_end is not None:

            def call(context, end, seconds, text):
                on_end(int(end), int(seconds), self._native.string(text) or "")

            self._callback = ffi.callback("void(void *, uint32_t, uint32_t, const char *)", call)
            options.on_end = self._callback
        handle = ffi.new("xpool_rank_t **")
        self._native.check(lib.xpool_rank_open(config.handle, options, handle))
        self.handle = handle[0]
        # The struct of every call, made once; only what changes is written per call.
        self.call = ffi.new("xpool_ffn_call_t *", {"struct_bytes": ffi.sizeof("xpool_ffn_call_t")})
        self.call.execution = EAGER
        self._dp_rows = ffi.new("uint32_t[]", MAX_DP)
        self._cast = ffi.cast
        self._submit = lib.xpool_rank_ffn
        self._live = ffi.new("xpool_live_t *", {"struct_bytes": ffi.sizeof("xpool_live_t")})
        self._mark = ffi.new("uint64_t *")

    def wait_executable(self, timeout_seconds=0.0):
        """Waits until the FFN side can execute; 0 takes deadlines.startup."""
        self._native.check(
            self._native.lib.xpool_rank_wait_executable(self.handle, timeout_seconds)
        )

    def serving(self, host, port, weight_bytes, kv_bytes, kv_tokens, max_context):
        ffi = self._native.ffi
        name = ffi.new("char[]", host.encode())
        serving = ffi.new(
            "xpool_serving_t *",
            {
                "struct_bytes": ffi.sizeof("xpool_serving_t"),
                "host": name,
                "port": port,
                "weight_bytes": weight_bytes,
                "kv_bytes": kv_bytes,
                "kv_tokens": kv_tokens,
                "max_context": max_context,
            },
        )
        self._native.check(self._native.lib.xpool_rank_serving(self.handle, serving))

    def begin_step(self, step, execution=EAGER, rows=None, stream=0, dp_rows=None, deadline_ns=0):
        """Says what the calls until the next `begin_step` belong to; `deadline_ns`: by when the first of
        the step's requests should have its token, on CLOCK_MONOTONIC, 0: none. On a GPU `rows` are the live ones
        of the step's tensors, which may be longer (padding of a captured graph); written on `stream`
        before what the step queues or replays there. None: every call's rows are all live. `dp_rows`:
        the rows of all attention DP ranks, where they are known already."""
        self.call.step = step
        self.call.execution = execution
        self.call.slo_deadline_ns = deadline_ns
        self.call.dp_rows = self._native.ffi.NULL
        self.call.live_on_device = 0
        self._step_stream = None
        if rows is None:
            return
        self.call.live_on_device = 1
        if dp_rows is not None:
            self.set_dp_rows(dp_rows)
        if self.dp_size > 1 and dp_rows is None:
            self._step_stream = stream  # written when the counts of all ranks are known
        else:
            self.live(rows, step, stream)

    def set_dp_rows(self, rows):
        """Rows of every attention DP rank in this step."""
        if len(rows) > MAX_DP:
            raise native.XpoolError(f"{len(rows)} attention DP ranks; at most {MAX_DP} are possible")
        for index, count in enumerate(rows):
            self._dp_rows[index] = count
        self.call.dp_rows = self._dp_rows
        if self._step_stream is not None:
            self.live(rows[self.dp_rank], self.call.step, self._step_stream)

    def live(self, rows, step, stream):
        """GPU: writes which rows count, in the order of `stream` (its address), for captured graphs."""
        live = self._live
        live.rows = rows
        live.step = step
        live.slo_deadline_ns = self.call.slo_deadline_ns
        live.dp_rows = self.call.dp_rows
        live.stream = self._cast("void *", stream)
        self._native.check(
            self._native.lib.xpool_rank_live(self.handle, live, self._native.ffi.NULL)
        )

    def mark(self, stream):
        """GPU: remembers on `stream` (its address) how the calls before it ended; a number for `look`."""
        self._native.check(
            self._native.lib.xpool_rank_mark(self.handle, self._cast("void *", stream), self._mark)
        )
        return self._mark[0]

    def look(self, mark):
        """GPU: raises what went wrong before the mark; the caller has waited for its stream."""
        self._native.check(self._native.lib.xpool_rank_look(self.handle, mark))

    def finish(self, timeout_seconds=10.0):
        """GPU: raises what went wrong in the calls that have run; their stream is idle."""
        self._native.check(self._native.lib.xpool_rank_finish(self.handle, timeout_seconds))

    def ffn(self, layer, rows, dtype, input_address, output_address):
        """The FFN of one layer, from and to contiguous memory; returns an xpool_status_t."""
        call = self.call
        call.layer = layer
        call.rows = rows
        call.dtype = dtype
        call.input = self._cast("void *", input_address)
        call.output = self._cast("void *", output_address)
        return self._submit(self.handle, call)

    def queue_ffn(self, layer, rows, dtype, input_address, output_address, stream):
        """The same on a GPU: from and to device memory, queued on `stream` (its address)."""
        self.call.stream = self._cast("void *", stream)
        return self.ffn(layer, rows, dtype, input_address, output_address)

    def error(self, status):
        return self._native.error(status, "")

    def state(self):
        ffi = self._native.ffi
        state = ffi.new("xpool_rank_state_t *", {"struct_bytes": ffi.sizeof("xpool_rank_state_t")})
        self._native.lib.xpool_rank_state(self.handle, state)
        values = {field: getattr(state, field) for field in State._fields}
        values["failure"] = self._native.string(values["failure"])
        return State(**values)

    def close(self):
        if self.handle is not None:
            self._native.lib.xpool_rank_close(self.handle)
            self.handle = None
