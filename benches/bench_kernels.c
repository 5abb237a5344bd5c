/* SPDX-License-Identifier: MIT */
/*
 * Speed of the CPU kernels beside what the machine itself can do, in one run.
 *
 * Decode: few rows against a set of matrices of SmolLM2-135M's FFN shapes (hidden 576, intermediate
 * 1536), GB/s of packed weights, beside the read bandwidth measured over as many bytes. Prefill:
 * many rows, GFLOP/s, beside the multiply-add peak of the same instruction set. For every variant
 * this processor has, and for each number of threads from 1 to --threads in powers of two.
 *
 * One thread is timed by its own CPU time, so that a busy machine disturbs it little; several
 * threads need an idle machine.
 *
 * --mib below 2 or so keeps the weights in cache and so shows the cost of computing alone.
 *
 *   bench_kernels [--threads N] [--rows 1,2,4,8,16] [--prefill 256] [--dtype NAME] [--variant NAME]
 *                 [--seconds S] [--mib N]
 */
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#include "kernels/kernels.h"

#define BENCH_HIDDEN       576
#define BENCH_INTERMEDIATE 1536
#define BENCH_SET_BYTES    (96u << 20) /* weights of one pass: SmolLM2's own size */
#define BENCH_MAX_MATRICES 256
#define BENCH_MAX_ROWS     512

static double bench_seconds = 0.4; /* least time of one measurement */
static float bench_sink;           /* keeps results alive */

static clockid_t bench_clock = CLOCK_MONOTONIC;

