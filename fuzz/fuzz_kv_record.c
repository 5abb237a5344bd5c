/* SPDX-License-Identifier: MIT */
/*
 * Fuzz target: a record of the KV market, as `xpool kv --replay` takes it. Whatever passes the
 * checks is decided again, so this also gives the policy snapshots that no market would make.
 */
#include <stddef.h>
#include <stdint.h>

#include "control/kv_record.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    kv_record_replay_t replay = {0};
    xp_error_clear();
    if (kv_record_replay(data, size, &replay) == XP_OK)
        XP_ASSERT(replay.different <= replay.records);
    else
        XP_ASSERT(xp_error_last()->text[0]);
    return 0;
}
