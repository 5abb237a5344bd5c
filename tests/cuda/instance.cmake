# SPDX-License-Identifier: MIT
# The Instance of tests/cuda/soak_on_device, on any device, and the counter of host launches.
if(NOT TARGET libxpool OR NOT TARGET xpool_ffn)
  return()
endif()
add_executable(cuda_instance ${CMAKE_SOURCE_DIR}/tests/cuda/instance.c
               ${CMAKE_SOURCE_DIR}/tests/cuda/instance_table.c)
set_target_properties(cuda_instance PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/tests
                      BUILD_RPATH_USE_ORIGIN ON)
target_include_directories(cuda_instance PRIVATE ${CMAKE_SOURCE_DIR}/tests/cuda)
xpool_cuda_images(cuda_instance tests ${CMAKE_SOURCE_DIR}/tests/cuda/instance.cu)
target_link_libraries(cuda_instance PRIVATE libxpool xpool_ffn xpool_kernels xpool_cuda m)

# CUPTI is loaded at run time; only its header is needed here.
if(XPOOL_CUDA_FOUND)
  get_filename_component(cuda_bin ${XPOOL_NVCC} DIRECTORY)
  find_path(XPOOL_CUPTI_HEADERS cupti.h HINTS ${cuda_bin}/../include ${cuda_bin}/../extras/CUPTI/include
            ${cuda_bin}/../targets/x86_64-linux/include)
  find_path(XPOOL_CUDA_HEADERS cuda.h HINTS ${cuda_bin}/../include ${cuda_bin}/../targets/x86_64-linux/include)
  if(XPOOL_CUPTI_HEADERS AND XPOOL_CUDA_HEADERS)
    add_library(cuda_launch_count MODULE ${CMAKE_SOURCE_DIR}/tests/cuda/launch_count.c)
    set_target_properties(cuda_launch_count PROPERTIES PREFIX "" C_VISIBILITY_PRESET hidden
                          LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/tests)
    target_include_directories(cuda_launch_count SYSTEM PRIVATE ${XPOOL_CUPTI_HEADERS} ${XPOOL_CUDA_HEADERS})
    target_link_libraries(cuda_launch_count PRIVATE ${CMAKE_DL_LIBS})
  endif()
endif()
