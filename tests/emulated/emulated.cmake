# SPDX-License-Identifier: MIT
# The decode kernel and its candidates without a GPU (emulated.h). Fibers are switched in x86-64 assembly.
if(NOT CMAKE_SYSTEM_PROCESSOR STREQUAL "x86_64")
  return()
endif()
set(emulated_sources)
if(XPOOL_CUDA_CANDIDATES)
  file(GLOB emulated_sources CONFIGURE_DEPENDS ${CMAKE_SOURCE_DIR}/src/ffn/cuda/candidates/*.cu)
endif()
foreach(source ${CMAKE_SOURCE_DIR}/src/ffn/cuda/decode.cu ${emulated_sources})
  get_filename_component(name ${source} NAME_WE)
  set(program emulated_${name})
  add_executable(${program} ${CMAKE_SOURCE_DIR}/tests/emulated/decode_emulated.cpp
                            ${CMAKE_SOURCE_DIR}/tests/emulated/emulated.cpp)
  target_include_directories(${program} BEFORE PRIVATE ${CMAKE_SOURCE_DIR}/tests/emulated)
  target_compile_definitions(${program} PRIVATE DECODE_SOURCE="${source}")
  target_compile_options(${program} PRIVATE -Wno-unknown-pragmas -Wno-unused-function
                                            -Wno-missing-field-initializers
                                            -Wno-maybe-uninitialized)
  set_target_properties(${program} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/tests)
  add_test(NAME cuda/emulated-${name} COMMAND ${program})
  set_tests_properties(cuda/emulated-${name} PROPERTIES TIMEOUT 900)
endforeach()
