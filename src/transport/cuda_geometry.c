/* SPDX-License-Identifier: MIT */
/* Offsets and sizes of an arena on a CUDA device. Pure functions without a driver, any thread. */
#include "transport/arena.h"
#include "transport/cuda_transport.h"

uint64_t transport_cuda_plain_bytes(const transport_geometry_t *geometry)
{
    return transport_arena_bytes(geometry);
}
uint64_t transport_cuda_input_offset(const transport_geometry_t *geometry)
{
    return transport_arena_input_offset(geometry);
}
uint64_t transport_cuda_output_offset(const transport_geometry_t *geometry)
{
    return transport_arena_output_offset(geometry);
}
uint64_t transport_cuda_partial_offset(const transport_geometry_t *geometry)
{
    return transport_arena_partial_offset(geometry);
}
uint64_t transport_cuda_partial_bytes(const transport_geometry_t *geometry)
{
    return transport_partial_bytes(geometry);
}
