# SPDX-License-Identifier: MIT
# Programs that need a GPU. They build everywhere; where there is no GPU they exit with 77, "skipped".
# tests/cuda/run_on_device runs them all on a machine with one.
set(cuda_folder ${CMAKE_SOURCE_DIR}/tests/cuda)
function(xpool_cuda_program name source)
  add_executable(${name} ${source} ${cuda_folder}/kit.c ${cuda_folder}/agent.c ${cuda_folder}/client.c)
  set_target_properties(${name} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/tests)
  target_include_directories(${name} PRIVATE ${cuda_folder})
  xpool_cuda_images(${name} tests ${cuda_folder}/transport_echo.cu)
  target_link_libraries(${name} PRIVATE xpool_transport)
endfunction()
xpool_cuda_program(cuda_transport_single ${cuda_folder}/transport_single.c)
xpool_cuda_program(cuda_transport_kill ${cuda_folder}/transport_kill.c)
xpool_cuda_program(cuda_transport_sanitize ${cuda_folder}/transport_sanitize.c)
xpool_cuda_program(cuda_hop_transport ${CMAKE_SOURCE_DIR}/benches/cuda/hop_transport.c)
add_test(NAME cuda/transport-single COMMAND cuda_transport_single)
add_test(NAME cuda/transport-kill COMMAND cuda_transport_kill)
add_test(NAME cuda/transport-one-process COMMAND cuda_transport_sanitize)
set_tests_properties(cuda/transport-single cuda/transport-kill cuda/transport-one-process
                     PROPERTIES LABELS cuda TIMEOUT 180 SKIP_RETURN_CODE 77 RUN_SERIAL TRUE)

include(${CMAKE_SOURCE_DIR}/tests/cuda/ffn.cmake OPTIONAL)
include(${CMAKE_SOURCE_DIR}/tests/cuda/stage.cmake OPTIONAL)
include(${CMAKE_SOURCE_DIR}/tests/cuda/instance.cmake OPTIONAL)

# A driver without a GPU, under the real one's names, and the programs of all roles over it.
add_library(fake_cuda SHARED ${CMAKE_SOURCE_DIR}/tests/tools/fake_cuda.c)
set_target_properties(fake_cuda PROPERTIES OUTPUT_NAME cuda SUFFIX .so.1
                      LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/tests/fake-cuda)
target_link_libraries(fake_cuda PRIVATE xpool_base ${CMAKE_DL_LIBS})
# The same for provider nvshmem: a plug-in over ordinary memory, and a wheel whose library is empty.
set(fake_nvshmem_folder ${CMAKE_BINARY_DIR}/tests/fake-nvshmem)
add_library(fake_nvshmem SHARED ${CMAKE_SOURCE_DIR}/tests/tools/fake_nvshmem.c)
set_target_properties(fake_nvshmem PROPERTIES OUTPUT_NAME xpool_nvshmem LIBRARY_OUTPUT_DIRECTORY ${fake_nvshmem_folder})
file(CONFIGURE OUTPUT ${CMAKE_BINARY_DIR}/tests/fake-nvshmem/empty.c CONTENT "typedef int nothing_t;\n")
add_library(fake_nvshmem_host SHARED ${CMAKE_BINARY_DIR}/tests/fake-nvshmem/empty.c)
set_target_properties(fake_nvshmem_host PROPERTIES OUTPUT_NAME nvshmem_host SUFFIX .so.3
                      LIBRARY_OUTPUT_DIRECTORY ${fake_nvshmem_folder}/wheel/lib)
include(${CMAKE_SOURCE_DIR}/tests/cuda/kv.cmake OPTIONAL)

# No kernel of the product spills registers.
get_property(cuda_reports GLOBAL PROPERTY XPOOL_CUDA_REPORTS)
if(cuda_reports)
  list(REMOVE_DUPLICATES cuda_reports)
  add_test(NAME cuda/resources COMMAND ${cuda_folder}/resources --brief ${cuda_reports})
  set_tests_properties(cuda/resources PROPERTIES LABELS cuda TIMEOUT 30)
endif()

# The driver's interface as we declare it, beside the toolkit's header.
if(XPOOL_CUDA_FOUND)
  get_filename_component(cuda_bin ${XPOOL_NVCC} DIRECTORY)
  find_path(XPOOL_CUDA_HEADERS cuda.h HINTS ${cuda_bin}/../include ${cuda_bin}/../targets/x86_64-linux/include)
  if(XPOOL_CUDA_HEADERS)
    add_executable(cuda_driver_abi ${cuda_folder}/driver_abi.c)
    set_target_properties(cuda_driver_abi PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/tests)
    target_include_directories(cuda_driver_abi SYSTEM PRIVATE ${XPOOL_CUDA_HEADERS})
    target_link_libraries(cuda_driver_abi PRIVATE xpool_base)
    add_test(NAME cuda/driver-abi COMMAND cuda_driver_abi)
    set_tests_properties(cuda/driver-abi PROPERTIES LABELS cuda TIMEOUT 30)
  endif()
endif()
