/* SPDX-License-Identifier: MIT */
/* Sums over layers of what routers chose. */
#include "ffn/ffn.h"

/* Upper ends of the bins but the last, in hundredths of the mean. */
static const uint32_t usage_edges[FFN_USAGE_BINS - 1] = {25, 50, 75, 100, 125, 150, 200};

void ffn_usage_add(uint64_t executions, uint64_t rows, uint64_t experts, const uint64_t *chosen,
                   uint32_t places, ffn_usage_t *usage)
{
    uint64_t total = 0;
    if (places == 0)
        return;
    for (uint32_t e = 0; e < places; e++)
        total += chosen[e];
    for (uint32_t e = 0; e < places; e++) {
        const uint64_t count = chosen[e];
        if (usage->places == 0 && e == 0)
            usage->least = usage->most = count;
        usage->least = count < usage->least ? count : usage->least;
        usage->most = count > usage->most ? count : usage->most;
        usage->chosen += count != 0;
        uint32_t bin = 0;
        while (bin + 1 < FFN_USAGE_BINS && count * places * 100 >= total * usage_edges[bin])
            bin++;
        if (total)
            usage->bins[bin]++;
    }
    usage->executions += executions;
    usage->rows += rows;
    usage->experts += experts;
    usage->places += places;
}
