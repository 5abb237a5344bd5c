# SPDX-License-Identifier: MIT
# The Python package: an importable tree at <build>/python, and what a wheel installs (pyproject.toml).
#
# Public header and library lie inside the package. Python files are copied, so that a copied build
# folder is complete; the library is linked, relatively, since a program may have it mapped while it is
# built anew.
if(NOT TARGET libxpool)
  return()
endif()

set(python_tree ${CMAKE_BINARY_DIR}/python)
file(GLOB_RECURSE python_sources RELATIVE ${CMAKE_SOURCE_DIR}/python CONFIGURE_DEPENDS
     ${CMAKE_SOURCE_DIR}/python/xpool/*.py)
set(python_outputs "")
foreach(source ${python_sources})
  add_custom_command(OUTPUT ${python_tree}/${source}
    COMMAND ${CMAKE_COMMAND} -E copy ${CMAKE_SOURCE_DIR}/python/${source} ${python_tree}/${source}
    DEPENDS ${CMAKE_SOURCE_DIR}/python/${source})
  list(APPEND python_outputs ${python_tree}/${source})
endforeach()
add_custom_command(OUTPUT ${python_tree}/xpool/xpool.h
  COMMAND ${CMAKE_COMMAND} -E copy ${CMAKE_SOURCE_DIR}/include/xpool/xpool.h ${python_tree}/xpool/xpool.h
  DEPENDS ${CMAKE_SOURCE_DIR}/include/xpool/xpool.h)
add_custom_target(xpool_python ALL
  COMMAND ${CMAKE_COMMAND} -E create_symlink
          ../../lib/$<TARGET_SONAME_FILE_NAME:libxpool> ${python_tree}/xpool/libxpool.so
  DEPENDS ${python_outputs} ${python_tree}/xpool/xpool.h
  COMMENT "Python package in ${python_tree}")
add_dependencies(xpool_python libxpool)

# A file that is no longer in the sources is no longer in the tree.
file(GLOB_RECURSE python_present RELATIVE ${python_tree} ${python_tree}/xpool/*.py)
foreach(present ${python_present})
  if(NOT present IN_LIST python_sources)
    file(REMOVE ${python_tree}/${present})
  endif()
endforeach()

# How SGLang finds the plugin in the tree; in a wheel the same comes from pyproject.toml.
set(python_info ${python_tree}/xpool-${PROJECT_VERSION}.dist-info)
file(WRITE ${python_info}/METADATA
     "Metadata-Version: 2.1\nName: xpool\nVersion: ${PROJECT_VERSION}\n")
file(WRITE ${python_info}/entry_points.txt
     "[sglang.srt.plugins]\nxpool = xpool.sglang.plugin:install\n")

if(DEFINED SKBUILD)
  target_link_options(libxpool PRIVATE -s)
  target_link_options(xpool PRIVATE -s)
  install(FILES include/xpool/xpool.h DESTINATION xpool COMPONENT python)
  install(FILES $<TARGET_FILE:libxpool> DESTINATION xpool RENAME libxpool.so COMPONENT python)
  install(PROGRAMS $<TARGET_FILE:xpool> DESTINATION ${SKBUILD_SCRIPTS_DIR} COMPONENT python)
endif()
