# SPDX-License-Identifier: MIT
# Benchmark of elastic KV on one GPU, and its rehearsal over the driver without one.
if(NOT TARGET xpool_library OR NOT COMMAND xpool_cuda_images)
  return()
endif()
add_executable(cuda_kv_bench ${CMAKE_SOURCE_DIR}/benches/cuda/kv_bench.c ${CMAKE_SOURCE_DIR}/tests/cuda/kit.c
               ${CMAKE_SOURCE_DIR}/tests/cuda/agent.c ${CMAKE_SOURCE_DIR}/tests/cuda/client.c)
set_target_properties(cuda_kv_bench PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/tests)
target_include_directories(cuda_kv_bench PRIVATE ${CMAKE_SOURCE_DIR}/tests/cuda)
xpool_cuda_images(cuda_kv_bench tests ${CMAKE_SOURCE_DIR}/tests/cuda/transport_echo.cu)
xpool_cuda_images(cuda_kv_bench benches ${CMAKE_SOURCE_DIR}/benches/cuda/kv_bench.cu)
target_link_libraries(cuda_kv_bench PRIVATE xpool_library)
add_test(NAME cuda/kv-bench COMMAND cuda_kv_bench 7)
set_tests_properties(cuda/kv-bench PROPERTIES LABELS cuda TIMEOUT 120 SKIP_RETURN_CODE 77 RUN_SERIAL TRUE)
if(TARGET fake_cuda AND XPOOL_CUDA_FOUND)
  add_test(NAME cuda/kv-bench-rehearsal COMMAND cuda_kv_bench 3 64)
  set_tests_properties(cuda/kv-bench-rehearsal PROPERTIES LABELS cuda TIMEOUT 120 ENVIRONMENT
                       LD_LIBRARY_PATH=${CMAKE_BINARY_DIR}/tests/fake-cuda)
endif()
