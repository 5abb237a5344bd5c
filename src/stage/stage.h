/* SPDX-License-Identifier: MIT */
/*
 * The data plane between GPUs: stages, the direct lane, the relay, the scheduler.
 *
 * Every FfnAgent holds in its device memory one *stage* for each Instance that it computes for: a
 * line for each Instance Rank and the input rows (stage/records.h). On the direct lane the
 * Instance's put writes rows and line into the stage of every member of the layer's Execution
 * Group, each member forms the Invocation by itself, and the answer goes straight into the
 * Instance's Transport arena: one hop a way, no other process on the way. By the relay the
 * Instance's rows go through the AtnAgent's resident kernel, which speaks the same stage protocol
 * with a relay arena of its own in place of the Instance's.
 *
 * Descriptors go through the daemon. Order of a Generation's life:
 *   1. FfnAgent  create; export of stages and partials, import of the partials of other first
 *                members; start
 *   2. Instance  create; export of its arena (relay: the AtnAgent attaches it and exports its own)
 *   3. FfnAgents attach the arenas of all ranks of an Instance, every member of its groups
 *   4. Instance  (relay: AtnAgent) open: the stages of all those FfnAgents; then it may put
 *   An Instance that went away is detached at every FfnAgent before one of them attaches its
 *   successor: step 3 clears the stage, and nothing of the old one may come after that.
 *
 * Where an Instance outlives the Generation, its open request does too. By the relay it lies in the
 * Instance's arena, which the next AtnAgent attaches. On the direct lane it lies in the stages:
 * their memory is kept by the daemon's descriptors, the next FfnAgents take it over (`kept`) and
 * the Instance notices nothing: no mapping and no captured launch of its changes.
 *
 * Objects are used by one thread each, fail/shutdown/state calls included. Nothing here waits
 * without a deadline, and nothing is allocated between create/attach and detach/destroy.
 */
#ifndef XPOOL_STAGE_STAGE_H
#define XPOOL_STAGE_STAGE_H

#include <stdbool.h>

#include "fabric/plan.h"
#include "ffn/cuda/dispatch.h"
#include "observe/observe.h"
#include "stage/heap.h"
#include "transport/cuda_transport.h"

/* ---- sizes: pure functions for the planner; no driver ------------------------------------- */
/* 2 MiB: what cuda_vmm granularity is on every supported device. */
#define STAGE_GRANULARITY_BYTES (2u << 20)
#define STAGE_LINES_MAX         128u /* Instance Ranks of one FfnAgent */

typedef struct stage_bytes {
    uint64_t stages; /* one allocation an Instance; nvshmem: the heap, and what the library takes */
    uint64_t partials; /* where this FfnAgent is first of a group of several and reduces; scratch */
    uint64_t tables;   /* scheduler */
} stage_bytes_t;
/* Device memory of FfnAgent `ffn` (index among the FfnAgents). */
void stage_ffn_bytes(const fabric_plan_t *plan, uint32_t ffn, stage_bytes_t *bytes_out);
/* Rows of their own that the Lanes of FfnAgent `ffn` need (`buffer_rows` of the runtime): where
 * several ranks get complete rows of one member. 0: none. */
uint32_t stage_buffer_rows(const fabric_plan_t *plan, uint32_t ffn);
/* Rows of the largest Invocation (`max_rows` of the runtime): those of all DP ranks. */
uint32_t stage_max_rows(const fabric_plan_t *plan, uint32_t ffn);
/* Geometry of the arenas of an Instance, with its areas for Direct Partial. */
transport_geometry_t stage_geometry(const fabric_plan_instance_t *instance);
/* Device memory of one Instance Rank's arena (and of a relay arena on the AtnAgent's device). */
uint64_t stage_arena_bytes(const fabric_plan_instance_t *instance);
/* FfnAgents (bits) that belong to any group of the Instance: those whose stages it opens. */
uint32_t stage_members(const fabric_plan_instance_t *instance);
/* FfnAgents (bits) that hold partials for the Instance: its groups' first members, when they
 * reduce. */
uint32_t stage_reducers(const fabric_plan_instance_t *instance);

/* ---- FfnAgent ----------------------------------------------------------------------------- */
typedef struct stage_ffn stage_ffn_t;

