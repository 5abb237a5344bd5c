# SPDX-License-Identifier: MIT
# Generates src/wire/messages.proto into the build folder with nanopb's protoc plug-in.
find_program(PROTOC protoc REQUIRED)
find_program(PROTOC_GEN_NANOPB protoc-gen-nanopb REQUIRED)
set(wire_generated ${CMAKE_BINARY_DIR}/generated/wire)
file(MAKE_DIRECTORY ${wire_generated})
add_custom_command(
  OUTPUT ${wire_generated}/messages.pb.c ${wire_generated}/messages.pb.h
  COMMAND ${PROTOC} --plugin=protoc-gen-nanopb=${PROTOC_GEN_NANOPB}
          --nanopb_out=${wire_generated} -I${CMAKE_SOURCE_DIR}/src/wire
          ${CMAKE_SOURCE_DIR}/src/wire/messages.proto
  WORKING_DIRECTORY ${CMAKE_SOURCE_DIR}/src/wire
  DEPENDS ${CMAKE_SOURCE_DIR}/src/wire/messages.proto ${CMAKE_SOURCE_DIR}/src/wire/messages.options
  COMMENT "Generating wire messages")
add_custom_target(xpool_wire_messages DEPENDS ${wire_generated}/messages.pb.h)
target_sources(xpool_wire PRIVATE ${wire_generated}/messages.pb.c)
target_include_directories(xpool_wire SYSTEM PUBLIC ${CMAKE_BINARY_DIR}/generated)
add_dependencies(xpool_wire xpool_wire_messages)
