# SPDX-License-Identifier: Apache-2.0
#
# Decides UPCONV3D_WITH_CUDA from UPCONV3D_CUDA, and how CUDA targets are compiled. Neither a GPU nor a CUDA
# build of torch is needed; the CUDA runtime is linked statically and libcuda not at all.

set(UPCONV3D_CUDA_MINIMUM 12.5)  # first with cudaGetDriverEntryPointByVersion

if(NOT UPCONV3D_CUDA MATCHES "^(AUTO|ON|OFF)$")
  message(FATAL_ERROR "upconv3d: UPCONV3D_CUDA must be AUTO, ON or OFF; got ${UPCONV3D_CUDA}.")
endif()

# upconv3d_cmake_archs(<archs> <result_var>): as CMake names them. 80 and 80-real are real code, 80-virtual is PTX.
function(upconv3d_cmake_archs archs result_var)
  list(TRANSFORM archs APPEND "-real" REGEX "^[0-9]+[af]?$")
  set(${result_var} "${archs}" PARENT_SCOPE)
endfunction()

set(UPCONV3D_WITH_CUDA OFF)
set(_cuda_obstacle "UPCONV3D_CUDA is OFF")
if(NOT UPCONV3D_CUDA STREQUAL OFF)
  if(DEFINED CACHE{CMAKE_CUDA_COMPILER} AND NOT CMAKE_CUDA_COMPILER)
    unset(CMAKE_CUDA_COMPILER CACHE)  # check_language remembers that there was none; there may be one now
  endif()
  if(NOT DEFINED CMAKE_CUDA_COMPILER AND NOT DEFINED ENV{CUDACXX})
    # CMake looks on PATH alone; the toolkit's installer does not put itself there.
    find_program(UPCONV3D_NVCC nvcc HINTS ENV CUDA_HOME ENV CUDA_PATH PATH_SUFFIXES bin PATHS /usr/local/cuda)
    mark_as_advanced(UPCONV3D_NVCC)
    if(UPCONV3D_NVCC)
      set(ENV{CUDACXX} "${UPCONV3D_NVCC}")  # a compiler set by variable would not be tried before it is enabled
    endif()
  endif()
  # CMake tests the compiler for this list; the targets set their own.
  upconv3d_cmake_archs("${UPCONV3D_CUDA_ARCHS}" CMAKE_CUDA_ARCHITECTURES)
  include(CheckLanguage)
  if(CMAKE_CUDA_COMPILER OR NOT UPCONV3D_CUDA STREQUAL ON)
    check_language(CUDA)
  endif()
  if(CMAKE_CUDA_COMPILER OR UPCONV3D_CUDA STREQUAL ON)
    enable_language(CUDA)
    if(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS UPCONV3D_CUDA_MINIMUM)
      set(_cuda_obstacle "nvcc is ${CMAKE_CUDA_COMPILER_VERSION}, and ${UPCONV3D_CUDA_MINIMUM} is needed")
    else()
      set(UPCONV3D_WITH_CUDA ON)
    endif()
  else()
    set(_cuda_obstacle "no working CUDA compiler was found")
  endif()
endif()
if(NOT UPCONV3D_WITH_CUDA AND UPCONV3D_CUDA STREQUAL ON)
  message(FATAL_ERROR "upconv3d: UPCONV3D_CUDA=ON, but ${_cuda_obstacle}. Pass -DCMAKE_CUDA_COMPILER=<nvcc>.")
endif()

set(UPCONV3D_HAS_90A OFF)
set(UPCONV3D_SM80_ARCHS "")
set(UPCONV3D_CUDA_COMPILER_TEXT "")
set(UPCONV3D_CUDA_RUNTIME_VERSION "")
set(UPCONV3D_CUDA_ARCHS_TEXT "")
set(UPCONV3D_CUTLASS_VERSION "")
if(NOT UPCONV3D_WITH_CUDA)
  message(STATUS "upconv3d: CPU only (${_cuda_obstacle})")
  return()
endif()

foreach(_arch IN LISTS UPCONV3D_CUDA_ARCHS)
  if(NOT _arch MATCHES "^([0-9]+)[af]?(-real|-virtual)?$")
    message(FATAL_ERROR
      "upconv3d: UPCONV3D_CUDA_ARCHS must list architectures such as 80, 90a or, for PTX, 80-virtual; got ${_arch}.")
  endif()
  if(CMAKE_MATCH_1 GREATER_EQUAL 80)
    list(APPEND UPCONV3D_SM80_ARCHS ${_arch})
  elseif(_arch MATCHES "-virtual$")
    # It would promise GPUs from 8.0 on, whose kernels use what older ones lack.
    message(FATAL_ERROR "upconv3d: PTX in UPCONV3D_CUDA_ARCHS must be 80-virtual or later; got ${_arch}.")
  endif()
endforeach()
find_package(CUDAToolkit REQUIRED)
if(90a IN_LIST UPCONV3D_CUDA_ARCHS OR 90a-real IN_LIST UPCONV3D_CUDA_ARCHS)
  set(UPCONV3D_HAS_90A ON)
endif()
if(UPCONV3D_SM80_ARCHS)
  add_subdirectory(third_party)
endif()
set(UPCONV3D_CUDA_COMPILER_TEXT "${CMAKE_CUDA_COMPILER_ID} ${CMAKE_CUDA_COMPILER_VERSION}")
set(UPCONV3D_CUDA_RUNTIME_VERSION "${CUDAToolkit_VERSION}")
set(UPCONV3D_CUDA_ARCHS_TEXT "${UPCONV3D_CUDA_ARCHS}")
message(STATUS "upconv3d: CUDA ${CUDAToolkit_VERSION} for ${UPCONV3D_CUDA_ARCHS}")

# upconv3d_cuda_target(<target> <archs>): code for the archs; the project's nvcc flags.
function(upconv3d_cuda_target target archs)
  upconv3d_cmake_archs("${archs}" archs)
  set_target_properties(${target} PROPERTIES
    CUDA_ARCHITECTURES "${archs}"
    CUDA_STANDARD 20
    CUDA_STANDARD_REQUIRED ON
    CUDA_RUNTIME_LIBRARY Static
    CUDA_VISIBILITY_PRESET hidden)
  target_compile_options(${target} PRIVATE
    $<$<COMPILE_LANGUAGE:CUDA>:-O3;--expt-relaxed-constexpr>
    $<$<AND:$<COMPILE_LANGUAGE:CUDA>,$<BOOL:${UPCONV3D_LINEINFO}>>:-lineinfo>
    $<$<AND:$<COMPILE_LANGUAGE:CUDA>,$<BOOL:${UPCONV3D_PTXAS_VERBOSE}>>:-Xptxas=-v>
    $<$<AND:$<COMPILE_LANGUAGE:CUDA>,$<BOOL:${UPCONV3D_WERROR}>>:-Werror=all-warnings>)
  target_link_libraries(${target} PUBLIC upconv3d_core CUDA::cudart_static PRIVATE upconv3d_warnings)
endfunction()
