/* SPDX-License-Identifier: MIT */
/*
 * The symmetric heap: what lies where in it, where library and plug-in are found, and joining. The
 * library is never unloaded. One thread uses an object; nothing here runs while kernels stay.
 */
#include "stage/heap.h"

#include <dlfcn.h>
#include <errno.h>
#include <glob.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/clock.h"
#include "cuda/stream.h"
#include "fabric/records.h"
#include "stage/control.h"

#define HEAP_CLEAR_NS (10 * XP_NS_PER_S)
#define HEAP_HOST     "libnvshmem_host.so.3"
#define HEAP_PLUGIN   "libxpool_nvshmem.so"
#define HEAP_SOCKETS  "/tmp/nvshmem-socket-"

struct stage_heap {
    const xpool_nvshmem_plugin_t *plugin;
    const fabric_plan_t *plan;
    uint64_t bytes;
    void *base;                          /* symmetric */
    cuda_address_t peer[FABRIC_MAX_PES]; /* where that of each PE is mapped here, or 0 */
};

/* ---- what lies where ------------------------------------------------------------------------ */
static uint64_t align_up(uint64_t bytes, uint64_t unit)
{
    return (bytes + unit - 1) / unit * unit;
}

/* Adds `bytes` to the PE's part; returns where they begin. */
static uint64_t place(uint64_t *used, uint64_t bytes)
{
    uint64_t at = *used;
    *used += align_up(bytes, STAGE_HEAP_ALIGN_BYTES);
    return at;
}

/* The members of this FfnAgent's groups that hold partials for the others. */
static bool contributes(const fabric_plan_instance_t *instance, uint32_t ffn, uint32_t first)
{
    if (ffn == first || !stage_partials_members(instance, first))
        return false;
    for (uint32_t layer = 0; layer < instance->layers; layer++)
        if ((instance->layer_group[layer] >> ffn & 1) &&
            fabric_group_first(instance->layer_group[layer]) == first)
            return true;
    return false;
}

typedef struct thing {
    stage_heap_kind_t kind;
    uint32_t instance, owner, further;
} thing_t;

static uint64_t arena_bytes(const fabric_plan_instance_t *instance)
{
    transport_geometry_t geometry = stage_geometry(instance);
    return transport_cuda_plain_bytes(&geometry);
}

/* Adds `bytes`, where there are any; *found_out when it is the thing that is looked for. */
static void add(uint64_t *used, uint64_t bytes, thing_t own, const thing_t *looked,
                uint64_t *found_out)
{
    uint64_t at = place(used, bytes);
    if (bytes && looked && memcmp(&own, looked, sizeof(own)) == 0)
        *found_out = at;
}

/* What an FfnAgent holds, in the order of the plan; where the thing is that is looked for. */
static uint64_t walk_ffn(const fabric_plan_t *plan, uint32_t ffn, const thing_t *looked,
                         uint64_t *total_out)
{
    const bool far = plan->provider == FABRIC_PROVIDER_NVSHMEM_FAR;
    uint64_t used = 0, found = STAGE_HEAP_NOWHERE;
    for (uint32_t i = 0; i < plan->instance_count; i++) {
        const fabric_plan_instance_t *one = &plan->instances[i];
        if (!(stage_members(one) >> ffn & 1))
            continue;
        add(&used, stage_page_bytes(one), (thing_t){STAGE_HEAP_PAGE, i, ffn, 0}, looked, &found);
        add(&used, stage_partials_bytes(one, ffn), (thing_t){STAGE_HEAP_PARTIALS, i, ffn, 0},
            looked, &found);
        for (uint32_t r = 0; far && r < fabric_plan_ranks(one); r++)
            add(&used, arena_bytes(one), (thing_t){STAGE_HEAP_OUTBOX, i, ffn, r}, looked, &found);
        for (uint32_t first = 0; far && first < plan->ffn_count; first++)
            if (contributes(one, ffn, first))
                add(&used, stage_partials_bytes(one, first),
                    (thing_t){STAGE_HEAP_MIRROR, i, ffn, first}, looked, &found);
    }
    *total_out = used;
    return found;
}

