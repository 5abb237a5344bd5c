/* SPDX-License-Identifier: MIT */
/*
 * The only atomic operations that protocol headers use, for C and for CUDA, and the words with
 * which these languages say the same otherwise.
 *
 * Shared structs hold plain integers, so that their layout is the same in both languages; the
 * operation carries the order. In C they are the compiler's C11 operations, which ThreadSanitizer
 * follows; in CUDA they are cuda::atomic_ref of system scope. There are no bare fences: every order
 * belongs to an operation on a named word.
 */
#ifndef XPOOL_BASE_PROTOCOL_ATOMICS_H
#define XPOOL_BASE_PROTOCOL_ATOMICS_H

#ifdef __CUDACC__
#include <cuda/atomic>
#define PROTOCOL_FUNCTION static inline __host__ __device__
/* Between `struct` and its name: moved 16 bytes at once. */
#define PROTOCOL_ALIGNED_16 __align__(16)
template <typename T> using protocol_ref = cuda::atomic_ref<T, cuda::thread_scope_system>;
template <typename T> PROTOCOL_FUNCTION protocol_ref<T> protocol_make_ref(const T *word)
{
    return protocol_ref<T>(*const_cast<T *>(word));
}
#define PROTOCOL_LOAD_ACQUIRE(word) protocol_make_ref(word).load(cuda::memory_order_acquire)
#define PROTOCOL_LOAD_RELAXED(word) protocol_make_ref(word).load(cuda::memory_order_relaxed)
#define PROTOCOL_LOAD_TOTAL(word)   protocol_make_ref(word).load(cuda::memory_order_seq_cst)
#define PROTOCOL_STORE_RELEASE(word, value)                                                        \
    protocol_make_ref(word).store((value), cuda::memory_order_release)
#define PROTOCOL_STORE_TOTAL(word, value)                                                          \
    protocol_make_ref(word).store((value), cuda::memory_order_seq_cst)
#define PROTOCOL_STORE_RELAXED(word, value)                                                        \
    protocol_make_ref(word).store((value), cuda::memory_order_relaxed)
#define PROTOCOL_ADD_TOTAL(word, value)                                                            \
    protocol_make_ref(word).fetch_add((value), cuda::memory_order_seq_cst)
#define PROTOCOL_ADD_RELAXED(word, value)                                                          \
    protocol_make_ref(word).fetch_add((value), cuda::memory_order_relaxed)
/* Relaxed, of a word of 64 bits in device memory, for who does not need the value before: no thread
 * waits for it. */
#ifdef __CUDA_ARCH__
#define PROTOCOL_COUNT(word, value)                                                                \
    asm volatile("red.relaxed.sys.global.add.u64 [%0], %1;" ::"l"(__cvta_generic_to_global(word)), \
                 "l"((uint64_t)(value))                                                            \
                 : "memory")
#else
#define PROTOCOL_COUNT PROTOCOL_ADD_RELAXED
#endif
/* True when *word was *expected and is now value; otherwise *expected holds what was found. */
#define PROTOCOL_CAS(word, expected, value)                                                        \
    protocol_make_ref(word).compare_exchange_strong(                                               \
        *(expected), (value), cuda::memory_order_acq_rel, cuda::memory_order_acquire)
/* The same where all who use the word are on one device: it waits for no bus. */
#define PROTOCOL_CAS_NEAR(word, expected, value)                                                   \
    cuda::atomic_ref<uint64_t, cuda::thread_scope_device>(*(word)).compare_exchange_strong(        \
        *(expected), (value), cuda::memory_order_acq_rel, cuda::memory_order_acquire)
#else
#define PROTOCOL_FUNCTION                   static inline
#define PROTOCOL_ALIGNED_16                 __attribute__((aligned(16)))
#define PROTOCOL_LOAD_ACQUIRE(word)         __atomic_load_n((word), __ATOMIC_ACQUIRE)
#define PROTOCOL_LOAD_RELAXED(word)         __atomic_load_n((word), __ATOMIC_RELAXED)
#define PROTOCOL_LOAD_TOTAL(word)           __atomic_load_n((word), __ATOMIC_SEQ_CST)
#define PROTOCOL_STORE_RELEASE(word, value) __atomic_store_n((word), (value), __ATOMIC_RELEASE)
#define PROTOCOL_STORE_RELAXED(word, value) __atomic_store_n((word), (value), __ATOMIC_RELAXED)
#define PROTOCOL_STORE_TOTAL(word, value)   __atomic_store_n((word), (value), __ATOMIC_SEQ_CST)
#define PROTOCOL_ADD_TOTAL(word, value)     __atomic_fetch_add((word), (value), __ATOMIC_SEQ_CST)
#define PROTOCOL_ADD_RELAXED(word, value)   __atomic_fetch_add((word), (value), __ATOMIC_RELAXED)
#define PROTOCOL_COUNT                      PROTOCOL_ADD_RELAXED
/* True when *word was *expected and is now value; otherwise *expected holds what was found. */
#define PROTOCOL_CAS(word, expected, value)                                                        \
    __atomic_compare_exchange_n((word), (expected), (value), 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)
#define PROTOCOL_CAS_NEAR PROTOCOL_CAS
#endif

/* The store that publishes a sequence. XPOOL_WEAKEN_RELEASE plants the mistake that
 * tests/tsan/run.sh must find; nothing else defines it. */
#ifdef XPOOL_WEAKEN_RELEASE
#define PROTOCOL_PUBLISH(word, value) PROTOCOL_STORE_RELAXED(word, value)
#else
#define PROTOCOL_PUBLISH(word, value) PROTOCOL_STORE_RELEASE(word, value)
#endif
#endif
