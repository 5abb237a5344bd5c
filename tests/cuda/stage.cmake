# SPDX-License-Identifier: MIT
# Device program of the direct lane and the relay: two GPUs, real processes. Where there are none it
# exits with 77, "skipped".
if(NOT TARGET xpool_stage OR NOT COMMAND xpool_cuda_images)
  return()
endif()
add_executable(cuda_stage_device ${CMAKE_SOURCE_DIR}/tests/cuda/stage_device.c
               ${CMAKE_SOURCE_DIR}/tests/cuda/stage_roles.c
               ${CMAKE_SOURCE_DIR}/tests/cuda/kit.c ${CMAKE_SOURCE_DIR}/tests/cuda/agent.c)
set_target_properties(cuda_stage_device PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/tests)
target_include_directories(cuda_stage_device PRIVATE ${CMAKE_SOURCE_DIR}/tests/cuda)
xpool_cuda_images(cuda_stage_device tests ${CMAKE_SOURCE_DIR}/tests/cuda/transport_echo.cu
                  ${CMAKE_SOURCE_DIR}/tests/cuda/stage_test.cu)
target_link_libraries(cuda_stage_device PRIVATE xpool_stage)
add_test(NAME cuda/stage-device COMMAND cuda_stage_device)
set_tests_properties(cuda/stage-device PROPERTIES LABELS cuda TIMEOUT 330 SKIP_RETURN_CODE 77 RUN_SERIAL TRUE)
# All shapes' orders, attaches and ends over a libcuda without a GPU (tests.cmake), which computes nothing.
add_test(NAME cuda/stage-shapes-rehearsal COMMAND cuda_stage_device 1 shapes)
set_tests_properties(cuda/stage-shapes-rehearsal PROPERTIES LABELS cuda TIMEOUT 60 SKIP_RETURN_CODE 77
                     ENVIRONMENT "LD_LIBRARY_PATH=${CMAKE_BINARY_DIR}/tests/fake-cuda")

# All kernels of the module, one after the other, for compute-sanitizer: one GPU, one process.
add_executable(cuda_stage_sanitize ${CMAKE_SOURCE_DIR}/tests/cuda/stage_sanitize.c
               ${CMAKE_SOURCE_DIR}/tests/cuda/stage_sanitize_launches.c
               ${CMAKE_SOURCE_DIR}/tests/cuda/stage_sanitize_scheduler.c
               ${CMAKE_SOURCE_DIR}/tests/cuda/stage_sanitize_dispatch.c
               ${CMAKE_SOURCE_DIR}/tests/cuda/stage_sanitize_relay.c
               ${CMAKE_SOURCE_DIR}/tests/cuda/kit.c)
set_target_properties(cuda_stage_sanitize PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/tests)
target_include_directories(cuda_stage_sanitize PRIVATE ${CMAKE_SOURCE_DIR}/tests/cuda)
xpool_cuda_images(cuda_stage_sanitize tests ${CMAKE_SOURCE_DIR}/tests/cuda/transport_echo.cu
                  ${CMAKE_SOURCE_DIR}/tests/cuda/stage_test.cu)
target_link_libraries(cuda_stage_sanitize PRIVATE xpool_stage m)
add_test(NAME cuda/stage-one-process COMMAND cuda_stage_sanitize)
set_tests_properties(cuda/stage-one-process PROPERTIES LABELS cuda TIMEOUT 120 SKIP_RETURN_CODE 77 RUN_SERIAL TRUE)
# The same over a libcuda whose kernels of this module are the steps of the headers, on the host.
add_test(NAME cuda/stage-one-process-rehearsal COMMAND cuda_stage_sanitize)
set_tests_properties(cuda/stage-one-process-rehearsal PROPERTIES LABELS cuda TIMEOUT 120 SKIP_RETURN_CODE 77
                     ENVIRONMENT "LD_LIBRARY_PATH=${CMAKE_BINARY_DIR}/tests/fake-cuda;XPOOL_FAKE_STEPS=1")

# Provider nvshmem, with the same roles.
if(COMMAND xpool_nvshmem_images)
  add_executable(cuda_nvshmem_probe ${CMAKE_SOURCE_DIR}/tests/cuda/nvshmem_probe.c
                 ${CMAKE_SOURCE_DIR}/tests/cuda/stage_roles.c
                 ${CMAKE_SOURCE_DIR}/tests/cuda/kit.c ${CMAKE_SOURCE_DIR}/tests/cuda/agent.c)
  set_target_properties(cuda_nvshmem_probe PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/tests)
  target_include_directories(cuda_nvshmem_probe PRIVATE ${CMAKE_SOURCE_DIR}/tests/cuda)
  xpool_cuda_images(cuda_nvshmem_probe tests ${CMAKE_SOURCE_DIR}/tests/cuda/transport_echo.cu
                    ${CMAKE_SOURCE_DIR}/tests/cuda/stage_test.cu)
  xpool_nvshmem_images(cuda_nvshmem_probe tests ${CMAKE_SOURCE_DIR}/tests/cuda/nvshmem_ping.cu)
  target_link_libraries(cuda_nvshmem_probe PRIVATE xpool_stage)
  if(TARGET xpool_nvshmem)
    add_dependencies(cuda_nvshmem_probe xpool_nvshmem)
  endif()
  add_test(NAME cuda/nvshmem-probe COMMAND cuda_nvshmem_probe)
  set_tests_properties(cuda/nvshmem-probe PROPERTIES LABELS cuda TIMEOUT 300 SKIP_RETURN_CODE 77 RUN_SERIAL TRUE)
endif()
