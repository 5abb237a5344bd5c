/* SPDX-License-Identifier: MIT */
/*
 * Loads and launches the FFN kernels. Constant after loading; launches allocate nothing and wait
 * for nothing.
 */
#include "ffn/cuda/kernels.h"

#include <string.h>

#include "ffn/cuda/bulk_shape.h"
#include "ffn/cuda/decode_shape.h"

CUDA_IMAGE_DECLARE(ffn_decode);
CUDA_IMAGE_DECLARE(ffn_bulk);
CUDA_IMAGE_DECLARE(ffn_grouped);
CUDA_IMAGE_DECLARE(ffn_few);

_Static_assert(FFN_KERNEL_BULK_PLAN == FFN_KERNEL_BULK_ROUTE + BULK_ROUTE_SIZES, "routers");

#define KERNELS_ALIGNMENT  256u
#define KERNELS_SHARE_MOST 1.11 /* times the equal share */

static const char *const kernels_names[FFN_KERNEL_COUNT] = {
    [FFN_KERNEL_BULK_ROUTE] = "ffn_bulk_route_8",
    [FFN_KERNEL_BULK_ROUTE + 1] = "ffn_bulk_route_16",
    [FFN_KERNEL_BULK_ROUTE + 2] = "ffn_bulk_route_32",
    [FFN_KERNEL_BULK_PLAN] = "ffn_bulk_plan",
    [FFN_KERNEL_BULK_REDUCE] = "ffn_bulk_reduce",
    [FFN_KERNEL_REDUCE] = "ffn_reduce",
    [FFN_KERNEL_ACTIVATE] = "ffn_activate",
    [FFN_KERNEL_GATE_BF16] = "ffn_grouped_gate_bf16",
    [FFN_KERNEL_DOWN_BF16] = "ffn_grouped_down_bf16",
    [FFN_KERNEL_GATE_F16] = "ffn_grouped_gate_f16",
    [FFN_KERNEL_DOWN_F16] = "ffn_grouped_down_f16",
    [FFN_KERNEL_DECODE] = "ffn_decode",
    [FFN_KERNEL_FEW_ROUTE] = "ffn_few_route",
    [FFN_KERNEL_FEW_BF16] = "ffn_few_bf16",
    [FFN_KERNEL_FEW_F16] = "ffn_few_f16",
    [FFN_KERNEL_FEW_RESIDENT] = "ffn_few_resident",
};

static xp_status_t kernels_shared(const ffn_cuda_kernels_t *kernels, uint32_t which, uint32_t bytes)
{
    return CUDA_CALL(kernels->device->driver, cuFuncSetAttribute, kernels->function[which],
                     CUDA_FUNCTION_MAX_DYNAMIC_SHARED_BYTES, (int)bytes);
}

/* Boxes of the grouped products' stages; where they lie and how large the matrix is, the device
 * replaces. */
static xp_status_t kernels_map(const cuda_device_t *device, ffn_cuda_map_t *map_out)
{
    const uint64_t size[2] = {GROUPED_DEPTH, GROUPED_BOX_ROWS}, pitch[1] = {GROUPED_DEPTH * 2};
    const uint32_t box[2] = {GROUPED_DEPTH, GROUPED_BOX_ROWS}, step[2] = {1, 1};
    cuda_tensor_map_t map;
    XP_TRY(CUDA_CALL(device->driver, cuTensorMapEncodeTiled, &map, CUDA_MAP_UINT16, 2, NULL, size,
                     pitch, box, step, CUDA_MAP_NOT_INTERLEAVED, CUDA_MAP_SWIZZLE_128,
                     CUDA_MAP_L2_128, CUDA_MAP_FILL_ZEROS));
    memcpy(map_out, &map, sizeof(*map_out));
    return XP_OK;
}

