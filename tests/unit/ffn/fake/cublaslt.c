/* SPDX-License-Identifier: MIT */
/*
 * As much of cuBLASLt as ffn/cuda/library.c calls, over memory that the host can read: products in
 * the order in which they are asked for, whatever the stream. An algorithm holds for the shape that
 * it was chosen for, and for no other.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef struct layout {
    int type;
    uint64_t rows, columns;
    int64_t pitch;
} layout_t;

typedef struct algorithm {
    uint64_t columns, type, unused[6];
} algorithm_t;

typedef struct choice {
    algorithm_t algorithm;
    size_t workspace_bytes;
    int status;
    float waves;
    int reserved[4];
} choice_t;

/* Products so far, and those that used activations on a second stream (one use, at start, is free):
 * where a layer's lie depends on its scratch alone, whatever its rows. */
uint32_t fake_cublaslt_products, fake_cublaslt_mixed;
static struct {
    const void *activations;
    void *stream;
    uint32_t streams;
} used[16];
static void *written[2]; /* by the two products before: gate's and up's place */

static void note(const void *activations, void *stream)
{
    for (uint32_t i = 0; i < 16; i++) {
        if (used[i].activations == activations && used[i].stream == stream)
            return;
        if (used[i].activations == activations && used[i].streams == 2) {
            fake_cublaslt_mixed++;
            return;
        }
        if (used[i].activations == activations || !used[i].activations) {
            used[i].activations = activations;
            used[i].stream = stream;
            used[i].streams++;
            return;
        }
    }
}

enum { TYPE_F32 = 0, TYPE_F16 = 2, TYPE_BF16 = 14 };

static float element_load(const void *at, uint64_t index, int type)
{
    uint16_t bits = ((const uint16_t *)at)[index];
    if (type == TYPE_F16) {
        _Float16 half;
        memcpy(&half, &bits, 2);
        return (float)half;
    }
    const uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, 4);
    return value;
}

static void element_store(void *at, uint64_t index, int type, float value)
{
    if (type == TYPE_F32) {
        ((float *)at)[index] = value;
    } else if (type == TYPE_F16) {
        ((_Float16 *)at)[index] = (_Float16)value;
    } else {
        uint32_t wide;
        memcpy(&wide, &value, 4);
        ((uint16_t *)at)[index] = (uint16_t)((wide + 0x7fff + (wide >> 16 & 1)) >> 16);
    }
}

static int make(void **out, size_t bytes)
{
    *out = calloc(1, bytes);
    return *out ? 0 : 3;
}

#define EXPORTED __attribute__((visibility("default")))
EXPORTED int cublasLtCreate(void **handle)
{
    return make(handle, 8);
}
EXPORTED int cublasLtDestroy(void *handle)
{
    memset(used, 0, sizeof(used));
    free(handle);
    return 0;
}
EXPORTED int cublasLtMatmulDescCreate(void **product, int compute, int scale)
{
    return compute == 68 && scale == 0 ? make(product, 8) : 7;
}
EXPORTED int cublasLtMatmulDescDestroy(void *product)
{
    free(product);
    return 0;
}
EXPORTED int cublasLtMatmulDescSetAttribute(void *product, int attribute, const void *value,
                                            size_t bytes)
{
    (void)product;
    return attribute == 3 && bytes == 4 && *(const int32_t *)value == 1 ? 0 : 7;
}
EXPORTED int cublasLtMatrixLayoutCreate(void **layout, int type, uint64_t rows, uint64_t columns,
                                        int64_t pitch)
{
    const int status = make(layout, sizeof(layout_t));
    if (status == 0)
        *(layout_t *)*layout = (layout_t){type, rows, columns, pitch};
    return status;
}
EXPORTED int cublasLtMatrixLayoutDestroy(void *layout)
{
    free(layout);
    return 0;
}
EXPORTED int cublasLtMatmulPreferenceCreate(void **preference)
{
    return make(preference, 8);
}
EXPORTED int cublasLtMatmulPreferenceDestroy(void *preference)
{
    free(preference);
    return 0;
}
EXPORTED int cublasLtMatmulPreferenceSetAttribute(void *preference, int attribute,
                                                  const void *value, size_t bytes)
{
    (void)preference;
    (void)value;
    return attribute == 1 && bytes == 8 ? 0 : 7;
}
EXPORTED int cublasLtMatmulAlgoGetHeuristic(void *handle, void *product, void *a, void *b, void *c,
                                            void *d, void *preference, int wanted,
                                            choice_t *choices, int *found)
{
    (void)handle;
    (void)product;
    (void)a;
    (void)c;
    (void)preference;
    (void)wanted;
    *choices = (choice_t){.algorithm = {.columns = ((layout_t *)b)->columns,
                                        .type = (uint64_t)((layout_t *)d)->type}};
    *found = 1;
    return 0;
}

/* d[rows of a' by columns of b] = a' x b, all of them by columns. */
EXPORTED int cublasLtMatmul(void *handle, void *product, const void *alpha, const void *a,
                            void *a_as, const void *b, void *b_as, const void *beta, const void *c,
                            void *c_as, void *d, void *d_as, const algorithm_t *algorithm,
                            void *workspace, size_t workspace_bytes, void *stream)
{
    const layout_t *left = a_as, *right = b_as, *out = d_as;
    (void)handle;
    (void)product;
    (void)c;
    (void)c_as;
    (void)workspace;
    (void)workspace_bytes;
    if (*(const float *)alpha != 1 || *(const float *)beta != 0 || left->rows != right->rows ||
        left->columns != out->rows || right->columns != out->columns ||
        algorithm->columns != right->columns || algorithm->type != (uint64_t)out->type)
        return 7;
    fake_cublaslt_products++;
    if (b == written[0])
        note(b, stream);
    written[0] = written[1];
    written[1] = d;
    for (uint64_t column = 0; column < out->columns; column++)
        for (uint64_t row = 0; row < out->rows; row++) {
            double sum = 0;
            for (uint64_t k = 0; k < left->rows; k++)
                sum += (double)element_load(a, row * (uint64_t)left->pitch + k, left->type) *
                       element_load(b, column * (uint64_t)right->pitch + k, right->type);
            element_store(d, column * (uint64_t)out->pitch + row, out->type, (float)sum);
        }
    return 0;
}
