/* SPDX-License-Identifier: MIT */
/*
 * The processes of the direct lane's device test, and the orders that its parent gives them over
 * sockets: FfnAgents, the relay of an AtnAgent, Instances, and a probe of what can be mapped.
 */
#ifndef XPOOL_TESTS_CUDA_STAGE_ROLES_H
#define XPOOL_TESTS_CUDA_STAGE_ROLES_H

#include "agent.h"
#include "stage/stage.h"

#define WIDTH       2048
#define ROWS        512
#define BULK_ROWS   8192
#define LAYERS      48
#define MEMBERS_MAX 2
#define SAMPLES_MAX 100000u
#define SOON        kit_in(10)

/* ---- plans: the same in every process ------------------------------------------------------- */
enum { SCENE_ONE = 0, SCENE_TWO, SCENE_MESH, SCENE_FAN_IN, SCENES };
enum { INSTANCE_A = 0, INSTANCE_B, INSTANCE_BULK };
/* How roles differ from the defaults, bits; for comparisons in one run. */
enum {
    VARIANT_NOTES = 1,       /* FfnAgent: keeps what its jobs spend */
    VARIANT_HELPERS = 2,     /* FfnAgent: the scheduler's own warp moves no rows */
    VARIANT_SMALL_CALLS = 4, /* Instance: one launch for 16 KiB at most, else three */
};

void scene_plan(uint32_t scene, fabric_plan_t *plan);

/* ---- provider nvshmem ----------------------------------------------------------------------- */
/* In the environment of FfnAgents and relays: stages lie in the symmetric heap ("near", or "far"
 * for NVSHMEM_FAR), and the first message to each of them is a join_t; PE 0 answers `make` with the
 * id.
 */
#define HEAP_VARIABLE "XPOOL_TEST_HEAP"
typedef struct join {
    uint32_t make, pe;
    unsigned char id[XPOOL_NVSHMEM_ID_BYTES];
} join_t;

/* ---- orders --------------------------------------------------------------------------------- */
enum {
    ORDER_EXPORT = 1,
    ORDER_EXPORT_PARTIALS,
    ORDER_IMPORT,
    ORDER_START,
    ORDER_HAND, /* an arena of the ATTACH that comes; of several ranks, in their order */
    ORDER_ATTACH,
    ORDER_DETACH,
    ORDER_LOOK,
    ORDER_COUNTERS,
    ORDER_PING,
    ORDER_OPEN,
    ORDER_TRIPS, /* other: 1 with notes of the client's own time */
    ORDER_GRAPH,
    ORDER_BULK,
    ORDER_LOOP,
    ORDER_LOOP_END,
    ORDER_CLOSE,
    ORDER_STOP
};
typedef struct order {
    uint32_t what, instance, other, rows, count;
} order_t;
typedef struct answer {
    xp_status_t status;
    kit_summary_t times;
    uint64_t done, wrong, ns, values[10];
    char text[256];
} answer_t;

/* ---- what a way between two GPUs costs ------------------------------------------------------ */
/* Raw round trip of as many bytes and a word, and the execution that lies in a round trip: the mean
 * of the echo's rows as the scheduler notes them. Negative: not measured in this run. */
typedef struct hop_floor {
    double p50_us, p99_us, compute_us;
} hop_floor_t;
/* Of an FfnAgent with VARIANT_NOTES: what an echo took between two of its answers to
 * ORDER_COUNTERS. */
double hop_compute_us(const answer_t *before, const answer_t *after);
/* Rows hop.cuda.<way>.p50_over_floor and p99_over_floor: (round trip - compute) over the floor's
 * P50, if both are known. `floor_text` says what the floor is. */
void hop_rows(const char *way, const answer_t *trips, const hop_floor_t *floor,
              const char *floor_text);
/* Rows hop.cuda.<way>.split.*: means of the round trips (ORDER_TRIPS with notes) between two
 * answers to ORDER_COUNTERS of an FfnAgent with VARIANT_NOTES. The clocks of two GPUs cannot be
 * compared, so both hops are one row: what the Instance waits, less what the scheduler spends;
 * `between`: what lies in them besides. */
#define HOP_RELAYED ", the AtnAgent's mailbox and copies of both ways between"
void hop_split_rows(const char *way, const char *between, const answer_t *before,
                    const answer_t *trips, const answer_t *after, uint32_t rows,
                    const hop_floor_t *floor);
/* Row hop.cuda.<way>.bulk_gbs of a relayed way, of an answer to ORDER_BULK and the execution's time
 * of a layer. */
void hop_bulk_row(const char *way, const answer_t *bulk, double execute_us);

/* A client's first number: what agent_spawn() hands to the role. */
static inline uint32_t client_number(uint32_t instance, uint32_t rank, uint32_t scene,
                                     uint32_t variant, bool by_relay)
{
    return instance | scene << 8 | variant << 12 | (uint32_t)by_relay << 16 | rank << 20;
}
static inline uint32_t relay_number(uint32_t scene, uint32_t atn)
{
    return scene | atn << 8;
}
/* By roles that have a heap to join: what is left of the GPU's memory before and after is printed.
 */
stage_heap_t *role_join(const cuda_device_t *device, const fabric_plan_t *plan, int socket);
/* For main(): runs the role and exits when the arguments ask for it. */
void stage_roles_main(int argc, char **argv);
/* Built with nvcc? */
bool stage_roles_usable(void);
#endif
