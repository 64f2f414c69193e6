# SPDX-License-Identifier: Apache-2.0
#
# The only lists of kernel variants, of the convolution and of the gradient of its weight. From the former come one
# .cu per variant, the table that select_plan reads (conv_instances) and the table of launchers
# (find_conv_transpose_launcher); from the latter grad_w_instances and find_grad_w_launcher.
#
# To add a variant, add a line. Order matters where two are estimated equally quick: the first wins.
#   kernel          90: conv_transpose_relu_group_norm_sm90, for Hopper; 90_twice: conv_transpose_twice_sm90, for
#                   Hopper, whose tile is that of one of two warpgroups; 90_held: conv_transpose_held_sm90, for
#                   Hopper, with tiles of 64 channels; 80: conv_transpose_relu_moments_sm80, for compute
#                   capability 8.0 and later
#   operand         what the tensor cores multiply
#   products        1, or 3 for the hi/lo split that carries float32's accuracy
#   stored          before(conv) until it is normalized: the dtype of y, or (90 only) u16, which becomes float32
#   block_channels, block_positions   the tile
#   block_inputs    (90, 90_twice) input channels of a k-block: 64, or 32 for blocks of few; 64 if left out

set(UPCONV3D_CONV_INSTANCES
  # kernel operand products stored block_channels block_positions [block_inputs]
  "90 bf16 1 bf16 128 256"
  "90 bf16 1 bf16 128 128"
  "90 bf16 1 bf16  64 256"
  "90 bf16 1 bf16 128 256 32"
  "90 bf16 1 bf16  64 256 32"
  "90 f16  1 f16  128 256"
  "90 f16  1 f16  128 128"
  "90 f16  1 f16   64 256"
  "90 f16  1 f16  128 256 32"
  "90 f16  1 f16   64 256 32"
  "90 f16  1 u16  128 256"
  "90 f16  1 u16  128 128"
  "90 f16  1 u16   64 256"
  "90 f16  1 u16  128 256 32"
  "90 f16  1 u16   64 256 32"
  "90 f16  1 f32  128 256"
  "90 f16  1 f32  128 128"
  "90 f16  1 f32   64 256"
  "90 f16  1 f32  128 256 32"
  "90 f16  1 f32   64 256 32"
  "90 f16  3 f32  128 128"
  "90 f16  3 f32   64 128"
  "90_twice bf16 1 bf16  64 256"
  "90_twice bf16 1 bf16  64 256 32"
  "90_twice f16  1 f16   64 256"
  "90_twice f16  1 f16   64 256 32"
  "90_twice f16  1 f32   64 256"
  "90_twice f16  1 f32   64 256 32"
  "90_held bf16 1 bf16  64  64"
  "90_held bf16 1 bf16  64 128"
  "90_held f16  1 f16   64  64"
  "90_held f16  1 f16   64 128"
  "80 bf16 1 bf16 128 128"
  "80 bf16 1 bf16  64 128"
  "80 f16  1 f16  128 128"
  "80 f16  1 f16   64 128"
  "80 f16  1 f32  128 128"
  "80 f16  1 f32   64 128"
  "80 f16  3 f32   64 128"
)

# Variants of conv_transpose_grad_w_sm90, the gradient of the weight: operand and products as above, and the tile's
# rows and columns. Two consumer warpgroups share the columns of 128 rows; of 64 rows each takes half of the columns.
set(UPCONV3D_GRAD_W_INSTANCES
  # operand products rows columns
  "bf16 1 128 256"
  "bf16 1 128 192"
  "bf16 1  64 512"
  "f16  1 128 256"
  "f16  1 128 192"
  "f16  1  64 512"
  "f16  3 128 128"
  "f16  3 128 192"
)

# What the names of the list are in CUTLASS (90), in CUDA (80), in core/problem.hpp (as y), and in bits.
set(_cutlass_bf16 cutlass::bfloat16_t)
set(_cutlass_f16 cutlass::half_t)
set(_cutlass_f32 float)
set(_cutlass_u16 Stepped16)
set(_cuda_bf16 __nv_bfloat16)
set(_cuda_f16 __half)
set(_cuda_f32 float)
set(_core_bf16 DType::kBFloat16)
set(_core_f16 DType::kFloat16)
set(_core_f32 DType::kFloat32)
set(_core_u16 DType::kFloat32)
set(_bits_bf16 16)
set(_bits_f16 16)
set(_bits_f32 32)
set(_bits_u16 16)

