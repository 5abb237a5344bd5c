# SPDX-License-Identifier: MIT
# libxpool.so: every module below src/library linked in, and nothing exported but the symbols that
# include/xpool/symbols.txt lists. Its installation: header, library, pkg-config file, and the
# example engine's source.
include(GNUInstallDirs)
if(NOT TARGET xpool_library)
  return()
endif()

set(XPOOL_LIBRARY_ABI 1)
set(symbols_file ${CMAKE_SOURCE_DIR}/include/xpool/symbols.txt)
set_property(DIRECTORY APPEND PROPERTY CMAKE_CONFIGURE_DEPENDS ${symbols_file})
file(STRINGS ${symbols_file} symbols REGEX "^xpool_")
list(JOIN symbols ";\n    " symbols)
file(CONFIGURE OUTPUT ${CMAKE_BINARY_DIR}/generated/libxpool.map @ONLY CONTENT
"LIBXPOOL_@XPOOL_LIBRARY_ABI@ {
  global:
    @symbols@;
  local:
    *;
};
")

add_library(libxpool SHARED $<TARGET_OBJECTS:xpool_library> src/library/shared/stdio.c)
# Some of it is C++ (the TOML reader), whose runtime is linked in.
set_target_properties(libxpool PROPERTIES
  OUTPUT_NAME xpool SOVERSION ${XPOOL_LIBRARY_ABI} LINKER_LANGUAGE CXX
  LINK_DEPENDS ${CMAKE_BINARY_DIR}/generated/libxpool.map
  LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/lib)
target_link_libraries(libxpool PRIVATE xpool_library)
target_link_options(libxpool PRIVATE
  -Wl,--version-script=${CMAKE_BINARY_DIR}/generated/libxpool.map -Wl,--exclude-libs,ALL
  -Wl,-z,relro -Wl,-z,now -Wl,-z,nodelete -Wl,-Bsymbolic)
if(NOT XPOOL_SANITIZE AND NOT XPOOL_FUZZ)
  target_link_options(libxpool PRIVATE -Wl,-z,defs)
endif()

# The prefix is found from the file's own place, so that an installed tree may be moved.
file(RELATIVE_PATH prefix_from_pc /${CMAKE_INSTALL_LIBDIR}/pkgconfig /)
string(REGEX REPLACE "/$" "" prefix_from_pc "${prefix_from_pc}")
file(CONFIGURE OUTPUT ${CMAKE_BINARY_DIR}/generated/xpool.pc @ONLY CONTENT
"prefix=\${pcfiledir}/@prefix_from_pc@
libdir=\${prefix}/@CMAKE_INSTALL_LIBDIR@
includedir=\${prefix}/@CMAKE_INSTALL_INCLUDEDIR@

Name: xpool
Description: FFN of language models on CrossPool's FfnAgents, for engines that keep attention and KV Cache
Version: @PROJECT_VERSION@
Libs: -L\${libdir} -lxpool
Cflags: -I\${includedir}
")

install(TARGETS libxpool LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT library
        NAMELINK_COMPONENT library)
install(FILES include/xpool/xpool.h DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/xpool COMPONENT library)
install(FILES ${CMAKE_BINARY_DIR}/generated/xpool.pc
        DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig COMPONENT library)
install(FILES examples/engine.c examples/README.md DESTINATION share/doc/xpool/examples
        COMPONENT library)
if(TARGET xpool)
  install(TARGETS xpool RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR} COMPONENT program)
endif()

# The example, built as its users build it: against the public header and the shared library only.
add_executable(engine_example examples/engine.c)
set_target_properties(engine_example PROPERTIES C_STANDARD 99 C_EXTENSIONS OFF
                      RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/examples OUTPUT_NAME engine)
target_link_libraries(engine_example PRIVATE libxpool Threads::Threads)
