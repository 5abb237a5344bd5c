// SPDX-License-Identifier: MIT
// The protocol headers are one source for C and CUDA: this file is compiled and linked wherever nvcc
// is present, and instantiates every mailbox transition in device code. Nothing here is run.
#include "transport/mailbox.h"

#include "fabric/records.h"

extern "C" __global__ void mailbox_echo(mailbox_arena_t *arena, uint64_t answered)
{
    mailbox_request_t request;
    uint32_t status = mailbox_closed(arena);
    const uint32_t seen = mailbox_bell_observe(&arena->response.bell);
    if (status == 0 && mailbox_request_read(arena, answered, &request) == MAILBOX_LIVE) {
        mailbox_response_publish(arena, request.sequence, 0);
        mailbox_bell_ring(&arena->response.bell);
    } else if (mailbox_bell_sleep(&arena->response.bell, seen)) {
        mailbox_bell_awake(&arena->response.bell);
    }
    if (mailbox_response_read(arena, answered + 1, &status) == MAILBOX_NONSENSE)
        mailbox_close(arena, 1);
    mailbox_request_publish(arena, answered + 2);
}

int main()
{
    return sizeof(fabric_header_t) == 0;
}
