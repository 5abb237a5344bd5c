# SPDX-License-Identifier: MIT
# What is built runs where it is copied to: libraries are linked from their archives where the
# distribution has them. Included after the libraries were found by pkg-config.
option(XPOOL_STATIC_LIBRARIES "Link libraries from their archives where they are" ON)

# xpool_prefer_archives(TARGET ARCHIVE...): links the imported target from these, when all are there.
function(xpool_prefer_archives target)
  if(NOT XPOOL_STATIC_LIBRARIES OR NOT TARGET ${target})
    return()
  endif()
  set(found "")
  foreach(archive ${ARGN})
    find_library(XPOOL_ARCHIVE_${archive} lib${archive}.a)
    mark_as_advanced(XPOOL_ARCHIVE_${archive})
    if(NOT XPOOL_ARCHIVE_${archive})
      message(STATUS "No lib${archive}.a: ${target} is linked dynamically")
      return()
    endif()
    list(APPEND found ${XPOOL_ARCHIVE_${archive}})
  endforeach()
  set_property(TARGET ${target} PROPERTY INTERFACE_LINK_LIBRARIES
               ${found} Threads::Threads ${CMAKE_DL_LIBS})
endfunction()

xpool_prefer_archives(PkgConfig::LIBEVENT event event_pthreads)
xpool_prefer_archives(PkgConfig::JANSSON jansson)
xpool_prefer_archives(PkgConfig::PCRE2 pcre2-8)
xpool_prefer_archives(PkgConfig::CRYPTO crypto)

# The sanitizers bring their own runtime, which wants the shared one.
if(XPOOL_STATIC_LIBRARIES AND NOT XPOOL_SANITIZE AND NOT XPOOL_FUZZ)
  add_link_options(-static-libgcc $<$<LINK_LANGUAGE:CXX>:-static-libstdc++>)
endif()
