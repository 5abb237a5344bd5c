/* SPDX-License-Identifier: MIT */
/*
 * An AtnAgent for tests: a process of its own (a spinning kernel makes freeing calls of its own
 * process wait for ever) that serves mailboxes with the echo kernel and takes orders over a socket.
 */
#ifndef XPOOL_TESTS_CUDA_AGENT_H
#define XPOOL_TESTS_CUDA_AGENT_H

#include <sys/types.h>

#include "cuda/mps.h"
#include "kit.h"

/* An MPS controller for device 0, and the environment by which this process and its children use
 * it. NULL, and a line that says why, where there is none. Call it before the driver is loaded. */
mps_t *agent_mps_begin(void);
void agent_mps_end(mps_t *mps); /* accepts NULL */

typedef struct agent {
    pid_t pid;
    int socket;
} agent_t;

/* For main(): runs the role and exits when the arguments ask for it. */
void agent_main(int argc, char **argv);

/* Starts this program again as the role `name` with a socket, the page of life words and two
 * numbers. Descriptors as kit_role_socket() and kit_role_life() give them. */
void agent_spawn(const char *name, int life_fd, uint32_t a, uint32_t b, agent_t *agent_out);
void agent_ended(agent_t *agent); /* by itself, with 0, or this program fails */
int agent_reap(agent_t *agent);   /* closes the socket, waits for the end; its exit code, or -1 */
int kit_role_socket(char **argv);
int kit_role_life(char **argv);
uint32_t kit_role_number(char **argv, int which);

/* One message, with a descriptor or -1. Receiving waits 30 s at most; false: the peer is gone. */
bool kit_send(int socket, const void *message, size_t bytes, int fd);
bool kit_receive(int socket, void *message, size_t bytes, int *fd_out);

void agent_start(int life_fd, uint32_t life_index, uint32_t slots, agent_t *agent_out);
xp_status_t agent_attach(agent_t *agent, int arena_fd, const transport_geometry_t *geometry,
                         uint32_t life_index, uint32_t *slot_out);
xp_status_t agent_detach(agent_t *agent, uint32_t slot);
xp_status_t agent_close(agent_t *agent, uint32_t slot, xp_status_t reason);
xp_status_t agent_report(agent_t *agent, uint32_t slot, transport_cuda_report_t *report_out);
/* Slots that are left without answer; with AGENT_HOLD_FIRST, only requests of layer 0. */
#define AGENT_HOLD_FIRST 0x80000000u
void agent_hold(agent_t *agent, uint32_t mask);
/* Launches the other side of test_ping_pong on an arena's output area; `wait`: for its end. */
xp_status_t agent_ping_pong(agent_t *agent, int arena_fd, const transport_geometry_t *geometry,
                            uint32_t count);
/* The resident kernel and then the process end; returns what stopping the kernel took, in ns. */
uint64_t agent_stop(agent_t *agent);
/* Ends the agent's word: how long until its kernel has left, in ns. */
uint64_t agent_own_end(agent_t *agent);
void agent_kill(agent_t *agent);
#endif
