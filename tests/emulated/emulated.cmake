# SPDX-License-Identifier: MIT
# The decode kernel and the layers of few rows without a GPU (emulated.h). Fibers are switched in x86-64 assembly.
if(NOT CMAKE_SYSTEM_PROCESSOR STREQUAL "x86_64")
  return()
endif()
foreach(name decode few route)
  set(program emulated_${name})
  add_executable(${program} ${CMAKE_SOURCE_DIR}/tests/emulated/${name}_emulated.cpp
                            ${CMAKE_SOURCE_DIR}/tests/emulated/emulated.cpp)
  target_include_directories(${program} BEFORE PRIVATE ${CMAKE_SOURCE_DIR}/tests/emulated)
  target_compile_options(${program} PRIVATE -Wno-unknown-pragmas -Wno-unused-function
                                            -Wno-missing-field-initializers
                                            -Wno-maybe-uninitialized)
  set_target_properties(${program} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/tests)
  add_test(NAME cuda/emulated-${name} COMMAND ${program})
  set_tests_properties(cuda/emulated-${name} PROPERTIES TIMEOUT 900)
endforeach()
