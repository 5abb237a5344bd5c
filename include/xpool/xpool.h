/* SPDX-License-Identifier: MIT */
/*
 * libxpool: the C interface for engines that keep attention and KV Cache and leave the FFN half of
 * every layer to CrossPool's FfnAgents. C99, no dependency of its own; every struct begins with its
 * size, so that it can grow.
 *
 * The order of an Instance Rank's life:
 *
 *   xpool_config_open          the same configuration as the daemon's
 *   xpool_rank_open            registers with the daemon: workload, Transport arena
 *   xpool_kv_open              the KV Cache's address range, where the plan's is elastic
 *   xpool_rank_wait_executable FFN weights are in place, the arena is attached
 *   xpool_rank_ffn             any number of calls, from one thread at a time; on a GPU they are
 *                              queued on the caller's stream, xpool_rank_live says which rows count
 *                              when a captured graph is replayed, xpool_rank_mark and _look (or
 *                              _finish) how they ended
 *   xpool_rank_serving         past the initialisation barrier: the model counts as served
 *   xpool_rank_close           says goodbye, gives the arena back
 *
 * A background thread of the library speaks with the daemon. It never calls back except through
 * `on_end`, installs no signal handler, and blocks every signal in itself. No function may be used
 * after fork() in the child.
 *
 * Errors: every fallible function returns an xpool_status_t; xpool_error() gives the text of the
 * calling thread's last error. Outputs are written only on success.
 */
#ifndef XPOOL_XPOOL_H
#define XPOOL_XPOOL_H

#include <stddef.h>
#include <stdint.h>

#define XPOOL_ABI 1

#if defined(__GNUC__)
#define XPOOL_API __attribute__((visibility("default")))
#else
#define XPOOL_API
#endif