static xp_status_t kernels_prepare(ffn_cuda_kernels_t *kernels)
{
    const cuda_device_t *device = kernels->device;
    int fit, registers;
    XP_TRY(kernels_shared(kernels, FFN_KERNEL_DECODE, DECODE_SHARED_BYTES));
    XP_TRY(CUDA_CALL(device->driver, cuOccupancyMaxActiveBlocksPerMultiprocessor, &fit,
                     kernels->function[FFN_KERNEL_DECODE], (int)DECODE_THREADS,
                     DECODE_SHARED_BYTES));
    if (fit < 1)
        return xp_fail(XP_UNSUPPORTED, "cuda:%d (%s) does not take a block of %s", device->ordinal,
                       device->info.name, kernels_names[FFN_KERNEL_DECODE]);
    XP_TRY(CUDA_CALL(device->driver, cuFuncGetAttribute, &registers, CUDA_FUNCTION_REGISTERS,
                     kernels->function[FFN_KERNEL_DECODE]));
    if (registers > (int)DECODE_MOST_REGISTERS)
        return xp_fail(XP_UNSUPPORTED,
                       "%s takes %d registers a thread; with more than %u nobody else's kernels "
                       "would start beside it",
                       kernels_names[FFN_KERNEL_DECODE], registers, DECODE_MOST_REGISTERS);
    for (uint32_t i = 0; i < BULK_ROUTE_SIZES; i++)
        XP_TRY(kernels_shared(kernels, FFN_KERNEL_BULK_ROUTE + i,
                              BULK_ROUTE_BYTES(i, FFN_CUDA_MAX_EXPERTS)));
    XP_TRY(kernels_map(device, &kernels->map));
    for (uint32_t i = FFN_KERNEL_GATE_BF16; i <= FFN_KERNEL_DOWN_F16; i++)
        XP_TRY(kernels_shared(kernels, i, GROUPED_SHARED_BYTES));
    for (uint32_t i = FFN_KERNEL_FEW_BF16; i <= FFN_KERNEL_FEW_RESIDENT; i++)
        XP_TRY(kernels_shared(kernels, i, FEW_SHARED_BYTES));
    return XP_OK;
}

xp_status_t ffn_cuda_kernels_load(const cuda_device_t *device, uint32_t blocks,
                                  ffn_cuda_kernels_t *kernels_out)
{
    ffn_cuda_kernels_t loaded = {.device = device};
    const uint32_t multiprocessors = (uint32_t)device->info.multiprocessors;
    xp_status_t status;
    if (device->info.capability != FFN_CUDA_CAPABILITY)
        return xp_fail(XP_UNSUPPORTED,
                       "cuda:%d (%s) has compute capability %d.%d; the FFN kernels need 9.0",
                       device->ordinal, device->info.name, device->info.capability / 10,
                       device->info.capability % 10);
    if (!device->info.cooperative)
        return xp_fail(XP_UNSUPPORTED, "cuda:%d (%s) has no cooperative launches", device->ordinal,
                       device->info.name);
    if (multiprocessors > FFN_CUDA_MAX_BLOCKS)
        return xp_fail(XP_UNSUPPORTED, "cuda:%d has %u multiprocessors; at most %u are supported",
                       device->ordinal, multiprocessors, FFN_CUDA_MAX_BLOCKS);
    if (blocks > multiprocessors)
        return xp_fail(XP_INVALID, "%u blocks, but cuda:%d has %u multiprocessors", blocks,
                       device->ordinal, multiprocessors);
    loaded.blocks = blocks ? blocks : multiprocessors;
    XP_TRY_GOTO(status, failed,
                cuda_module_load(device, &cuda_image_ffn_decode, kernels_names + FFN_KERNEL_DECODE,
                                 1, &loaded.decode, loaded.function + FFN_KERNEL_DECODE));
    XP_TRY_GOTO(status, failed,
                cuda_module_load(device, &cuda_image_ffn_bulk, kernels_names, FFN_KERNEL_GATE_BF16,
                                 &loaded.bulk, loaded.function));
    XP_TRY_GOTO(status, failed,
                cuda_module_load(device, &cuda_image_ffn_grouped,
                                 kernels_names + FFN_KERNEL_GATE_BF16,
                                 FFN_KERNEL_DECODE - FFN_KERNEL_GATE_BF16, &loaded.grouped,
                                 loaded.function + FFN_KERNEL_GATE_BF16));
    XP_TRY_GOTO(status, failed,
                cuda_module_load(device, &cuda_image_ffn_few, kernels_names + FFN_KERNEL_FEW_ROUTE,
                                 FFN_KERNEL_COUNT - FFN_KERNEL_FEW_ROUTE, &loaded.few,
                                 loaded.function + FFN_KERNEL_FEW_ROUTE));
    XP_TRY_GOTO(status, failed, kernels_prepare(&loaded));
    *kernels_out = loaded;
    return XP_OK;
failed:
    ffn_cuda_kernels_unload(&loaded);
    return status;
}

