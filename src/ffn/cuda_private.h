/* SPDX-License-Identifier: MIT */
/*
 * What the files of the CUDA runtime share. cuda_runtime.c owns models, memory and life;
 * cuda_template.c what is captured; cuda_serve.c the host thread.
 */
#ifndef XPOOL_FFN_CUDA_PRIVATE_H
#define XPOOL_FFN_CUDA_PRIVATE_H

#include <pthread.h>
#include <stdatomic.h>

#include "ffn/cuda/dispatch_steps.h"
#include "ffn/cuda/kernels.h"
#include "ffn/cuda/library.h"
#include "ffn/cuda/usage.h"
#include "ffn/cuda_load.h"
#include "ffn/cuda_records.h"

#define CUDA_MAX_SIGNATURES 64
#define CUDA_MAX_CAPACITIES 12
/* Most rows of bulk work in a Lane's own workspace. Larger Invocations take turns in one workspace,
 * in the order of the bulk stream, so that pieces can be large without a large workspace a Lane. */
#define CUDA_OWN_ROWS     1024u
#define CUDA_UPLOAD_BYTES ((uint64_t)256 << 10)
#define CUDA_LIMIT_NS     (10 * XP_NS_PER_S) /* for one step of starting */

enum {
    DISPATCH_GATHER = 0,
    DISPATCH_PIECE,
    DISPATCH_PUBLISH,
    DISPATCH_FILL,
    DISPATCH_DIGEST,
    DISPATCH_CLOCK,
    DISPATCH_KERNELS
};

typedef struct cuda_model {
    bool installed;
    char id[96];
    cuda_shard_t shard;
    uint32_t layers, first_layer;
    uint32_t hidden, dtype;
    uint64_t bytes;          /* of device memory, rounded up */
    uint32_t *template;      /* [layers] */
    ffn_cuda_layer_t *layer; /* [layers]: router and bias; the rest is filled in by start */
    ffn_cuda_part_t *part;   /* [parts], a layer after the other */
    uint32_t *first_part;    /* [layers] */
    uint32_t parts;
    uint64_t usage_first, usage_bytes; /* its counters of chosen experts, from start on */
} cuda_model_t;

/* Dense layers of up to so many rows are a matter of streaming the weights once, which the library
 * does best with a plan for just that number. */
#define CUDA_LIBRARY_ROWS 128u
#define CUDA_FEW_PLANS    (CUDA_LIBRARY_ROWS - FFN_CUDA_DENSE_ROWS)

/* GraphTemplate: what all layers of one Execution Signature share. */
typedef struct cuda_template {
    ffn_cuda_signature_t signature;
    uint32_t piece_rows;
    uint32_t capacities, capacity[CUDA_MAX_CAPACITIES]; /* rows, ascending */
    cuda_graph_exec_t exec[CUDA_MAX_CAPACITIES][FFN_CUDA_MAX_LANES];
    ffn_library_plan_t *plan; /* dense, of piece_rows rows; or NULL */
    /* Likewise: of FFN_CUDA_DENSE_ROWS + 1 rows and more, each number of them. */
    ffn_library_plan_t *few_plan[CUDA_FEW_PLANS];
    bool warm; /* the plans have run */
} cuda_template_t;

/* Device addresses of a Lane's parts. */
typedef struct cuda_lane {
    cuda_address_t lane, piece, answer, run, done, input, output, workspace;
} cuda_lane_t;

/* Pinned host memory of the words that are copied to and fro; one user each. */
typedef struct cuda_staging {
    /* host thread */
    ffn_cuda_queue_t queue;
    uint32_t lease, stop, failure;
    /* owner, before start */
    uint64_t word, clock;
    /* ffn_cuda_runtime_stats, under stats_lock */
    ffn_cuda_counters_t counters;
    uint8_t upload[CUDA_UPLOAD_BYTES]; /* owner, before start */
} cuda_staging_t;

