/* SPDX-License-Identifier: MIT */
/* The message ExpertUsage. */
#include "agents/usage.h"

#include <string.h>

void agent_usage_send(agent_usage_t *sent, participant_t *participant, uint32_t weights,
                      const ffn_usage_t *usage)
{
    xpw_Envelope envelope = {.which_body = xpw_Envelope_expert_usage_tag};
    xpw_ExpertUsage *message = &envelope.body.expert_usage;
    if (weights >= FABRIC_MAX_INSTANCES || usage->executions == sent->told[weights])
        return;
    *message = (xpw_ExpertUsage){.weights = weights,
                                 .executions = usage->executions,
                                 .rows = usage->rows,
                                 .experts = usage->experts,
                                 .places = usage->places,
                                 .chosen = usage->chosen,
                                 .least = usage->least,
                                 .most = usage->most,
                                 .bins_count = FFN_USAGE_BINS};
    _Static_assert(sizeof(message->bins) == sizeof(usage->bins), "the message holds all bins");
    memcpy(message->bins, usage->bins, sizeof(message->bins));
    if (participant_send(participant, &envelope, NULL, 0) == XP_OK)
        sent->told[weights] = usage->executions;
}
