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
    uint32_t life, notice, stop;
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

static transport_patience_t patience(void)
{
    return (transport_patience_t){.life = (uintptr_t)&shared.life,
                                  .notice = (uintptr_t)&shared.notice,
                                  .limit_ns = 10,
                                  .pause_ns = 1000};
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
        transport_patience_t limits = patience();
        transport_clock_t clock;
        transport_device_wait_start(&clock, 0);
        if (!transport_device_wait_begin(state))
            while (!transport_device_wait_look(&shared.arena, state) &&
                   !transport_device_wait_life(&limits, state, &clock, 0))
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

/* One AtnAgent's last act: it answers and closes. Arena by arena. */
enum { LAST_ARENAS = 200000 };
static mailbox_arena_t *last_arenas;

/* The two meet within nanoseconds only where both look without a pause. */
static void last_look(uint32_t *looks)
{
    if ((*looks)++ % 256 == 0)
        sched_yield();
}

static void *answer_and_close_run(void *argument)
{
    (void)argument;
    for (uint32_t i = 0; i < LAST_ARENAS; i++) {
        mailbox_request_t request;
        for (uint32_t looks = 1;
             mailbox_request_read(&last_arenas[i & 1], 0, &request) != MAILBOX_LIVE;)
            last_look(&looks);
        mailbox_response_publish(&last_arenas[i & 1], 1, XP_OK);
        mailbox_close(&last_arenas[i & 1], XP_CLOSED);
    }
    return NULL;
}

static void test_answer_before_close(void **state)
{
    (void)state;
    pthread_t agent;
    last_arenas = test_calloc(2, sizeof(*last_arenas));
    assert_int_equal(pthread_create(&agent, NULL, answer_and_close_run, NULL), 0);
    for (uint32_t i = 0; i < LAST_ARENAS; i++) {
        mailbox_arena_t *arena = &last_arenas[i & 1];
        uint32_t answer, closed;
        mailbox_request_publish(arena, 1);
        mailbox_look_t look;
        for (uint32_t looks = 1;; last_look(&looks)) {
            look = mailbox_response_wait_look(arena, 1, &answer, &closed);
            if (look != MAILBOX_NONE || closed)
                break;
        }
        assert_int_equal(look, MAILBOX_LIVE);
        for (uint32_t looks = 1; !mailbox_closed(arena);)
            last_look(&looks);
        memset(arena, 0, sizeof(*arena));
    }
    pthread_join(agent, NULL);
    test_free(last_arenas);
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

/* ---- from one AtnAgent to the next ---------------------------------------------------------- */
#define LIVES 40

/* Serves a few requests and dies in the middle of one: with rows half written, or all but the
 * sequence. The last life serves until it is told to stop. */
static void *mortal_run(void *argument)
{
    const uint32_t number = *(const uint32_t *)argument;
    uint64_t answered = PROTOCOL_LOAD_ACQUIRE(&shared.arena.response.sequence);
    for (uint32_t served = 0; !__atomic_load_n(&shared.stop, __ATOMIC_ACQUIRE);) {
        mailbox_request_t request;
        mailbox_look_t look = mailbox_request_read(&shared.arena, answered, &request);
        if (look == MAILBOX_NONSENSE)
            shared.wrong++;
        if (look != MAILBOX_LIVE) {
            sched_yield();
            continue;
        }
        const uint32_t all = request.rows * WIDTH;
        const int last = number + 1 < LIVES && served++ == number % 7;
        for (uint32_t i = 0; i < (last && number % 2 ? all / 2 : all); i++)
            shared.output[i] = shared.input[i] + request.layer + 1;
        if (last)
            return NULL;
        answered = request.sequence;
        mailbox_response_publish(&shared.arena, answered, XP_OK);
    }
    return NULL;
}

/* In the daemon's and the Instance's host's place: the next AtnAgent when the former one is gone,
 * and the notice around it. */
static void *lives_run(void *argument)
{
    for (uint32_t number = 0; number < LIVES; number++) {
        pthread_t agent;
        pthread_create(&agent, NULL, mortal_run, &number);
        if (number)
            PROTOCOL_STORE_RELEASE(&shared.notice, shared.notice + 1);
        pthread_join(agent, NULL);
        if (number + 1 < LIVES)
            PROTOCOL_STORE_RELEASE(&shared.notice, shared.notice + 1);
    }
    return NULL;
}

static void test_lives(void **state)
{
    transport_device_state_t device = {0};
    pthread_t lives;
    memset(&shared, 0, sizeof(shared));
    pthread_create(&lives, NULL, lives_run, NULL);
    for (uint64_t pass = 0; pass < PASSES; pass++)
        assert_int_equal(one_pass(&device, pass), XP_OK);
    __atomic_store_n(&shared.stop, 1u, __ATOMIC_RELEASE);
    pthread_join(lives, NULL);
    assert_int_equal(shared.wrong, 0);
    assert_int_equal(device.sequence, PASSES * LAYERS);
    assert_int_equal(shared.notice, 2 * (LIVES - 1));
}

/* A look of a wait at `now_ns`. */
static uint32_t look(transport_clock_t *clock, uint64_t now_ns)
{
    transport_device_state_t device = {.phase = TRANSPORT_PHASE_LIVE};
    transport_patience_t limits = patience();
    const int over = transport_device_wait_life(&limits, &device, clock, now_ns);
    assert_int_equal(over, device.status != XP_OK);
    return device.status;
}

static void test_patience(void **state)
{
    transport_clock_t clock;
    memset(&shared, 0, sizeof(shared));
    transport_device_wait_start(&clock, 5);
    assert_int_equal(look(&clock, 14), XP_OK);
    assert_int_equal(look(&clock, 15), XP_TIMEOUT);
    /* A pause counts from its begin, and what follows from its end. */
    shared.notice = 1;
    assert_int_equal(look(&clock, 14), XP_OK);
    assert_int_equal(look(&clock, 1013), XP_OK);
    assert_int_equal(look(&clock, 1014), XP_TIMEOUT);
    shared.notice = 2;
    assert_int_equal(look(&clock, 1500), XP_OK);
    assert_int_equal(look(&clock, 1509), XP_OK);
    assert_int_equal(look(&clock, 1510), XP_TIMEOUT);
    /* One that was over before a look is seen by its count. */
    shared.notice = 4;
    assert_int_equal(look(&clock, 1510), XP_OK);
    /* A wait that begins in a pause has all of it, and what began before the first look counts. */
    shared.notice = 5;
    transport_device_wait_start(&clock, 100);
    assert_int_equal(look(&clock, 1099), XP_OK);
    assert_int_equal(look(&clock, 1100), XP_TIMEOUT);
    /* However often: never longer than any watchdog. */
    transport_device_wait_start(&clock, 100);
    for (uint64_t now = 100; now < 100 + TRANSPORT_WAIT_MAX_NS; now += TRANSPORT_WAIT_MAX_NS / 99) {
        shared.notice += 2;
        assert_int_equal(look(&clock, now), XP_OK);
    }
    shared.notice += 2;
    assert_int_equal(look(&clock, 100 + TRANSPORT_WAIT_MAX_NS), XP_TIMEOUT);
    /* The end, by the host's word or by the process's. */
    shared.notice = TRANSPORT_NOTICE_END | XP_FATAL;
    assert_int_equal(look(&clock, 100), XP_FATAL);
    shared.notice = TRANSPORT_NOTICE_END;
    assert_int_equal(look(&clock, 100), XP_PEER);
    shared.notice = TRANSPORT_NOTICE_END | XP_STATUS_COUNT;
    assert_int_equal(look(&clock, 100), XP_PEER);
    assert_false(transport_notice_paused(TRANSPORT_NOTICE_END | 1));
    life_word_end(&shared.life);
    assert_int_equal(look(&clock, 100), XP_CANCELLED);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_two_sides), cmocka_unit_test(test_answer_before_close),
        cmocka_unit_test(test_slot_words), cmocka_unit_test(test_lives),
        cmocka_unit_test(test_patience)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
