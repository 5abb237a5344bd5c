/* SPDX-License-Identifier: MIT */
/*
 * Exact placement of weight sets on FFN devices: the smallest largest load, proved. Pure
 * computation on the caller's thread, in memory that it takes once.
 *
 * Devices are filled one after the other, from the largest weight set to the smallest, "on it"
 * tried before "not on it". A device that stays too empty leaves more to the others than they hold,
 * so its load must lie in a window [limit - slack, limit]; a table of the sums that the sets still
 * to be decided can reach tells whether it still can. The first complete assignment at the smallest
 * feasible limit is the answer; that no smaller limit is feasible is proved by a bound or by an
 * exhausted search.
 */
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "control/planner.h"

#define PLACE_CLOCK_STRIDE 4096 /* search nodes between looks at the clock */
#define PLACE_TABLE_BYTES  (64u << 20)
#define PLACE_LEAST_BITS   4096u
#define PLACE_MEMO         (1u << 16)
#define PLACE_KEY_WORDS    4 /* 4 bits an item: copies still to be placed */

typedef struct place_memo {
    uint64_t key[PLACE_KEY_WORDS];
    uint32_t device, round; /* round 0: empty */
} place_memo_t;

typedef struct place_stage {
    uint32_t count;                     /* of items that may be put on this device or not */
    uint32_t item[CONFIG_MAX_MODELS];   /* they, largest first */
    uint64_t bucket;                    /* of one bit */
    uint64_t words;                     /* of a row */
    uint64_t *rows;                     /* [count + 1]: sums that items k.. can reach */
    uint64_t slack;                     /* what all devices from this one on may leave empty */
    uint32_t chosen[CONFIG_MAX_MODELS]; /* 1: on it */
} place_stage_t;

typedef struct place_search {
    uint32_t items, devices;
    uint64_t unit;                     /* bytes; what follows counts in it */
    uint32_t order[CONFIG_MAX_MODELS]; /* the caller's index of the k-th largest */
    uint64_t bytes[CONFIG_MAX_MODELS]; /* descending */
    uint32_t tp[CONFIG_MAX_MODELS];
    uint64_t capacity[FABRIC_MAX_FFN], limit[FABRIC_MAX_FFN];
    uint64_t total;                   /* of all copies */
    uint32_t left[CONFIG_MAX_MODELS]; /* copies still to be placed */
    uint32_t masks[CONFIG_MAX_MODELS];
    place_stage_t stages[FABRIC_MAX_FFN];
    uint64_t *tables;
    uint64_t table_words; /* of one stage */
    place_memo_t *memo;
    uint32_t round;
    uint64_t deadline_ns, nodes;
    bool timed_out;
} place_search_t;

static bool out_of_time(place_search_t *search)
{
    if (!search->timed_out && xp_monotonic_ns() > search->deadline_ns)
        search->timed_out = true;
    return search->timed_out;
}

/* ---- bounds -----------------------------------------------------------------------------------
 */

/* Whether copies of `sizes` (descending) may fit `devices` devices of `limit` each: L2 of Martello
 * and Toth for bin packing. Copies of one item count as items of their own. */
static bool may_fit(const uint64_t *sizes, uint32_t count, uint32_t devices, uint64_t limit)
{
    if (count == 0)
        return true;
    if (sizes[0] > limit)
        return false;
    for (uint32_t k = 0; k <= count; k++) {
        /* Copies below `least` are left out; k == count: none. */
        uint64_t least = k < count ? sizes[k] : 0;
        if (least > limit / 2)
            continue;
        uint64_t alone = 0, halves = 0, room = 0, small = 0;
        for (uint32_t i = 0; i < count && sizes[i] >= least; i++) {
            if (sizes[i] > limit - least)
                alone++; /* nothing of what counts fits beside it */
            else if (sizes[i] > limit / 2)
                halves++, room += limit - sizes[i];
            else
                small += sizes[i];
        }
        uint64_t more = small > room ? (small - room + limit - 1) / limit : 0;
        if (alone + halves + more > devices)
            return false;
    }
    return true;
}

static uint64_t room_within(const place_search_t *search, uint64_t limit)
{
    uint64_t room = 0;
    for (uint32_t d = 0; d < search->devices; d++)
        room += search->capacity[d] < limit ? search->capacity[d] : limit;
    return room;
}

static uint32_t copies_from(const place_search_t *search, const uint32_t *left, uint64_t *sizes_out)
{
    uint32_t count = 0;
    for (uint32_t i = 0; i < search->items; i++)
        for (uint32_t c = 0; c < left[i]; c++)
            sizes_out[count++] = search->bytes[i];
    return count;
}

