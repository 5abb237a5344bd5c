/* SPDX-License-Identifier: MIT */
/*
 * cuBLASLt as a table of functions found at run time. The declarations are our own, of the
 * library's binary interface of major version 13.
 *
 * Row-major out[rows][n] = in[rows][k] x w[n][k]^T is, in the library's column-major words, the
 * product of w (k x n, transposed) and in (k x rows).
 */
#include "ffn/cuda/library.h"

#include <dlfcn.h>
#include <stdlib.h>
#include <string.h>

#define LIBRARY_NAME "libcublasLt.so.13"
#define LIBRARY_WORKSPACE_BYTES                                                                    \
    ((uint64_t)32 << 20) /* what the library asks for on this hardware */
#define LIBRARY_ALIGNMENT 256u

enum {
    LIBRARY_TYPE_F32 = 0,
    LIBRARY_TYPE_F16 = 2,
    LIBRARY_TYPE_BF16 = 14,
    LIBRARY_COMPUTE_F32 = 68,
    LIBRARY_TRANSPOSE = 1,
    LIBRARY_ATTRIBUTE_TRANSPOSE_A = 3,
    LIBRARY_ATTRIBUTE_MULTIPROCESSORS = 15,
    LIBRARY_PREFERENCE_WORKSPACE = 1,
};

typedef struct library_algorithm {
    uint64_t data[8];
} library_algorithm_t;

typedef struct library_choice {
    library_algorithm_t algorithm;
    size_t workspace_bytes;
    int status;
    float waves;
    int reserved[4];
} library_choice_t;

/* X(name, parameters): every function returns 0 or an error. */
#define LIBRARY_FUNCTIONS(X)                                                                       \
    X(cublasLtCreate, (void **handle))                                                             \
    X(cublasLtDestroy, (void *handle))                                                             \
    X(cublasLtMatmulDescCreate, (void **product, int compute, int scale))                          \
    X(cublasLtMatmulDescDestroy, (void *product))                                                  \
    X(cublasLtMatmulDescSetAttribute,                                                              \
      (void *product, int attribute, const void *value, size_t bytes))                             \
    X(cublasLtMatrixLayoutCreate,                                                                  \
      (void **layout, int type, uint64_t rows, uint64_t columns, int64_t pitch))                   \
    X(cublasLtMatrixLayoutDestroy, (void *layout))                                                 \
    X(cublasLtMatmulPreferenceCreate, (void **preference))                                         \
    X(cublasLtMatmulPreferenceDestroy, (void *preference))                                         \
    X(cublasLtMatmulPreferenceSetAttribute,                                                        \
      (void *preference, int attribute, const void *value, size_t bytes))                          \
    X(cublasLtMatmulAlgoGetHeuristic,                                                              \
      (void *handle, void *product, void *a, void *b, void *c, void *d, void *preference,          \
       int wanted, library_choice_t *choices, int *found))                                         \
    X(cublasLtMatmul, (void *handle, void *product, const void *alpha, const void *a, void *a_as,  \
                       const void *b, void *b_as, const void *beta, const void *c, void *c_as,     \
                       void *d, void *d_as, const library_algorithm_t *algorithm, void *workspace, \
                       size_t workspace_bytes, cuda_stream_t stream))

struct ffn_library {
    const ffn_cuda_kernels_t *kernels;
    void *shared_object;
    void *handle;
#define X(name, parameters) int(*name) parameters;
    LIBRARY_FUNCTIONS(X)
#undef X
};

/* One product of a plan. */
typedef struct library_product {
    void *product, *weights, *in, *out;
    library_algorithm_t algorithm;
    size_t workspace_bytes;
} library_product_t;

enum { LIBRARY_GATE_UP = 0, LIBRARY_DOWN, LIBRARY_DOWN_PARTIAL, LIBRARY_PRODUCTS };

struct ffn_library_plan {
    ffn_library_t *library;
    ffn_cuda_signature_t signature;
    uint32_t rows;
    library_product_t product[LIBRARY_PRODUCTS];
};

static xp_status_t library_check(int result, const char *call)
{
    if (result == 0)
        return XP_OK;
    return xp_fail(XP_IO, "%s: error %d", call, result);
}
#define LIBRARY_CALL(library, call, ...) library_check((library)->call(__VA_ARGS__), #call)

