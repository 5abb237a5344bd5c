# SPDX-License-Identifier: MIT
# The decode kernel without a GPU (emulated.h). Fibers are switched in x86-64 assembly.
if(NOT CMAKE_SYSTEM_PROCESSOR STREQUAL "x86_64")
  return()
endif()
add_executable(emulated_decode ${CMAKE_SOURCE_DIR}/tests/emulated/decode_emulated.cpp
                               ${CMAKE_SOURCE_DIR}/tests/emulated/emulated.cpp)
target_include_directories(emulated_decode BEFORE PRIVATE ${CMAKE_SOURCE_DIR}/tests/emulated)
target_compile_options(emulated_decode PRIVATE -Wno-unknown-pragmas -Wno-unused-function
                                               -Wno-missing-field-initializers
                                               -Wno-maybe-uninitialized)
set_target_properties(emulated_decode PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/tests)
add_test(NAME cuda/emulated-decode COMMAND emulated_decode)
set_tests_properties(cuda/emulated-decode PROPERTIES TIMEOUT 900)