static double bench_now(void)
{
    struct timespec now;
    clock_gettime(bench_clock, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

/* ---- what the machine can do ---- */

typedef struct read_job {
    const uint64_t *words;
    size_t count;
    _Atomic uint64_t sum;
} read_job_t;

static uint64_t read_plain(const uint64_t *words, size_t count)
{
    uint64_t sum[8] = {0}, total = 0;
    for (size_t i = 0; i + 8 <= count; i += 8)
        for (size_t j = 0; j < 8; j++)
            sum[j] += words[i + j];
    for (size_t j = 0; j < 8; j++)
        total += sum[j];
    return total;
}

#if defined(__x86_64__)
/* Wide loads and a prefetch, as the kernels do it: the plain loop does not reach the memory's rate.
 */
__attribute__((target("avx2"))) static uint64_t read_avx2(const uint64_t *words, size_t count)
{
    __m256i sum[4];
    for (int j = 0; j < 4; j++)
        sum[j] = _mm256_setzero_si256();
    for (size_t i = 0; i + 16 <= count; i += 16) {
        _mm_prefetch((const char *)(words + i) + 2048, _MM_HINT_T0);
        _mm_prefetch((const char *)(words + i) + 2112, _MM_HINT_T0);
        for (size_t j = 0; j < 4; j++)
            sum[j] = _mm256_add_epi64(
                sum[j], _mm256_loadu_si256((const __m256i *)(const void *)(words + i + 4 * j)));
    }
    sum[0] = _mm256_add_epi64(_mm256_add_epi64(sum[0], sum[1]), _mm256_add_epi64(sum[2], sum[3]));
    return (uint64_t)_mm256_extract_epi64(sum[0], 0) + (uint64_t)_mm256_extract_epi64(sum[0], 1) +
           (uint64_t)_mm256_extract_epi64(sum[0], 2) + (uint64_t)_mm256_extract_epi64(sum[0], 3);
}
#endif

static void read_member(void *context, uint32_t member, uint32_t members)
{
    read_job_t *job = context;
    size_t share = job->count / members;
    const uint64_t *words = job->words + share * member;
    uint64_t total;
#if defined(__x86_64__)
    total = kernels_variant_supported(KERNELS_AVX2) ? read_avx2(words, share)
                                                    : read_plain(words, share);
#else
    total = read_plain(words, share);
#endif
    atomic_fetch_add(&job->sum, total);
}

static double bench_read_bandwidth(xp_pool_t *pool, const void *memory, size_t bytes)
{
    read_job_t job = {.words = memory, .count = bytes / 8};
    double best = 0;
    for (int repeat = 0; repeat < 7; repeat++) {
        double start = bench_now();
        xp_pool_run(pool, read_member, &job);
        double rate = (double)bytes / (bench_now() - start);
        best = rate > best ? rate : best;
    }
    bench_sink += (float)job.sum;
    return best;
}

#if defined(__x86_64__)
__attribute__((target("avx2,fma"))) static double peak_avx2(uint64_t steps)
{
    __m256 sum[12], a = _mm256_set1_ps(1.0001f), b = _mm256_set1_ps(bench_sink);
    for (int i = 0; i < 12; i++)
        sum[i] = _mm256_set1_ps((float)i);
    for (uint64_t s = 0; s < steps; s++)
#pragma GCC unroll 12
        for (int i = 0; i < 12; i++)
            sum[i] = _mm256_fmadd_ps(sum[i], a, b);
    for (int i = 1; i < 12; i++)
        sum[0] = _mm256_add_ps(sum[0], sum[i]);
    bench_sink += _mm256_cvtss_f32(sum[0]) * 0;
    return 12.0 * 8 * 2 * (double)steps;
}

__attribute__((target("avx512f"))) static double peak_avx512(uint64_t steps)
{
    __m512 sum[12], a = _mm512_set1_ps(1.0001f), b = _mm512_set1_ps(bench_sink);
    for (int i = 0; i < 12; i++)
        sum[i] = _mm512_set1_ps((float)i);
    for (uint64_t s = 0; s < steps; s++)
#pragma GCC unroll 12
        for (int i = 0; i < 12; i++)
            sum[i] = _mm512_fmadd_ps(sum[i], a, b);
    for (int i = 1; i < 12; i++)
        sum[0] = _mm512_add_ps(sum[0], sum[i]);
    bench_sink += _mm512_cvtss_f32(sum[0]) * 0;
    return 12.0 * 16 * 2 * (double)steps;
}
#endif

static double peak_plain(uint64_t steps)
{
    float sum[32];
    for (int i = 0; i < 32; i++)
        sum[i] = (float)i;
    for (uint64_t s = 0; s < steps; s++)
        for (int i = 0; i < 32; i++)
            sum[i] = sum[i] * 1.0001f + 1e-9f;
    for (int i = 0; i < 32; i++)
        bench_sink += sum[i] * 0;
    return 32.0 * 2 * (double)steps;
}

typedef struct peak_job {
    kernels_variant_t variant;
    double operations[256];
} peak_job_t;

static void peak_member(void *context, uint32_t member, uint32_t members)
{
    (void)members;
    peak_job_t *job = context;
    const uint64_t steps = 2000000;
    switch (job->variant) {
#if defined(__x86_64__)
    case KERNELS_AVX2:
        job->operations[member] = peak_avx2(steps);
        break;
    case KERNELS_AVX512:
        job->operations[member] = peak_avx512(steps);
        break;
#endif
    default:
        job->operations[member] = peak_plain(steps);
        break;
    }
}

static double bench_peak(xp_pool_t *pool, kernels_variant_t variant)
{
    peak_job_t job = {.variant = variant};
    double best = 0;
    for (int repeat = 0; repeat < 5; repeat++) {
        double start = bench_now(), operations = 0;
        xp_pool_run(pool, peak_member, &job);
        double seconds = bench_now() - start;
        for (uint32_t m = 0; m < xp_pool_threads(pool); m++)
            operations += job.operations[m];
        best = operations / seconds > best ? operations / seconds : best;
    }
    return best;
}

/* ---- our kernels ---- */

typedef struct bench_set {
    kernels_matrix_t matrix[BENCH_MAX_MATRICES];
    uint32_t count;
    size_t bytes; /* of packed weights */
} bench_set_t;

/* Random bits are valid weights of every quantised type once the scales are finite; plain types get
 * values of ordinary size, since a processor multiplies subnormal numbers many times slower. */
static void bench_fill(uint8_t *data, size_t bytes, xp_dtype_t dtype)
{
    uint64_t state = 88172645463325252u;
    for (size_t i = 0; i + 8 <= bytes; i += 8) {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        uint64_t word = state & 0x3bff3bff3bff3bffu; /* no infinity in any 16-bit place */
        if (dtype == XP_DTYPE_F32)
            word = (state & 0x80ffffff80ffffffu) | 0x3c0000003c000000u;
        if (dtype == XP_DTYPE_BF16)
            word = (state & 0x80ff80ff80ff80ffu) | 0x3c003c003c003c00u;
        memcpy(data + i, &word, 8);
    }
}

static void bench_set_make(bench_set_t *set, xp_dtype_t dtype, uint8_t *memory, size_t capacity)
{
    memset(set, 0, sizeof(*set));
    uint32_t block = xp_dtype_block_elements(dtype);
    uint32_t hidden = (BENCH_HIDDEN + block - 1) / block * block;
    size_t used = 0;
    while (set->count < BENCH_MAX_MATRICES) {
        bool down = set->count % 3 == 2;
        kernels_matrix_t w = {.dtype = dtype,
                              .rows = down ? hidden : BENCH_INTERMEDIATE,
                              .columns = down ? BENCH_INTERMEDIATE : hidden};
        size_t bytes = kernels_matrix_bytes(dtype, w.rows, w.columns);
        if (used + bytes > capacity)
            break;
        w.data = memory + used;
        bench_fill(w.data, bytes, dtype);
        if (kernels_matrix_pack(&w) != XP_OK)
            exit(1);
        set->bytes += bytes;
        used += bytes;
        set->matrix[set->count++] = w;
    }
}

/* Seconds of one pass over the set, the best of several. */
static double bench_pass(xp_pool_t *pool, const bench_set_t *set, uint32_t rows, const float *x,
                         float *y, void *scratch, uint32_t matrices)
{
    double best = 1e9, until = bench_now() + bench_seconds;
    for (int pass = 0; pass < 4 || bench_now() < until; pass++) {
        double start = bench_now();
        for (uint32_t m = 0; m < matrices; m++)
            kernels_matmul(pool, &set->matrix[m], x, BENCH_INTERMEDIATE, rows, y,
                           BENCH_INTERMEDIATE, scratch);
        double seconds = bench_now() - start;
        best = seconds < best ? seconds : best;
    }
    return best;
}

static double bench_operations(const bench_set_t *set, uint32_t matrices, uint32_t rows)
{
    double operations = 0;
    for (uint32_t m = 0; m < matrices; m++)
        operations += 2.0 * set->matrix[m].rows * set->matrix[m].columns * rows;
    return operations;
}

typedef struct bench_options {
    uint32_t threads, prefill;
    uint32_t rows[16], row_count;
    size_t set_bytes;
    const char *dtype, *variant;
} bench_options_t;

static void bench_variant(const bench_options_t *options, xp_pool_t *pool, uint8_t *memory,
                          float *x, float *y, void *scratch, bench_set_t *set)
{
    kernels_variant_t variant = kernels_selected();
    double peak = bench_peak(pool, variant);
    double bandwidth = bench_read_bandwidth(pool, memory, BENCH_SET_BYTES);
    printf("\n%s, %u thread(s): read bandwidth %.1f GB/s, multiply-add peak %.0f GFLOP/s\n",
           kernels_variant_name(variant), xp_pool_threads(pool), bandwidth * 1e-9, peak * 1e-9);
    for (unsigned d = XP_DTYPE_F32; d < XP_DTYPE_COUNT; d++) {
        xp_dtype_t dtype = (xp_dtype_t)d;
        if (options->dtype && strcmp(options->dtype, xp_dtype_name(dtype)))
            continue;
        bench_set_make(set, dtype, memory, options->set_bytes);
        printf("  %-5s", xp_dtype_name(dtype));
        double one = 0;
        for (uint32_t i = 0; i < options->row_count; i++) {
            uint32_t rows = options->rows[i];
            double seconds = bench_pass(pool, set, rows, x, y, scratch, set->count);
            if (i == 0)
                one = rows / seconds;
            printf("  %2u: %5.1f GB/s %4.2fx", rows, (double)set->bytes / seconds * 1e-9,
                   rows / seconds / one);
        }
        uint32_t few = set->count < 6 ? set->count : 6;
        double seconds = bench_pass(pool, set, options->prefill, x, y, scratch, few);
        double rate = bench_operations(set, few, options->prefill) / seconds;
        printf("  | %u: %.0f GFLOP/s %.0f%%\n", options->prefill, rate * 1e-9, 100 * rate / peak);
        fflush(stdout);
    }
}

static uint32_t bench_parse_rows(const char *text, uint32_t *rows)
{
    uint32_t count = 0;
    for (char *end; *text && count < 16; text = *end ? end + 1 : end) {
        rows[count] = (uint32_t)strtoul(text, &end, 10);
        if (end == text || rows[count] < 1 || rows[count] > BENCH_MAX_ROWS)
            return 0;
        count++;
    }
    return count;
}

static int bench_usage(void)
{
    fprintf(stderr,
            "usage: bench_kernels [--threads N] [--rows 1,2,4] [--prefill N] [--dtype NAME] "
            "[--variant NAME] [--seconds S] [--mib N]\n");
    return 2;
}

int main(int argc, char **argv)
{
    bench_options_t options = {
        .threads = xp_usable_cpus(), .prefill = 256, .set_bytes = BENCH_SET_BYTES};
    options.row_count = bench_parse_rows("1,2,4,8,16", options.rows);
    for (int i = 1; i + 1 < argc; i += 2) {
        if (!strcmp(argv[i], "--threads"))
            options.threads = (uint32_t)strtoul(argv[i + 1], NULL, 10);
        else if (!strcmp(argv[i], "--rows"))
            options.row_count = bench_parse_rows(argv[i + 1], options.rows);
        else if (!strcmp(argv[i], "--prefill"))
            options.prefill = (uint32_t)strtoul(argv[i + 1], NULL, 10);
        else if (!strcmp(argv[i], "--dtype"))
            options.dtype = argv[i + 1];
        else if (!strcmp(argv[i], "--variant"))
            options.variant = argv[i + 1];
        else if (!strcmp(argv[i], "--mib"))
            options.set_bytes = (size_t)strtoul(argv[i + 1], NULL, 10) << 20;
        else if (!strcmp(argv[i], "--seconds"))
            bench_seconds = strtod(argv[i + 1], NULL);
        else
            return bench_usage();
    }
    if (argc % 2 == 0 || options.row_count == 0 || options.threads < 1 || options.threads > 256 ||
        options.set_bytes < 1 << 20 || options.set_bytes > BENCH_SET_BYTES || options.prefill < 1 ||
        options.prefill > BENCH_MAX_ROWS)
        return bench_usage();
    size_t row_floats = (size_t)BENCH_MAX_ROWS * BENCH_INTERMEDIATE;
    uint8_t *memory = aligned_alloc(4096, BENCH_SET_BYTES);
    float *x = aligned_alloc(64, row_floats * sizeof(float));
    float *y = aligned_alloc(64, row_floats * sizeof(float));
    void *scratch = aligned_alloc(64, options.threads * kernels_scratch_bytes(0, 0));
    bench_set_t *set = malloc(sizeof(*set));
    if (!memory || !x || !y || !scratch || !set) {
        fprintf(stderr, "bench_kernels: out of memory\n");
        return 1;
    }
    memset(memory, 1, BENCH_SET_BYTES);
    for (size_t i = 0; i < row_floats; i++)
        x[i] = (float)(i * 7919 % 1000) * 0.002f - 1.0f;
    for (unsigned v = 0; v < KERNELS_VARIANT_COUNT; v++) {
        kernels_variant_t variant = (kernels_variant_t)v;
        if (!kernels_variant_supported(variant) ||
            (options.variant && strcmp(options.variant, kernels_variant_name(variant))))
            continue;
        if (kernels_select_variant(variant) != XP_OK)
            return 1;
        for (uint32_t threads = 1; threads <= options.threads; threads *= 2) {
            xp_pool_t *pool = NULL;
            bench_clock = threads == 1 ? CLOCK_THREAD_CPUTIME_ID : CLOCK_MONOTONIC;
            if (xp_pool_create(threads, NULL, 0, &pool) != XP_OK) {
                fprintf(stderr, "bench_kernels: %s\n", xp_error_last()->text);
                return 1;
            }
            bench_variant(&options, pool, memory, x, y, scratch, set);
            xp_pool_destroy(pool);
        }
    }
    free(memory);
    free(x);
    free(y);
    free(scratch);
    free(set);
    return bench_sink == 12345.0f; /* never: only keeps the sums */
}
