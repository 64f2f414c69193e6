# SPDX-License-Identifier: Apache-2.0
#
# Python, pybind11 and torch. Of torch only the stable ABI's headers and libtorch_cpu are used, so that the
# torch that builds need not be the torch that runs. Defines upconv3d_torch,
# UPCONV3D_TORCH_INCLUDE and UPCONV3D_TORCH_VERSION.

find_package(Python 3.10 REQUIRED COMPONENTS Interpreter Development.Module)

if(NOT pybind11_DIR)
  execute_process(COMMAND "${Python_EXECUTABLE}" -m pybind11 --cmakedir
    OUTPUT_VARIABLE pybind11_DIR OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
endif()
find_package(pybind11 CONFIG)
if(NOT pybind11_FOUND)
  message(FATAL_ERROR "upconv3d: the binding needs pybind11; got none in ${Python_EXECUTABLE}.\n"
    "  ${Python_EXECUTABLE} -m pip install pybind11")
endif()

set(_torch_root "${UPCONV3D_TORCH_ROOT}")
if(NOT _torch_root)
  # find_spec reads the location without importing torch, which takes seconds.
  execute_process(
    COMMAND "${Python_EXECUTABLE}" -c
      "import importlib.util as u; s = u.find_spec('torch'); print(s.submodule_search_locations[0] if s else '')"
    OUTPUT_VARIABLE _torch_root OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
endif()
set(_torch_remedy
  "Install torch >= ${UPCONV3D_TORCH_MINIMUM} (its CPU build will do) there, and where pip builds, pass it\n"
  "--no-build-isolation; or pass -DUPCONV3D_TORCH_ROOT=<folder of the torch package>.")
set(_torch_header "${_torch_root}/include/torch/headeronly/version.h")
if(NOT _torch_root OR NOT EXISTS "${_torch_header}")
  message(FATAL_ERROR "upconv3d: the binding needs the headers of torch >= ${UPCONV3D_TORCH_MINIMUM}; "
    "got \"${_torch_root}\" for ${Python_EXECUTABLE}, without include/torch/headeronly/version.h.\n" ${_torch_remedy})
endif()
file(STRINGS "${_torch_header}" _torch_lines REGEX "#define TORCH_VERSION_(MAJOR|MINOR|PATCH) [0-9]+")
string(REGEX MATCHALL "[0-9]+" _torch_numbers "${_torch_lines}")
list(JOIN _torch_numbers "." UPCONV3D_TORCH_VERSION)
if(UPCONV3D_TORCH_VERSION VERSION_LESS UPCONV3D_TORCH_MINIMUM)
  message(FATAL_ERROR "upconv3d: torch must be ${UPCONV3D_TORCH_MINIMUM} or later; got ${UPCONV3D_TORCH_VERSION} in "
    "${_torch_root}.\n" ${_torch_remedy})
endif()
message(STATUS "upconv3d: torch ${UPCONV3D_TORCH_VERSION}, Python ${Python_VERSION}")

set(UPCONV3D_TORCH_INCLUDE "${_torch_root}/include")
add_library(upconv3d_torch INTERFACE)
target_include_directories(upconv3d_torch SYSTEM INTERFACE "${UPCONV3D_TORCH_INCLUDE}")
target_link_libraries(upconv3d_torch INTERFACE "${_torch_root}/lib/libtorch_cpu.so")