# upconv3d_generate_instances(<folder> <compiled_90> <compiled_80> <core_sources_var> <cuda_90_var> <cuda_80_var>)
# Writes the generated sources under <folder>. <compiled_...>: the .cu files of that arch are part of this build.
function(upconv3d_generate_instances folder compiled_90 compiled_80 core_sources_var cuda_90_var cuda_80_var)
  # Of each kernel: its name, the header that launches it, its arch, and whether it computes twice.
  set(stem_90 conv_transpose_relu_group_norm_sm90)
  set(stem_90_twice conv_transpose_twice_sm90)
  set(stem_90_held conv_transpose_held_sm90)
  set(stem_80 conv_transpose_relu_moments_sm80)
  set(header_90 ${stem_90})
  set(header_90_twice launch_twice_sm90)
  set(header_90_held launch_held_sm90)
  set(header_80 ${stem_80})
  set(arch_90 90)
  set(arch_90_twice 90)
  set(arch_90_held 90)
  set(arch_80 80)
  set(twice_90 false)
  set(twice_90_twice true)
  set(twice_90_held false)
  set(twice_80 false)
  set(held_90 false)
  set(held_90_twice false)
  set(held_90_held true)
  set(held_80 false)
  # Of each arch: what its launchers take, and its types.
  set(params_90 ConvTransposeParams)
  set(params_80 ConvTransposeSm80Params)
  set(types_90 _cutlass_)
  set(types_80 _cuda_)
  set(rows "")
  foreach(arch 90 80)
    set(declarations_${arch} "")
    set(branches_${arch} "")
    set(cuda_sources_${arch} "")
  endforeach()
  foreach(line IN LISTS UPCONV3D_CONV_INSTANCES)
    separate_arguments(fields UNIX_COMMAND "${line}")
    list(GET fields 0 kernel)
    list(GET fields 1 operand)
    list(GET fields 2 products)
    list(GET fields 3 stored)
    list(GET fields 4 bc)
    list(GET fields 5 bp)
    set(arch "${arch_${kernel}}")
    set(stem "${stem_${kernel}}")
    set(header "${header_${kernel}}")
    set(params "${params_${arch}}")
    set(name "${stem}_${operand}x${products}_${stored}_${bc}x${bp}")
    if(twice_${kernel})
      # The only tile and number of products that this kernel has.
      set(template_arguments "${${types_${arch}}${operand}}, ${${types_${arch}}${stored}}")
    elseif(held_${kernel})
      # Its tiles have one number of channels.
      set(template_arguments "${${types_${arch}}${operand}}, ${${types_${arch}}${stored}}, ${bp}")
    else()
      set(template_arguments
        "${${types_${arch}}${operand}}, ${products}, ${${types_${arch}}${stored}}, ${bc}, ${bp}")
    endif()
    set(bi 64)
    list(LENGTH fields count)
    if(count GREATER 6)
      list(GET fields 6 bi)
      string(APPEND name "x${bi}")
      string(APPEND template_arguments ", ${bi}")
    endif()
    if(compiled_${arch})
      set(compiled_literal true)
    else()
      set(compiled_literal false)
    endif()

    string(APPEND rows
      "      {.name = \"${name}\", .arch = ${arch}, .operand = ${_core_${operand}}, .products = ${products}, .output = ${_core_${stored}}, .stored_bits = ${_bits_${stored}}, .block_channels = ${bc}, .block_positions = ${bp}, .block_inputs = ${bi}, .twice = ${twice_${kernel}}, .held = ${held_${kernel}}, .compiled = ${compiled_literal}},\n")
    file(CONFIGURE OUTPUT "${folder}/${name}.cu" @ONLY CONTENT
"// SPDX-License-Identifier: Apache-2.0
// Generated from cpp/instances.cmake.
#include \"cuda/conv_transpose/@header@.cuh\"

namespace upconv3d::cuda {

void launch_@name@(const @params@& params, cudaStream_t stream) {
  launch_@stem@<@template_arguments@>(params, stream);
}

}  // namespace upconv3d::cuda
")
    if(compiled_${arch})
      string(APPEND declarations_${arch} "void launch_${name}(const ${params}& params, cudaStream_t stream);\n")
      string(APPEND branches_${arch} "  if (wanted == \"${name}\") return &launch_${name};\n")
      list(APPEND cuda_sources_${arch} "${folder}/${name}.cu")
    endif()
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
  upconv3d_generate_finder("${folder}/find_conv_transpose_launcher.cpp" conv_transpose_sm90.hpp
    ConvTransposeLauncher find_conv_transpose_launcher "arch 90a" "${declarations_90}" "${branches_90}")
  upconv3d_generate_finder("${folder}/find_conv_transpose_sm80_launcher.cpp" conv_transpose_sm80.hpp
    ConvTransposeSm80Launcher find_conv_transpose_sm80_launcher "an arch from 80 on" "${declarations_80}"
    "${branches_80}")
  set(${core_sources_var} "${folder}/conv_instances.cpp" PARENT_SCOPE)
  set(${cuda_90_var} "${cuda_sources_90}" PARENT_SCOPE)
  set(${cuda_80_var} "${cuda_sources_80}" PARENT_SCOPE)
endfunction()

# Writes the function <finder>, from an instance's name to its <launcher>.
function(upconv3d_generate_finder file header launcher finder arch declarations branches)
  file(CONFIGURE OUTPUT "${file}" @ONLY CONTENT
"// SPDX-License-Identifier: Apache-2.0
// Generated from cpp/instances.cmake.
#include <stdexcept>
#include <string>

#include \"cuda/conv_transpose/@header@\"

namespace upconv3d::cuda {

@declarations@
@launcher@ @finder@(const char* instance_name) {
  const std::string wanted = instance_name;
@branches@  throw std::logic_error(\"upconv3d: kernel \" + wanted + \" is not part of this build; its line is missing from \"
                         \"cpp/instances.cmake, or @arch@ from UPCONV3D_CUDA_ARCHS\");
}

}  // namespace upconv3d::cuda
")
endfunction()

# upconv3d_generate_grad_w_instances(<folder> <compiled> <core_sources_var> <cuda_var>)
# The same for UPCONV3D_GRAD_W_INSTANCES: the table grad_w_instances and the finder of its launchers.
function(upconv3d_generate_grad_w_instances folder compiled core_sources_var cuda_var)
  set(stem conv_transpose_grad_w_sm90)
  set(rows "")
  set(declarations "")
  set(branches "")
  set(cuda_sources "")
  foreach(line IN LISTS UPCONV3D_GRAD_W_INSTANCES)
    separate_arguments(fields UNIX_COMMAND "${line}")
    list(GET fields 0 operand)
    list(GET fields 1 products)
    list(GET fields 2 tile_rows)
    list(GET fields 3 tile_columns)
    set(name "${stem}_${operand}x${products}_${tile_rows}x${tile_columns}")
    math(EXPR row_chunks "${tile_rows} / 64")
    math(EXPR column_chunks "${tile_columns} / 64")
    set(template_arguments "${_cutlass_${operand}}, ${products}, ${row_chunks}, ${column_chunks}")
    if(compiled)
      set(compiled_literal true)
    else()
      set(compiled_literal false)
    endif()
    string(APPEND rows
      "      {.name = \"${name}\", .operand = ${_core_${operand}}, .products = ${products}, .row_chunks = ${row_chunks}, .column_chunks = ${column_chunks}, .compiled = ${compiled_literal}},\n")
    file(CONFIGURE OUTPUT "${folder}/${name}.cu" @ONLY CONTENT
"// SPDX-License-Identifier: Apache-2.0
// Generated from cpp/instances.cmake.
#include \"cuda/conv_transpose/@stem@.cuh\"

namespace upconv3d::cuda {

void launch_@name@(const GradWParams& params, cudaStream_t stream) {
  launch_@stem@<@template_arguments@>(params, stream);
}

}  // namespace upconv3d::cuda
")
    if(compiled)
      string(APPEND declarations "void launch_${name}(const GradWParams& params, cudaStream_t stream);\n")
      string(APPEND branches "  if (wanted == \"${name}\") return &launch_${name};\n")
      list(APPEND cuda_sources "${folder}/${name}.cu")
    endif()
  endforeach()

  file(CONFIGURE OUTPUT "${folder}/grad_w_instances.cpp" @ONLY CONTENT
"// SPDX-License-Identifier: Apache-2.0
// Generated from cpp/instances.cmake.
#include \"core/grad_w_plan.hpp\"

namespace upconv3d {

const std::vector<GradWInstance>& grad_w_instances() {
  static const std::vector<GradWInstance> instances = {
@rows@  };
  return instances;
}

}  // namespace upconv3d
")
  upconv3d_generate_finder("${folder}/find_grad_w_launcher.cpp" conv_transpose_grad_w_sm90.hpp
    GradWLauncher find_grad_w_launcher "arch 90a" "${declarations}" "${branches}")
  set(${core_sources_var} "${folder}/grad_w_instances.cpp" PARENT_SCOPE)
  set(${cuda_var} "${cuda_sources}" PARENT_SCOPE)
endfunction()