typedef struct stage_ffn_config {
    const cuda_device_t *device;
    const fabric_plan_t *plan;         /* outlives the object */
    uint32_t ffn;                      /* index among the FfnAgents */
    const transport_cuda_life_t *life; /* of this process, or NULL where no MPS is used */
    cuda_address_t dispatch; /* of the ffn_cuda_dispatch_t that executes; 0: echo (benchmarks) */
    /* Rows of so many elements at most are moved by the scheduler's own warp. 0: the default. */
    uint32_t own_elements;
    bool notes; /* keep what stage_ffn_counters_t says of jobs */
    /* Provider nvshmem: stages and partials lie here, and the ranks' relay arenas are found here;
     * nothing is exported, imported or received. NULL: memory of their own, passed by descriptor.
     * Outlives the object. */
    stage_heap_t *heap;
    /* [plan->instance_count]: descriptors of stages that an FfnAgent of a former Generation made
     * here, the caller's; -1: none. Instances that go on have them mapped, and what they wrote
     * there stays. NULL: none at all. */
    const int *kept;
} stage_ffn_config_t;

/* Takes all device memory and loads all code; launches nothing that stays. */
xp_status_t stage_ffn_create(const stage_ffn_config_t *config, stage_ffn_t **ffn_out);
/* A descriptor of the Instance's stage, the caller's. XP_NOT_FOUND: not a member. */
xp_status_t stage_ffn_export(const stage_ffn_t *ffn, uint32_t instance, int *fd_out);
/* Is that stage the kept one? Where it could not be mapped, or is none, there is a fresh one. */
bool stage_ffn_adopted(const stage_ffn_t *ffn, uint32_t instance);
/* Of its partials, for the other members. XP_NOT_FOUND: none here (stage_reducers). */
xp_status_t stage_ffn_export_partials(const stage_ffn_t *ffn, uint32_t instance, int *fd_out);
/* Maps the partials that FfnAgent `first` exported; before start. `fd` stays the caller's. */
xp_status_t stage_ffn_import_partials(stage_ffn_t *ffn, uint32_t instance, uint32_t first, int fd);
/* Launches the scheduler. XP_INVALID names partials that are missing. */
xp_status_t stage_ffn_start(stage_ffn_t *ffn);

/* Maps the arenas of all ranks, in rank order, clears the stage and hands the Instance to the
 * scheduler. The descriptors stay the caller's; with a heap there are none (NULL). XP_PEER: not the
 * planned arenas. */
xp_status_t stage_ffn_attach(stage_ffn_t *ffn, uint32_t instance, const int *arena_fds,
                             uint32_t ranks, uint64_t deadline_ns);
/* The same for an Instance of a former Generation, which has gone on all the while: its stage is
 * the kept one and is not cleared, and what it wrote there after the last answer in its arenas is
 * taken up. Nobody else may still answer there. XP_PEER: its ranks have had different answers,
 * which one of them could never make up for. XP_UNSUPPORTED: the stage is not the kept one, or its
 * layers have different groups. `answered_out`: the last sequence that was answered; `open_out`:
 * one after it waits. */
xp_status_t stage_ffn_resume(stage_ffn_t *ffn, uint32_t instance, const int *arena_fds,
                             uint32_t ranks, uint64_t deadline_ns, uint64_t *answered_out,
                             bool *open_out);
/* What is in flight is finished and dropped; then the arenas are unmapped. XP_TIMEOUT: it is still
 * being executed, and stays mapped; call again. XP_CLOSED: the scheduler has left, destroy unmaps.
 */
xp_status_t stage_ffn_detach(stage_ffn_t *ffn, uint32_t instance, uint64_t deadline_ns);
/* Terminal close of the Instance's arenas. */
xp_status_t stage_ffn_close(stage_ffn_t *ffn, uint32_t instance, xp_status_t reason);

/* Looks at the scheduler; call it every few milliseconds. XP_OK: all is well. XP_FATAL with the
 * text of the failure that the scheduler found (disagreement, timeout, execution); the caller makes
 * it canonical. XP_CLOSED: it has left after a shutdown. `dropped_out`: bits of Instances whose
 * arenas it dropped since (nonsense from an Instance, or closed); each is to be detached. */
xp_status_t stage_ffn_look(stage_ffn_t *ffn, uint64_t deadline_ns, uint64_t *dropped_out);
/* A failure of somebody else: the scheduler leaves. Every attached arena is closed with XP_FATAL,
 * unless they are kept for the next Generation. */