static uint64_t walk_atn(const fabric_plan_t *plan, uint32_t atn, const thing_t *looked,
                         uint64_t *total_out)
{
    uint64_t used = 0, found = STAGE_HEAP_NOWHERE;
    for (uint32_t i = 0; i < plan->instance_count; i++) {
        const fabric_plan_instance_t *one = &plan->instances[i];
        for (uint32_t r = 0; r < fabric_plan_ranks(one); r++)
            if (one->rank_atn[r] == atn)
                add(&used, arena_bytes(one), (thing_t){STAGE_HEAP_RELAY, i, r, 0}, looked, &found);
    }
    *total_out = used;
    return found;
}

uint64_t stage_heap_bytes(const fabric_plan_t *plan)
{
    uint64_t most = 0, used;
    for (uint32_t f = 0; f < plan->ffn_count; f++) {
        (void)walk_ffn(plan, f, NULL, &used);
        most = used > most ? used : most;
    }
    for (uint32_t a = 0; a < plan->atn_count; a++) {
        (void)walk_atn(plan, a, NULL, &used);
        most = used > most ? used : most;
    }
    return align_up(most, STAGE_GRANULARITY_BYTES);
}

uint64_t stage_heap_offset(const fabric_plan_t *plan, stage_heap_kind_t kind, uint32_t instance,
                           uint32_t owner, uint32_t further)
{
    uint64_t total;
    const thing_t looked = {kind, instance, owner, further};
    if (instance >= plan->instance_count)
        return STAGE_HEAP_NOWHERE;
    if (kind != STAGE_HEAP_RELAY)
        return owner < plan->ffn_count ? walk_ffn(plan, owner, &looked, &total)
                                       : STAGE_HEAP_NOWHERE;
    if (owner >= fabric_plan_ranks(&plan->instances[instance]))
        return STAGE_HEAP_NOWHERE;
    return walk_atn(plan, plan->instances[instance].rank_atn[owner], &looked, &total);
}

/* ---- where library and plug-in are ---------------------------------------------------------- */
/* The first file that matches; a pattern that is cut off matches nothing. */
static bool first_match(const char *pattern, char found[PATH_MAX])
{
    glob_t matches;
    bool is = false;
    if (glob(pattern, 0, NULL, &matches) == 0 && matches.gl_pathc > 0) {
        int length = snprintf(found, PATH_MAX, "%s", matches.gl_pathv[0]);
        is = length > 0 && length < PATH_MAX && access(found, R_OK) == 0;
    }
    globfree(&matches);
    return is;
}

static bool wheel_in(const char *root, char found[PATH_MAX])
{
    char pattern[PATH_MAX];
    int length = snprintf(pattern, sizeof(pattern), "%s/lib/" HEAP_HOST, root);
    return length > 0 && length < PATH_MAX && first_match(pattern, found);
}

/* In the packages of an interpreter's prefix: where torch is, the wheel is. */
static bool wheel_of_prefix(const char *prefix, char found[PATH_MAX])
{
    static const char *const folders[] = {"site-packages", "dist-packages"};
    for (size_t i = 0; i < sizeof(folders) / sizeof(folders[0]); i++) {
        char pattern[PATH_MAX];
        int length =
            snprintf(pattern, sizeof(pattern), "%s/lib/python3*/%s/nvidia/nvshmem/lib/" HEAP_HOST,
                     prefix, folders[i]);
        if (length > 0 && length < PATH_MAX && first_match(pattern, found))
            return true;
    }
    return false;
}

/* `python` is the interpreter's path: PREFIX/bin/python. A link is not followed: a virtual
 * environment's interpreter links to another prefix's. */
static bool wheel_of_python(const char *python, char found[PATH_MAX])
{
    char prefix[PATH_MAX];
    int length = snprintf(prefix, sizeof(prefix), "%s", python);
    if (length <= 0 || length >= PATH_MAX || !strchr(python, '/'))
        return false;
    for (int up = 0; up < 2; up++) {
        char *slash = strrchr(prefix, '/');
        if (!slash)
            return false;
        *slash = 0;
    }
    return wheel_of_prefix(prefix, found);
}

