// SPDX-License-Identifier: Apache-2.0
/// \file
/// core/group_times.hpp: the plans of convolution groups, as they were timed. Without torch or CUDA.

#include <cstdint>
#include <exception>
#include <iostream>
#include <string>

#include "core/group_times.hpp"
#include "core/plan.hpp"
#include "core/plan_times.hpp"
#include "core_cases.hpp"

namespace upconv3d {
namespace {

/// x [n,c,extent^3] in groups, kernel 3, ReLU before one norm group.
Problem block(std::int64_t n, std::int64_t c, std::int64_t k, std::int64_t groups, std::int64_t extent) {
  Problem p = headline();
  p.n = n, p.c = c, p.k = k, p.groups = groups, p.in = {extent, extent, extent}, p.num_groups = 1;
  p.has_bias = true;
  return p;
}

void in_half_rows(Problem& p) {
  p.dtype = DType::kBFloat16, p.x_layout = p.y_layout = Layout::kNDHWC, p.w_channels_last = true;
}

void in_rows_of_float(Problem& p, Precision precision) {
  in_half_rows(p);
  p.dtype = DType::kFloat32, p.precision = precision;
}

void in_planes_of_float(Problem& p, Precision precision) {
  in_rows_of_float(p, precision);
  p.x_layout = p.y_layout = Layout::kNCDHW, p.w_channels_last = false;
}

void expect_plan(const Problem& p, Algorithm expected, const std::string& times) {
  const Plan plan = select_plan(p, hopper(), all_compiled());
  expect(plan.algorithm == expected, times + ": " + describe(p) + " -> " + name(plan.algorithm));
}

/// us of perf/results/h200_plans_of_kinds.txt.
void test_choices() {
  Problem pointwise = block(8, 200, 40, 5, 19);
  pointwise.kernel = {1, 1, 1};
  in_half_rows(pointwise);
  expect_plan(pointwise, Algorithm::kCudaDirect, "40 > 8, k1: library 278, direct 54, SM90 116");

  Problem strided = block(2, 160, 72, 2, 24);
  strided.kernel = strided.stride = {2, 2, 2};
  in_half_rows(strided);
  expect_plan(strided, Algorithm::kCudaDirect, "80 > 36, k2 s2: library 493, direct 122");

  Problem many_inputs = block(2, 512, 48, 4, 15);
  many_inputs.kernel = many_inputs.stride = {2, 2, 2};
  in_half_rows(many_inputs);
  expect_plan(many_inputs, Algorithm::kCudaDirect, "128 > 12, k2 s2: library 153, direct 46");

  Problem small = block(4, 48, 48, 2, 8);
  small.padding = {1, 1, 1};
  in_rows_of_float(small, Precision::kTF32);
  expect_plan(small, Algorithm::kCudaLibrary, "24 > 24: library 27, direct 56, SM90 57");

  Problem products = block(1, 192, 96, 2, 14);
  products.kernel = {1, 1, 1};
  in_planes_of_float(products, Precision::kTF32);
  expect_plan(products, Algorithm::kCudaLibrary, "96 > 48, k1: library 22, direct 46, SM90 49");

  Problem exact = block(2, 72, 80, 8, 7);
  exact.stride = {2, 2, 2}, exact.padding = exact.output_padding = {1, 1, 1};
  in_rows_of_float(exact, Precision::kIEEE);
  expect_plan(exact, Algorithm::kCudaDirect, "9 > 10, s2, ieee: library 124, direct 32");

  Problem cores = block(1, 192, 32, 16, 47);
  cores.kernel = cores.stride = {1, 2, 2};
  cores.tail.norm = false, cores.tail.activation = Activation::kGelu;
  in_half_rows(cores);
  expect_plan(cores, Algorithm::kCudaDirect, "12 > 2, no norm: library 1198, direct on CUDA cores 134");
}

/// What has times, and what cuDNN has kernels for.
void test_kinds() {
  Problem p = block(2, 64, 64, 4, 8);
  in_half_rows(p);
  expect(has_group_times(p) && !has_plan_times(p) && has_times(p), "groups of 16");
  expect(are_quick_groups(p), "as many outputs as inputs, a power of two");
  const auto changed = [&](auto change) {
    Problem q = p;
    change(q);
    return q;
  };
  for (const Problem& q :
       {changed([](Problem& q) { q.groups = 1; }), changed([](Problem& q) { q.groups = 32; }),
        changed([](Problem& q) { q.n = 0; }), changed([](Problem& q) { q.stride = {1, 1, 5}; }),
        changed([](Problem& q) { q.y_layout = Layout::kNCDHW; }),
        changed([](Problem& q) { q.tail.has_skip = true; }),
        changed([](Problem& q) { q.dtype = DType::kFloat64; })}) {
    expect(!has_group_times(q), "no times of groups: " + describe(q));
  }
  for (const Problem& q :
       {changed([](Problem& q) { q.k = 32; }), changed([](Problem& q) { q.stride = {2, 2, 2}; }),
        changed([](Problem& q) { q.kernel = {1, 1, 1}; }), changed([](Problem& q) { q.kernel = {5, 1, 1}; }),
        changed([](Problem& q) { q.dilation = {2, 1, 1}; }),
        changed([](Problem& q) { in_rows_of_float(q, Precision::kIEEE); })}) {
    expect(has_group_times(q) && !are_quick_groups(q), "without kernels of their own: " + describe(q));
  }
}

/// More work takes longer, whatever reads it.
void test_costs_grow() {
  for (const bool planes : {false, true}) {
    for (const int kind : {0, 1, 2}) {
      Problem p = block(2, 48, 24, 4, 16);
      in_rows_of_float(p, kind == 2 ? Precision::kIEEE : Precision::kTF32);
      if (kind == 0) p.dtype = DType::kBFloat16;
      if (planes) p.x_layout = p.y_layout = Layout::kNCDHW;
      for (const Extent3& stride : {Extent3{1, 1, 1}, Extent3{2, 2, 2}}) {
        p.stride = stride;
        const double us = cudnn_groups_us(p);
        Problem larger = p, longer = p;
        larger.n = 8, longer.kernel = {5, 5, 5};
        expect(us > 0 && cudnn_groups_us(larger) > us, "four times the samples: " + describe(larger));
        expect(cudnn_groups_us(longer) > us, "more taps: " + describe(longer));
      }
    }
  }
}

}  // namespace
}  // namespace upconv3d

int main() {
  try {
    upconv3d::test_choices();
    upconv3d::test_kinds();
    upconv3d::test_costs_grow();
  } catch (const std::exception& error) {
    upconv3d::expect(false, error.what());
  }
  if (upconv3d::failures == 0) std::cout << "group_times: all passed\n";
  return upconv3d::failures == 0 ? 0 : 1;
}
