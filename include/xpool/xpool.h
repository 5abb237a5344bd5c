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
 *   xpool_rank_wait_executable FFN weights are in place, the arena is attached
 *   xpool_rank_ffn             any number of calls, from one thread at a time
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
} xpool_ffn_call_t;
/* The FFN of one layer. Blocks until the answer is in `output`; ends by itself when the submission
 * deadline passes (XPOOL_TIMEOUT), the rank is closed or the Generation fails. */
XPOOL_API xpool_status_t xpool_rank_ffn(xpool_rank_t *rank, const xpool_ffn_call_t *call);

typedef struct xpool_rank_state {
    uint32_t struct_bytes;
    uint32_t max_rows, hidden;
    uint32_t executable; /* 1 after xpool_rank_wait_executable could return */
    uint32_t ended;      /* 0, or xpool_end_t */
    uint64_t ffn_calls, ffn_rows;
    uint64_t ffn_wait_ns; /* total time spent waiting for answers */
    char failure[512];    /* why, when it ended by failure */
} xpool_rank_state_t;
XPOOL_API void xpool_rank_state(const xpool_rank_t *rank, xpool_rank_state_t *state_out);

#ifdef __cplusplus
}
#endif
#endif