struct ffn_cuda_runtime {
    ffn_cuda_config_t config;
    const cuda_device_t *device;
    ffn_cuda_kernels_t kernels;
    cuda_module_t module;
    cuda_function_t function[DISPATCH_KERNELS];
    ffn_library_t *library;
    cuda_stream_t control, decode, bulk, resident, watch; /* watch: stats */
    cuda_staging_t *staging;
    ffn_cuda_ring_t *ring; /* mapped */
    cuda_address_t ring_at;
    ffn_cuda_records_t records;
    /* Device memory: words and dispatch from create on, tables and Lanes from start on. */
    cuda_block_t words, tables, lanes;
    cuda_address_t dispatch_at, queue_at, counters_at, lease_at, failure_at, word_at;
    cuda_address_t aside_at;       /* the queue's `aside`, or 0 */
    cuda_address_t usage_at;       /* counters of chosen experts, in `tables` */
    void *usage;                   /* pinned: a model's of them, under stats_lock; or NULL */
    cuda_address_t library_at;     /* scratch of the library's products, on the stream of bulk */
    cuda_address_t library_few_at; /* of those of few rows, on the urgent one; or 0 */
    cuda_address_t shared_at;      /* workspace of what has more rows than CUDA_OWN_ROWS; or 0 */
    cuda_lane_t lane[FFN_CUDA_MAX_LANES];
    ffn_cuda_dispatch_t dispatch;            /* host copy */
    ffn_cuda_limits_t limits, shared_limits; /* of a Lane's own workspace; of the shared one */
    cuda_model_t model[FFN_CUDA_MAX_MODELS];
    cuda_template_t template[CUDA_MAX_SIGNATURES];
    uint32_t templates, layers, captured;
    uint32_t *layer_template, *layer_part; /* by layer of the table: template; first part */
    ffn_cuda_part_t *part;                 /* all parts, as uploaded */
    bool started;
    /* the host thread */
    pthread_t thread;
    bool running;
    uint32_t ended; /* the host thread's, a futex: it only returns after that */
    _Atomic uint32_t stop;
    _Atomic uint32_t failed; /* an xp_status_t once something has failed */
    uint32_t failure_told;   /* the device knows; host thread */
    uint64_t taken;          /* requests */
    uint32_t lease;          /* last value written */
    bool offered;            /* that lease is odd, and its kernel is not launched yet */
    bool drained;    /* what was asked for before the scheduler had seen the offer is fired */
    bool few_wanted; /* what came last is the kernel of few rows' */
    uint64_t lease_since_ns, last_work_ns, last_bulk_ns, quiet_ns;
    _Atomic uint64_t host_launches, leases;
    _Atomic uint32_t lease_in_force; /* FFN_CUDA_LEASE_..., 0: none */
    bool stuck;                      /* work on the device did not end: its memory must stay */
    pthread_mutex_t failure_lock, stats_lock;
    xp_error_t failure;
};

static inline void *cuda_pointer(cuda_address_t address)
{
    return (void *)(uintptr_t)address;
}

/* cuda_template.c */
void cuda_template_plan(const ffn_cuda_config_t *config, const ffn_cuda_signature_t *signature,
                        cuda_template_t *template_out);
/* Device memory that the driver takes for a template's executables, by a generous rule. */
uint64_t cuda_template_bytes(const ffn_cuda_config_t *config,
                             const ffn_cuda_signature_t *signature);
/* Index of the smallest Capacity that holds `rows`. */
uint32_t cuda_template_capacity(const cuda_template_t *template, uint32_t rows);
/* Most rows for which the resident kernel of few rows computes its layers: as few as its Lanes'
 * workspaces hold at once; 0: none. */
uint32_t cuda_template_few_rows(const cuda_template_t *template);
/* Of the library, for that many rows; or NULL. */
const ffn_library_plan_t *cuda_template_few_plan(const cuda_template_t *template, uint32_t rows);
/* Whether such a Capacity's products are pieces in the workspace that all Lanes share. */
bool cuda_template_shares(const ffn_cuda_runtime_t *runtime, const cuda_template_t *template,
                          uint32_t capacity_rows);
xp_status_t cuda_template_capture(ffn_cuda_runtime_t *runtime, uint32_t index);
void cuda_template_release(ffn_cuda_runtime_t *runtime, uint32_t index);
/* The launches around products, for a stream that captures or not. */
xp_status_t cuda_template_gather(ffn_cuda_runtime_t *runtime, const cuda_template_t *template,
                                 uint32_t lane, uint32_t capacity_rows, cuda_stream_t stream);
xp_status_t cuda_template_piece(ffn_cuda_runtime_t *runtime, const cuda_template_t *template,
                                uint32_t lane, uint32_t first, uint32_t rows, cuda_stream_t stream);
xp_status_t cuda_template_publish(ffn_cuda_runtime_t *runtime, uint32_t index, uint32_t lane,
                                  uint32_t capacity_rows, cuda_stream_t stream);

/* cuda_serve.c */
xp_status_t cuda_serve_start(ffn_cuda_runtime_t *runtime);
xp_status_t cuda_serve_stop(ffn_cuda_runtime_t *runtime, uint64_t deadline_ns);
#endif
