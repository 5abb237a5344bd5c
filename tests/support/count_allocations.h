/* SPDX-License-Identifier: MIT */
/* The allocations of a test program, all threads: included by its one C file. */
#ifndef XPOOL_TESTS_COUNT_ALLOCATIONS_H
#define XPOOL_TESTS_COUNT_ALLOCATIONS_H

#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define COUNTS 0 /* the sanitizer's own allocator is in the way */
static _Atomic uint64_t allocations;
#else
#define COUNTS 1
static _Atomic uint64_t allocations;

extern void *__libc_malloc(size_t bytes);
extern void *__libc_calloc(size_t count, size_t bytes);
extern void *__libc_realloc(void *old, size_t bytes);

void *malloc(size_t bytes)
{
    atomic_fetch_add(&allocations, 1);
    return __libc_malloc(bytes);
}

void *calloc(size_t count, size_t bytes)
{
    atomic_fetch_add(&allocations, 1);
    return __libc_calloc(count, bytes);
}

void *realloc(void *old, size_t bytes)
{
    atomic_fetch_add(&allocations, 1);
    return __libc_realloc(old, bytes);
}
#endif
#endif
