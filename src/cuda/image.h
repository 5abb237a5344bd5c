/* SPDX-License-Identifier: MIT */
/*
 * Device code embedded in the program: one fatbin for each .cu file of a module. The build makes
 * the objects (cmake/XpoolCuda.cmake); src/ffn/cuda/dense.cu becomes `cuda_image_ffn_dense`. An
 * image of a build without nvcc is empty, and cuda_module_load() says so.
 */
#ifndef XPOOL_CUDA_IMAGE_H
#define XPOOL_CUDA_IMAGE_H

typedef struct cuda_image {
    const char *name;
    const unsigned char *begin, *end;
} cuda_image_t;

#define CUDA_IMAGE_DECLARE(name) extern const cuda_image_t cuda_image_##name
#endif