static bool bounds_allow(const place_search_t *search, uint64_t limit)
{
    uint64_t sizes[CONFIG_MAX_MODELS * FABRIC_MAX_FFN];
    return room_within(search, limit) >= search->total &&
           may_fit(sizes, copies_from(search, search->tp, sizes), search->devices, limit);
}

/* ---- sums that can be reached ---------------------------------------------------------------- */

/* row |= from << shift, within `words`. */
static void or_shifted(uint64_t *row, const uint64_t *from, uint64_t words, uint64_t shift)
{
    uint64_t whole = shift / 64, part = shift % 64;
    for (uint64_t w = whole; w < words; w++) {
        uint64_t value = from[w - whole] << part;
        if (part && w > whole)
            value |= from[w - whole - 1] >> (64 - part);
        row[w] |= value;
    }
}

/* With buckets of more than a unit a sum's bucket is that of its parts, or one more. */
static void make_table(const place_search_t *search, place_stage_t *stage, uint64_t most)
{
    uint64_t bits = (uint64_t)1 << (stage->count < 40 ? stage->count + 2 : 42);
    uint64_t room = search->table_words * 64 / (stage->count + 1) / 64 * 64;
    bits = bits > room ? room : bits < PLACE_LEAST_BITS ? PLACE_LEAST_BITS : bits;
    stage->bucket = most / bits + 1;
    stage->words = most / stage->bucket / 64 + 1;
    uint64_t *row = stage->rows + stage->count * stage->words;
    memset(row, 0, stage->words * sizeof(*row));
    row[0] = 1;
    for (uint32_t k = stage->count; k-- > 0;) {
        uint64_t shift = search->bytes[stage->item[k]] / stage->bucket;
        const uint64_t *below = row;
        row -= stage->words;
        memcpy(row, below, stage->words * sizeof(*row));
        or_shifted(row, below, stage->words, shift);
        if (stage->bucket > 1)
            or_shifted(row, below, stage->words, shift + 1);
    }
}

/* Whether items k.. may bring a sum that leaves at most the slack of `room` empty. */
static bool reaches(const place_stage_t *stage, uint32_t k, uint64_t room)
{
    const uint64_t *row = stage->rows + k * stage->words;
    uint64_t low = (room > stage->slack ? room - stage->slack : 0) / stage->bucket;
    uint64_t high = room / stage->bucket, first = low / 64, last = high / 64;
    for (uint64_t w = last + 1; w-- > first;) {
        uint64_t bits = row[w];
        if (w == last && high % 64 != 63)
            bits &= ((uint64_t)1 << (high % 64 + 1)) - 1;
        if (w == first)
            bits &= ~(uint64_t)0 << low % 64;
        if (bits)
            return true;
    }
    return false;
}

/* ---- search -----------------------------------------------------------------------------------
 */

static place_memo_t *memo_of(place_search_t *search, uint32_t device, uint64_t key[PLACE_KEY_WORDS])
{
    uint64_t hash = device;
    memset(key, 0, PLACE_KEY_WORDS * sizeof(*key));
    for (uint32_t i = 0; i < search->items; i++)
        key[i / 16] |= (uint64_t)search->left[i] << i % 16 * 4;
    for (uint32_t w = 0; w < PLACE_KEY_WORDS; w++)
        hash = (hash ^ key[w]) * 0x9e3779b97f4a7c15ull ^ hash >> 29;
    return &search->memo[(hash >> 32) % PLACE_MEMO];
}

static bool fill_device(place_search_t *search, uint32_t device);

/* Decides item k.. of the device, which has `room` left; true: all devices are filled. */
static bool decide(place_search_t *search, uint32_t device, uint32_t k, uint64_t room)
{
    place_stage_t *stage = &search->stages[device];
    if (++search->nodes % PLACE_CLOCK_STRIDE == 0 && out_of_time(search))
        return false;
    if (k == stage->count) {
        if (room > stage->slack)
            return false; /* the table only knew its bucket */
        for (uint32_t j = 0; j < stage->count; j++) {
            search->left[stage->item[j]] -= stage->chosen[j];
            search->masks[stage->item[j]] |= stage->chosen[j] << device;
        }
        if (fill_device(search, device + 1))
            return true;
        for (uint32_t j = 0; j < stage->count; j++) {
            search->left[stage->item[j]] += stage->chosen[j];
            search->masks[stage->item[j]] &= ~(stage->chosen[j] << device);
        }
        return false;
    }
    uint32_t item = stage->item[k];
    uint64_t bytes = search->bytes[item];
    if (bytes <= room && reaches(stage, k + 1, room - bytes)) {
        stage->chosen[k] = 1;
        if (decide(search, device, k + 1, room - bytes))
            return true;
    }
    /* Without it, its likes are not on the device either: they are interchangeable. */
    uint32_t next = k;
    while (next < stage->count && search->bytes[stage->item[next]] == bytes &&
           search->left[stage->item[next]] == search->left[item])
        stage->chosen[next++] = 0;
    return !search->timed_out && reaches(stage, next, room) && decide(search, device, next, room);
}