xp_status_t stage_ffn_fail(stage_ffn_t *ffn, bool keep);
/* Ordered end: the scheduler finishes what it took, takes nothing new, and leaves. */
xp_status_t stage_ffn_shutdown(stage_ffn_t *ffn);

typedef struct stage_ffn_counters {
    uint64_t invocations, rows;
    uint64_t resident, host;     /* by who executed: the resident kernel, a host launch */
    uint64_t abandoned, dropped; /* Invocations without a consumer; Instances with nonsense */
    uint64_t queue_ns;           /* complete set of lines to Lane, summed */
    uint64_t execute_ns;         /* Lane to done, summed */
    uint64_t lanes_peak, lanes_in_use;
    uint64_t turns; /* of the scheduler's loop */
    uint64_t longest_turn_ns;
    uint64_t cuts; /* of `resident`: in the middle of a longer Invocation */
    /* With `notes`, of jobs of one chunk, summed: from the look that found the line to the job's
     * begin, to its end, to the published answer. */
    uint64_t noted, noted_taken_ns, noted_job_ns, noted_answer_ns, noted_longest_ns;
} stage_ffn_counters_t;
xp_status_t stage_ffn_counters(stage_ffn_t *ffn, uint64_t deadline_ns,
                               stage_ffn_counters_t *counters_out);
xp_status_t stage_ffn_instance_counters(stage_ffn_t *ffn, uint32_t instance, uint64_t deadline_ns,
                                        uint64_t *invocations_out, uint64_t *rows_out);

/* Ends the scheduler at once; XP_TIMEOUT when it has not left by the deadline. */
xp_status_t stage_ffn_stop(stage_ffn_t *ffn, uint64_t deadline_ns);
/* Stops (within a second) and frees. Accepts NULL. What executes must have ended before. */
void stage_ffn_destroy(stage_ffn_t *ffn);

/* ---- Instance Rank ------------------------------------------------------------------------ */
typedef enum stage_path {
    STAGE_DIRECT = 0, /* put writes into the members' stages */
    STAGE_RELAY       /* put writes into the arena, for the AtnAgent */
} stage_path_t;

typedef struct stage_client stage_client_t;
typedef struct stage_client_config {
    const cuda_device_t *device;
    const fabric_plan_instance_t *instance; /* copied */
    uint32_t index;                         /* its place in the plan, and the plan's Generation: */
    uint64_t generation;                    /* a stage of another one is refused */
    uint32_t rank;
    stage_path_t path;
    const transport_cuda_life_t *life;
    uint64_t limit_ns;   /* of one wait, but for pauses */
    uint64_t pause_ns;   /* of one pause */
    uint64_t call_bytes; /* rows that one launch puts, waits for and takes; 0: the default */
} stage_client_config_t;

xp_status_t stage_client_create(const stage_client_config_t *config, stage_client_t **client_out);
/* Closes the arena first. The caller's streams must be idle. Accepts NULL. */
void stage_client_destroy(stage_client_t *client);
/* A descriptor of the arena, the caller's. */
xp_status_t stage_client_export(const stage_client_t *client, int *fd_out);
/* STAGE_DIRECT: maps the stage that FfnAgent `ffn` exported for this Instance. Once for every bit
 * of stage_members(); put refuses (XP_RETRY) until then. */
xp_status_t stage_client_open(stage_client_t *client, uint32_t ffn, int stage_fd);

/* As transport_cuda_client_*, which see: launches on the caller's stream, also while it captures;
 * live rows are read on the device. dp_rows of the live record: rows of every DP rank (needed when
 * the Instance has several; all ranks say the same), this rank's being `rows`. */
cuda_address_t stage_client_live(const stage_client_t *client);
xp_status_t stage_client_live_write(stage_client_t *client, const transport_live_t *live,
                                    cuda_stream_t stream);
xp_status_t stage_client_put(stage_client_t *client, uint32_t layer, cuda_address_t live,
                             const transport_tensor_t *input, cuda_stream_t stream);
xp_status_t stage_client_wait(stage_client_t *client, cuda_stream_t stream);
xp_status_t stage_client_take(stage_client_t *client, const transport_tensor_t *output,
                              cuda_stream_t stream);
