/* SPDX-License-Identifier: MIT */
/* Progress and failure of readers that load one shard together. */
#include "ffn/load_share.h"

void load_share_fail(load_share_t *share, xp_status_t status)
{
    pthread_mutex_lock(&share->error_lock);
    if (!atomic_load(&share->failed)) {
        share->error = *xp_error_last();
        share->error.status = status;
        atomic_store(&share->failed, true);
    }
    pthread_mutex_unlock(&share->error_lock);
}

void load_share_report(load_share_t *share, uint64_t bytes)
{
    uint64_t done = atomic_fetch_add(&share->done_bytes, bytes) + bytes;
    if (share->install->progress)
        share->install->progress(share->install->progress_context, done, share->total_bytes);
}

xp_status_t load_share_status(load_share_t *share)
{
    if (!atomic_load(&share->failed))
        return XP_OK;
    return xp_fail_at(share->error.status, share->error.file, share->error.line, "%s",
                      share->error.text);
}

xp_status_t load_check_install(const ffn_install_t *install, uint32_t most, const char *held_id)
{
    if (install->model >= most)
        return xp_fail(XP_INVALID, "model index %u; at most %u models", install->model, most);
    if (held_id)
        return xp_fail(XP_INVALID, "model index %u already holds %s", install->model, held_id);
    if (install->tp_size < 1 || install->tp_rank >= install->tp_size)
        return xp_fail(XP_INVALID, "shard %u of %u", install->tp_rank, install->tp_size);
    return XP_OK;
}
