/* SPDX-License-Identifier: MIT */
/*
 * All kernels of module stage on one GPU in one process, for compute-sanitizer: it goes neither
 * with MPS, nor with memory that is mapped while a kernel runs, nor with kernels that wait for each
 * other. Launches of an Instance find their answers published ahead; scheduler and relay are served
 * by a thread of the host. Every output is compared with plain C.
 *
 * usage: cuda_stage_sanitize [launches] [scheduler] [relay]     all of them without an argument
 *        cuda_stage_sanitize planted | planted-rows             errors for the tool to find: a race
 *            and a write past the end by a kernel of the test; the latter by the scheduler itself
 *
 * Not here: stage_relay_nvshmem and stage_courier, whose library wants a job of PEs to start.
 */
#include "stage_sanitize.h"

#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <stdarg.h>
#include <string.h>

CUDA_IMAGE_DECLARE(stage_kernels);
CUDA_IMAGE_DECLARE(stage_scheduler);
CUDA_IMAGE_DECLARE(stage_relay);
CUDA_IMAGE_DECLARE(tests_stage_test);

kit_t sanitize_kit;
life_page_t *sanitize_life;
static cuda_function_t kernels[SANITIZE_KERNELS];
static cuda_module_t modules[4];
static uint32_t cases;

/* ---- memory --------------------------------------------------------------------------------- */
enum { KEPT_MAX = 512, STAGING = 1 << 20 };
static cuda_address_t devices[KEPT_MAX];
static void *pinned[KEPT_MAX];
static uint32_t device_count, pinned_count;

cuda_address_t sanitize_device(uint64_t bytes, const void *from)
{
    CHECK(device_count < KEPT_MAX && bytes <= STAGING);
    cuda_address_t at = devices[device_count++] = kit_alloc(&sanitize_kit, bytes);
    void *zero = from ? NULL : calloc(1, bytes);
    CHECK(from || zero);
    kit_write(&sanitize_kit, at, from ? from : zero, bytes);
    free(zero);
    return at;
}

void *sanitize_pinned(uint64_t bytes)
{
    CHECK(pinned_count < KEPT_MAX);
    CHECK_OK(cuda_host_alloc(&sanitize_kit.device, bytes, &pinned[pinned_count]));
    memset(pinned[pinned_count], 0, bytes);
    return pinned[pinned_count++];
}

void sanitize_free(void)
{
    while (device_count)
        kit_free(&sanitize_kit, devices[--device_count]);
    while (pinned_count)
        cuda_host_free(&sanitize_kit.device, pinned[--pinned_count]);
}

void sanitize_read(cuda_address_t from, void *to, uint64_t bytes)
{
    kit_read(&sanitize_kit, from, to, bytes);
}

/* ---- launches ------------------------------------------------------------------------------- */
static xp_status_t stream_idle(void)
{
    xp_clock_t clock = xp_clock_system();
    return cuda_stream_wait(&sanitize_kit.device, sanitize_kit.stream, &clock,
                            kit_in(SANITIZE_LIMIT_S));
}

void sanitize_launch(uint32_t kernel, uint32_t blocks, uint32_t threads, void **parameters)
{
    CHECK_OK(cuda_launch(&sanitize_kit.device, kernels[kernel], blocks, threads,
                         sanitize_kit.stream, parameters));
    CHECK_OK(stream_idle());
}

static bool over; /* the launch beside the script */
static uint64_t script_deadline_ns;

bool sanitize_failed(const char *file, int line, const char *what)
{
    fprintf(stderr, "%s:%d: failed: %s\n", file, line, what);
    return false;
}
bool sanitize_goes_on(const char *file, int line, const char *what)
{
    if (__atomic_load_n(&over, __ATOMIC_ACQUIRE) || xp_monotonic_ns() > script_deadline_ns)
        return sanitize_failed(file, line, what);
    sched_yield();
    return true;
}

static void *script_main(void *context)
{
    bool (*script)(void);
    memcpy(&script, context, sizeof(script));
    const bool good = script();
    if (!good)
        life_word_end(&sanitize_life->word[0]);
    return good ? context : NULL;
}

xp_status_t sanitize_try(bool (*script)(void), uint32_t kernel, uint32_t threads, void **parameters,
                         bool *good_out)
{
    pthread_t thread;
    void *good;
    __atomic_store_n(&over, false, __ATOMIC_RELEASE);
    script_deadline_ns = kit_in(SANITIZE_LIMIT_S / 2);
    CHECK(pthread_create(&thread, NULL, script_main, &script) == 0);
    xp_status_t status = cuda_launch(&sanitize_kit.device, kernels[kernel], 1, threads,
                                     sanitize_kit.stream, parameters);
    if (status == XP_OK)
        status = stream_idle();
    __atomic_store_n(&over, true, __ATOMIC_RELEASE);
    CHECK(pthread_join(thread, &good) == 0);
    *good_out = good != NULL;
    return status;
}

