/* SPDX-License-Identifier: MIT */
/*
 * An Instance for tests: a process of its own with one arena, which replays a captured graph of
 * CLIENT_LAYERS layers and checks every element, or measures, as it is told over a socket.
 */
#ifndef XPOOL_TESTS_CUDA_CLIENT_H
#define XPOOL_TESTS_CUDA_CLIENT_H

#include "agent.h"

#define CLIENT_LAYERS 48

/* One line a client in shared memory: how far its loop is. */
typedef struct board_line {
    uint64_t replays, wrong;
    uint32_t stop, ended; /* ended: xp_status_t of the pass that ended the loop, + 1 */
    uint8_t pad[40];
} board_line_t;

typedef struct client {
    agent_t role; /* pid and socket */
    uint32_t life_index, slot;
    int arena_fd;
    transport_geometry_t geometry;
    bool attached;
} client_t;

typedef struct client_setup {
    transport_geometry_t geometry;
    uint32_t rows, compute_ns, line, seed;
    uint64_t limit_ns;
} client_setup_t;

typedef struct client_times {
    kit_summary_t each;
    double per_layer_us; /* graphs: P50 of a replay over its layers */
    uint64_t wrong, done;
} client_times_t;

/* For main(): runs the role and exits when the arguments ask for it. */
void client_main(int argc, char **argv);

/* Starts one; returns before it is ready. */
void client_start(int life_fd, int board_fd, uint32_t life_index, const client_setup_t *setup,
                  client_t *client_out);
/* Waits until it is ready and has the AtnAgent take its arena. False: it did not start. */
bool client_attach(client_t *client, agent_t *agent);
void client_loop(client_t *client); /* until its line says stop */
client_times_t client_graph_times(client_t *client, uint32_t replays);
client_times_t client_eager_times(client_t *client, uint32_t calls);
client_times_t client_round_trips(client_t *client, uint32_t count);
client_times_t client_ping_pong(client_t *client, agent_t *agent, uint32_t count);
client_times_t client_put_times(client_t *client, uint32_t count);
void client_exit(client_t *client); /* in order; checks its exit code */
void client_kill(client_t *client); /* SIGKILL, and reaped */
#endif