static bool limits_are_alike(const place_search_t *search, uint32_t device)
{
    for (uint32_t d = device + 1; d < search->devices; d++)
        if (search->limit[d] != search->limit[device])
            return false;
    return true;
}

/* What has to be on the device; what may be goes into the stage. False: it does not fit. */
static bool prepare(place_search_t *search, uint32_t device, uint64_t *room_out, uint64_t *must_out)
{
    place_stage_t *stage = &search->stages[device];
    uint32_t devices = search->devices - device;
    uint64_t total = 0, limits = 0, room = search->limit[device];
    /* Where the rest of the devices are alike, the first of what is left may as well be here. */
    bool first = limits_are_alike(search, device);
    stage->count = 0;
    *must_out = 0;
    for (uint32_t d = device; d < search->devices; d++)
        limits += search->limit[d];
    for (uint32_t i = 0; i < search->items; i++) {
        if (!search->left[i])
            continue;
        if (search->left[i] > devices)
            return false;
        total += search->bytes[i] * search->left[i];
        if (search->left[i] == devices || first) {
            if (search->bytes[i] > room)
                return false;
            room -= search->bytes[i];
            *must_out |= (uint64_t)1 << i;
            first = false;
        } else {
            stage->item[stage->count++] = i;
        }
    }
    if (total > limits)
        return false;
    stage->slack = limits - total;
    *room_out = room;
    return true;
}

static void put_must(place_search_t *search, uint32_t device, uint64_t must, bool on)
{
    for (; must; must &= must - 1) {
        uint32_t i = (uint32_t)__builtin_ctzll(must);
        search->left[i] += on ? -1 : 1;
        search->masks[i] ^= 1u << device;
    }
}

static bool fill_device(place_search_t *search, uint32_t device)
{
    uint64_t room, must, key[PLACE_KEY_WORDS], sizes[CONFIG_MAX_MODELS * FABRIC_MAX_FFN], most = 0;
    if (device == search->devices)
        return true;
    place_memo_t *memo = memo_of(search, device, key);
    if (memo->round == search->round && memo->device == device &&
        memcmp(memo->key, key, sizeof(key)) == 0)
        return false; /* what is left was tried, and does not fit */
    for (uint32_t d = device; d < search->devices; d++)
        most = search->limit[d] > most ? search->limit[d] : most;
    bool good =
        prepare(search, device, &room, &must) &&
        may_fit(sizes, copies_from(search, search->left, sizes), search->devices - device, most);
    if (good && !out_of_time(search)) {
        make_table(search, &search->stages[device], room);
        put_must(search, device, must, true);
        good = reaches(&search->stages[device], 0, room) && decide(search, device, 0, room);
        if (good)
            return true;
        put_must(search, device, must, false);
    }
    if (!search->timed_out) {
        memcpy(memo->key, key, sizeof(key));
        memo->device = device;
        memo->round = search->round;
    }
    return false;
}

/* Whether a placement within `limit` exists; it is in masks then. */
static bool feasible(place_search_t *search, uint64_t limit)
{
    if (!bounds_allow(search, limit))
        return false;
    search->round++;
    for (uint32_t d = 0; d < search->devices; d++)
        search->limit[d] = search->capacity[d] < limit ? search->capacity[d] : limit;
    memcpy(search->left, search->tp, sizeof(search->left));
    memset(search->masks, 0, sizeof(search->masks));
    return fill_device(search, 0);
}

static uint64_t largest_load(const place_search_t *search)
{
    uint64_t largest = 0;
    for (uint32_t d = 0; d < search->devices; d++) {
        uint64_t load = 0;
        for (uint32_t i = 0; i < search->items; i++)
            load += search->masks[i] >> d & 1 ? search->bytes[i] : 0;
        largest = load > largest ? load : largest;
    }
    return largest;
}

/* The smallest limit that no bound forbids; more than `most` where all are forbidden. */
static uint64_t least_limit(const place_search_t *search, uint64_t most)
{
    uint64_t low = 0, high = most + 1;
    while (low < high) {
        uint64_t middle = low + (high - low) / 2;
        if (bounds_allow(search, middle))
            high = middle;
        else
            low = middle + 1;
    }
    return low;
}

