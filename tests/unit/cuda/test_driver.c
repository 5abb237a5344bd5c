/* SPDX-License-Identifier: MIT */
/* Loader, device, device code, VMM, streams and graphs over the fake driver, each call failed in
 * turn. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "cuda/stream.h"
#include "cuda/vmm.h"
#include "fake_driver.h"

static int runs;
static void run_count(const fake_launch_t *launch)
{
    uint32_t value;
    memcpy(&value, launch->values[0], sizeof(value));
    runs += (int)value;
}
static const fake_kernel_t kernels[] = {{"count", run_count, {4}}, {"other", run_count, {4}}};
static const unsigned char image_bytes[4];
static const cuda_image_t image = {"test_image", image_bytes, image_bytes + 4};
static const cuda_image_t empty_image = {"test_empty", NULL, NULL};
static cuda_device_t device;

static int setup(void **state)
{
    runs = 0;
    fake_reset(kernels, 2);
    return cuda_device_open(&fake_driver, 1, &device) == XP_OK ? 0 : -1;
}

static int teardown(void **state)
{
    cuda_device_close(&device);
    return fake.contexts == 0 && fake_objects() == 0 ? 0 : -1;
}

static void says(const char *text)
{
    if (!strstr(xp_error_last()->text, text))
        fail_msg("'%s' does not say '%s'", xp_error_last()->text, text);
}

static void test_fill(void **state)
{
    cuda_driver_t driver;
    cuda_symbols_t symbols = {fake_find, NULL};
    assert_int_equal(cuda_driver_fill(&symbols, &driver), XP_OK);
    assert_int_equal(driver.version, CUDA_DRIVER_VERSION_MIN);
    assert_ptr_equal(driver.cuMemMap, fake_driver.cuMemMap);

    cuda_driver_t untouched, before;
    memset(&untouched, 0x77, sizeof(untouched));
    before = untouched;
#define X(name, symbol, parameters)                                                                \
    symbols.context = (void *)(uintptr_t) #symbol;                                                 \
    assert_int_equal(cuda_driver_fill(&symbols, &untouched), XP_UNSUPPORTED);                      \
    says("has no " #symbol ":");
    CUDA_DRIVER_FUNCTIONS(X)
#undef X
    symbols.context = NULL;
    fake.version = 12080;
    assert_int_equal(cuda_driver_fill(&symbols, &untouched), XP_UNSUPPORTED);
    says("speaks CUDA 12.8; 13.0 or later");
    fake.version = CUDA_DRIVER_VERSION_MIN;
    fake.devices = 0;
    assert_int_equal(cuda_driver_fill(&symbols, &untouched), XP_UNSUPPORTED);
    says("CUDA_VISIBLE_DEVICES");
    fake.devices = 2;
    fake.fail_name = "cuInit";
    fake.fail_result = CUDA_RESULT_NO_DEVICE;
    assert_int_equal(cuda_driver_fill(&symbols, &untouched), XP_UNSUPPORTED);
    says("cuInit: CUDA_ERROR_FAKE (100)");
    assert_memory_equal(&untouched, &before, sizeof(before));
}

/* Whatever this machine is, the answer is an ordinary status, twice the same. */
static void test_load(void **state)
{
    const cuda_driver_t *driver = NULL, *again = NULL;
    xp_status_t status = cuda_driver_load(&driver);
    assert_int_equal(cuda_driver_load(&again), status);
    assert_ptr_equal(driver, again);
    if (status == XP_OK) {
        assert_true(driver->version >= CUDA_DRIVER_VERSION_MIN);
        return;
    }
    assert_null(driver);
    assert_true(xp_error_last()->text[0] != 0);
}

static void test_statuses(void **state)
{
    const struct {
        int result;
        xp_status_t status;
    } wanted[] = {{0, XP_OK},        {1, XP_INVALID},     {2, XP_NO_MEMORY}, {100, XP_UNSUPPORTED},
                  {400, XP_INVALID}, {500, XP_NOT_FOUND}, {600, XP_RETRY},   {700, XP_FATAL},
                  {701, XP_IO},      {719, XP_FATAL},     {720, XP_IO},      {801, XP_UNSUPPORTED},
                  {805, XP_PEER},    {806, XP_FATAL},     {808, XP_PEER},    {810, XP_FATAL},
                  {999, XP_FATAL},   {304, XP_IO}};
    for (size_t i = 0; i < sizeof(wanted) / sizeof(wanted[0]); i++)
        assert_int_equal(cuda_check_at(&fake_driver, wanted[i].result, "cuX", "f", 1),
                         wanted[i].status);
    xp_error_clear();
    cuda_check_at(&fake_driver, 600, "cuX", "f", 1);
    assert_string_equal(xp_error_last()->text, ""); /* "not yet" is no error */
    cuda_check_at(&fake_driver, 2, "cuX", "f", 1);
    assert_string_equal(xp_error_last()->text,
                        "cuX: CUDA_ERROR_OUT_OF_MEMORY (2): the fake driver was told to");
}