void ffn_cuda_kernels_unload(ffn_cuda_kernels_t *kernels)
{
    cuda_module_unload(&kernels->few);
    cuda_module_unload(&kernels->grouped);
    cuda_module_unload(&kernels->bulk);
    cuda_module_unload(&kernels->decode);
    *kernels = (ffn_cuda_kernels_t){0};
}

xp_status_t ffn_cuda_signature_check(const ffn_cuda_signature_t *s)
{
    const uint32_t last = s->experts ? s->shared_intermediate : s->intermediate;
    if (s->hidden == 0 || s->intermediate == 0 || s->hidden % FFN_CUDA_WIDTH_MULTIPLE ||
        s->intermediate % FFN_CUDA_WIDTH_MULTIPLE || last % FFN_CUDA_WIDTH_MULTIPLE)
        return xp_fail(XP_INVALID, "FFN of %u to %u (shared %u): widths are multiples of %u",
                       s->hidden, s->intermediate, s->shared_intermediate, FFN_CUDA_WIDTH_MULTIPLE);
    if (s->dtype > FFN_CUDA_F16)
        return xp_fail(XP_UNSUPPORTED, "FFN weights of type %u; the device kernels take BF16, FP16",
                       s->dtype);
    if (s->experts == 0)
        return XP_OK;
    if (s->experts > FFN_CUDA_MAX_EXPERTS || s->top_k == 0 || s->top_k > s->experts ||
        s->top_k > FFN_CUDA_MAX_TOP_K)
        return xp_fail(XP_UNSUPPORTED, "%u of %u experts; at most %u of %u are supported", s->top_k,
                       s->experts, FFN_CUDA_MAX_TOP_K, FFN_CUDA_MAX_EXPERTS);
    if (s->groups > FFN_CUDA_MAX_GROUPS || (s->groups > 1 && s->experts % s->groups) ||
        (s->groups > 1 && s->experts / s->groups * s->top_groups < s->top_k))
        return xp_fail(XP_UNSUPPORTED, "%u experts in %u groups, %u of them chosen (at most %u)",
                       s->experts, s->groups, s->top_groups, FFN_CUDA_MAX_GROUPS);
    if (s->router_dtype != FFN_CUDA_F32 && s->router_dtype != s->dtype)
        return xp_fail(XP_UNSUPPORTED, "router of type %u with weights of type %u", s->router_dtype,
                       s->dtype);
    return XP_OK;
}

static void kernels_widen(uint32_t *field, uint32_t value)
{
    if (*field < value)
        *field = value;
}

void ffn_cuda_limits_add(ffn_cuda_limits_t *limits, const ffn_cuda_signature_t *s)
{
    uint32_t chosen = ffn_cuda_decode_rows(s) * s->top_k;
    if (chosen > s->experts)
        chosen = s->experts;
    if (s->experts == 0)
        chosen = 1;
    kernels_widen(&limits->hidden, s->hidden);
    kernels_widen(&limits->experts, s->experts);
    kernels_widen(&limits->top_k, s->experts ? s->top_k : 0);
    kernels_widen(&limits->decode_rows, ffn_cuda_decode_rows(s));
    kernels_widen(&limits->decode_elements,
                  chosen * s->intermediate + (s->experts ? s->shared_intermediate : 0));
    kernels_widen(&limits->row_elements, (s->experts ? s->top_k : 1) * s->intermediate +
                                             (s->experts ? s->shared_intermediate : 0));
}

