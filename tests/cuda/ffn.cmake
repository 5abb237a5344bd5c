# SPDX-License-Identifier: MIT
# Device programs of the FFN kernels; where there is no GPU they exit with 77, "skipped".
# tests/cuda/ffn_on_device runs them all on a machine with one.
if(NOT TARGET xpool_ffn OR NOT COMMAND xpool_cuda_images)
  return()
endif()
function(xpool_ffn_program name source)
  add_executable(${name} ${source} ${CMAKE_SOURCE_DIR}/tests/cuda/ffn_kit.c)
  set_target_properties(${name} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/tests)
  target_include_directories(${name} PRIVATE ${CMAKE_SOURCE_DIR}/tests/cuda)
  xpool_cuda_images(${name} tests ${CMAKE_SOURCE_DIR}/tests/cuda/ffn_device.cu)
  target_link_libraries(${name} PRIVATE xpool_ffn m)
endfunction()
xpool_ffn_program(cuda_ffn_kernels ${CMAKE_SOURCE_DIR}/tests/cuda/ffn_kernels.c)
xpool_ffn_program(cuda_ffn_runtime ${CMAKE_SOURCE_DIR}/tests/cuda/ffn_runtime.c)
target_sources(cuda_ffn_runtime PRIVATE ${CMAKE_SOURCE_DIR}/tests/cuda/ffn_load.c)
xpool_cuda_images(cuda_ffn_runtime tests ${CMAKE_SOURCE_DIR}/tests/cuda/ffn_scheduler.cu)
xpool_ffn_program(cuda_ffn_bench ${CMAKE_SOURCE_DIR}/benches/cuda/ffn_bench.c)
target_sources(cuda_ffn_bench PRIVATE ${CMAKE_SOURCE_DIR}/benches/cuda/ffn_bench_ways.c)
add_test(NAME cuda/ffn-kernels COMMAND cuda_ffn_kernels)
add_test(NAME cuda/ffn-runtime COMMAND cuda_ffn_runtime families real mixed)
set_tests_properties(cuda/ffn-kernels cuda/ffn-runtime PROPERTIES LABELS cuda TIMEOUT 180 SKIP_RETURN_CODE 77
                                                 RUN_SERIAL TRUE)
