/* SPDX-License-Identifier: MIT */
/*
 * FFN execution on one GPU: weight shards in device memory, GraphTemplates, Executor Lanes, and the
 * host thread that serves what the resident kernel does not. The FfnAgent owns one runtime.
 *
 *   create -> install (or adopt) each weight set -> start -> ... -> stop -> destroy
 *
 * Create, install, start and destroy are the owner's, by one thread. After start the host thread is
 * the only one that launches; the owner may call the functions marked "any thread". Nothing is
 * allocated after start. The device must be current for the calling thread (cuda_device_use).
 */
#ifndef XPOOL_FFN_CUDA_RUNTIME_H
#define XPOOL_FFN_CUDA_RUNTIME_H

#include "base/clock.h"
#include "cuda/device.h"
#include "ffn/cuda/dispatch.h"
#include "ffn/ffn.h"

/* Allocations of a shard; a model of 1.5 TB still fits at the default size of one. */
#define FFN_CUDA_WEIGHT_BLOCKS     32
#define FFN_CUDA_WEIGHT_BLOCK_SIZE ((uint64_t)48 << 30)

typedef struct ffn_cuda_runtime ffn_cuda_runtime_t;

/* Queues what publishes a Lane's Invocation, as the last launches of every GraphTemplate, in place
 * of the runtime's own (which serves the Lane's ffn_cuda_answer_t). It must end by writing `done`.
 * capacity_rows bounds the live rows. Called while launches are captured: only queues work. */
typedef xp_status_t (*ffn_cuda_publish_t)(void *context, uint32_t lane, uint32_t capacity_rows,
                                          cuda_stream_t stream);
/* The canonical failure's text; called once, by the thread that found it. */
typedef void (*ffn_cuda_failed_t)(void *context, xp_status_t status, const char *text);

typedef struct ffn_cuda_config {
    const cuda_device_t *device; /* open; outlives the runtime */
    uint32_t lanes;              /* 1 .. FFN_CUDA_MAX_LANES */
    uint32_t max_rows;           /* of an Invocation */
    uint32_t buffer_rows;        /* of the Lanes' own input and output rows; 0 = none */
    uint64_t memory_bytes;       /* budget: everything that the ledger counts; 0 = no limit */
    bool resident;               /* steady decoding by the resident kernel */
    bool cuts;                   /* of which short Invocations cut long ones */
    bool shared_role;            /* the GPU also holds another role: no resident kernel, and no
                                    cooperative launch, since others' blocks may be in the way */
    bool library;                /* dense bulk by cuBLASLt where it is found */
    uint32_t blocks;             /* of the decode grid; 0 = all multiprocessors but one, which is
                                    the scheduler's */
    uint32_t piece_rows;         /* most rows of one piece of bulk work; 0 = by the 300 us rule */
    uint32_t records;           /* Invocation records kept for ffn_cuda_runtime_records; 0 = none */
    int32_t cpu;                /* of the host thread; negative = not pinned */
    uint64_t block_bytes;       /* most bytes of one allocation of weights; 0 = 48 GiB */
    uint64_t quiet_ns;          /* without host work before the lease is taken again; 0 = 2 ms */
    ffn_cuda_publish_t publish; /* NULL: the runtime's own */
    void *publish_context;
    ffn_cuda_failed_t failed; /* may be NULL */
    void *failed_context;
} ffn_cuda_config_t;

xp_status_t ffn_cuda_runtime_create(const ffn_cuda_config_t *config,
                                    ffn_cuda_runtime_t **runtime_out);
/* Stops first. NULL and half-built objects are accepted. */
void ffn_cuda_runtime_destroy(ffn_cuda_runtime_t *runtime);

/* ---- weights ---------------------------------------------------------------------------------
 */
/* A shard in device memory, as one process hands it to the next: allocations and what they hold.
 * `identity` names the shard (tensors, shapes, types, files), `content` is the sum over its bytes,
 * computed on the device after loading; both are checked before the memory is used. */
typedef struct ffn_cuda_weights {
    uint32_t count;
    int fd[FFN_CUDA_WEIGHT_BLOCKS]; /* the holder's to close */
    uint64_t bytes[FFN_CUDA_WEIGHT_BLOCKS];
    uint64_t identity, content;
} ffn_cuda_weights_t;

typedef struct ffn_cuda_load_report {
    uint64_t bytes;   /* in device memory */
    uint64_t read;    /* from files; 0: dummy weights or adopted ones */
    uint64_t took_ns; /* of reading, filling or adopting */
    bool adopted;
} ffn_cuda_load_report_t;

/* Loads this shard (install->path, or seeded dummy weights) into device memory: either the whole
 * model is installed or nothing is left of it. `kept`, or NULL: a shard that may be adopted without
 * reading; when it is not that shard, or not whole, it is loaded anew. XP_NO_MEMORY names needed
 * and left bytes, XP_UNSUPPORTED a quantisation or width that the kernels do not take. */
