/* SPDX-License-Identifier: MIT */
/*
 * Joining a Fabric, its failure and shutdown words, and its counters. Owns the participant object;
 * any thread may fail, shut down or read counters, the rest belongs to the thread that attached.
 */
#include "fabric/fabric.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "fabric/internal.h"

_Static_assert(sizeof(fabric_pe_counters_t) == FABRIC_COUNT_COUNT * sizeof(uint64_t),
               "the counters of the interface are those of the records");
_Static_assert(sizeof(fabric_pe_counters_t) <= sizeof(((fabric_pe_record_t *)0)->counters),
               "the record has a place for each counter");

xp_status_t fabric_attach(const char *provider_name, const fabric_plan_t *plan,
                          const fabric_descriptors_t *descriptors, uint32_t pe,
                          fabric_t **fabric_out)
{
    const fabric_provider_ops_t *ops = fabric_provider_find(provider_name);
    if (!ops)
        return xp_fail(XP_UNSUPPORTED, "no Fabric provider \"%s\" in this build; there is \"shm\"",
                       provider_name ? provider_name : "");
    XP_TRY(fabric_plan_check(plan, sizeof(*plan)));
    if (pe != FABRIC_PE_OBSERVER && pe >= plan->atn_count + plan->ffn_count)
        return xp_fail(XP_INVALID, "PE %u in a plan of %u", pe, plan->atn_count + plan->ffn_count);
    fabric_t *fabric = calloc(1, sizeof(*fabric));
    if (!fabric)
        return xp_fail(XP_NO_MEMORY, "no memory to join the Fabric");
    fabric->plan = *plan;
    fabric->pe = pe;
    fabric_layout_compute(plan, &fabric->layout);

    xp_status_t status;
    XP_TRY_GOTO(status, fail, ops->map(&fabric->plan, descriptors, pe, &fabric->provider));
    const fabric_header_t *header = fabric_local(fabric, 0);
    uint32_t magic = PROTOCOL_LOAD_RELAXED(&header->magic);
    uint32_t abi = PROTOCOL_LOAD_RELAXED(&header->abi);
    uint64_t bytes = PROTOCOL_LOAD_RELAXED(&header->bytes);
    uint64_t digest = PROTOCOL_LOAD_RELAXED(&header->plan_digest);
    uint64_t expected = fabric_plan_digest(plan);
    if (magic != FABRIC_ARENA_MAGIC || abi != FABRIC_ABI)
        status = xp_fail(XP_PEER, "not a Fabric arena of ABI %u (magic %#x, ABI %u)", FABRIC_ABI,
                         magic, abi);
    else if (bytes != fabric->layout.bytes)
        status = xp_fail(XP_PEER, "Fabric arena says %llu bytes, its plan needs %llu",
                         (unsigned long long)bytes, (unsigned long long)fabric->layout.bytes);
    else if (digest != expected)
        status = xp_fail(XP_PEER, "Fabric arena is of plan %016llx, not %016llx",
                         (unsigned long long)digest, (unsigned long long)expected);
    if (status != XP_OK)
        goto fail;
    *fabric_out = fabric;
    return XP_OK;
fail:
    fabric_detach(fabric);
    return status;
}

void fabric_detach(fabric_t *fabric)
{
    if (!fabric)
        return;
    if (fabric->provider)
        fabric->provider->ops->unmap(fabric->provider);
    free(fabric);
}

bool fabric_fail(fabric_t *fabric, uint32_t pe, const char *text)
{
    return fabric->provider->ops->fail(fabric->provider, pe, text ? text : "");
}

static const fabric_header_t *fabric_header(const fabric_t *fabric)
{
    return fabric_local(fabric, 0);
}

bool fabric_has_failed(const fabric_t *fabric)
{
    return PROTOCOL_LOAD_ACQUIRE(&fabric_header(fabric)->failure) != 0;
}

xp_status_t fabric_failure(const fabric_t *fabric, uint32_t *pe_out)
{
    const fabric_header_t *header = fabric_header(fabric);
    /* acquire: pairs with the swap in the provider's fail. */
    uint64_t word = PROTOCOL_LOAD_ACQUIRE(&header->failure);
    if (!word)
        return XP_OK;
    uint32_t index = (uint32_t)(word & 0xff);
    if (pe_out)
        *pe_out = (uint32_t)((word >> 8) - 1);
    if (index >= FABRIC_FAILURE_TEXTS)
        return xp_fail(XP_FATAL, "the Generation failed; too many failed at once to say why");
    char text[FABRIC_FAILURE_TEXT];
    memcpy(text, header->failure_texts[index], sizeof(text));
    text[sizeof(text) - 1] = '\0';
    return xp_fail(XP_FATAL, "%s", text);
}