static xp_status_t find_wheel(const char *root, const char *const *pythons, uint32_t count,
                              char found[PATH_MAX])
{
    static const char *const systems[] = {"/usr/local", "/usr"};
    const char *variable = getenv(STAGE_HEAP_ROOT_VARIABLE), *environment = getenv("VIRTUAL_ENV");
    const char *named = root && *root ? root : variable;
    if (named && *named)
        return wheel_in(named, found)
                   ? XP_OK
                   : xp_fail(XP_UNSUPPORTED,
                             "no lib/" HEAP_HOST
                             " in %.300s (fabric.nvshmem_root, or " STAGE_HEAP_ROOT_VARIABLE
                             "): name the folder nvidia/nvshmem of the wheel "
                             "nvidia-nvshmem-cu13",
                             named);
    for (uint32_t i = 0; i < count; i++)
        if (pythons[i] && wheel_of_python(pythons[i], found))
            return XP_OK;
    if (environment && *environment && wheel_of_prefix(environment, found))
        return XP_OK;
    for (size_t i = 0; i < sizeof(systems) / sizeof(systems[0]); i++)
        if (wheel_of_prefix(systems[i], found))
            return XP_OK;
    return xp_fail(XP_UNSUPPORTED,
                   "the wheel nvidia-nvshmem-cu13 is neither beside the models' Python nor in the "
                   "system's; name its folder nvidia/nvshmem with " STAGE_HEAP_ROOT_VARIABLE);
}

static xp_status_t find_plugin(char found[PATH_MAX])
{
    static const char *const beside[] = {"", "/lib", "/../lib", "/.."};
    const char *variable = getenv(STAGE_HEAP_PLUGIN_VARIABLE);
    char program[PATH_MAX], pattern[PATH_MAX + 64];
    if (variable && *variable)
        return first_match(variable, found)
                   ? XP_OK
                   : xp_fail(XP_UNSUPPORTED,
                             "no plug-in %.300s (" STAGE_HEAP_PLUGIN_VARIABLE "): name " HEAP_PLUGIN
                             " or leave the variable out",
                             variable);
    ssize_t length = readlink("/proc/self/exe", program, sizeof(program) - 1);
    if (length > 0) {
        program[length] = 0;
        char *slash = strrchr(program, '/');
        if (slash)
            *slash = 0;
        for (size_t i = 0; i < sizeof(beside) / sizeof(beside[0]); i++) {
            snprintf(pattern, sizeof(pattern), "%s%s/" HEAP_PLUGIN, program, beside[i]);
            if (first_match(pattern, found))
                return XP_OK;
        }
    }
    return xp_fail(XP_UNSUPPORTED, "no " HEAP_PLUGIN " beside the program: this build was made "
                                   "without nvcc or without the wheel nvidia-nvshmem-cu13");
}

xp_status_t stage_heap_find(const char *root, const char *const *pythons, uint32_t count,
                            stage_heap_place_t *place_out)
{
    stage_heap_place_t found;
    XP_TRY(find_wheel(root, pythons, count, found.host));
    XP_TRY(find_plugin(found.plugin));
    *place_out = found;
    return XP_OK;
}

/* ---- joining -------------------------------------------------------------------------------- */
typedef struct variable {
    const char *name, *value;
    bool always; /* the user's own value does not count */
} variable_t;

static xp_status_t set_environment(uint64_t bytes)
{
    char stated[32], most[32], granularity[32];
    snprintf(stated, sizeof(stated), "%llu", (unsigned long long)bytes);
    snprintf(most, sizeof(most), "%llu", (unsigned long long)(bytes + STAGE_HEAP_OWN_BYTES));
    snprintf(granularity, sizeof(granularity), "%u", STAGE_GRANULARITY_BYTES);
    const variable_t variables[] = {
        {"NVSHMEM_DISABLE_NVLS", "1", true}, /* multicast objects can hang the GPUs' fabric */
        {"NVSHMEM_SYMMETRIC_SIZE", stated, true},
        {"NVSHMEM_MAX_MEMORY_PER_GPU", most, true},
        {"NVSHMEM_CUMEM_GRANULARITY", granularity, true},
        {"NVSHMEM_DISABLE_LOCAL_ONLY_PROXY", "1", false},
        {"NVSHMEM_REMOTE_TRANSPORT", "none", false}, /* one host */
        {"NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME", "lo", false},
        {"NVSHMEM_BOOTSTRAP_UID_SOCK_FAMILY", "AF_INET", false},
    };
    for (size_t i = 0; i < sizeof(variables) / sizeof(variables[0]); i++)
        if (setenv(variables[i].name, variables[i].value, variables[i].always) != 0)
            return xp_fail_errno(XP_NO_MEMORY, "cannot set %s", variables[i].name);
    return XP_OK;
}

