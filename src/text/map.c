/* SPDX-License-Identifier: MIT */
/* Arena, text-to-id map and id vector of the tokenizer. Owns the memory it hands out; no threads.
 */
#include "text/internal.h"

#include <stdlib.h>
#include <string.h>

#define ARENA_BLOCK_BYTES (1u << 20)

typedef struct text_arena_block {
    struct text_arena_block *next;
    char data[];
} text_arena_block_t;

void *text_arena_take(text_arena_t *arena, size_t bytes)
{
    bytes = (bytes + 7) & ~(size_t)7;
    if (!arena->blocks || arena->capacity - arena->used < bytes) {
        size_t capacity = bytes > ARENA_BLOCK_BYTES ? bytes : ARENA_BLOCK_BYTES;
        text_arena_block_t *block = malloc(sizeof(*block) + capacity);
        if (!block)
            return NULL;
        block->next = arena->blocks;
        arena->blocks = block;
        arena->used = 0;
        arena->capacity = capacity;
    }
    void *taken = arena->blocks->data + arena->used;
    arena->used += bytes;
    return taken;
}

void text_arena_fini(text_arena_t *arena)
{
    while (arena->blocks) {
        text_arena_block_t *next = arena->blocks->next;
        free(arena->blocks);
        arena->blocks = next;
    }
    arena->used = arena->capacity = 0;
}

static uint32_t hash_text(const char *text, size_t length)
{
    uint64_t hash = 0xCBF29CE484222325u ^ length;
    while (length >= 8) {
        uint64_t word;
        memcpy(&word, text, 8);
        hash = (hash ^ word) * 0x9E3779B97F4A7C15u;
        hash ^= hash >> 29;
        text += 8;
        length -= 8;
    }
    uint64_t tail = 0;
    if (length)
        memcpy(&tail, text, length);
    hash = (hash ^ tail) * 0x9E3779B97F4A7C15u;
    return (uint32_t)(hash >> 32) ^ (uint32_t)hash;
}

xp_status_t text_map_init(text_map_t *map, size_t expected)
{
    size_t capacity = 64;
    while (capacity < expected * 2)
        capacity *= 2;
    map->entries = calloc(capacity, sizeof(*map->entries));
    if (!map->entries)
        return xp_fail(XP_NO_MEMORY, "no memory for a vocabulary of %zu tokens", expected);
    map->capacity = capacity;
    map->count = 0;
    return XP_OK;
}

void text_map_fini(text_map_t *map)
{
    free(map->entries);
    *map = (text_map_t){0};
}

static text_map_entry_t *find(const text_map_t *map, const char *text, size_t length, uint32_t hash)
{
    /* The table is never full, so the walk ends. */
    for (size_t at = hash & (map->capacity - 1);; at = (at + 1) & (map->capacity - 1)) {
        text_map_entry_t *entry = &map->entries[at];
        if (!entry->text ||
            (entry->hash == hash && entry->length == length && !memcmp(entry->text, text, length)))
            return entry;
    }
}

int32_t text_map_get(const text_map_t *map, const char *text, size_t length)
{
    if (!map->entries)
        return -1;
    const text_map_entry_t *entry = find(map, text, length, hash_text(text, length));
    return entry->text ? entry->id : -1;
}

xp_status_t text_map_put(text_map_t *map, const char *text, size_t length, int32_t id)
{
    if (map->count * 2 >= map->capacity) {
        text_map_t larger;
        XP_TRY(text_map_init(&larger, map->capacity));
        for (size_t i = 0; i < map->capacity; i++) {
            const text_map_entry_t *entry = &map->entries[i];
            if (entry->text)
                *find(&larger, entry->text, entry->length, entry->hash) = *entry;
        }
        larger.count = map->count;
        free(map->entries);
        *map = larger;
    }
    uint32_t hash = hash_text(text, length);
    text_map_entry_t *entry = find(map, text, length, hash);
    if (!entry->text)
        map->count++;
    *entry = (text_map_entry_t){.text = text, .length = (uint32_t)length, .hash = hash, .id = id};
    return XP_OK;
}

xp_status_t text_ids_push(text_ids_t *ids, int32_t id)
{
    if (ids->count == ids->capacity) {
        size_t capacity = ids->capacity ? ids->capacity * 2 : 64;
        int32_t *data = realloc(ids->data, capacity * sizeof(*data));
        if (!data)
            return xp_fail(XP_NO_MEMORY, "no memory for %zu token ids", capacity);
        ids->data = data;
        ids->capacity = capacity;
    }
    ids->data[ids->count++] = id;
    return XP_OK;
}