xp_status_t ffn_cuda_runtime_install(ffn_cuda_runtime_t *runtime, const ffn_install_t *install,
                                     const ffn_cuda_weights_t *kept,
                                     ffn_cuda_load_report_t *report_out);
/* New descriptors of an installed shard's memory, the caller's to close. */
xp_status_t ffn_cuda_runtime_export(ffn_cuda_runtime_t *runtime, uint32_t model,
                                    ffn_cuda_weights_t *weights_out);

/* ---- ledger, for the planner: pure functions, no driver --------------------------------------
 */
#define FFN_CUDA_GRANULE ((uint64_t)2 << 20) /* device memory comes in pieces of that */
typedef struct ffn_cuda_ledger {
    uint64_t weight_bytes;    /* of the shard, in whole granules */
    uint64_t table_bytes;     /* the runtime's: tables, dispatch, queue; once a device */
    uint64_t lane_bytes;      /* Lanes' own rows, once a device */
    uint64_t workspace_bytes; /* of all Lanes, once a device */
    uint64_t graph_bytes;     /* allowance for captured executables, which the driver holds */
} ffn_cuda_ledger_t;

/* Bytes of one shard's weights. `checkpoint` NULL: dummy weights. */
xp_status_t ffn_cuda_weight_bytes(const model_spec_t *spec, const checkpoint_t *checkpoint,
                                  xp_dtype_t dtype, uint32_t tp_size, uint64_t *bytes_out);

/* What a device's runtime takes beside the weights for these models. `specs`: of the models placed
 * there, with their tensor parallel sizes. */
xp_status_t ffn_cuda_runtime_bytes(const model_spec_t *const *specs, const uint32_t *tp_sizes,
                                   uint32_t models, uint32_t lanes, uint32_t max_rows,
                                   uint32_t buffer_rows, bool library,
                                   ffn_cuda_ledger_t *ledger_out);

/* ---- execution -------------------------------------------------------------------------------
 */
/* Makes workspaces, captures all GraphTemplates, uploads the tables and starts the host thread. No
 * install after it. */
xp_status_t ffn_cuda_runtime_start(ffn_cuda_runtime_t *runtime);

/* Device address of the ffn_cuda_dispatch_t, for the scheduler; constant from create on, contents
 * valid from start on. */
cuda_address_t ffn_cuda_runtime_dispatch(const ffn_cuda_runtime_t *runtime);
/* Host copies of the same, for tests and host-side schedulers. */
const ffn_cuda_dispatch_t *ffn_cuda_runtime_tables(const ffn_cuda_runtime_t *runtime);

/* Ends the lease and the host thread; what was fired is waited for, at most until deadline_ns of
 * the monotonic clock (XP_TIMEOUT; the memory is then not given back by destroy, since kernels may
 * use it: the process should end). Idempotent. */
xp_status_t ffn_cuda_runtime_stop(ffn_cuda_runtime_t *runtime, uint64_t deadline_ns);

/* Any thread: ends the runtime's work at once with this failure (another one was accepted). The
 * resident kernel leaves, the scheduler sees `failure`. */
void ffn_cuda_runtime_fail(ffn_cuda_runtime_t *runtime, xp_status_t status, const char *text);
/* Any thread. XP_OK while nothing has failed; else the first failure, with its text recorded. */
xp_status_t ffn_cuda_runtime_health(const ffn_cuda_runtime_t *runtime);

enum { FFN_CUDA_LEASE_DECODE = 1, FFN_CUDA_LEASE_FEW }; /* whose the lease is */

/* Any thread. */
typedef struct ffn_cuda_stats {
    uint64_t weight_bytes, workspace_bytes, table_bytes;
    uint32_t signatures, templates;      /* templates: captured executables */
    uint64_t invocations, rows, busy_ns; /* all, by the device's clock */
    uint64_t resident_invocations;       /* of these, without a host launch */
    uint64_t host_launches;              /* launches by the host thread since start, of any kind */
    uint64_t leases;                     /* times the lease was taken */
    uint32_t lease_in_force;             /* FFN_CUDA_LEASE_..., 0: none */
} ffn_cuda_stats_t;
xp_status_t ffn_cuda_runtime_stats(ffn_cuda_runtime_t *runtime, ffn_cuda_stats_t *stats_out);

/* Any thread. What a model's routers chose: one copy of its counters, while kernels go on adding to
 * them. XP_INVALID: no such model, or before start. */
xp_status_t ffn_cuda_runtime_usage(ffn_cuda_runtime_t *runtime, uint32_t model,
                                   ffn_usage_t *usage_out);

/* Any one thread: up to `limit` records of Invocations that ended since the last call, oldest
 * first, times in nanoseconds of CLOCK_MONOTONIC. Records that were overwritten unread are counted
 * in skipped_out. */
uint32_t ffn_cuda_runtime_records(ffn_cuda_runtime_t *runtime, ffn_cuda_record_t *records_out,
                                  uint32_t limit, uint64_t *skipped_out);

uint64_t ffn_cuda_runtime_model_bytes(const ffn_cuda_runtime_t *runtime, uint32_t model);
#endif