static xp_status_t load(const stage_heap_place_t *place, const xpool_nvshmem_plugin_t **plugin_out)
{
    /* By its full path first: the plug-in needs it by name, and it is on no search path. */
    if (!dlopen(place->host, RTLD_NOW | RTLD_GLOBAL))
        return xp_fail(XP_UNSUPPORTED, "cannot load NVSHMEM: %.400s", dlerror());
    void *library = dlopen(place->plugin, RTLD_NOW | RTLD_LOCAL);
    if (!library)
        return xp_fail(XP_UNSUPPORTED, "cannot load the plug-in: %.400s", dlerror());
    const xpool_nvshmem_plugin_t *(*table)(void);
    *(void **)&table = dlsym(library, XPOOL_NVSHMEM_SYMBOL);
    const xpool_nvshmem_plugin_t *plugin = table ? table() : NULL;
    if (!plugin)
        return xp_fail(XP_UNSUPPORTED, "%.300s is no plug-in of this program", place->plugin);
    if (plugin->abi != XPOOL_NVSHMEM_ABI || plugin->bytes != sizeof(*plugin))
        return xp_fail(XP_UNSUPPORTED, "%.300s has ABI %u (%u bytes), this build %u (%zu bytes)",
                       place->plugin, plugin->abi, plugin->bytes, XPOOL_NVSHMEM_ABI,
                       sizeof(*plugin));
    *plugin_out = plugin;
    return XP_OK;
}

xp_status_t stage_heap_open(const stage_heap_place_t *place, const fabric_plan_t *plan,
                            stage_heap_t **heap_out)
{
    const xpool_nvshmem_plugin_t *plugin;
    XP_TRY(set_environment(stage_heap_bytes(plan)));
    XP_TRY(load(place, &plugin));
    return stage_heap_wrap(plugin, plan, heap_out);
}

xp_status_t stage_heap_wrap(const xpool_nvshmem_plugin_t *plugin, const fabric_plan_t *plan,
                            stage_heap_t **heap_out)
{
    stage_heap_t *heap = calloc(1, sizeof(*heap));
    if (!heap)
        return xp_fail(XP_NO_MEMORY, "no memory for the symmetric heap's description");
    heap->plugin = plugin;
    heap->plan = plan;
    heap->bytes = stage_heap_bytes(plan);
    *heap_out = heap;
    return XP_OK;
}

xp_status_t stage_heap_make_id(stage_heap_t *heap, unsigned char id_out[XPOOL_NVSHMEM_ID_BYTES])
{
    int result = heap->plugin->make_id(id_out);
    return result == 0 ? XP_OK : xp_fail(XP_IO, "NVSHMEM makes no unique id (error %d)", result);
}

static xp_status_t clear(const stage_heap_t *heap, const cuda_device_t *device)
{
    cuda_stream_t stream;
    xp_clock_t clock = xp_clock_system();
    XP_TRY(cuda_stream_create(device, false, &stream));
    xp_status_t status = CUDA_CALL(device->driver, cuMemsetD8Async,
                                   (cuda_address_t)(uintptr_t)heap->base, 0, heap->bytes, stream);
    if (status == XP_OK)
        status = cuda_stream_wait(device, stream, &clock, xp_monotonic_ns() + HEAP_CLEAR_NS);
    cuda_stream_destroy(device, stream);
    return status;
}

/* With limited support the library names shared memory after the first PE of each GPU. */
static void forget_limited(uint32_t pes)
{
    for (uint32_t pe = 0; pe < pes; pe++) {
        char name[32];
        snprintf(name, sizeof(name), "/mps_shm_%u", pe);
        (void)shm_unlink(name);
    }
}