static void test_devices(void **state)
{
    cuda_device_info_t infos[1];
    uint32_t count;
    assert_int_equal(cuda_devices_list(&fake_driver, infos, 1, &count), XP_OK);
    assert_int_equal(count, 2);
    assert_string_equal(infos[0].name, "Fake 0");
    assert_string_equal(device.info.uuid, "GPU-01112131-4151-6171-8191-a1b1c1d1e1f1");
    assert_string_equal(device.info.bus_id, "0000:01:00.0");
    assert_int_equal(device.info.capability, 90);
    assert_true(device.info.vmm && device.info.mps);
    assert_int_equal(device.granularity_bytes, FAKE_GRANULARITY);
    cuda_device_t other;
    assert_int_equal(cuda_device_open(&fake_driver, 2, &other), XP_NOT_FOUND);
    says("no device cuda:2: this process sees 2");
    assert_int_equal(cuda_device_open(&fake_driver, -1, &other), XP_NOT_FOUND);
}

/* Runs `operation` with its n-th driver call failed, for every n; nothing may be left each time. */
static void torture(xp_status_t (*operation)(void))
{
    int contexts = fake.contexts, objects = fake_objects();
    for (uint64_t n = 1;; n++) {
        assert_true(n < 100);
        fake.fail_at = n;
        xp_status_t status = operation();
        bool failed = fake.fail_at == 0;
        fake.fail_at = 0;
        if (!failed) {
            assert_int_equal(status, XP_OK);
            return;
        }
        if (status != XP_NO_MEMORY)
            fail_msg("%s failed, status %s", fake.failed, xp_status_name(status));
        says(fake.failed); /* the message names the call */
        assert_int_equal(fake.contexts, contexts);
        assert_int_equal(fake_objects(), objects);
    }
}

static xp_status_t open_device(void)
{
    cuda_device_t other = {0};
    XP_TRY(cuda_device_open(&fake_driver, 0, &other));
    cuda_device_close(&other);
    return XP_OK;
}

static xp_status_t load_module(void)
{
    static const char *const names[] = {"count", "other"};
    cuda_module_t module = {0};
    cuda_function_t functions[2];
    fake.loads = 0;
    XP_TRY(cuda_module_load(&device, &image, names, 2, &module, functions));
    assert_int_equal(fake.loads, 2); /* eagerly */
    cuda_module_unload(&module);
    return XP_OK;
}

static xp_status_t make_blocks(void)
{
    cuda_block_t block = {0}, imported = {0};
    int fd = -1;
    xp_status_t status = cuda_block_create(&device, 1000, &block);
    if (status == XP_OK)
        status = cuda_vmm_export(&device, block.handle, &fd);
    if (status == XP_OK)
        status = cuda_block_import(&device, fd, 1000, &imported);
    if (status == XP_OK) {
        assert_int_equal(block.bytes, FAKE_GRANULARITY);
        assert_true(block.address != imported.address);
        strcpy((char *)(uintptr_t)block.address, "shared");
        assert_string_equal((char *)(uintptr_t)imported.address, "shared");
    } else {
        assert_int_equal(imported.handle, 0);
    }
    if (fd >= 0)
        close(fd);
    cuda_block_destroy(&imported);
    cuda_block_destroy(&block);
    cuda_block_destroy(&block);
    return status;
}

static xp_status_t capture(void)
{
    static const char *const names[] = {"count"};
    cuda_stream_t stream = NULL;
    cuda_graph_exec_t exec = NULL;
    cuda_event_t event = NULL;
    cuda_module_t module = {0};
    cuda_function_t function;
    uint32_t value = 3;
    void *parameters[] = {&value};
    bool capturing = false;
    xp_status_t status;
    XP_TRY_GOTO(status, done, cuda_module_load(&device, &image, names, 1, &module, &function));
    XP_TRY_GOTO(status, done, cuda_stream_create(&device, true, &stream));
    XP_TRY_GOTO(status, done, cuda_event_create(&device, false, &event));
    XP_TRY_GOTO(status, done, cuda_capture_begin(&device, stream));
    capturing = true;
    XP_TRY_GOTO(status, done, cuda_launch(&device, function, 1, 1, stream, parameters));
    value = 4; /* arguments are taken at the launch */
    XP_TRY_GOTO(status, done, cuda_launch(&device, function, 1, 1, stream, parameters));
    capturing = false;
    XP_TRY_GOTO(status, done, cuda_capture_end(&device, stream, &exec));
    runs = 0;
    XP_TRY_GOTO(status, done, cuda_graph_launch(&device, exec, stream));
    XP_TRY_GOTO(status, done, cuda_graph_launch(&device, exec, stream));
    assert_int_equal(runs, 14);
done:
    if (capturing) { /* what was captured of a failed pass is thrown away */
        xp_error_t error = *xp_error_last();
        if (cuda_capture_end(&device, stream, &exec) != XP_OK)
            exec = NULL;
        xp_fail(status, "%s", error.text);
    }
    cuda_graph_destroy(&device, exec);
    cuda_event_destroy(&device, event);
    cuda_stream_destroy(&device, stream);
    cuda_module_unload(&module);
    return status;
}

