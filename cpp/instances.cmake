# SPDX-License-Identifier: Apache-2.0
#
# The only list of kernel variants. From it come one .cu per variant, the table that select_plan reads
# (conv_instances) and the table of launchers (find_conv_transpose_launcher).
#
# To add a variant, add a line. Order matters where two are estimated equally quick: the first wins.
#   operand         what the tensor cores multiply
#   products        1, or 3 for the hi/lo split that carries float32's accuracy
#   stored          relu(conv) until it is normalized: the dtype of y, or u16, which becomes float32
#   block_channels, block_positions   the tile: gemm_m x gemm_n
#   plan            stored: conv_transpose_relu_group_norm_sm90, relu(conv) lies in memory in between;
#                   twice: conv_transpose_twice_sm90, whose tile is that of one of two warpgroups

set(UPCONV3D_CONV_INSTANCES
  # operand products stored block_channels block_positions plan
  "bf16 1 bf16 128 256 stored"
  "bf16 1 bf16 128 128 stored"
  "bf16 1 bf16  64 256 stored"
  "f16  1 f16  128 256 stored"
  "f16  1 f16  128 128 stored"
  "f16  1 f16   64 256 stored"
  "f16  1 u16  128 256 stored"
  "f16  1 u16  128 128 stored"
  "f16  1 u16   64 256 stored"
  "f16  1 f32  128 128 stored"
  "f16  1 f32   64 256 stored"
  "f16  3 f32  128 128 stored"
  "f16  3 f32   64 128 stored"
  "bf16 1 bf16  64 256 twice"
  "f16  1 f16   64 256 twice"
  "f16  1 f32   64 256 twice"
)

# What the names of the list are in CUTLASS, in core/problem.hpp (as y), and in bits.
set(_cutlass_bf16 cutlass::bfloat16_t)
set(_cutlass_f16 cutlass::half_t)
set(_cutlass_f32 float)
set(_cutlass_u16 Unorm16)
set(_core_bf16 DType::kBFloat16)
set(_core_f16 DType::kFloat16)
set(_core_f32 DType::kFloat32)
set(_core_u16 DType::kFloat32)
# Of each plan: its kernel, the header that launches it, and whether it computes the convolution twice.
set(_kernel_stored conv_transpose_relu_group_norm_sm90)
set(_kernel_twice conv_transpose_twice_sm90)
set(_header_stored conv_transpose_relu_group_norm_sm90)
set(_header_twice launch_twice_sm90)
set(_twice_stored false)
set(_twice_twice true)
set(_bits_bf16 16)
set(_bits_f16 16)
set(_bits_f32 32)
set(_bits_u16 16)

# upconv3d_generate_instances(<folder> <compiled> <core_sources_var> <cuda_sources_var>)
# Writes the generated sources under <folder>. <compiled>: the .cu files are part of this build.
function(upconv3d_generate_instances folder compiled core_sources_var cuda_sources_var)
  if(compiled)
    set(compiled_literal true)
  else()
    set(compiled_literal false)
  endif()
  set(rows "")
  set(declarations "")
  set(branches "")
  set(cuda_sources "")
  foreach(line IN LISTS UPCONV3D_CONV_INSTANCES)
    separate_arguments(fields UNIX_COMMAND "${line}")
    list(GET fields 0 operand)
    list(GET fields 1 products)
    list(GET fields 2 stored)
    list(GET fields 3 bc)
    list(GET fields 4 bp)
    list(GET fields 5 plan)
    set(kernel ${_kernel_${plan}})
    set(header ${_header_${plan}})
    set(name "${kernel}_${operand}x${products}_${stored}_${bc}x${bp}")
    if(plan STREQUAL "twice")
      # The only tile and number of products that this kernel has.
      set(template_arguments "${_cutlass_${operand}}, ${_cutlass_${stored}}")
    else()
      set(template_arguments "${_cutlass_${operand}}, ${products}, ${_cutlass_${stored}}, ${bc}, ${bp}")
    endif()

    string(APPEND rows
      "      {\"${name}\", ${_core_${operand}}, ${products}, ${_core_${stored}}, ${_bits_${stored}}, ${bc}, ${bp}, ${_twice_${plan}}, ${compiled_literal}},\n")
    string(APPEND declarations "void launch_${name}(const ConvTransposeParams& params, cudaStream_t stream);\n")
    string(APPEND branches "  if (wanted == \"${name}\") return &launch_${name};\n")
    file(CONFIGURE OUTPUT "${folder}/${name}.cu" @ONLY CONTENT
"// SPDX-License-Identifier: Apache-2.0
// Generated from cpp/instances.cmake.
#include \"cuda/conv_transpose/@header@.cuh\"

namespace upconv3d::cuda {

void launch_@name@(const ConvTransposeParams& params, cudaStream_t stream) {
  launch_@kernel@<@template_arguments@>(params, stream);
}

}  // namespace upconv3d::cuda
")
    list(APPEND cuda_sources "${folder}/${name}.cu")
  endforeach()

  file(CONFIGURE OUTPUT "${folder}/conv_instances.cpp" @ONLY CONTENT
"// SPDX-License-Identifier: Apache-2.0
// Generated from cpp/instances.cmake.
#include \"core/plan.hpp\"

namespace upconv3d {

const std::vector<ConvInstance>& conv_instances() {
  static const std::vector<ConvInstance> instances = {
@rows@  };
  return instances;
}

}  // namespace upconv3d
")
  if(NOT compiled)
    set(declarations "")
    set(branches "")
    set(cuda_sources "")
  endif()
  file(CONFIGURE OUTPUT "${folder}/find_conv_transpose_launcher.cpp" @ONLY CONTENT
"// SPDX-License-Identifier: Apache-2.0
// Generated from cpp/instances.cmake.
#include <stdexcept>
#include <string>

#include \"cuda/conv_transpose/conv_transpose_sm90.hpp\"

namespace upconv3d::cuda {

@declarations@
ConvTransposeLauncher find_conv_transpose_launcher(const char* instance_name) {
  const std::string wanted = instance_name;
@branches@  throw std::logic_error(\"upconv3d: kernel \" + wanted + \" is not part of this build; its line is missing from \"
                         \"cpp/instances.cmake, or arch 90a from UPCONV3D_CUDA_ARCHS\");
}

}  // namespace upconv3d::cuda
")
  set(${core_sources_var} "${folder}/conv_instances.cpp" PARENT_SCOPE)
  set(${cuda_sources_var} "${cuda_sources}" PARENT_SCOPE)
endfunction()