xp_status_t stage_client_call(stage_client_t *client, uint32_t layer, cuda_address_t live,
                              const transport_tensor_t *input, const transport_tensor_t *output,
                              cuda_stream_t stream);
xp_status_t stage_client_finish(stage_client_t *client, uint64_t deadline_ns);
xp_status_t stage_client_close(stage_client_t *client, xp_status_t reason);
/* As transport_cuda_client_pause() and _end(). In a pause the next Generation's agents take over.
 */
void stage_client_pause(stage_client_t *client, bool paused);
void stage_client_end(stage_client_t *client, xp_status_t reason);
/* Copies the client's state into pinned host memory, in the order of `stream`. */
xp_status_t stage_client_state_copy(const stage_client_t *client, transport_device_state_t *to,
                                    cuda_stream_t stream);
/* For tests and for launches of the caller's own: where a put of `layer` goes, and what answers it
 * (members with partials, bits; 0: the response). */
struct stage_put;
xp_status_t stage_client_describe(stage_client_t *client, uint32_t layer, uint32_t captured,
                                  struct stage_put *put_out, uint32_t *direct_out,
                                  transport_cuda_parts_t *parts_out);
typedef struct stage_client_counters {
    uint64_t requests, rows, looks, wait_ns;
} stage_client_counters_t;
xp_status_t stage_client_counters(stage_client_t *client, uint64_t deadline_ns,
                                  stage_client_counters_t *counters_out);

/* ---- AtnAgent: the relay ------------------------------------------------------------------ */
typedef struct stage_atn stage_atn_t;

/* Launches the resident kernel, with room for every Instance Rank of AtnAgent `atn`. With a heap
 * (provider nvshmem; NULL: none) relay arenas and stages lie there: nothing is exported or opened,
 * and the kernel is the plug-in's. The heap outlives the object. records: of answered requests that
 * are kept for stage_atn_observe(); 0: none are made. */
xp_status_t stage_atn_create(const cuda_device_t *device, const fabric_plan_t *plan, uint32_t atn,
                             const transport_cuda_life_t *life, stage_heap_t *heap,
                             uint32_t records, stage_atn_t **atn_out);
/* A descriptor of the rank's relay arena, for the FfnAgents' attach. */
xp_status_t stage_atn_export(const stage_atn_t *atn, uint32_t instance, uint32_t rank, int *fd_out);
/* Maps a stage; once for every bit of stage_members(), before attach. */
xp_status_t stage_atn_open(stage_atn_t *atn, uint32_t instance, uint32_t ffn, int stage_fd);
/* Hands the Instance Rank's arena to the resident kernel. life_index: the Instance's word. */
xp_status_t stage_atn_attach(stage_atn_t *atn, uint32_t instance, uint32_t rank, int arena_fd,
                             uint32_t life_index, uint64_t deadline_ns);
/* The same for a rank that waits since a former Generation, none of whose agents lives. arena_fds:
 * of all ranks, in their order. Ranks submit a layer together, so the last answers differ by one at
 * most: a rank that lacks the last one gets it first from a rank of its attention DP rank, whose
 * rows are the same; *from_out is that one, or the rank itself. XP_PEER where none of those has it:
 * the Instance cannot go on. */
xp_status_t stage_atn_resume(stage_atn_t *atn, uint32_t instance, uint32_t rank,
                             const int *arena_fds, uint32_t ranks, uint32_t life_index,
                             uint64_t deadline_ns, uint32_t *from_out);
xp_status_t stage_atn_detach(stage_atn_t *atn, uint32_t instance, uint32_t rank,
                             uint64_t deadline_ns);
/* What the kernel says of the rank: attached or dropped, and counts. */
xp_status_t stage_atn_report(stage_atn_t *atn, uint32_t instance, uint32_t rank,
                             uint64_t deadline_ns, transport_cuda_report_t *report_out);
/* Moves what was recorded since the last call to the observer (or nowhere, where NULL). Returns the
 * records that were lost, since they came faster. */
uint64_t stage_atn_observe(stage_atn_t *atn, observe_t *observe);
/* Closes every attached arena with XP_FATAL (failure) or XP_CLOSED (shutdown). */
xp_status_t stage_atn_close_all(stage_atn_t *atn, xp_status_t reason);
void stage_atn_destroy(stage_atn_t *atn); /* accepts NULL */
#endif
