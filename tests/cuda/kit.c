/* SPDX-License-Identifier: MIT */
/* Helpers of the device tests; everything that can block has a limit. */
#include "kit.h"

#include <string.h>
#include <unistd.h>

#include "samples.h"

CUDA_IMAGE_DECLARE(tests_transport_echo);

void kit_open(kit_t *kit, uint64_t pinned_bytes)
{
    static const char *const names[KIT_KERNELS] = {
        "transport_echo", "test_nonsense",       "test_round_trips", "test_ping_pong",
        "test_compute",   "transport_echo_once", "test_answer_ahead"};
    const cuda_driver_t *driver;
    memset(kit, 0, sizeof(*kit));
    if (cuda_driver_load(&driver) != XP_OK) {
        printf("skipped: %s\n", xp_error_last()->text);
        exit(KIT_SKIP);
    }
    CHECK_OK(cuda_device_open(driver, 0, &kit->device));
    if (cuda_image_tests_transport_echo.begin == cuda_image_tests_transport_echo.end) {
        printf("skipped: built without nvcc\n");
        exit(KIT_SKIP);
    }
    CHECK_OK(cuda_module_load(&kit->device, &cuda_image_tests_transport_echo, names, KIT_KERNELS,
                              &kit->module, kit->kernels));
    CHECK_OK(cuda_stream_create(&kit->device, false, &kit->stream));
    CHECK_OK(cuda_stream_create(&kit->device, true, &kit->side));
    kit->pinned_bytes = pinned_bytes;
    CHECK_OK(cuda_host_alloc(&kit->device, pinned_bytes, &kit->pinned));
    kit->hold = kit_alloc(kit, 256);
    kit_hold(kit, 0);
}

void kit_close(kit_t *kit)
{
    kit_free(kit, kit->hold);
    cuda_host_free(&kit->device, kit->pinned);
    cuda_stream_destroy(&kit->device, kit->side);
    cuda_stream_destroy(&kit->device, kit->stream);
    cuda_module_unload(&kit->module);
    cuda_device_close(&kit->device);
}

cuda_address_t kit_alloc(kit_t *kit, uint64_t bytes)
{
    cuda_address_t address;
    CHECK_OK(CUDA_CALL(kit->device.driver, cuMemAlloc, &address, bytes));
    return address;
}

void kit_free(kit_t *kit, cuda_address_t address)
{
    CUDA_IGNORE(kit->device.driver, cuMemFree, address);
}

static void kit_side_wait(kit_t *kit)
{
    xp_clock_t clock = xp_clock_system();
    CHECK_OK(cuda_stream_wait(&kit->device, kit->side, &clock, kit_in(10)));
}

void kit_write(kit_t *kit, cuda_address_t to, const void *from, uint64_t bytes)
{
    CHECK(bytes <= kit->pinned_bytes);
    memcpy(kit->pinned, from, bytes);
    CHECK_OK(CUDA_CALL(kit->device.driver, cuMemcpyHtoDAsync, to, kit->pinned, bytes, kit->side));
    kit_side_wait(kit);
}

void kit_read(kit_t *kit, cuda_address_t from, void *to, uint64_t bytes)
{
    CHECK(bytes <= kit->pinned_bytes);
    CHECK_OK(CUDA_CALL(kit->device.driver, cuMemcpyDtoHAsync, kit->pinned, from, bytes, kit->side));
    kit_side_wait(kit);
    memcpy(to, kit->pinned, bytes);
}

void kit_hold(kit_t *kit, uint32_t mask)
{
    kit_write(kit, kit->hold, &mask, sizeof(mask));
}

uint64_t kit_in(double seconds)
{
    return xp_monotonic_ns() + (uint64_t)(seconds * 1e9);
}

transport_tensor_t kit_tensor(cuda_address_t data, uint64_t rows, uint64_t width)
{
    return (transport_tensor_t){.data = (void *)(uintptr_t)data,
                                .dtype = XP_DTYPE_BF16,
                                .rank = 2,
                                .rows = rows,
                                .width = width,
                                .row_stride = width};
}

uint16_t kit_value(uint64_t seed, uint64_t index)
{
    uint64_t x = (seed + 1) * 0x9e3779b97f4a7c15ull + index * 0xbf58476d1ce4e5b9ull;
    x ^= x >> 29;
    x *= 0x94d049bb133111ebull;
    return (uint16_t)(x >> 40);
}

static int compare_samples(const void *a, const void *b)
{
    uint32_t left = *(const uint32_t *)a, right = *(const uint32_t *)b;
    return left < right ? -1 : left > right;
}

kit_summary_t kit_summarise(uint32_t *samples_ns, uint32_t count)
{
    CHECK(count > 0);
    static uint32_t number;
    qsort(samples_ns, count, sizeof(samples_ns[0]), compare_samples);
    kit_summary_t times = {samples_ns[count / 2] / 1e3, samples_ns[count - 1 - count / 100] / 1e3,
                           samples_ns[count - 1] / 1e3, ""};
    snprintf(times.samples, sizeof(times.samples), "%d-%u", getpid(), ++number);
    samples_keep(times.samples, samples_ns, count);
    return times;
}

void kit_samples(const kit_summary_t *times, const char *metric)
{
    samples_name(times->samples, metric);
}

void kit_row(const char *metric, double value, const char *unit, double floor, const char *target,
             const char *note)
{
    char floor_text[32] = "null";
    if (floor >= 0)
        snprintf(floor_text, sizeof(floor_text), "%.3f", floor);
    printf("{\"metric\": \"%s\", \"value\": %.3f, \"unit\": \"%s\", \"floor\": %s, \"peer\": null, "
           "\"target\": %s%s%s, \"note\": \"%s\"}\n",
           metric, value, unit, floor_text, target ? "\"" : "", target ? target : "null",
           target ? "\"" : "", note);
    fflush(stdout);
}
