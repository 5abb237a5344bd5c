/* SPDX-License-Identifier: MIT */
/*
 * The engine object. Fields under `lock` are shared; everything else belongs to the engine thread
 * once engine_start() has made it, and to the creating thread before and after.
 */
#ifndef XPOOL_ENGINE_ENGINE_PRIVATE_H
#define XPOOL_ENGINE_ENGINE_PRIVATE_H

#include <pthread.h>
#include <stdatomic.h>

#include "engine/engine.h"
#include "engine/kv.h"
#include "engine/model.h"
#include "engine/pages.h"
#include "engine/sampler.h"
#include "engine/scheduler.h"
#include "engine/weights.h"

#define ENGINE_SLOT_BITS     16u /* of a request id; the rest counts arrivals */
#define ENGINE_MAX_SEQUENCES 65535u
#define ENGINE_PROMPT_ROWS   128u /* rows of one step that may want PROMPT events */
#define ENGINE_MIN_EVENTS    512u
#define ENGINE_LATENCIES     1024u
#define ENGINE_PAUSE_NS      (5 * XP_NS_PER_MS) /* how often a paused engine looks up */

typedef struct engine_latencies {
    uint64_t samples[ENGINE_LATENCIES];
    uint64_t count, sum_ns; /* since start; the ring holds the last ones */
} engine_latencies_t;

/* Elastic KV; engine thread. */
typedef struct engine_elastic {
    kv_rank_t *rank; /* NULL: not elastic */
    uint32_t start_bundles;
    bool open; /* a command is not carried out yet, or not as far as it says */
    uint64_t last_activity_ns;
    uint64_t
        cache_since_ns; /* since when more is asked for the prefix cache's sake; 0: it is not */
    uint64_t grow_failures, failures_before; /* when one was alone and stuck, or a grant came */
    char grow_error[160];
} engine_elastic_t;

struct engine {
    char model_id[96];
    engine_config_t config; /* pointers in it are not used after create */
    model_spec_t spec;
    tokenizer_t *tokenizer; /* NULL: none */
    engine_weights_t weights;
    engine_kv_t kv;
    engine_pages_t pages;
    xp_pool_t *pool;
    engine_model_t model;
    engine_scheduler_t scheduler;
    engine_batch_t batch;
    engine_elastic_t elastic;
    uint32_t max_rows, max_context;
    bool kv_limited;  /* max_context is what the KV Cache holds */
    int32_t home_cpu; /* the engine thread's, member 0 of the team; -1 = any */
    uint64_t entropy; /* seeds of requests without one */

    engine_sequence_t *sequences;
    uint32_t sequence_count;
    int32_t *token_region; /* of all sequences */
    size_t token_region_bytes;
    uint32_t *page_region;
    size_t page_region_bytes;

    uint64_t steps;

    /* Engine thread: sequences whose last events are not out yet, and the rows being sampled. */
    engine_sequence_t **ending;
    uint32_t ending_count;
    struct engine_sampling_row {
        engine_sequence_t *sequence;
        uint32_t row;   /* of the step */
        int32_t prompt; /* index of the prompt token this row predicts, or -1: sample */
        xp_status_t status;
        engine_sample_t sample;
        char error[128];
    } * sampling_rows;
    uint32_t sampling_count;
    float *sampling_logits; /* [sampling_count][vocab] */
    atomic_uint next_sample;

    pthread_t thread;
    bool created_lock, created_wake;
    pthread_mutex_t lock;
    pthread_cond_t wake;

    /* Under lock. */
    bool started, thread_ended, stopping, failed;
    bool attention; /* something for the thread to look at */
    bool cancel_wanted, flush_wanted;
    uint64_t stop_deadline_ns;
    char failure[256];
    uint64_t next_serial;
    uint32_t *free_slots, free_slot_count;
    uint32_t *inbox, inbox_count; /* slots in order of arrival */
    engine_event_t *events;       /* ring */
    uint32_t event_capacity, event_head, event_count;
    int event_fd;
    bool event_signalled; /* event_fd is readable */
    bool paused;          /* the thread waits for room in the ring */
    engine_stats_t stats;
    engine_latencies_t ttft, tbt;
};

/* loop.c */
void *engine_thread_main(void *context);
/* One iteration: takes what others left, then at most one step. True when it got something done.
 * For the thread, and for tests that step by hand. */
bool engine_iterate(engine_t *engine);
/* output.c: events. */
/* Room in the ring, under the lock. */
uint32_t engine_event_room(engine_t *engine);
/* The sequence leaves the scheduler, its KV is free; its last events follow when there is room. */
void engine_sequence_end(engine_t *engine, engine_sequence_t *sequence, engine_finish_t finish,
                         const char *error);
/* Produces the last events of ending sequences as far as the ring has room. Lock held. */
bool engine_flush_ending(engine_t *engine);
/* Samples and sends what the batch just computed. */
void engine_output_batch(engine_t *engine);
/* elastic.c */
/* Takes the channel's geometry into the configuration, before anything is sized. */
xp_status_t engine_elastic_prepare(engine_t *engine);
/* The KV Cache exists: maps what the first command says and limits the pages to it. */
xp_status_t engine_elastic_open(engine_t *engine);
/* The thread is about to run: tells the daemon that commands are carried out from now on. */
xp_status_t engine_elastic_start(engine_t *engine);
/* Between steps: takes the newest command and carries out what there is to do, a bounded piece at a
 * time. True when it got something done. */
bool engine_elastic_apply(engine_t *engine);
/* After a step: ends a request that only memory which the machine does not have would help. */
void engine_elastic_end_stuck(engine_t *engine);
/* After a step, and before the thread sleeps: usage and demand. */
void engine_elastic_report(engine_t *engine, uint64_t now_ns);
/* Tokens one sequence can come to have; any thread. */
uint32_t engine_elastic_context(const engine_t *engine);
/* stats.c; publish with the lock held. */
void engine_latency_add(engine_latencies_t *latencies, uint64_t ns);
void engine_stats_publish(engine_t *engine);
#endif
