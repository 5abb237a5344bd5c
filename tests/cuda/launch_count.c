/* SPDX-License-Identifier: MIT */
/*
 * Counts what a process asks of the driver, by NVIDIA's own profiling interface: the driver loads
 * this library where CUDA_INJECTION64_PATH names it, and CUPTI calls back for every call of the
 * driver's interface, whoever makes it. Counts are a mapped file, read by tests/cuda/soak_on_device
 * while the process runs: XPOOL_COUNT_FOLDER/<pid>.count. XPOOL_COUNT_CUPTI names libcupti.
 */
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cupti.h>

#define COUNT_MAGIC   0x01544e5543505801ull
#define COUNT_ENTRIES 2048u

typedef struct count_entry {
    char name[56];
    uint64_t count;
} count_entry_t;

typedef struct count_file {
    uint64_t magic;
    uint32_t entries, subscribed;
    char error[112];
    count_entry_t entry[COUNT_ENTRIES]; /* by callback id */
} count_file_t;

static count_file_t *counts;

static void CUPTIAPI on_call(void *context, CUpti_CallbackDomain domain, CUpti_CallbackId id,
                             const void *data)
{
    const CUpti_CallbackData *call = data;
    (void)context;
    if (domain != CUPTI_CB_DOMAIN_DRIVER_API || call->callbackSite != CUPTI_API_ENTER ||
        id >= COUNT_ENTRIES)
        return;
    count_entry_t *entry = &counts->entry[id];
    if (!entry->name[0] && call->functionName) /* all writers write the same */
        strncpy(entry->name, call->functionName, sizeof(entry->name) - 1);
    __atomic_fetch_add(&entry->count, 1, __ATOMIC_RELAXED);
}

static int give_up(const char *what, const char *why)
{
    snprintf(counts->error, sizeof(counts->error), "%s: %s", what, why ? why : "unknown");
    return 1; /* the process goes on, uncounted */
}

int InitializeInjection(void);

/* Called by the driver when it starts. */
__attribute__((visibility("default"))) int InitializeInjection(void)
{
    typedef CUptiResult (*subscribe_t)(CUpti_SubscriberHandle *, CUpti_CallbackFunc, void *);
    typedef CUptiResult (*enable_t)(uint32_t, CUpti_SubscriberHandle, CUpti_CallbackDomain);
    const char *folder = getenv("XPOOL_COUNT_FOLDER"), *library = getenv("XPOOL_COUNT_CUPTI");
    CUpti_SubscriberHandle subscriber;
    char path[4096];
    if (!folder || counts)
        return 1;
    snprintf(path, sizeof(path), "%s/%d.count", folder, (int)getpid());
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (fd < 0 || ftruncate(fd, sizeof(*counts)) != 0)
        return 1;
    void *map = mmap(NULL, sizeof(*counts), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (map == MAP_FAILED)
        return 1;
    counts = map;
    counts->entries = COUNT_ENTRIES;
    counts->magic = COUNT_MAGIC;
    void *cupti = dlopen(library ? library : "libcupti.so.13", RTLD_NOW | RTLD_LOCAL);
    if (!cupti)
        return give_up("dlopen", dlerror());
    subscribe_t subscribe = (subscribe_t)dlsym(cupti, "cuptiSubscribe");
    enable_t enable = (enable_t)dlsym(cupti, "cuptiEnableDomain");
    if (!subscribe || !enable)
        return give_up("dlsym", dlerror());
    CUptiResult result = subscribe(&subscriber, on_call, NULL);
    if (result == CUPTI_SUCCESS)
        result = enable(1, subscriber, CUPTI_CB_DOMAIN_DRIVER_API);
    if (result != CUPTI_SUCCESS) {
        char number[32];
        snprintf(number, sizeof(number), "CUPTI error %d", (int)result);
        return give_up("subscribe", number);
    }
    __atomic_store_n(&counts->subscribed, 1u, __ATOMIC_RELEASE);
    return 1;
}