/* XP_NOT_FOUND: none fits. What fits is in masks. */
static xp_status_t search_limits(place_search_t *search)
{
    uint64_t most = 0;
    for (uint32_t d = 0; d < search->devices; d++)
        most = search->capacity[d] > most ? search->capacity[d] : most;
    uint64_t low = least_limit(search, most); /* everything below is not feasible */
    uint64_t step = low / 4096 + 1, high = low;
    while (high <= most && !feasible(search, high)) {
        if (search->timed_out)
            return XP_TIMEOUT;
        low = high + 1;
        high = high < most && high + step > most ? most : high + step;
        step *= 2;
    }
    if (high > most)
        return XP_NOT_FOUND;
    uint64_t shown = high; /* the limit whose first placement is in masks */
    high = largest_load(search);
    while (low < high) {
        uint64_t middle = low + (high - low) / 2;
        shown = feasible(search, middle) ? middle : UINT64_MAX;
        if (shown == middle) {
            high = largest_load(search);
        } else if (search->timed_out) {
            return XP_TIMEOUT;
        } else {
            low = middle + 1;
        }
    }
    if (shown != high)
        (void)feasible(search, high);
    return search->timed_out ? XP_TIMEOUT : XP_OK;
}

/* Sizes come in pages: in their greatest common divisor numbers are small, and a limit between two
 * multiples of it is none. */
static uint64_t unit_of(const uint64_t *bytes, uint32_t items)
{
    uint64_t unit = 0;
    for (uint32_t i = 0; i < items; i++)
        for (uint64_t rest = bytes[i]; rest;) {
            uint64_t next = unit % rest;
            unit = rest;
            rest = next;
        }
    return unit ? unit : 1;
}

static void order_items(place_search_t *search, const uint64_t *bytes, const uint32_t *tp,
                        uint32_t items)
{
    /* Stable: the configuration's order among equals. */
    for (uint32_t i = 0; i < items; i++) {
        uint32_t at = i;
        for (; at > 0 && bytes[search->order[at - 1]] < bytes[i]; at--)
            search->order[at] = search->order[at - 1];
        search->order[at] = i;
    }
    for (uint32_t i = 0; i < items; i++) {
        search->bytes[i] = bytes[search->order[i]] / search->unit;
        search->tp[i] = tp[search->order[i]];
        search->total += search->bytes[i] * search->tp[i];
    }
}

xp_status_t planner_place(const uint64_t *bytes, const uint32_t *tp, uint32_t items,
                          const uint64_t *capacity, uint32_t devices, uint64_t deadline_ns,
                          uint32_t *masks_out)
{
    _Static_assert(CONFIG_MAX_MODELS <= 64 && CONFIG_MAX_MODELS <= 16 * PLACE_KEY_WORDS, "bits");
    XP_ASSERT(items <= CONFIG_MAX_MODELS && devices >= 1 && devices <= FABRIC_MAX_FFN);
    xp_status_t status = XP_NO_MEMORY;
    place_search_t *search = calloc(1, sizeof(*search));
    if (search) {
        search->table_words = PLACE_TABLE_BYTES / sizeof(uint64_t) / devices;
        search->tables = malloc(search->table_words * devices * sizeof(uint64_t));
        search->memo = calloc(PLACE_MEMO, sizeof(*search->memo));
    }
    if (!search || !search->tables || !search->memo) {
        xp_fail(status, "no memory for the placement search");
        goto done;
    }
    search->items = items;
    search->devices = devices;
    search->deadline_ns = deadline_ns;
    search->unit = unit_of(bytes, items);
    for (uint32_t d = 0; d < devices; d++) {
        search->capacity[d] = capacity[d] / search->unit;
        search->stages[d].rows = search->tables + d * search->table_words;
    }
    order_items(search, bytes, tp, items);
    status = search_limits(search);
    if (status == XP_TIMEOUT)
        xp_fail(status,
                "the exact placement of %u weight sets on %u FFN devices was not finished in time; "
                "raise ffn.placement.timeout_seconds or configure fewer models",
                items, devices);
    else if (status != XP_OK)
        status = xp_fail(XP_NO_MEMORY, "no placement fits");
    for (uint32_t i = 0; i < items && status == XP_OK; i++)
        masks_out[search->order[i]] = search->masks[i];
done:
    if (search) {
        free(search->tables);
        free(search->memo);
    }
    free(search);
    return status;
}
