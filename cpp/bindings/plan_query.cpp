// SPDX-License-Identifier: Apache-2.0
#include "bindings/plan_query.hpp"

#include <torch/csrc/stable/ops.h>

#include <cstdlib>
#include <iostream>
#include <stdexcept>

#include "bindings/build_info.hpp"
#include "core/errors.hpp"
#include "core/text.hpp"
#if UPCONV3D_WITH_CUDA
#include "cuda/forward.hpp"
#endif

namespace upconv3d::bindings {
namespace {

Device query_cuda_device([[maybe_unused]] int index) {
#if UPCONV3D_WITH_CUDA
  Device device = cuda::query_device(index);
  if (!archs_run_on(device.compute_capability)) {
    throw std::runtime_error(
        concat("upconv3d: this build must contain kernels for the GPU it runs on; got compute "
               "capability ",
               device.compute_capability / 10, '.', device.compute_capability % 10, " on cuda:", index,
               ", compiled archs ", kCudaArchs, ". Rebuild with -DUPCONV3D_CUDA_ARCHS=\"", kCudaArchs, ';',
               device.compute_capability, "\"."));
  }
  device.forced_plan = forced_plan();
  return device;
#else
  throw std::runtime_error(
      concat("upconv3d: CUDA tensors need a build with CUDA; got a tensor on cuda:", index,
             " and a CPU-only build. Rebuild where nvcc is found: cmake -DUPCONV3D_CUDA=ON "
             "-DCMAKE_CUDA_COMPILER=<nvcc>, or pip install with "
             "-C cmake.define.UPCONV3D_CUDA=ON."));
#endif
}

}  // namespace

const std::string& forced_plan() {
  static const std::string plan = [] {
    const char* const value = std::getenv("UPCONV3D_PLAN");
    return std::string(value ? value : "");
  }();
  return plan;
}

Device query_device(const std::string& device) {
  if (device == "cpu") {
    Device host;
    host.max_threads = static_cast<int>(torch::stable::get_num_threads());
    return host;
  }
  constexpr const char* kCudaPrefix = "cuda:";
  if (device.rfind(kCudaPrefix, 0) == 0) return query_cuda_device(std::stoi(device.substr(5)));
  throw UnsupportedViolation(concat("upconv3d: a plan needs data to run on; got device=", device,
                                    ". Move the tensors to \"cpu\" or \"cuda\"."));
}

Plan make_plan(const Problem& problem, const Device& device, const std::vector<ConvInstance>& instances,
               bool for_training) {
  Plan plan = for_training ? select_training_plan(problem, device, instances)
                           : select_plan(problem, device, instances);
#if UPCONV3D_WITH_CUDA
  if (device.is_cuda) cuda::complete_plan(problem, device, plan);
#endif
  return plan;
}

void print_plan_if_asked(const Problem& problem, const Plan& plan) {
  const char* const print = std::getenv("UPCONV3D_PRINT_PLAN");
  if (print && std::string(print) == "1") {
    std::cerr << "upconv3d: " << describe(problem) << '\n' << describe(plan) << std::endl;
  }
}

}  // namespace upconv3d::bindings