void sanitize_play(bool (*script)(void), uint32_t kernel, uint32_t threads, void **parameters)
{
    bool good;
    CHECK_OK(sanitize_try(script, kernel, threads, parameters, &good));
    CHECK(good);
}

/* ---- values --------------------------------------------------------------------------------- */
uint16_t sanitize_value(uint64_t seed, uint64_t index)
{
    return sanitize_bf16((float)((index + index / 67 * 5 + seed) % 32));
}
float sanitize_float(uint16_t bits)
{
    const uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, sizeof(value));
    return value;
}
uint16_t sanitize_bf16(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof(bits));
    const uint16_t near = (uint16_t)(bits >> 16), far = (uint16_t)(near + 1);
    const double less = fabs((double)value - sanitize_float(near));
    const double more = fabs((double)sanitize_float(far) - value);
    return less < more || (less == more && near % 2 == 0) ? near : far;
}

float sanitize_partial(uint64_t seed, uint32_t member, uint64_t index)
{
    if (index % 5 == 0)
        return member ? 0.0f : (float)(257 + index % 127 * 2);
    return (float)((index * 7 + member * 31 + seed) % 211) * 0.37f + 0.011f * (float)member;
}

void sanitize_case(const char *format, ...)
{
    va_list arguments;
    cases++;
    va_start(arguments, format);
    vprintf(format, arguments);
    va_end(arguments);
    printf(": as it should be\n");
}

/* ---- all ------------------------------------------------------------------------------------ */
static void load(const cuda_image_t *image, const char *const *names, uint32_t first,
                 uint32_t count)
{
    static uint32_t loaded;
    CHECK_OK(cuda_module_load(&sanitize_kit.device, image, names + first, count, &modules[loaded++],
                              kernels + first));
}

static void begin(void)
{
    static const char *const names[SANITIZE_KERNELS] = {
        "stage_put",         "stage_wait",       "stage_take",           "stage_call",
        "stage_describe",    "stage_page_start", "stage_partials_start", "stage_post",
        "stage_close",       "stage_scheduler",  "stage_relay",          "stage_relay_describe",
        "stage_test_planted"};
    kit_open(&sanitize_kit, STAGING);
    load(&cuda_image_stage_kernels, names, SANITIZE_PUT, SANITIZE_SCHEDULER - SANITIZE_PUT);
    load(&cuda_image_stage_scheduler, names, SANITIZE_SCHEDULER, 1);
    load(&cuda_image_stage_relay, names, SANITIZE_RELAY, 2);
    load(&cuda_image_tests_stage_test, names, SANITIZE_PLANTED, 1);
    void *life;
    CHECK_OK(cuda_host_alloc(&sanitize_kit.device, sizeof(*sanitize_life), &life));
    memset(life, 0, sizeof(*sanitize_life));
    sanitize_life = life;
}

static void end(void)
{
    sanitize_free();
    cuda_host_free(&sanitize_kit.device, sanitize_life);
    for (uint32_t i = 0; i < sizeof(modules) / sizeof(modules[0]); i++)
        cuda_module_unload(&modules[i]);
    kit_close(&sanitize_kit);
}

/* A word past the end of an allocation is still within the driver's, so this ends well without the
 * tool. With it the launch may fail, and with it the context. */
static int planted(void)
{
    const cuda_address_t words = sanitize_device(4, NULL);
    uint32_t at = 1;
    void *parameters[] = {(void *)&words, &at};
    xp_status_t status = cuda_launch(&sanitize_kit.device, kernels[SANITIZE_PLANTED], 1, 64,
                                     sanitize_kit.stream, parameters);
    if (status == XP_OK)
        status = stream_idle();
    printf("planted: the launch %s\n", status == XP_OK ? "ended" : "failed");
    return 0;
}

static bool wanted(int count, char **arguments, const char *part)
{
    for (int i = 1; i < count; i++)
        if (strcmp(arguments[i], part) == 0)
            return true;
    return count == 1;
}

int main(int count, char **arguments)
{
    setvbuf(stdout, NULL, _IOLBF, 0);
    begin();
    if (count == 2 && strcmp(arguments[1], "planted") == 0)
        return planted();
    if (count == 2 && strcmp(arguments[1], "planted-rows") == 0) {
        sanitize_short_rows();
        return 0;
    }
    if (wanted(count, arguments, "launches"))
        sanitize_launches();
    if (wanted(count, arguments, "scheduler")) {
        sanitize_scheduler();
        sanitize_dispatch();
    }
    if (wanted(count, arguments, "relay"))
        sanitize_relay();
    end();
    printf("%u cases, 0 failed: stage_sanitize\n", cases);
    return cases ? 0 : 1;
}