#ifdef __cplusplus
extern "C" {
#endif

typedef enum xpool_status {
    XPOOL_OK = 0,
    XPOOL_RETRY = 1,   /* not now */
    XPOOL_TIMEOUT = 2, /* the deadline passed; the rank is unusable from then on */
    XPOOL_CLOSED = 3,  /* an ordered end */
    XPOOL_INVALID = 4, /* wrong arguments or configuration; nothing was published */
    XPOOL_NOT_FOUND = 5,
    XPOOL_UNSUPPORTED = 6,
    XPOOL_NO_MEMORY = 7,
    XPOOL_REFUSED = 8, /* the daemon refused this rank; the text says why */
    XPOOL_FAILED = 9   /* the Generation failed; the text is the canonical failure */
} xpool_status_t;

typedef enum xpool_dtype { XPOOL_F32 = 0, XPOOL_F16 = 1, XPOOL_BF16 = 2 } xpool_dtype_t;

/* Which kind of step a call belongs to. */
typedef enum xpool_step { XPOOL_DECODE = 0, XPOOL_PREFILL = 1, XPOOL_MIXED = 2 } xpool_step_t;

/* How the engine executes the call; recorded by observers, nothing else depends on it. */
typedef enum xpool_execution {
    XPOOL_EAGER = 0,
    XPOOL_DECODE_GRAPH = 1,
    XPOOL_PREFILL_GRAPH = 2
} xpool_execution_t;

/* XPOOL_ABI of the library, and the release ("0.1.0"). */
XPOOL_API uint32_t xpool_abi(void);
XPOOL_API const char *xpool_version(void);
/* Text of this thread's last error; "" when there was none. Valid until its next call. */
XPOOL_API const char *xpool_error(void);

/* ---- configuration ---------------------------------------------------------------------- */
typedef struct xpool_config xpool_config_t;

/* Resolves the configuration. `path`: a TOML file, or NULL for XPOOL_CONFIG of the environment. */
XPOOL_API xpool_status_t xpool_config_open(const char *path, xpool_config_t **config_out);
XPOOL_API void xpool_config_close(xpool_config_t *config); /* accepts NULL */
XPOOL_API uint32_t xpool_config_model_count(const xpool_config_t *config);
/* Strings live as long as the configuration. NULL when there is no such model. */
XPOOL_API const char *xpool_config_model_id(const xpool_config_t *config, uint32_t index);
/* models[].path, resolved against vendor.model_base_uri; an absolute path. */
XPOOL_API const char *xpool_config_model_path(const xpool_config_t *config, const char *model_id);

typedef struct xpool_model_info {
    uint32_t struct_bytes;
    char architecture[64]; /* config.json's architectures[0] */
    char engine[16];       /* models[].engine: "native", "sglang" */
    uint32_t hidden, layers;
    uint32_t attention_tp, attention_dp;
    uint32_t decode_rows, prefill_rows;
    /* The three below come from the plan (computed without the daemon; nothing is started). */
    uint32_t max_rows;    /* rows of one xpool_rank_ffn call, at most */
    uint32_t max_context; /* tokens one request may have */
    uint32_t kv_tokens;   /* KV Cache capacity of each rank */
    /* models[].slo, or scheduler.slo; 0: none */
    double slo_ttft_ms, slo_tbt_ms;
    char device[32];     /* attention device of rank 0: "cpu:0", "cuda:1" */
    uint32_t kv_elastic; /* 1: the KV Cache grows and shrinks while it is in use; kv_tokens is the
                            most */
} xpool_model_info_t;
/* Reads the checkpoints' headers and plans; seconds at most. */
XPOOL_API xpool_status_t xpool_config_model_info(const xpool_config_t *config, const char *model_id,
                                                 xpool_model_info_t *info_out);

/* The checkpoint tensors that the FfnAgents hold: `name` is one of them (1) or not (0), judged by
 * the architecture of `model_id`. An engine skips these when it loads. -1 with an error: unknown
 * model or architecture. */
XPOOL_API int xpool_config_is_ffn_tensor(const xpool_config_t *config, const char *model_id,
                                         const char *name);

/* ---- Instance Rank ---------------------------------------------------------------------- */
typedef struct xpool_rank xpool_rank_t;

typedef enum xpool_end {
    XPOOL_END_FAILED = 1, /* canonical failure, refusal, or a lost daemon: end the process */
    XPOOL_END_DRAIN = 2,  /* an ordered end: finish open requests within `seconds`, then close */
    XPOOL_END_NOW = 3     /* an ordered end: close now */
} xpool_end_t;

typedef struct xpool_rank_options {
    uint32_t struct_bytes;
    const char *model_id;
    uint32_t rank; /* attention DP rank * attention_tp + attention TP rank */
    /* The engine's resolved workload; refused when it differs from configuration or checkpoint, or
     * when the plan's capacity is too small for it. */
    const char *engine;     /* name and release, e.g. "sglang 0.5.13.post1" */
    const char *checkpoint; /* the folder or file the engine loads; compared with the plan's */
    uint32_t hidden, layers;
    uint32_t attention_tp, attention_dp;
    uint32_t decode_rows;  /* most rows of a decode step */
    uint32_t prefill_rows; /* most rows of a prefill step */
    uint32_t dtype;        /* xpool_dtype_t of the rows handed over */
    /* Called on the library's thread, for each kind at most once. `text` says why and is valid
     * during the call. May be NULL; calls then fail and xpool_rank_state() tells. Must not call
     * xpool_rank_close(). */
    void (*on_end)(void *context, uint32_t end, uint32_t seconds, const char *text);
    void *context;
    /* Where the plan puts this rank on a GPU: its ordinal in this process. Tensors are then device
     * pointers, in the device's primary context (what the CUDA runtime and torch use). */
    uint32_t device;
} xpool_rank_options_t;

/* Registers and waits until the daemon has admitted the rank (deadlines.registration). */
XPOOL_API xpool_status_t xpool_rank_open(const xpool_config_t *config,
                                         const xpool_rank_options_t *options,
                                         xpool_rank_t **rank_out);
/* Closes the arena and says goodbye. Accepts NULL. */
XPOOL_API void xpool_rank_close(xpool_rank_t *rank);

/* Waits until the FFN side can execute this rank's calls; `timeout_seconds` 0 takes
 * deadlines.startup. */
XPOOL_API xpool_status_t xpool_rank_wait_executable(xpool_rank_t *rank, double timeout_seconds);

typedef struct xpool_serving {
    uint32_t struct_bytes;
    const char *host; /* where the engine's HTTP server listens; the same for every rank */
    uint32_t port;    /* 0: it has none, and the gateway does not route to it */
    uint64_t weight_bytes, kv_bytes; /* of this rank */
    uint32_t kv_tokens, max_context;
} xpool_serving_t;
/* This rank is past the initialisation barrier. The model counts as served when all of its ranks
 * are and its HTTP server answers /health. */
XPOOL_API xpool_status_t xpool_rank_serving(xpool_rank_t *rank, const xpool_serving_t *serving);

typedef struct xpool_ffn_call {
    uint32_t struct_bytes;
    uint32_t layer;
    uint32_t rows;            /* 0 .. max_rows */
    uint32_t dtype;           /* xpool_dtype_t of both tensors */
    uint32_t step;            /* xpool_step_t */
    uint32_t execution;       /* xpool_execution_t */
    uint64_t slo_deadline_ns; /* CLOCK_MONOTONIC, for the deadline policy; 0 = none */
    const uint32_t *dp_rows;  /* rows of every attention DP rank; NULL when attention_dp is 1 */
    const void *input;        /* rows x hidden, contiguous; may be NULL when rows is 0 */
    void *output;             /* rows x hidden, contiguous; may be `input` itself */
    /* On a GPU. */
    void *stream;            /* the caller's stream, a cudaStream_t; NULL: the legacy default one */
    uint32_t live_on_device; /* 1: the rows that count are those of the last xpool_rank_live, and
                              * `rows` is how many the tensors have; 0: all of them count. While the
                              * stream captures, 1 is taken */
} xpool_ffn_call_t;
/* The FFN of one layer. On a CPU: blocks until the answer is in `output`; ends by itself when the
 * submission deadline passes (XPOOL_TIMEOUT), the rank is closed or the Generation fails. On a GPU:
 * queued on `stream`, also while that captures, and returns at once; what then goes wrong poisons
 * the outputs of the pass, is told by xpool_rank_finish() and, within a second, by on_end. */
XPOOL_API xpool_status_t xpool_rank_ffn(xpool_rank_t *rank, const xpool_ffn_call_t *call);

typedef struct xpool_live {
    uint32_t struct_bytes;
    uint32_t rows;            /* of this rank; the first ones of the tensors */
    uint32_t step;            /* xpool_step_t */
    uint64_t slo_deadline_ns; /* CLOCK_MONOTONIC; 0 = none */
    const uint32_t *dp_rows;  /* as in xpool_ffn_call_t */
    void *stream;             /* written in its order, before what is queued or replayed next */
} xpool_live_t;
/* GPU: writes the record of live rows. A captured graph has the shapes that it was captured with;
 * rows past the live ones are padding, which must not travel (they would be sent to experts).
 * `live` NULL: writes nothing. `record_out` may be NULL; gets the record's device address, for
 * engines that write it themselves: uint32 rows, uint32 step, uint64 slo_deadline_ns, uint32
 * dp_rows[8]. */
XPOOL_API xpool_status_t xpool_rank_live(xpool_rank_t *rank, const xpool_live_t *live,
                                         uint64_t *record_out);
/* GPU: how the calls ended that have run so far, to be asked when their stream is idle. XPOOL_OK:
 * all outputs are right; XPOOL_RETRY: the device did not tell within `timeout_seconds`. */
XPOOL_API xpool_status_t xpool_rank_finish(xpool_rank_t *rank, double timeout_seconds);

/* GPU: remembers, in the order of `stream` and without waiting, how the calls before it ended. Not
 * while the stream captures. The last 64 marks are kept. */
XPOOL_API xpool_status_t xpool_rank_mark(xpool_rank_t *rank, void *stream, uint64_t *mark_out);
/* GPU: what a mark says, once its stream has passed it (the caller has waited for an event behind
 * it); costs one load where all is well. XPOOL_OK: all outputs before it are right; XPOOL_RETRY: it
 * has not been passed. */
XPOOL_API xpool_status_t xpool_rank_look(xpool_rank_t *rank, uint64_t mark);

typedef struct xpool_rank_state {
    uint32_t struct_bytes;
    uint32_t max_rows, hidden;
    uint32_t executable; /* 1 after xpool_rank_wait_executable could return */
    uint32_t ended;      /* 0, or xpool_end_t */
    uint64_t ffn_calls, ffn_rows;
    uint64_t ffn_wait_ns; /* total time spent waiting for answers */
    char failure[512];    /* why, when it ended by failure */
    /* On a GPU, since xpool_rank_serving (before it: since the beginning); ffn_calls and ffn_rows
     * are then those that the device has executed, rows being live ones. */
    uint64_t eager_decode_calls, eager_prefill_calls; /* queued one by one, outside graphs */
    uint64_t replayed_calls;                          /* executed by replayed graphs */
    uint64_t captured_calls;                          /* in graphs, all that were captured */
} xpool_rank_state_t;
XPOOL_API void xpool_rank_state(const xpool_rank_t *rank, xpool_rank_state_t *state_out);

/* ---- elastic KV Cache ------------------------------------------------------------------- */
/*
 * The KV Cache of a rank lies in one address range whose addresses never change. A prefix of it,
 * whole bundles of tokens, has memory; the daemon moves memory between the ranks of all models by
 * commands, which the engine asks for between two of its scheduler's steps. Tokens are counted in
 * slots: slot s begins at address + s * token_bytes, all layers of one token together, and may hold
 * any token. Slots past the mapped ones may be read on the CPU, though nothing is there, and must
 * never be written; on a GPU nothing may touch them, a fill or a copy of a whole tensor included.
 *
 * Of the commands of a group, the tensor parallel ranks of one attention DP rank, every rank gets
 * the same shrink at the same step. A grow is told to rank 0 of the group alone, once all ranks
 * have the memory: it tells the others by its own means at which step to use it. Steps are the
 * engine's count, the same on all ranks of a group, of which rank 0 is never behind another.
 *
 * One thread at a time uses a KV; it needs its rank, and is closed before it.
 */
typedef struct xpool_kv xpool_kv_t;

typedef struct xpool_kv_options {
    uint32_t struct_bytes;
    uint64_t token_bytes; /* of one token here: every layer, K and V; refused if not the plan's,
                             which on a GPU may have padding behind it (xpool_kv_info_t) */
} xpool_kv_options_t;

/* Reserves the range and maps what the daemon grants at the start: the floor. XPOOL_UNSUPPORTED:
 * the daemon keeps no account of this rank's KV Cache; the engine makes one of its own, of
 * xpool_model_info_t.kv_tokens at most. */
XPOOL_API xpool_status_t xpool_kv_open(xpool_rank_t *rank, const xpool_kv_options_t *options,
                                       xpool_kv_t **kv_out);
XPOOL_API void xpool_kv_close(xpool_kv_t *kv); /* nobody uses the range any more; accepts NULL */

typedef struct xpool_kv_info {
    uint32_t struct_bytes;
    uint32_t elastic; /* 0: no command will ever come */
    uint32_t leader;  /* 1: rank 0 of its group, the one that reports */
    void *address;
    uint64_t reserved_bytes, token_bytes;
    uint32_t bundle_tokens;                /* memory comes and goes in this unit */
    uint32_t reserved_tokens;              /* slots of the range: a multiple of it */
    uint32_t floor_tokens, ceiling_tokens; /* of now; `xpool kv set` changes them */
    uint32_t mapped_tokens;
    int32_t bell; /* a descriptor that is readable after each command, and when a refusal, a ceiling
                     or admit_tokens has changed; -1: none. xpool_kv_poll empties it */
    /* New prefills wait while live requests would come to hold more: others need the memory that
     * the group has. UINT32_MAX: they need not. */
    uint32_t admit_tokens;
    int32_t device; /* ordinal of the GPU that the range is on, in this process; -1: a CPU's */
    /* Of the command applied last, the same in all ranks of the group from one step on. Where ranks
     * have mapped for a grow and are yet to be told, it is that: nothing is released meanwhile. */
    uint32_t goal_tokens;
} xpool_kv_info_t;
XPOOL_API xpool_status_t xpool_kv_info(const xpool_kv_t *kv, xpool_kv_info_t *info_out);

/* The engine has captured its graphs and takes no more memory of its own: once, by every rank,
 * before the first request. On a GPU the daemon forms the pool from what is free then; until all
 * ranks that share the device have said so nobody gets more than its floor. Nothing on a CPU. */
XPOOL_API xpool_status_t xpool_kv_captured(xpool_kv_t *kv);

typedef enum xpool_kv_order {
    XPOOL_KV_GROW =
        1, /* slots below `tokens` have memory: xpool_kv_release(tokens), then use them */
    XPOOL_KV_SHRINK = 2 /* use no free slot from `tokens` on, empty them, xpool_kv_release() */
} xpool_kv_order_t;

typedef struct xpool_kv_command {
    uint32_t struct_bytes;
    uint32_t order;  /* xpool_kv_order_t */
    uint32_t tokens; /* slots, whole bundles; never 0 */
    uint32_t trim;   /* 1: drop the whole prefix cache first */
} xpool_kv_command_t;
/* The command that is due at scheduler step `step`; XPOOL_RETRY when there is none.
 * `least_tokens`: slots that all live requests need, were they moved together. Empties the bell. */
XPOOL_API xpool_status_t xpool_kv_poll(xpool_kv_t *kv, uint32_t step, uint32_t least_tokens,
                                       xpool_kv_command_t *command_out);
/* Answers a command: slots from `tokens` on, rounded up to whole bundles, are in nobody's use here,
 * and their memory goes back. More slots than the command said are a beginning, after which fewer
 * follow as soon as live requests have left them; the daemon waits for no request. */
XPOOL_API xpool_status_t xpool_kv_release(xpool_kv_t *kv, uint32_t tokens);
/* The same on a GPU once what was queued on `stream` has ended, the last of the work that may use
 * those slots. XPOOL_RETRY: it has not ended within 0.2 s, nothing was given back; call again. */
XPOOL_API xpool_status_t xpool_kv_release_after(xpool_kv_t *kv, uint32_t tokens, void *stream);

typedef enum xpool_kv_demand {
    XPOOL_KV_NONE = 0,
    XPOOL_KV_PREFILL = 1, /* a request that has not begun waits for room */
    XPOOL_KV_DECODE = 2   /* live work cannot go on */
} xpool_kv_demand_t;

/* What the group needs and holds, in slots of one rank; times are CLOCK_MONOTONIC. */
typedef struct xpool_kv_report {
    uint32_t struct_bytes;
    uint32_t demand;               /* xpool_kv_demand_t */
    uint32_t demand_tokens;        /* slots needed in all, not in addition */
    uint32_t live_tokens;          /* slots that live requests hold */
    uint32_t cached_tokens;        /* slots that only the prefix cache holds */
    uint32_t running, waiting;     /* requests; both 0: the group is idle */
    uint64_t demand_deadline_ns;   /* UINT64_MAX: none */
    uint64_t demand_since_ns;      /* since when it waits; names the demand */
    uint64_t last_activity_ns;     /* last step with work */
    uint64_t earliest_deadline_ns; /* of live work; UINT64_MAX: none */
} xpool_kv_report_t;
/* Replaces the last report; costs nothing when it says the same. Only rank 0's counts. */
XPOOL_API xpool_status_t xpool_kv_report(xpool_kv_t *kv, const xpool_kv_report_t *report);
/* 1: the daemon has said that the demand reported last cannot be met now. */
XPOOL_API int xpool_kv_refused(const xpool_kv_t *kv);

#ifdef __cplusplus
}
#endif
#endif
