# SPDX-License-Identifier: Apache-2.0
#
# Licenses of headers that are compiled into the module: who passes it on has to pass them on, too
# (BSD-3-Clause, second condition).

# Installs a license as upconv3d/licenses/<name>.txt: LICENSE.txt of `folder`, or what the distribution of the
# building Python that is called `name` was installed with.
function(upconv3d_install_license name folder)
  set(_license "${folder}/LICENSE.txt")
  if(NOT EXISTS "${_license}")
    execute_process(
      COMMAND "${Python_EXECUTABLE}" -c [=[
import sys
from importlib import metadata

try:
    files = metadata.files(sys.argv[1]) or []
except metadata.PackageNotFoundError:
    files = []
print(next((f.locate() for f in files if f.name.startswith("LICENSE")), ""))
]=] "${name}"
      OUTPUT_VARIABLE _license OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
  endif()
  if(NOT EXISTS "${_license}")
    message(WARNING
      "upconv3d: a module with ${name}'s code in it is to be passed on with ${name}'s license; got no such file in "
      "${folder} or with ${Python_EXECUTABLE}'s ${name}. Add it to what you pass on.")
    return()
  endif()
  install(FILES "${_license}" DESTINATION upconv3d/licenses RENAME "${name}.txt")
endfunction()