void ffn_cuda_shares_adjust(uint32_t blocks, const uint32_t (*cycles)[FFN_CUDA_MAX_BLOCKS],
                            uint32_t (*shares)[FFN_CUDA_MAX_BLOCKS + 1])
{
    for (uint32_t phase = 0; phase < 2; phase++) {
        const double even = (double)FFN_CUDA_SHARE_ONE / blocks;
        const bool equal = shares[phase][blocks] == 0;
        double share[FFN_CUDA_MAX_BLOCKS], sum = 0, mean = 0, at = 0, most = 1;
        for (uint32_t i = 0; i < blocks; i++)
            mean += (double)cycles[phase][i] / blocks;
        for (uint32_t i = 0; i < blocks; i++) {
            const double now = equal ? even : (double)(shares[phase][i + 1] - shares[phase][i]);
            /* Half the way: when some end early, the others' last part is faster than the rest. */
            share[i] = cycles[phase][i] ? now * (1 + 0.5 * (mean / cycles[phase][i] - 1)) : now;
            sum += share[i];
        }
        for (uint32_t i = 0; i < blocks; i++) {
            share[i] *= blocks / sum;
            most = share[i] > most ? share[i] : most;
        }
        /* Where one would get too much, all move towards the even share. */
        const double keep = most > KERNELS_SHARE_MOST ? (KERNELS_SHARE_MOST - 1) / (most - 1) : 1;
        for (uint32_t i = 0; i < blocks; i++) {
            shares[phase][i] = (uint32_t)at;
            at += (1 + (share[i] - 1) * keep) * even;
        }
        shares[phase][blocks] = FFN_CUDA_SHARE_ONE;
    }
}

typedef struct kernels_carve {
    cuda_address_t base;
    uint64_t used;
} kernels_carve_t;

static void *kernels_take(kernels_carve_t *carve, uint64_t bytes)
{
    void *at = (void *)(uintptr_t)(carve->base + carve->used);
    carve->used += (bytes + KERNELS_ALIGNMENT - 1) / KERNELS_ALIGNMENT * KERNELS_ALIGNMENT;
    return at;
}

static uint32_t kernels_tiles(const ffn_cuda_limits_t *limits, uint32_t rows, uint32_t tile_rows)
{
    return rows * limits->top_k / tile_rows + limits->experts + rows / tile_rows + 1;
}

static uint64_t kernels_carve(const ffn_cuda_limits_t *limits, cuda_address_t base,
                              ffn_cuda_workspace_t *w)
{
    kernels_carve_t carve = {.base = base};
    const uint64_t decode = limits->decode_rows, rows = limits->bulk_rows;
    const uint64_t pairs = rows * limits->top_k;
    w->meeting = kernels_take(&carve, sizeof(ffn_cuda_meeting_t));
    w->logits = kernels_take(&carve, decode * limits->experts * sizeof(w->logits[0]));
    w->decode_pitch = limits->decode_elements;
    w->shares = kernels_take(&carve, 2 * sizeof(w->shares[0]));
    w->cycles = kernels_take(&carve, 2 * sizeof(w->cycles[0]));
    w->decode_activations = kernels_take(&carve, decode * w->decode_pitch * 2);
    w->bulk_rows = limits->bulk_rows;
    w->max_tiles = 0;
    if (rows == 0)
        return carve.used;
    const uint32_t few = limits->bulk_rows < FEW_ROWS_MOST ? limits->bulk_rows : FEW_ROWS_MOST;
    w->max_tiles = kernels_tiles(limits, limits->bulk_rows, FFN_CUDA_TILE_ROWS);
    if (w->max_tiles < kernels_tiles(limits, few, FEW_TILE_ROWS))
        w->max_tiles = kernels_tiles(limits, few, FEW_TILE_ROWS);
    w->counts = kernels_take(&carve, limits->experts * sizeof(uint32_t));
    w->tile_count = kernels_take(&carve, 2 * sizeof(uint32_t));
    w->arrived = kernels_take(&carve, FEW_ROUTE_ARRIVED * sizeof(w->arrived[0]));
    w->chosen = kernels_take(&carve, pairs * sizeof(uint32_t));
    w->weights = kernels_take(&carve, pairs * sizeof(float));
    w->pair_at = kernels_take(&carve, pairs * sizeof(uint32_t));
    w->row_ids = kernels_take(&carve, pairs * sizeof(uint32_t));
    w->tiles = kernels_take(&carve, w->max_tiles * sizeof(ffn_cuda_tile_t));
    w->taken = kernels_take(&carve, 2 * sizeof(uint32_t));
    w->maps = kernels_take(&carve, FFN_CUDA_MAPS(limits->experts) * sizeof(ffn_cuda_map_t));
    w->activations = kernels_take(&carve, rows * limits->row_elements * 2);
    w->products = kernels_take(&carve, (pairs + rows) * limits->hidden * sizeof(float));
    return carve.used;
}