xp_status_t stage_heap_join(stage_heap_t *heap, const cuda_device_t *device, uint32_t pe,
                            const unsigned char id[XPOOL_NVSHMEM_ID_BYTES])
{
    const uint32_t pes = heap->plan->atn_count + heap->plan->ffn_count;
    if (heap->base || pe >= pes)
        return xp_fail(XP_INVALID, "PE %u of %u joins%s", pe, pes, heap->base ? " again" : "");
    int result = heap->plugin->join(id, (int)pe, (int)pes);
    if (result != 0)
        return xp_fail(XP_FATAL, "PE %u of %u cannot join NVSHMEM (error %d)", pe, pes, result);
    xpool_nvshmem_sharing_t sharing = heap->plugin->sharing();
    if (sharing == XPOOL_NVSHMEM_LIMITED)
        forget_limited(pes);
    if (sharing != XPOOL_NVSHMEM_ALONE && sharing != XPOOL_NVSHMEM_FULL)
        return xp_fail(XP_UNSUPPORTED,
                       "several PEs share %s, and NVSHMEM gives them %s: MPS must run there, "
                       "nvidia-cuda-mps-control be on PATH and CUDA_MPS_ACTIVE_THREAD_PERCENTAGE "
                       "of the PEs be 100 in all",
                       device->info.name,
                       sharing == XPOOL_NVSHMEM_LIMITED ? "limited multi-process support"
                                                        : "an unknown state");
    void *base = heap->plugin->take(heap->bytes);
    if (!base)
        return xp_fail(XP_NO_MEMORY, "no symmetric heap of %llu bytes on %s",
                       (unsigned long long)heap->bytes, device->info.name);
    heap->base = base;
    /* Asked once: later, while kernels stay, the library is not called. */
    for (uint32_t i = 0; i < pes; i++) {
        void *at = i == pe ? base : stage_heap_far(heap) ? NULL : heap->plugin->peer(base, (int)i);
        heap->peer[i] = (cuda_address_t)(uintptr_t)at;
    }
    return clear(heap, device);
}

cuda_image_t stage_heap_image(const stage_heap_t *heap)
{
    return (cuda_image_t){"nvshmem plug-in", heap->plugin->image, heap->plugin->image_end};
}

xp_status_t stage_heap_module_ready(stage_heap_t *heap, const cuda_module_t *module)
{
    int result = heap->plugin->module_ready(module->handle);
    return result == 0 ? XP_OK
                       : xp_fail(XP_FATAL, "NVSHMEM does not take device code (error %d)", result);
}

bool stage_heap_far(const stage_heap_t *heap)
{
    return heap->plan->provider == FABRIC_PROVIDER_NVSHMEM_FAR;
}

cuda_address_t stage_heap_at(const stage_heap_t *heap, uint64_t offset)
{
    XP_ASSERT(heap->base && offset < heap->bytes);
    return (cuda_address_t)(uintptr_t)heap->base + offset;
}

cuda_address_t stage_heap_peer(const stage_heap_t *heap, uint64_t offset, uint32_t pe)
{
    XP_ASSERT(heap->base && offset < heap->bytes && pe < FABRIC_MAX_PES);
    return heap->peer[pe] ? heap->peer[pe] + offset : 0;
}

void stage_heap_close(stage_heap_t *heap)
{
    free(heap);
}

/* ---- what killed processes leave ------------------------------------------------------------ */
void stage_heap_sweep(int pid)
{
    char patterns[2][64];
    glob_t matches;
    snprintf(patterns[0], sizeof(patterns[0]), HEAP_SOCKETS "%d-*", pid);
    snprintf(patterns[1], sizeof(patterns[1]), HEAP_SOCKETS "*-%d", pid);
    for (int i = 0; i < 2; i++) {
        if (glob(patterns[i], GLOB_NOSORT, NULL, &matches) == 0)
            for (size_t m = 0; m < matches.gl_pathc; m++)
                (void)unlink(matches.gl_pathv[m]); /* another user's is not ours to remove */
        globfree(&matches);
    }
}
