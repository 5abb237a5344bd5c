# SPDX-License-Identifier: MIT
# The plug-in of Fabric provider `nvshmem`: built where nvcc and the wheel nvidia-nvshmem-cu13 are, in the
# test environment or where -DXPOOL_NVSHMEM_ROOT=<...>/nvidia/nvshmem says. Without them the build is complete but for
# the plug-in, and its programs say so when the provider is asked for.
#
#   target xpool_nvshmem                        libxpool_nvshmem.so, beside the programs
#   xpool_nvshmem_images(TARGET PREFIX SRC...)  as xpool_cuda_images, of code that calls NVSHMEM
set(XPOOL_NVSHMEM AUTO CACHE STRING "AUTO (where nvcc and the wheel are), ON (required) or OFF")
set(XPOOL_NVSHMEM_ROOT "" CACHE PATH "Folder nvidia/nvshmem of the wheel nvidia-nvshmem-cu13")
set(XPOOL_NVSHMEM_FOUND OFF)
if(XPOOL_CUDA_FOUND AND NOT XPOOL_NVSHMEM STREQUAL "OFF")
  set(nvshmem_root ${XPOOL_NVSHMEM_ROOT})
  if(NOT nvshmem_root)
    file(GLOB nvshmem_roots ${CMAKE_SOURCE_DIR}/.xpool-cache/venv-test/lib/python3*/site-packages/nvidia/nvshmem)
    if(nvshmem_roots)
      list(GET nvshmem_roots 0 nvshmem_root)
    endif()
  endif()
  if(nvshmem_root AND EXISTS ${nvshmem_root}/include/nvshmem.h AND EXISTS ${nvshmem_root}/lib/libnvshmem_device.a
     AND EXISTS ${nvshmem_root}/lib/libnvshmem_host.so.3)
    set(XPOOL_NVSHMEM_FOUND ON)
  elseif(XPOOL_NVSHMEM_ROOT)
    message(FATAL_ERROR "XPOOL_NVSHMEM_ROOT=${XPOOL_NVSHMEM_ROOT} holds no include/nvshmem.h, lib/libnvshmem_device.a "
                        "and lib/libnvshmem_host.so.3")
  endif()
endif()
if(XPOOL_NVSHMEM STREQUAL "ON" AND NOT XPOOL_NVSHMEM_FOUND)
  message(FATAL_ERROR "XPOOL_NVSHMEM=ON needs nvcc and the wheel nvidia-nvshmem-cu13 (-DXPOOL_NVSHMEM_ROOT=...)")
endif()

set(nvshmem_gencode)
foreach(architecture ${XPOOL_CUDA_ARCHITECTURES})
  list(APPEND nvshmem_gencode -gencode arch=compute_${architecture},code=sm_${architecture})
endforeach()

# Compiled apart, then linked on the device side with the library: a fatbin that the driver loads.
function(xpool_nvshmem_fatbin fatbin)
  set(objects)
  foreach(source ${ARGN})
    get_filename_component(name ${source} NAME_WE)
    set(object ${fatbin}.${name}.o)
    list(APPEND objects ${object})
    add_custom_command(
      OUTPUT ${object}
      COMMAND ${CMAKE_COMMAND} -E make_directory ${CMAKE_BINARY_DIR}/cuda
      COMMAND ${XPOOL_NVCC} ${XPOOL_NVCC_FLAGS} -isystem ${nvshmem_root}/include -rdc=true -dc
              -Xcompiler -Wno-unknown-pragmas,-Wno-unused-function -MD -MF ${object}.d -MT ${object} -o ${object}
              ${source}
      DEPENDS ${source} DEPFILE ${object}.d VERBATIM COMMENT "nvcc ${name} with NVSHMEM")
  endforeach()
  add_custom_command(
    OUTPUT ${fatbin}
    COMMAND ${XPOOL_NVCC} ${nvshmem_gencode} -dlink -fatbin -o ${fatbin} ${objects} ${nvshmem_root}/lib/libnvshmem_device.a
    DEPENDS ${objects} VERBATIM COMMENT "device code of ${fatbin} with NVSHMEM's")
endfunction()

function(xpool_nvshmem_images target prefix)
  foreach(source ${ARGN})
    get_filename_component(name ${source} NAME_WE)
    set(image ${prefix}_${name})
    set(carrier ${CMAKE_BINARY_DIR}/cuda/${image}.c)
    if(XPOOL_NVSHMEM_FOUND)
      set(fatbin ${CMAKE_BINARY_DIR}/cuda/${image}.fatbin)
      xpool_nvshmem_fatbin(${fatbin} ${source})
    endif()
    xpool_cuda_carrier(${target} ${image} "${fatbin}")
  endforeach()
endfunction()

if(XPOOL_NVSHMEM_FOUND)
  set(nvshmem_sources ${CMAKE_SOURCE_DIR}/src/stage/nvshmem)
  set(nvshmem_image ${CMAKE_BINARY_DIR}/cuda/nvshmem_relay.fatbin)
  set(nvshmem_plugin ${CMAKE_BINARY_DIR}/libxpool_nvshmem.so)
  xpool_nvshmem_fatbin(${nvshmem_image} ${nvshmem_sources}/relay.cu ${nvshmem_sources}/courier.cu)
  add_custom_command(
    OUTPUT ${nvshmem_plugin}
    COMMAND ${XPOOL_NVCC} -std=c++17 -O2 -Xcompiler -fPIC,-fvisibility=hidden,-Wall,-Werror -shared -cudart none
            -DNVSHMEM_HOSTLIB_ONLY -DXPOOL_NVSHMEM_IMAGE=\\\"${nvshmem_image}\\\"
            -I${CMAKE_SOURCE_DIR}/src -isystem ${nvshmem_root}/include -o ${nvshmem_plugin}
            ${nvshmem_sources}/plugin.cpp -L${nvshmem_root}/lib -l:libnvshmem_host.so.3
    DEPENDS ${nvshmem_sources}/plugin.cpp ${nvshmem_sources}/plugin.h ${nvshmem_image} VERBATIM
    COMMENT "plug-in of provider nvshmem")
  add_custom_target(xpool_nvshmem ALL DEPENDS ${nvshmem_plugin})
endif()