uint64_t ffn_cuda_workspace_bytes(const ffn_cuda_limits_t *limits)
{
    ffn_cuda_workspace_t unused = {0};
    return kernels_carve(limits, 0, &unused);
}

void ffn_cuda_workspace_carve(const ffn_cuda_limits_t *limits, cuda_address_t base,
                              ffn_cuda_workspace_t *workspace_out)
{
    *workspace_out = (ffn_cuda_workspace_t){0};
    kernels_carve(limits, base, workspace_out);
}

static xp_status_t kernels_launch(const ffn_cuda_kernels_t *kernels, uint32_t which,
                                  uint32_t blocks, uint32_t threads, uint32_t shared_bytes,
                                  cuda_stream_t stream, void **parameters)
{
    return CUDA_CALL(kernels->device->driver, cuLaunchKernel, kernels->function[which], blocks, 1,
                     1, threads, 1, 1, shared_bytes, stream, parameters, NULL);
}

static xp_status_t kernels_decode_launch(const ffn_cuda_kernels_t *kernels, cuda_address_t lane,
                                         cuda_address_t queue, uint32_t look_ahead,
                                         cuda_stream_t stream)
{
    void *parameters[] = {&lane, &queue, &look_ahead};
    return CUDA_CALL(kernels->device->driver, cuLaunchCooperativeKernel,
                     kernels->function[FFN_KERNEL_DECODE], kernels->blocks, 1, 1, DECODE_THREADS, 1,
                     1, DECODE_SHARED_BYTES, stream, parameters);
}

xp_status_t ffn_cuda_decode(const ffn_cuda_kernels_t *kernels, cuda_address_t lane,
                            cuda_stream_t stream)
{
    return kernels_decode_launch(kernels, lane, 0, 0, stream);
}

xp_status_t ffn_cuda_resident(const ffn_cuda_kernels_t *kernels, cuda_address_t queue,
                              bool look_ahead, cuda_stream_t stream)
{
    return kernels_decode_launch(kernels, 0, queue, look_ahead, stream);
}

xp_status_t ffn_cuda_few_resident(const ffn_cuda_kernels_t *kernels, cuda_address_t queue,
                                  cuda_stream_t stream)
{
    void *parameters[] = {&queue};
    return CUDA_CALL(kernels->device->driver, cuLaunchCooperativeKernel,
                     kernels->function[FFN_KERNEL_FEW_RESIDENT], kernels->blocks, 1, 1, FEW_THREADS,
                     1, 1, FEW_SHARED_BYTES, stream, parameters);
}

/* Elements of the activations that one row has. */
static uint64_t kernels_width(const ffn_cuda_signature_t *s)
{
    return s->experts ? (uint64_t)s->top_k * s->intermediate + s->shared_intermediate
                      : s->intermediate;
}

/* The launches of one layer, one after the other; a failed one ends it. */
typedef struct kernels_sequence {
    const ffn_cuda_kernels_t *kernels;
    cuda_stream_t stream;
    const ffn_cuda_watch_t *watch;
    xp_status_t status;
} kernels_sequence_t;