xp_status_t ffn_library_open(const ffn_cuda_kernels_t *kernels, ffn_library_t **library_out)
{
    ffn_library_t *library = calloc(1, sizeof(*library));
    xp_status_t status;
    if (!library)
        return xp_fail(XP_NO_MEMORY, "no memory for the table of " LIBRARY_NAME);
    library->kernels = kernels;
    library->shared_object = dlopen(LIBRARY_NAME, RTLD_NOW | RTLD_LOCAL);
    if (!library->shared_object) {
        status = xp_fail(XP_UNSUPPORTED,
                         "no " LIBRARY_NAME ": %s; set LD_LIBRARY_PATH to where it is", dlerror());
        goto failed;
    }
#define X(name, parameters)                                                                        \
    if (!(*(void **)&library->name = dlsym(library->shared_object, #name))) {                      \
        status = xp_fail(XP_UNSUPPORTED, LIBRARY_NAME " has no " #name);                           \
        goto failed;                                                                               \
    }
    LIBRARY_FUNCTIONS(X)
#undef X
    XP_TRY_GOTO(status, failed, LIBRARY_CALL(library, cublasLtCreate, &library->handle));
    *library_out = library;
    return XP_OK;
failed:
    ffn_library_close(library);
    return status;
}

void ffn_library_close(ffn_library_t *library)
{
    if (!library)
        return;
    if (library->handle)
        library->cublasLtDestroy(library->handle);
    if (library->shared_object)
        dlclose(library->shared_object);
    free(library);
}

static xp_status_t library_choose(ffn_library_plan_t *plan, library_product_t *p)
{
    ffn_library_t *library = plan->library;
    const uint64_t workspace_bytes = LIBRARY_WORKSPACE_BYTES;
    void *preference = NULL;
    library_choice_t choice;
    int found = 0;
    XP_TRY(LIBRARY_CALL(library, cublasLtMatmulPreferenceCreate, &preference));
    xp_status_t status =
        LIBRARY_CALL(library, cublasLtMatmulPreferenceSetAttribute, preference,
                     LIBRARY_PREFERENCE_WORKSPACE, &workspace_bytes, sizeof(workspace_bytes));
    if (status == XP_OK)
        status = LIBRARY_CALL(library, cublasLtMatmulAlgoGetHeuristic, library->handle, p->product,
                              p->weights, p->in, p->out, p->out, preference, 1, &choice, &found);
    library->cublasLtMatmulPreferenceDestroy(preference);
    if (status == XP_OK && found == 0)
        status = xp_fail(XP_UNSUPPORTED, LIBRARY_NAME " has no algorithm for %u rows of %u by %u",
                         plan->rows, plan->signature.hidden, plan->signature.intermediate);
    if (status != XP_OK)
        return status;
    p->algorithm = choice.algorithm;
    p->workspace_bytes = choice.workspace_bytes;
    return XP_OK;
}

static xp_status_t library_product_make(ffn_library_plan_t *plan, library_product_t *p, uint32_t n,
                                        uint32_t k, int out_type, uint32_t multiprocessors)
{
    ffn_library_t *library = plan->library;
    const int type = plan->signature.dtype == FFN_CUDA_BF16 ? LIBRARY_TYPE_BF16 : LIBRARY_TYPE_F16;
    const int32_t transpose = LIBRARY_TRANSPOSE, limit = (int32_t)multiprocessors;
    XP_TRY(LIBRARY_CALL(library, cublasLtMatmulDescCreate, &p->product, LIBRARY_COMPUTE_F32,
                        LIBRARY_TYPE_F32));
    XP_TRY(LIBRARY_CALL(library, cublasLtMatmulDescSetAttribute, p->product,
                        LIBRARY_ATTRIBUTE_TRANSPOSE_A, &transpose, sizeof(transpose)));
    if (multiprocessors)
        XP_TRY(LIBRARY_CALL(library, cublasLtMatmulDescSetAttribute, p->product,
                            LIBRARY_ATTRIBUTE_MULTIPROCESSORS, &limit, sizeof(limit)));
    XP_TRY(LIBRARY_CALL(library, cublasLtMatrixLayoutCreate, &p->weights, type, k, n, k));
    XP_TRY(LIBRARY_CALL(library, cublasLtMatrixLayoutCreate, &p->in, type, k, plan->rows, k));
    XP_TRY(LIBRARY_CALL(library, cublasLtMatrixLayoutCreate, &p->out, out_type, n, plan->rows, n));
    return library_choose(plan, p);
}

xp_status_t ffn_library_plan_make(ffn_library_t *library, const ffn_cuda_signature_t *signature,
                                  uint32_t rows, uint32_t multiprocessors,
                                  ffn_library_plan_t **plan_out)
{
    const uint32_t hidden = signature->hidden, width = signature->intermediate;
    xp_status_t status;
    if (signature->experts || rows == 0)
        return xp_fail(XP_INVALID, "cuBLASLt plans are for dense layers and at least one row");
    XP_TRY(ffn_cuda_signature_check(signature));
    ffn_library_plan_t *plan = calloc(1, sizeof(*plan));
    if (!plan)
        return xp_fail(XP_NO_MEMORY, "no memory for a cuBLASLt plan");
    plan->library = library;
    plan->signature = *signature;
    plan->rows = rows;
    const int type = signature->dtype == FFN_CUDA_BF16 ? LIBRARY_TYPE_BF16 : LIBRARY_TYPE_F16;
    XP_TRY_GOTO(status, failed,
                library_product_make(plan, &plan->product[LIBRARY_GATE_UP], width, hidden, type,
                                     multiprocessors));
    XP_TRY_GOTO(status, failed,
                library_product_make(plan, &plan->product[LIBRARY_DOWN], hidden, width, type,
                                     multiprocessors));
    XP_TRY_GOTO(status, failed,
                library_product_make(plan, &plan->product[LIBRARY_DOWN_PARTIAL], hidden, width,
                                     LIBRARY_TYPE_F32, multiprocessors));
    *plan_out = plan;
    return XP_OK;
failed:
    ffn_library_plan_free(plan);
    return status;
}

void ffn_library_plan_free(ffn_library_plan_t *plan)
{
    if (!plan)
        return;
    for (uint32_t i = 0; i < LIBRARY_PRODUCTS; i++) {
        library_product_t *p = &plan->product[i];
        if (p->product)
            plan->library->cublasLtMatmulDescDestroy(p->product);
        if (p->weights)
            plan->library->cublasLtMatrixLayoutDestroy(p->weights);
        if (p->in)
            plan->library->cublasLtMatrixLayoutDestroy(p->in);
        if (p->out)
            plan->library->cublasLtMatrixLayoutDestroy(p->out);
    }
    free(plan);
}

static uint64_t library_activations(const ffn_cuda_signature_t *signature, uint32_t rows)
{
    const uint64_t bytes = (uint64_t)rows * signature->intermediate * 2;
    return (bytes + LIBRARY_ALIGNMENT - 1) / LIBRARY_ALIGNMENT * LIBRARY_ALIGNMENT;
}

static uint64_t library_activation_bytes(const ffn_library_plan_t *plan)
{
    return library_activations(&plan->signature, plan->rows);
}

uint64_t ffn_library_scratch_bound(const ffn_cuda_signature_t *signature, uint32_t rows)
{
    return 2 * library_activations(signature, rows) + LIBRARY_WORKSPACE_BYTES;
}

uint64_t ffn_library_scratch_bytes(const ffn_library_plan_t *plan)
{
    return ffn_library_scratch_bound(&plan->signature, plan->rows);
}

static void *library_pointer(cuda_address_t address)
{
    return (void *)(uintptr_t)address;
}

static xp_status_t library_multiply(const ffn_library_plan_t *plan, uint32_t which,
                                    const void *weights, cuda_address_t in, cuda_address_t out,
                                    cuda_address_t workspace, cuda_stream_t stream)
{
    const library_product_t *p = &plan->product[which];
    const float one = 1.0f, zero = 0.0f;
    return LIBRARY_CALL(plan->library, cublasLtMatmul, plan->library->handle, p->product, &one,
                        weights, p->weights, library_pointer(in), p->in, &zero,
                        library_pointer(out), p->out, library_pointer(out), p->out, &p->algorithm,
                        library_pointer(workspace), p->workspace_bytes, stream);
}

xp_status_t ffn_library_run(const ffn_library_plan_t *plan, const ffn_cuda_part_t *part,
                            cuda_address_t input, cuda_address_t output, cuda_address_t partial,
                            cuda_address_t scratch, cuda_stream_t stream)
{
    const uint64_t bytes = library_activation_bytes(plan);
    const cuda_address_t gate = scratch, up = scratch + bytes, workspace = scratch + 2 * bytes;
    XP_TRY(library_multiply(plan, LIBRARY_GATE_UP, part->gate, input, gate, workspace, stream));
    XP_TRY(library_multiply(plan, LIBRARY_GATE_UP, part->up, input, up, workspace, stream));
    XP_TRY(ffn_cuda_activate(
        plan->library->kernels, gate, up, (uint64_t)plan->rows * plan->signature.intermediate,
        (ffn_cuda_dtype_t)plan->signature.dtype, plan->signature.activation, stream));
    return library_multiply(plan, output ? LIBRARY_DOWN : LIBRARY_DOWN_PARTIAL, part->down, gate,
                            output ? output : partial, workspace, stream);
}
