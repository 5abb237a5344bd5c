/* SPDX-License-Identifier: MIT */
/* Short-lived conversations of a command with the daemon: one question, one answer, with a
 * deadline. Blocking; for command-line programs only. */
#ifndef XPOOL_CONTROL_CLIENT_H
#define XPOOL_CONTROL_CLIENT_H

#include "config/config.h"
#include "wire/wire.h"

/* Sends Hello as a client, then `question`, and waits for a message of kind `answer_tag`. XP_RETRY
 * when no daemon listens, XP_TIMEOUT, XP_CLOSED when it ends first. */
xp_status_t client_ask(const config_t *config, const char *name, const xpw_Envelope *question,
                       pb_size_t answer_tag, uint64_t timeout_ns, xpw_Envelope *answer_out);
/* The same where a descriptor may come with the answer: the caller's then; -1 when there is none.
 */
xp_status_t client_ask_for(const config_t *config, const char *name, const xpw_Envelope *question,
                           pb_size_t answer_tag, uint64_t timeout_ns, xpw_Envelope *answer_out,
                           int *fd_out);
#endif