static void kernels_next(kernels_sequence_t *sequence, const char *step, uint32_t which,
                         uint32_t blocks, uint32_t threads, uint32_t shared_bytes,
                         void **parameters)
{
    blocks = blocks ? blocks : 1;
    if (sequence->status != XP_OK)
        return;
    sequence->status = kernels_launch(sequence->kernels, which, blocks, threads, shared_bytes,
                                      sequence->stream, parameters);
    if (sequence->watch && sequence->status == XP_OK)
        sequence->watch->queued(sequence->watch->context, step);
}

static uint32_t kernels_parts(uint32_t whole, uint32_t part)
{
    return (whole + part - 1) / part;
}

/* Launches that together do the products, none of which takes much more than FFN_CUDA_PIECE_NS. */
static void kernels_shares(kernels_sequence_t *sequence, const char *step, uint32_t kernel,
                           uint64_t macs, uint32_t blocks, cuda_address_t lane)
{
    const uint64_t most = (uint64_t)FFN_CUDA_MACS_NS * FFN_CUDA_PIECE_NS;
    uint32_t share, shares = (uint32_t)((macs + most - 1) / most);
    void *parameters[] = {&lane, &share, &shares};
    shares = shares ? shares : 1;
    for (share = 0; share < shares; share++)
        kernels_next(sequence, step, kernel, blocks, GROUPED_THREADS, GROUPED_SHARED_BYTES,
                     parameters);
}

static uint32_t kernels_blocks(const ffn_cuda_kernels_t *kernels, uint32_t blocks)
{
    return blocks == 0 || blocks > kernels->blocks ? kernels->blocks : blocks;
}

uint32_t ffn_cuda_route_size(const ffn_cuda_kernels_t *kernels, uint32_t capacity_rows)
{
    uint32_t size = 0;
    while (size + 1 < BULK_ROUTE_SIZES &&
           kernels_parts(capacity_rows, BULK_ROUTE_ROWS(size)) > kernels->blocks)
        size++;
    return size;
}

xp_status_t ffn_cuda_bulk_watched(const ffn_cuda_kernels_t *kernels,
                                  const ffn_cuda_signature_t *signature, uint32_t capacity_rows,
                                  uint32_t blocks, cuda_address_t lane, cuda_stream_t stream,
                                  const ffn_cuda_watch_t *watch)
{
    const bool half = signature->dtype == FFN_CUDA_F16;
    const uint32_t pairs = capacity_rows * signature->top_k;
    const uint64_t macs = kernels_width(signature) * signature->hidden * capacity_rows;
    kernels_sequence_t sequence = {.kernels = kernels, .stream = stream, .watch = watch};
    void *parameters[] = {&lane};
    const uint32_t size = ffn_cuda_route_size(kernels, capacity_rows);
    void *plan[] = {&lane, (void *)&kernels->map};
    blocks = kernels_blocks(kernels, blocks);
    if (pairs)
        kernels_next(&sequence, "router", FFN_KERNEL_BULK_ROUTE + size,
                     kernels_parts(capacity_rows, BULK_ROUTE_ROWS(size)), BULK_ROUTE_THREADS,
                     BULK_ROUTE_BYTES(size, signature->experts), parameters);
    kernels_next(&sequence, "plan", FFN_KERNEL_BULK_PLAN,
                 1 + kernels_parts(pairs, BULK_PLAN_THREADS) +
                     BULK_PLAN_MAP_BLOCKS(signature->experts),
                 BULK_PLAN_THREADS, 0, plan);
    kernels_shares(&sequence, "gate", half ? FFN_KERNEL_GATE_F16 : FFN_KERNEL_GATE_BF16, 2 * macs,
                   blocks, lane);
    kernels_shares(&sequence, "down", half ? FFN_KERNEL_DOWN_F16 : FFN_KERNEL_DOWN_BF16, macs,
                   blocks, lane);
    kernels_next(&sequence, "reduce", FFN_KERNEL_BULK_REDUCE, capacity_rows, BULK_THREADS, 0,
                 parameters);
    return sequence.status;
}

