// SPDX-License-Identifier: Apache-2.0
#include <cuda_runtime_api.h>

#include <map>
#include <mutex>
#include <stdexcept>
#include <string>

#include "core/text.hpp"
#include "cuda/check.hpp"
#include "cuda/forward.hpp"

namespace upconv3d::cuda {
namespace {

/// "13.0" for 13000.
std::string version_text(int version) {
  return concat(version / 1000, '.', version % 1000 / 10);
}

/// Refuses a driver that is missing or older than the runtime this module was built with.
void check_driver() {
  int driver = 0;
  check(cudaDriverGetVersion(&driver), "asking for the CUDA driver's version");
  const std::string runtime = version_text(CUDART_VERSION);
  if (driver == 0) {
    throw std::runtime_error(concat("upconv3d: CUDA needs NVIDIA's driver; got none, CUDA runtime ", runtime,
                                    ". Install a driver for CUDA ", runtime, ", or use CPU tensors."));
  }
  // Within a major version, a runtime runs on the drivers of earlier minor versions.
  if (driver / 1000 < CUDART_VERSION / 1000) {
    throw std::runtime_error(concat("upconv3d: the NVIDIA driver must support CUDA ", CUDART_VERSION / 1000,
                                    "; got a driver for CUDA ", version_text(driver), ", CUDA runtime ",
                                    runtime, ". Update the driver, or build with an older CUDA toolkit."));
  }
}

Device read_device(int index) {
  check_driver();
  const std::string doing = concat("reading the properties of CUDA device ", index);
  int major = 0;
  int minor = 0;
  Device device;
  device.is_cuda = true;
  check(cudaDeviceGetAttribute(&major, cudaDevAttrComputeCapabilityMajor, index), doing);
  check(cudaDeviceGetAttribute(&minor, cudaDevAttrComputeCapabilityMinor, index), doing);
  check(cudaDeviceGetAttribute(&device.sm_count, cudaDevAttrMultiProcessorCount, index), doing);
  device.compute_capability = major * 10 + minor;
  return device;
}

}  // namespace

Device query_device(int index) {
  static std::mutex mutex;
  static std::map<int, Device> devices;
  const std::lock_guard<std::mutex> lock(mutex);
  const auto known = devices.find(index);
  if (known != devices.end()) return known->second;
  return devices.emplace(index, read_device(index)).first->second;
}

}  // namespace upconv3d::cuda