xp_status_t fabric_fail_now(fabric_t *fabric, const char *format, ...)
{
    char text[FABRIC_FAILURE_TEXT];
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(text, sizeof(text), format, arguments);
    va_end(arguments);
    fabric_fail(fabric, fabric->pe, text);
    return fabric_failure(fabric, NULL);
}

void fabric_shutdown(fabric_t *fabric)
{
    fabric->provider->ops->shutdown(fabric->provider);
}

bool fabric_is_shutdown(const fabric_t *fabric)
{
    return PROTOCOL_LOAD_TOTAL(&fabric_header(fabric)->shutdown) != 0;
}

void fabric_reduce(const fabric_t *fabric, uint32_t lane, uint32_t members, uint64_t first,
                   uint64_t elements, float *out)
{
    memcpy(out, fabric_local(fabric, fabric_lane_partial(&fabric->layout, lane, 0) + first),
           elements * sizeof(float));
    for (uint32_t member = 1; member < members; member++) {
        const float *partial =
            fabric_local(fabric, fabric_lane_partial(&fabric->layout, lane, member) + first);
        for (uint64_t i = 0; i < elements; i++)
            out[i] += partial[i];
    }
}

static fabric_pe_record_t *pe_record(const fabric_t *fabric, uint32_t pe)
{
    return (fabric_pe_record_t *)fabric_local(fabric, fabric->layout.pes) + pe;
}

/* State and shutdown words are in the one total order: an FfnAgent that has seen the shutdown and
 * no running AtnAgent knows that one starting later will see the shutdown too. */
void fabric_set_state(fabric_t *fabric, fabric_pe_state_t state)
{
    PROTOCOL_STORE_TOTAL(&pe_record(fabric, fabric->pe)->state, (uint32_t)state);
}

fabric_pe_state_t fabric_get_state(const fabric_t *fabric, uint32_t pe)
{
    return (fabric_pe_state_t)PROTOCOL_LOAD_TOTAL(&pe_record(fabric, pe)->state);
}

void fabric_count(fabric_t *fabric, fabric_counter_t counter, uint64_t amount)
{
    PROTOCOL_ADD_RELAXED(&pe_record(fabric, fabric->pe)->counters[counter], amount);
}

void fabric_count_set(fabric_t *fabric, fabric_counter_t counter, uint64_t value)
{
    PROTOCOL_STORE_RELAXED(&pe_record(fabric, fabric->pe)->counters[counter], value);
}

void fabric_count_instance(fabric_t *fabric, uint32_t instance, uint64_t rows)
{
    fabric_instance_record_t *record =
        (fabric_instance_record_t *)fabric_local(fabric, fabric->layout.instances) + instance;
    PROTOCOL_ADD_RELAXED(&record->invocations, 1u);
    PROTOCOL_ADD_RELAXED(&record->rows, rows);
}

void fabric_counters(const fabric_t *fabric, uint32_t pe, fabric_pe_counters_t *counters_out)
{
    *counters_out = (fabric_pe_counters_t){0};
    if (pe >= fabric->plan.atn_count + fabric->plan.ffn_count)
        return;
    uint64_t values[FABRIC_COUNT_COUNT];
    const fabric_pe_record_t *record = pe_record(fabric, pe);
    for (int i = 0; i < FABRIC_COUNT_COUNT; i++)
        values[i] = PROTOCOL_LOAD_RELAXED(&record->counters[i]);
    memcpy(counters_out, values, sizeof(values));
}

void fabric_instance_counters(const fabric_t *fabric, uint32_t instance, uint64_t *invocations_out,
                              uint64_t *rows_out)
{
    *invocations_out = 0;
    *rows_out = 0;
    if (instance >= fabric->plan.instance_count)
        return;
    const fabric_instance_record_t *record =
        (const fabric_instance_record_t *)fabric_local(fabric, fabric->layout.instances) + instance;
    *invocations_out = PROTOCOL_LOAD_RELAXED(&record->invocations);
    *rows_out = PROTOCOL_LOAD_RELAXED(&record->rows);
}