static xp_status_t register_host(void)
{
    static char page[4096];
    cuda_address_t address;
    void *pinned;
    XP_TRY(cuda_host_register(&device, page, sizeof(page), &address));
    cuda_host_unregister(&device, page);
    XP_TRY(cuda_host_alloc(&device, 100, &pinned));
    cuda_host_free(&device, pinned);
    cuda_host_free(&device, NULL);
    return XP_OK;
}

static void test_ladders(void **state)
{
    torture(open_device);
    torture(load_module);
    torture(make_blocks);
    torture(capture);
    torture(register_host);
}

static void test_module_errors(void **state)
{
    static const char *const names[] = {"missing"};
    cuda_module_t module;
    cuda_function_t function;
    assert_int_equal(cuda_module_load(&device, &empty_image, names, 1, &module, &function),
                     XP_UNSUPPORTED);
    says("without nvcc");
    assert_int_equal(cuda_module_load(&device, &image, names, 1, &module, &function), XP_NOT_FOUND);
    says("device function missing of test_image");
    fake.fail_name = "cuModuleLoadData";
    fake.fail_result = CUDA_RESULT_NO_BINARY_FOR_GPU;
    assert_int_equal(cuda_module_load(&device, &image, names, 1, &module, &function),
                     XP_UNSUPPORTED);
    says("compute capability 9.0");
}

static void test_received_memory(void **state)
{
    cuda_block_t block, imported;
    int fd;
    assert_int_equal(cuda_block_create(&device, 0, &block), XP_INVALID);
    assert_int_equal(cuda_block_create(&device, 1, &block), XP_OK);
    assert_int_equal(cuda_vmm_export(&device, block.handle, &fd), XP_OK);
    /* A size that is not the sender's, and something that is no descriptor: the peer's fault. */
    assert_int_equal(cuda_block_import(&device, fd, FAKE_GRANULARITY + 1, &imported), XP_PEER);
    assert_int_equal(cuda_block_import(&device, -1, 1, &imported), XP_PEER);
    assert_int_equal(cuda_block_import(&device, fd, 0, &imported), XP_INVALID);
    /* The memory outlives its maker's mapping. */
    strcpy((char *)(uintptr_t)block.address, "still here");
    cuda_block_destroy(&block);
    assert_int_equal(cuda_block_import(&device, fd, 1, &imported), XP_OK);
    assert_string_equal((char *)(uintptr_t)imported.address, "still here");
    cuda_block_destroy(&imported);
    close(fd);
}

static uint64_t fake_now;
static uint64_t fake_clock_now(void *context)
{
    return fake_now += 1000;
}
static bool always_busy(cuda_stream_t stream)
{
    return true;
}

static void test_stream_wait(void **state)
{
    cuda_stream_t stream;
    xp_clock_t clock = {fake_clock_now, NULL};
    assert_int_equal(cuda_stream_create(&device, false, &stream), XP_OK);
    assert_int_equal(cuda_stream_wait(&device, stream, &clock, 0), XP_OK);
    fake.busy = always_busy;
    fake_now = 0;
    assert_int_equal(cuda_stream_wait(&device, stream, &clock, 100000), XP_TIMEOUT);
    says("did not end before its deadline");
    fake.fail_name = "cuStreamQuery";
    fake.fail_result = CUDA_RESULT_ILLEGAL_ADDRESS;
    assert_int_equal(cuda_stream_wait(&device, stream, &clock, UINT64_MAX), XP_FATAL);
    cuda_stream_destroy(&device, stream);
    cuda_stream_destroy(&device, NULL);
}

int main(void)
{
#define TEST(name) cmocka_unit_test_setup_teardown(name, setup, teardown)
    const struct CMUnitTest tests[] = {
        TEST(test_fill),
        TEST(test_load),
        TEST(test_statuses),
        TEST(test_devices),
        TEST(test_ladders),
        TEST(test_module_errors),
        TEST(test_received_memory),
        TEST(test_stream_wait),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