xp_status_t ffn_cuda_bulk(const ffn_cuda_kernels_t *kernels, const ffn_cuda_signature_t *signature,
                          uint32_t capacity_rows, uint32_t blocks, cuda_address_t lane,
                          cuda_stream_t stream)
{
    return ffn_cuda_bulk_watched(kernels, signature, capacity_rows, blocks, lane, stream, NULL);
}

uint32_t ffn_cuda_few_rows(const ffn_cuda_signature_t *signature)
{
    /* The router's logits lie in the place of the products. */
    const uint64_t room = (uint64_t)(signature->top_k + 1) * signature->hidden;
    return room >= signature->experts ? FEW_ROWS_MOST : 0;
}

xp_status_t ffn_cuda_few_watched(const ffn_cuda_kernels_t *kernels,
                                 const ffn_cuda_signature_t *signature, uint32_t capacity_rows,
                                 uint32_t blocks, cuda_address_t lane, cuda_stream_t stream,
                                 const ffn_cuda_watch_t *watch)
{
    const uint32_t products =
        signature->dtype == FFN_CUDA_F16 ? FFN_KERNEL_FEW_F16 : FFN_KERNEL_FEW_BF16;
    const uint32_t routers = kernels_parts(signature->experts, FEW_ROUTE_EXPERTS) *
                             kernels_parts(capacity_rows ? capacity_rows : 1, FEW_ROUTE_ROWS);
    kernels_sequence_t sequence = {.kernels = kernels, .stream = stream, .watch = watch};
    uint32_t down = 0;
    void *parameters[] = {&lane, &down};
    if (capacity_rows > ffn_cuda_few_rows(signature))
        return xp_fail(XP_INVALID, "%u rows; the products of few rows take %u", capacity_rows,
                       ffn_cuda_few_rows(signature));
    blocks = kernels_blocks(kernels, blocks);
    kernels_next(&sequence, "router", FFN_KERNEL_FEW_ROUTE, routers, FEW_ROUTE_THREADS, 0,
                 parameters);
    kernels_next(&sequence, "gate", products, blocks, FEW_THREADS, FEW_SHARED_BYTES, parameters);
    down = 1;
    kernels_next(&sequence, "down", products, blocks, FEW_THREADS, FEW_SHARED_BYTES, parameters);
    kernels_next(&sequence, "reduce", FFN_KERNEL_BULK_REDUCE, capacity_rows, BULK_THREADS, 0,
                 parameters);
    return sequence.status;
}

xp_status_t ffn_cuda_few(const ffn_cuda_kernels_t *kernels, const ffn_cuda_signature_t *signature,
                         uint32_t capacity_rows, uint32_t blocks, cuda_address_t lane,
                         cuda_stream_t stream)
{
    return ffn_cuda_few_watched(kernels, signature, capacity_rows, blocks, lane, stream, NULL);
}

xp_status_t ffn_cuda_reduce(const ffn_cuda_kernels_t *kernels, uint32_t capacity_rows,
                            uint32_t hidden, cuda_address_t lane, cuda_stream_t stream)
{
    const uint64_t work = ((uint64_t)capacity_rows * hidden / 4 + BULK_THREADS - 1) / BULK_THREADS;
    const uint32_t most = kernels->blocks * 8;
    void *parameters[] = {&lane};
    return kernels_launch(kernels, FFN_KERNEL_REDUCE,
                          work < 1 ? 1 : (work > most ? most : (uint32_t)work), BULK_THREADS, 0,
                          stream, parameters);
}

xp_status_t ffn_cuda_activate(const ffn_cuda_kernels_t *kernels, cuda_address_t gate,
                              cuda_address_t up, uint64_t elements, ffn_cuda_dtype_t dtype,
                              uint32_t activation, cuda_stream_t stream)
{
    const uint64_t work = (elements / 8 + BULK_THREADS - 1) / BULK_THREADS;
    const uint32_t most = kernels->blocks * 8;
    uint32_t type = dtype;
    void *parameters[] = {&gate, &up, &elements, &type, &activation};
    return kernels_launch(kernels, FFN_KERNEL_ACTIVATE,
                          work < 1 ? 1 : (work > most ? most : (uint32_t)work), BULK_THREADS, 0,
                          stream, parameters);
}
