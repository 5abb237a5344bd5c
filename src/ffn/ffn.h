/* SPDX-License-Identifier: MIT */
/*
 * FFN execution on one device: weight shards, Execution Signatures, GraphTemplates, and running one
 * Invocation's compute. The FfnAgent owns one runtime; the Fabric calls ffn_runtime_execute().
 *
 * All memory is taken by create and install; execute allocates nothing.
 */
#ifndef XPOOL_FFN_FFN_H
#define XPOOL_FFN_FFN_H

#include <stdint.h>

#include "base/pool.h"
#include "base/status.h"
#include "model/checkpoint.h"
#include "model/spec.h"

#define FFN_MAX_MODELS 64

typedef struct ffn_runtime ffn_runtime_t;

typedef struct ffn_runtime_config {
    uint32_t threads;     /* compute threads of the device */
    const uint32_t *cpus; /* pinning, or NULL */
    uint32_t cpu_count;
    uint32_t lanes;        /* Executor Lanes: one workspace each */
    uint32_t max_rows;     /* largest Execution Capacity */
    uint64_t memory_bytes; /* budget of the device: weights + workspaces; 0 = no limit */
    bool zero_output;      /* test aid: write zeros instead of the result, */
    const char *zero_path; /* or only while this file exists; NULL: never. The caller's string */
} ffn_runtime_config_t;

xp_status_t ffn_runtime_create(const ffn_runtime_config_t *config, ffn_runtime_t **runtime_out);
void ffn_runtime_destroy(ffn_runtime_t *runtime);

/* A shard's memory as one process hands it to the next: frozen, so that its bytes are those that
 * were complete. `identity` names the shard (tensors, shapes, types, files, kernels' form),
 * `content` is a sum over its bytes; both are compared before the memory is used. */
typedef struct ffn_weights {
    int fd; /* the holder's to close */
    uint64_t bytes, identity, content;
} ffn_weights_t;

typedef struct ffn_load_report {
    uint64_t bytes;   /* of the shard's memory */
    uint64_t read;    /* of it filled from files; 0: dummy weights or adopted ones */
    uint64_t took_ns; /* of reading, filling or adopting */
    bool adopted;
} ffn_load_report_t;

/* Progress of loading, called from reader threads: bytes done of bytes in all. */
typedef void (*ffn_progress_t)(void *context, uint64_t done_bytes, uint64_t total_bytes);

typedef struct ffn_install {
    uint32_t model; /* index in the plan, < FFN_MAX_MODELS */
    const char *model_id;
    const char *path; /* checkpoint folder or GGUF file */
    xp_dtype_t dtype; /* AUTO keeps the checkpoint's; plain types convert plain tensors */
    bool dummy;       /* load_format = "dummy": seeded random weights, shape from the spec */
    uint32_t tp_rank, tp_size; /* shard: intermediate (dense) and expert width split by tp_size */
    uint32_t readers;          /* parallel reader threads, >= 1 */
    ffn_progress_t progress;   /* may be NULL */
    void *progress_context;
    const ffn_weights_t *kept; /* CPU devices: a shard that may be adopted without reading; when it
                                * is another one, refused() is called and it is loaded. Or NULL */
    void (*refused)(void *context); /* kept weights are not adopted; called before loading; may be
                                     * NULL */
    void *refused_context;
    ffn_load_report_t *report; /* CPU devices; may be NULL */
} ffn_install_t;

/* Loads this shard's tensors of every layer (or adopts them) into a memfd named
 * "xpool-ffn:<model_id>" (so that smaps shows what it is), packs them for the selected kernels,
 * forms signatures and templates. Either the whole model is installed or nothing is left of it.
 * XP_NO_MEMORY names needed and left bytes. */
xp_status_t ffn_runtime_install(ffn_runtime_t *runtime, const ffn_install_t *install);
/* A new descriptor of an installed shard's frozen memory, the caller's to close. */
xp_status_t ffn_runtime_export(const ffn_runtime_t *runtime, uint32_t model,
                               ffn_weights_t *weights_out);
void ffn_runtime_uninstall(ffn_runtime_t *runtime, uint32_t model);

/* Exact bytes ffn_runtime_install() will take for that shard (planner's ledger): weights, tables.
 */
xp_status_t ffn_install_bytes(const model_spec_t *spec, const checkpoint_t *checkpoint,
                              xp_dtype_t dtype, uint32_t tp_size, uint64_t *bytes_out);
/* Bytes of workspaces for these widths (planner's ledger). `max_intermediate` is the largest
 * ffn_workspace_width() of the models on the device: an MoE row is as wide as its top_k experts. */
uint64_t ffn_workspace_bytes(uint32_t threads, uint32_t lanes, uint32_t max_rows,
                             uint32_t max_hidden, uint32_t max_intermediate, uint32_t max_experts);

/* Floats of activations one row needs in the widest layer of this shard. */
uint32_t ffn_workspace_width(const model_spec_t *spec, uint32_t tp_size);

/* out[rows][hidden] = this shard's partial of FFN(in[rows][hidden]); layer counts the model's
 * decoder layers from 0. rows 0..max_rows. Called by one thread at a time a lane; the runtime
 * serialises lanes on its team. With tp_size 1 the partial is the complete result. Router work is
 * repeated on each shard from the same input, so all shards choose the same experts. */
xp_status_t ffn_runtime_execute(ffn_runtime_t *runtime, uint32_t lane, uint32_t model,
                                uint32_t layer, uint32_t rows, const float *in, float *out);

/* What an execution of `rows` rows of that layer uses: number of its GraphTemplate and rows of the
 * Execution Capacity. Any thread while the model is installed. */
xp_status_t ffn_runtime_describe(const ffn_runtime_t *runtime, uint32_t model, uint32_t layer,
                                 uint32_t rows, uint32_t *template_out, uint32_t *capacity_out);

/* What a model's routers chose since start, over its layers of experts on this device; live rows
 * only. */
#define FFN_USAGE_BINS 8
typedef struct ffn_usage {
    uint64_t executions;  /* of a layer, with rows; rows that are computed in pieces: one a piece */
    uint64_t rows;        /* over them */
    uint64_t experts;     /* distinct ones that an execution read, summed */
    uint64_t places;      /* experts installed, over all layers */
    uint64_t chosen;      /* of these, chosen by a row at least once */
    uint64_t least, most; /* rows that chose the expert chosen least, and most */
    /* Experts by their rows over their layer's mean: below 0.25, 0.5, 0.75, 1, 1.25, 1.5, 2, and
     * from there on. Layers without any row are in none. */
    uint64_t bins[FFN_USAGE_BINS];
} ffn_usage_t;

/* Adds one layer: its counters and `places` counts of rows. */
void ffn_usage_add(uint64_t executions, uint64_t rows, uint64_t experts, const uint64_t *chosen,
                   uint32_t places, ffn_usage_t *usage);

typedef struct ffn_stats {
    uint64_t weight_bytes; /* over all installed models */
    uint64_t workspace_bytes;
    uint32_t signatures, templates;
    uint64_t executions, rows; /* since start */
    uint64_t busy_ns;
} ffn_stats_t;
void ffn_runtime_stats(const ffn_runtime_t *runtime, ffn_stats_t *stats_out);
/* XP_INVALID: no such model. XP_RETRY: an execution has gone on for longer than 20 ms. */
xp_status_t ffn_runtime_usage(ffn_runtime_t *runtime, uint32_t model, ffn_usage_t *usage_out);
uint64_t ffn_runtime_model_bytes(const ffn_runtime_t *runtime, uint32_t model);
#endif
