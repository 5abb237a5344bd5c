/* SPDX-License-Identifier: MIT */
/*
 * The steps of the CUDA Transport's kernels between two threads: what the GPU runs, under the C
 * memory model, so that ThreadSanitizer sees every access. One thread is the Instance, one a slot's
 * warp, and a third ends the Instance's word in the middle.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>
#include <pthread.h>
#include <sched.h>
#include <string.h>

#include "transport/cuda_device.h"

#define PASSES 3000
#define LAYERS 8
#define ROWS   4
#define WIDTH  16

static struct {
    mailbox_arena_t arena;
    uint32_t input[ROWS * WIDTH], output[ROWS * WIDTH];
    transport_slot_t slot;
    uint32_t life, stop;
    uint64_t wrong, answered;
} shared;

static void *warp_run(void *argument)
{
    transport_slot_t *slot = &shared.slot;
    uint64_t answered = 0;
    uint32_t now = 0;
    for (;;) {
        uint32_t wanted = PROTOCOL_LOAD_ACQUIRE(&slot->wanted);
        if (PROTOCOL_LOAD_ACQUIRE(&shared.stop))
            return NULL;
        if (transport_slot_turn(wanted) != transport_slot_turn(now)) {
            now = wanted;
            PROTOCOL_STORE_RELEASE(&slot->now, now);
        }
        if (transport_slot_state(now) != TRANSPORT_SLOT_ATTACHED || life_word_look(&shared.life)) {
            sched_yield();
            continue;
        }
        mailbox_request_t request;
        mailbox_look_t look = mailbox_request_read(&shared.arena, answered, &request);
        if (look != MAILBOX_LIVE) {
            sched_yield();
            continue;
        }
        if (!transport_slot_request_valid(slot, &request))
            shared.wrong++;
        for (uint32_t i = 0; i < request.rows * WIDTH; i++)
            shared.output[i] = shared.input[i] + request.layer + 1;
        answered = request.sequence;
        shared.answered = answered;
        mailbox_response_publish(&shared.arena, answered, XP_OK);
    }
}

static void *killer_run(void *argument)
{
    const uint64_t *passes = argument;
    while (__atomic_load_n(passes, __ATOMIC_ACQUIRE) < PASSES / 2)
        sched_yield();
    life_word_end(&shared.life);
    return NULL;
}

/* Returns the status after the pass. */
static uint32_t one_pass(transport_device_state_t *state, uint64_t pass)
{
    transport_live_t live = {.rows = (uint32_t)(pass % (ROWS + 1))};
    for (uint32_t layer = 0; layer < LAYERS; layer++) {
        if (state->status == XP_OK && state->phase == TRANSPORT_PHASE_IDLE)
            for (uint32_t i = 0; i < live.rows * WIDTH; i++)
                shared.input[i] = (uint32_t)pass * 1000 + i;
        transport_device_put(&shared.arena, state, &live, layer, ROWS);
        if (!transport_device_wait_begin(state))
            while (!transport_device_wait_look(&shared.arena, state) &&
                   !transport_device_wait_life(&shared.life, state, 0, 1))
                sched_yield();
        if (transport_device_take_allowed(state))
            for (uint32_t i = 0; i < live.rows * WIDTH; i++)
                shared.wrong += shared.output[i] != (uint32_t)pass * 1000 + i + layer + 1;
        transport_device_take(state);
    }
    return state->status;
}

static void test_two_sides(void **state)
{
    static uint64_t passes;
    transport_device_state_t device = {0};
    pthread_t warp, killer;
    memset(&shared, 0, sizeof(shared));
    passes = 0;
    shared.slot.max_rows = ROWS;
    shared.slot.dp_size = 1;
    assert_int_equal(pthread_create(&warp, NULL, warp_run, NULL), 0);
    assert_int_equal(pthread_create(&killer, NULL, killer_run, &passes), 0);
    PROTOCOL_STORE_RELEASE(&shared.slot.wanted, transport_slot_word(1, TRANSPORT_SLOT_ATTACHED));
    while (passes < PASSES && one_pass(&device, passes) == XP_OK)
        __atomic_fetch_add(&passes, 1, __ATOMIC_RELEASE);
    /* The end of the word ended a wait, or came between two passes and ends the next. */
    assert_true(passes >= PASSES / 2);
    pthread_join(killer, NULL);
    uint64_t sequence = device.sequence;
    if (device.status == XP_OK)
        assert_int_equal(one_pass(&device, 1), XP_CANCELLED);
    else
        assert_int_equal(device.status, XP_CANCELLED);
    assert_true(device.sequence <= sequence + 1);
    assert_int_equal(one_pass(&device, 1), XP_CANCELLED);
    PROTOCOL_STORE_RELEASE(&shared.stop, 1u);
    pthread_join(warp, NULL);
    assert_int_equal(shared.wrong, 0);
    assert_true(shared.answered == device.sequence || shared.answered + 1 == device.sequence);
}

static void test_slot_words(void **state)
{
    uint32_t word = transport_slot_word(7, TRANSPORT_SLOT_DROPPED);
    assert_int_equal(transport_slot_turn(word), 7);
    assert_int_equal(transport_slot_state(word), TRANSPORT_SLOT_DROPPED);
    transport_slot_t slot = {.max_rows = 4, .dp_size = 2};
    mailbox_request_t request = {.rows = 4, .dp_rows = {4, 4, 99}};
    assert_true(
        transport_slot_request_valid(&slot, &request)); /* two counts, the third is nobody's */
    request.dp_rows[1] = 5;
    assert_false(transport_slot_request_valid(&slot, &request));
    slot.dp_size = 1;
    assert_true(transport_slot_request_valid(&slot, &request));
    request.rows = 5;
    assert_false(transport_slot_request_valid(&slot, &request));
    request.rows = 0;
    request.layer = MAILBOX_LAYER_LIMIT;
    assert_false(transport_slot_request_valid(&slot, &request));
    request.layer = 0;
    request.kind = MAILBOX_KIND_COUNT;
    assert_false(transport_slot_request_valid(&slot, &request));
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_two_sides),
                                       cmocka_unit_test(test_slot_words)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
