/* SPDX-License-Identifier: MIT */
/*
 * What the parts of cuda_stage_sanitize share: memory whose end is where its last byte is, a kernel
 * that is launched while a script of the host goes on, values that 16-bit rows hold exactly.
 *
 * Words that kernel and script exchange lie in pinned host memory. So a resident kernel is served,
 * and told to leave, without a launch or a copy beside it, as tools need it that run one kernel at
 * a time or hold the caller until it has ended.
 */
#ifndef XPOOL_TESTS_CUDA_STAGE_SANITIZE_H
#define XPOOL_TESTS_CUDA_STAGE_SANITIZE_H

#include <stdbool.h>

#include "kit.h"
#include "stage/records.h"

#define SANITIZE_LIMIT_S 60.0
/* Header, and a word for each member. */
#define SANITIZE_ARENA (MAILBOX_PARTIALS_START + MAILBOX_MAX_PARTIALS * sizeof(mailbox_partial_t))

enum {
    SANITIZE_PUT = 0,
    SANITIZE_WAIT,
    SANITIZE_TAKE,
    SANITIZE_CALL,
    SANITIZE_DESCRIBE,
    SANITIZE_PAGE_START,
    SANITIZE_PARTIALS_START,
    SANITIZE_POST,
    SANITIZE_CLOSE,
    SANITIZE_SCHEDULER,
    SANITIZE_RELAY,
    SANITIZE_RELAY_DESCRIBE,
    SANITIZE_PLANTED,
    SANITIZE_KERNELS
};

extern kit_t sanitize_kit;
extern life_page_t *sanitize_life; /* pinned; word 0 is ours, all alive */

/* All of it until the part ends: sanitize_free(). Device memory of just so many bytes, with `from`
 * in it or all zero. */
cuda_address_t sanitize_device(uint64_t bytes, const void *from);
void *sanitize_pinned(uint64_t bytes); /* zero; the device has it at the same address */
void sanitize_free(void);
void sanitize_read(cuda_address_t from, void *to, uint64_t bytes);

void sanitize_launch(uint32_t kernel, uint32_t blocks, uint32_t threads, void **parameters);
/* A launch, and meanwhile `script` on a thread of its own; it returns whether all was well, makes
 * no call to the driver, and ends the kernel. Where it fails, our life word ends it. */
void sanitize_play(bool (*script)(void), uint32_t kernel, uint32_t threads, void **parameters);
/* The same where the launch or the script may fail. */
xp_status_t sanitize_try(bool (*script)(void), uint32_t kernel, uint32_t threads, void **parameters,
                         bool *good_out);
/* Of the script: until the condition holds; false once the launch is over or too much time is. */
#define SANITIZE_UNTIL(condition)                                                                  \
    do {                                                                                           \
        while (!(condition))                                                                       \
            if (!sanitize_goes_on(__FILE__, __LINE__, #condition))                                 \
                return false;                                                                      \
    } while (0)
#define SANITIZE_MUST(condition)                                                                   \
    do {                                                                                           \
        if (!(condition))                                                                          \
            return sanitize_failed(__FILE__, __LINE__, #condition);                                \
    } while (0)
bool sanitize_goes_on(const char *file, int line, const char *what);
bool sanitize_failed(const char *file, int line, const char *what);

/* Counts a case of the closing line. */
void sanitize_case(const char *format, ...) __attribute__((format(printf, 1, 2)));

uint16_t sanitize_value(uint64_t seed, uint64_t index); /* BF16: 0 to 31 */
float sanitize_float(uint16_t bits);                    /* of BF16 */
/* To nearest, ties to even; of finite values. */
uint16_t sanitize_bf16(float value);
/* A member's partial. Not whole numbers, so that the order of the sum and its one rounding show;
 * every fifth sum lies between two BF16 values. */
float sanitize_partial(uint64_t seed, uint32_t member, uint64_t index);

void sanitize_launches(void);
void sanitize_scheduler(void);
void sanitize_dispatch(void);
void sanitize_relay(void);
/* One Invocation of the scheduler whose rows are 16 bytes longer than where they go. */
void sanitize_short_rows(void);
#endif
