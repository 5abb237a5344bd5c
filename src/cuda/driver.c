/* SPDX-License-Identifier: MIT */
/*
 * Loads the driver library and keeps the process's table, which is written once under pthread_once
 * and constant from then on. Never links the library, never unloads it: kernels may be running.
 */
#include "cuda/driver.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

static cuda_driver_t process_driver;
static xp_status_t process_status;
static char process_text[XP_ERROR_TEXT_MAX];
static pthread_once_t process_once = PTHREAD_ONCE_INIT;

static xp_status_t status_of_result(int result)
{
    switch (result) {
    case CUDA_RESULT_SUCCESS:
        return XP_OK;
    case CUDA_RESULT_NOT_READY:
        return XP_RETRY;
    case CUDA_RESULT_OUT_OF_MEMORY:
        return XP_NO_MEMORY;
    case CUDA_RESULT_INVALID_VALUE:
    case CUDA_RESULT_INVALID_HANDLE:
        return XP_INVALID;
    case CUDA_RESULT_NO_DEVICE:
    case CUDA_RESULT_INVALID_DEVICE:
    case CUDA_RESULT_NO_BINARY_FOR_GPU:
    case CUDA_RESULT_NOT_SUPPORTED:
        return XP_UNSUPPORTED;
    case CUDA_RESULT_NOT_FOUND:
        return XP_NOT_FOUND;
    case CUDA_RESULT_MPS_CONNECTION_FAILED:
    case CUDA_RESULT_MPS_SERVER_NOT_READY:
    case CUDA_RESULT_MPS_MAX_CLIENTS:
    case CUDA_RESULT_MPS_MAX_CONNECTIONS:
        return XP_PEER;
    case CUDA_RESULT_MPS_RPC_FAILURE:
    case CUDA_RESULT_MPS_CLIENT_TERMINATED:
        return XP_FATAL;
    default:
        /* 700 to 720 but for the launch's own resources are what a faulting kernel leaves behind.
         */
        return (result >= CUDA_RESULT_ILLEGAL_ADDRESS && result <= CUDA_RESULT_LAUNCH_FAILED &&
                result != 701) ||
                       result == 46 || result == 999
                   ? XP_FATAL
                   : XP_IO;
    }
}

xp_status_t cuda_check_at(const cuda_driver_t *driver, int result, const char *call,
                          const char *file, int line)
{
    if (result == CUDA_RESULT_SUCCESS)
        return XP_OK;
    xp_status_t status = status_of_result(result);
    if (status == XP_RETRY)
        return status;
    const char *name = NULL, *text = NULL;
    if (!driver->cuGetErrorName || driver->cuGetErrorName(result, &name) != CUDA_RESULT_SUCCESS)
        name = NULL;
    if (!driver->cuGetErrorString || driver->cuGetErrorString(result, &text) != CUDA_RESULT_SUCCESS)
        text = NULL;
    return xp_fail_at(status, file, line, "%s: %s (%d): %s", call, name ? name : "unknown error",
                      result, text ? text : "the driver has no text for it");
}

xp_status_t cuda_driver_fill(const cuda_symbols_t *symbols, cuda_driver_t *driver_out)
{
    cuda_driver_t driver = {0};
#define X(name, symbol, parameters)                                                                \
    *(void **)&driver.name = symbols->find(symbols->context, #symbol);                             \
    if (!driver.name)                                                                              \
        return xp_fail(XP_UNSUPPORTED,                                                             \
                       "the NVIDIA driver has no %s: CUDA %d.%d or later is needed; update it",    \
                       #symbol, CUDA_DRIVER_VERSION_MIN / 1000,                                    \
                       CUDA_DRIVER_VERSION_MIN % 1000 / 10);
    CUDA_DRIVER_FUNCTIONS(X)
#undef X
    XP_TRY(CUDA_CALL(&driver, cuDriverGetVersion, &driver.version));
    if (driver.version < CUDA_DRIVER_VERSION_MIN)
        return xp_fail(XP_UNSUPPORTED,
                       "the NVIDIA driver speaks CUDA %d.%d; %d.%d or later is needed",
                       driver.version / 1000, driver.version % 1000 / 10,
                       CUDA_DRIVER_VERSION_MIN / 1000, CUDA_DRIVER_VERSION_MIN % 1000 / 10);
    XP_TRY(CUDA_CALL(&driver, cuInit, 0));
    int devices;
    XP_TRY(CUDA_CALL(&driver, cuDeviceGetCount, &devices));
    if (devices == 0)
        return xp_fail(XP_UNSUPPORTED, "the NVIDIA driver shows no device to this process "
                                       "(CUDA_VISIBLE_DEVICES hides those not named in it)");
    *driver_out = driver;
    return XP_OK;
}

static void *library_find(void *library, const char *symbol)
{
    return dlsym(library, symbol);
}

static xp_status_t load_library(void)
{
    /* Read by the driver when it is initialised; an explicit choice of the user stays. */
    setenv("CUDA_MODULE_LOADING", "EAGER", 0);
    void *library = dlopen(CUDA_DRIVER_LIBRARY, RTLD_NOW | RTLD_LOCAL);
    if (!library)
        return xp_fail(XP_UNSUPPORTED, "no CUDA on this machine: %s", dlerror());
    cuda_symbols_t symbols = {library_find, library};
    return cuda_driver_fill(&symbols, &process_driver);
}

static void load_once(void)
{
    process_status = load_library();
    if (process_status != XP_OK)
        snprintf(process_text, sizeof(process_text), "%s", xp_error_last()->text);
}

xp_status_t cuda_driver_load(const cuda_driver_t **driver_out)
{
    pthread_once(&process_once, load_once);
    if (process_status != XP_OK)
        return xp_fail(process_status, "%s", process_text);
    *driver_out = &process_driver;
    return XP_OK;
}
