/* SPDX-License-Identifier: MIT */
/* Router rules: from one row's logits to its experts and their weights. */
#ifndef XPOOL_FFN_ROUTE_H
#define XPOOL_FFN_ROUTE_H

#include <stdint.h>

#include "base/status.h"
#include "model/spec.h"

/* Refuses a rule that cannot choose top_k experts. */
xp_status_t ffn_route_check(const model_ffn_t *rule);

/* Writes top_k distinct experts, best first, and their final weights. `logits` is overwritten with
 * the scores. `bias` (e_score_correction_bias) shifts the choice only; NULL when there is none.
 * Equal scores: the lowest expert first. A NaN never wins against a number. */
void ffn_route_row(const model_ffn_t *rule, float *logits, const float *bias, uint32_t *chosen_out,
                   float *weights_out);
#endif
