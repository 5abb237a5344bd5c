/* SPDX-License-Identifier: MIT */
/* "Did you mean": edit distance, and the registry key nearest to a wrong one. Pure functions. */
#include "config/settings.h"

#include <stdio.h>
#include <string.h>

#define WORD_MAX 96

static uint32_t minimum(uint32_t a, uint32_t b)
{
    return a < b ? a : b;
}

uint32_t config_text_distance(const char *left, const char *right, uint32_t limit)
{
    size_t m = strlen(left), n = strlen(right);
    if (m > WORD_MAX || n > WORD_MAX)
        return limit + 1;
    /* Three rows of the usual table suffice: the swap of two neighbours looks two rows back. */
    uint32_t rows[3][WORD_MAX + 1];
    uint32_t *before = rows[0], *previous = rows[1], *current = rows[2];
    for (size_t j = 0; j <= n; j++)
        previous[j] = (uint32_t)j;
    for (size_t i = 1; i <= m; i++) {
        current[0] = (uint32_t)i;
        for (size_t j = 1; j <= n; j++) {
            uint32_t replace = previous[j - 1] + (left[i - 1] != right[j - 1]);
            uint32_t best = minimum(replace, minimum(previous[j], current[j - 1]) + 1);
            if (i > 1 && j > 1 && left[i - 1] == right[j - 2] && left[i - 2] == right[j - 1])
                best = minimum(best, before[j - 2] + 1);
            current[j] = best;
        }
        uint32_t *oldest = before;
        before = previous;
        previous = current;
        current = oldest;
    }
    return minimum(previous[n], limit + 1);
}

/* A third of the word may be wrong before a suggestion is noise. */
static uint32_t tolerance(const char *word)
{
    size_t length = strlen(word);
    return length < 4 ? 1 : length < 9 ? 2 : (uint32_t)(length / 3 < 6 ? length / 3 : 6);
}

const char *config_text_nearest(const char *word, const char *const *candidates, uint32_t count)
{
    uint32_t best_distance = tolerance(word) + 1;
    const char *best = NULL;
    for (uint32_t i = 0; i < count; i++) {
        uint32_t distance = config_text_distance(word, candidates[i], best_distance);
        if (distance < best_distance) {
            best_distance = distance;
            best = candidates[i];
        }
    }
    return best;
}

static const char *last_part(const char *key)
{
    const char *dot = strrchr(key, '.');
    return dot ? dot + 1 : key;
}

/* Takes `candidate` when it is nearer to `key` than the best so far. */
static void consider(const char *key, const char *candidate, uint32_t *best_distance, char *best,
                     size_t size)
{
    uint32_t distance = config_text_distance(key, candidate, *best_distance);
    if (distance < *best_distance) {
        *best_distance = distance;
        snprintf(best, size, "%s", candidate);
    }
}

bool config_setting_nearest(const char *key, char *nearest_out, size_t size)
{
    uint32_t best_distance = tolerance(key) + 1;
    char best[WORD_MAX] = "";
    for (uint32_t i = 0; i < config_setting_count; i++) {
        const char *candidate = config_settings[i].key;
        consider(key, candidate, &best_distance, best, sizeof(best));
        /* Sections too: for "deamon" the answer is "daemon". */
        for (const char *dot = strchr(candidate, '.'); dot; dot = strchr(dot + 1, '.')) {
            size_t length = (size_t)(dot - candidate);
            char section[WORD_MAX];
            if (length >= sizeof(section))
                break;
            if (length > 2 && dot[-1] == ']')
                length -= 2; /* [[models]] is written without the brackets of "models[]" */
            memcpy(section, candidate, length);
            section[length] = '\0';
            consider(key, section, &best_distance, best, sizeof(best));
        }
    }
    /* The right name in the wrong section. */
    const char *name = last_part(key);
    for (uint32_t i = 0; !best[0] && i < config_setting_count; i++)
        if (strcmp(name, last_part(config_settings[i].key)) == 0)
            snprintf(best, sizeof(best), "%s", config_settings[i].key);
    if (!best[0])
        return false;
    snprintf(nearest_out, size, "%s", best);
    return true;
}
