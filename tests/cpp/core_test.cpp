// SPDX-License-Identifier: Apache-2.0
/// \file
/// cpp/core without torch, CUDA or a test framework: problems, rules and plan selection.

#include <algorithm>
#include <cstdint>
#include <exception>
#include <functional>
#include <iostream>
#include <limits>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "core/arguments.hpp"
#include "core/border_slabs.hpp"
#include "core/errors.hpp"
#include "core/idle_taps.hpp"
#include "core/launch_memo.hpp"
#include "core/one_voxel.hpp"
#include "core/plan.hpp"
#include "core/problem.hpp"
#include "core/text.hpp"
#include "core_cases.hpp"

namespace upconv3d {
namespace {

TensorDesc tensor(const std::vector<std::int64_t>& sizes) {
  TensorDesc desc;
  desc.sizes = sizes;
  desc.strides.resize(sizes.size());
  std::int64_t next = 1;
  for (std::size_t axis = sizes.size(); axis-- > 0; next *= sizes[axis]) desc.strides[axis] = next;
  desc.dtype = "float32";
  desc.device = "cpu";
  return desc;
}

Arguments arguments() {
  Arguments a;
  a.input = tensor({2, 4, 3, 3, 3});
  a.weight = tensor({4, 6, 3, 3, 3});
  a.stride = a.dilation = {1, 1, 1};
  a.padding = a.output_padding = {0, 0, 0};
  a.num_groups = 2;
  return a;
}

/// Taps counted one by one, for the closed form of useful_flops.
double counted_flops(const Problem& p) {
  double taps = 1.0;
  for (int axis = 0; axis < 3; ++axis) {
    std::int64_t hits = 0;
    for (std::int64_t i = 0; i < p.in[axis]; ++i) {
      for (std::int64_t t = 0; t < p.kernel[axis]; ++t) {
        const std::int64_t z = i * p.stride[axis] - p.padding[axis] + t * p.dilation[axis];
        if (z >= 0 && z < p.out()[axis]) ++hits;
      }
    }
    taps *= static_cast<double>(hits);
  }
  return 2.0 * static_cast<double>(p.n * (p.c / p.groups) * p.k) * taps;
}

void test_problem() {
  expect(headline().out() == Extent3{34, 34, 34}, "output of the headline shape");
  expect(headline().useful_flops() == 231928233984.0, "useful work of the headline shape, 231.9 GFLOP");
  for (std::int64_t stride = 1; stride <= 3; ++stride) {
    for (std::int64_t padding = 0; padding <= 4; ++padding) {
      Problem p = headline();
      p.in = {4, 5, 7};
      p.kernel = {1, 3, 4};
      p.stride = {stride, 1, stride};
      p.padding = {0, padding, 1};
      p.dilation = {1, 2, 2};
      p.output_padding = {0, 1, stride - 1};
      if (p.out()[1] > 0) expect(p.useful_flops() == counted_flops(p), "useful work: " + describe(p));
    }
  }
}

/// Whether any input of an axis reaches the output by a tap.
bool reaches_output(const Problem& p, int axis, std::int64_t tap) {
  for (std::int64_t i = 0; i < p.in[axis]; ++i) {
    const std::int64_t z = i * p.stride[axis] - p.padding[axis] + tap * p.dilation[axis];
    if (z >= 0 && z < p.out()[axis]) return true;
  }
  return false;
}

/// Whether PyTorch can be asked for so many of an axis's taps from `first` on, the rest being idle.
bool can_be_left(const Problem& p, int axis, std::int64_t first, std::int64_t count) {
  for (std::int64_t tap = 0; tap < p.kernel[axis]; ++tap) {
    if ((tap < first || tap >= first + count) && reaches_output(p, axis, tap)) return false;
  }
  Problem left = p;
  left.kernel[axis] = count, left.padding[axis] = p.padding[axis] - first * p.dilation[axis];
  left.output_padding[axis] = 0;
  left.output_padding[axis] = p.out()[axis] - left.out()[axis];
  return left.padding[axis] >= 0 && left.output_padding[axis] >= 0 &&
         left.output_padding[axis] < std::max(p.stride[axis], p.dilation[axis]);
}

/// On one axis, counted one by one: what is left computes the same, PyTorch can be asked for it, and for
/// nothing shorter.
void test_idle_taps_of(const Problem& p, int axis) {
  const std::string what = "idle taps of " + describe(p);
  const std::optional<CroppedTaps> cropped = without_idle_taps(p);
  const Problem& left = cropped ? cropped->problem : p;
  const std::int64_t first = cropped ? cropped->first[axis] : 0;
  expect(!cropped || left.kernel[axis] < p.kernel[axis], what + ": fewer");
  expect(left.out() == p.out(), what + ": output");
  expect(left.padding[axis] == p.padding[axis] - first * p.dilation[axis], what + ": where taps are");
  for (std::int64_t tap = 0; tap < p.kernel[axis]; ++tap) {
    const bool is_left = tap >= first && tap < first + left.kernel[axis];
    expect(is_left || !reaches_output(p, axis, tap), what + ": tap " + std::to_string(tap));
  }
  const std::int64_t bound = std::max(p.stride[axis], p.dilation[axis]);
  expect(left.padding[axis] >= 0 && left.output_padding[axis] >= 0 && left.output_padding[axis] < bound,
         what + ": PyTorch's arguments");
  for (std::int64_t count = 1; count < left.kernel[axis]; ++count) {
    for (std::int64_t from = 0; from + count <= p.kernel[axis]; ++from) {
      expect(!can_be_left(p, axis, from, count), what + ": fewer taps, " + std::to_string(count));
    }
  }
}

void test_idle_taps() {
  expect(!without_idle_taps(headline()), "the headline shape has no idle taps");
  Problem flat = headline();
  flat.in = {1, 32, 32}, flat.kernel = {3, 3, 3}, flat.padding = {1, 1, 1};
  const std::optional<CroppedTaps> cropped = without_idle_taps(flat);
  expect(cropped && cropped->problem.kernel == Extent3{1, 3, 3} && cropped->first == Extent3{1, 0, 0} &&
             cropped->problem.padding == Extent3{0, 1, 1},
         "one tap of a kernel of three is left on an axis of one voxel");
  int dropped = 0;
  for (int code = 0; code < 4 * 5 * 4 * 7 * 3 * 4; ++code) {
    int rest = code;
    const auto digit = [&](int base) { return std::exchange(rest, rest / base) % base; };
    Problem p = headline();
    constexpr int kAxis = 1;
    p.in[kAxis] = 1 + digit(4), p.kernel[kAxis] = 1 + digit(5), p.stride[kAxis] = 1 + digit(4);
    p.padding[kAxis] = digit(7), p.dilation[kAxis] = 1 + digit(3), p.output_padding[kAxis] = digit(4);
    const bool valid = p.output_padding[kAxis] < std::max(p.stride[kAxis], p.dilation[kAxis]);
    if (!valid || p.out()[kAxis] < 1) continue;
    test_idle_taps_of(p, kAxis);
    if (without_idle_taps(p)) ++dropped;
  }
  expect(dropped > 100, "problems with idle taps: " + std::to_string(dropped));
}

/// Products of one voxel, output by output: each has a tap.
void test_one_voxel() {
  int products = 0, others = 0;
  for (int code = 0; code < 6 * 3 * 4 * 3 * 3; ++code) {
    int rest = code;
    const auto digit = [&](int base) { return std::exchange(rest, rest / base) % base; };
    Problem p = headline();
    p.in = {1, 1, 1};
    constexpr int kAxis = 2;
    p.kernel[kAxis] = 1 + digit(6), p.stride[kAxis] = 1 + digit(3), p.padding[kAxis] = digit(4);
    p.dilation[kAxis] = 1 + digit(3), p.output_padding[kAxis] = digit(3);
    const bool valid = p.output_padding[kAxis] < std::max(p.stride[kAxis], p.dilation[kAxis]);
    if (!valid || p.out()[kAxis] < 1) continue;
    bool all = true;
    for (std::int64_t at = 0; at < p.out()[kAxis]; ++at) {
      bool has_tap = false;
      for (std::int64_t tap = 0; tap < p.kernel[kAxis]; ++tap) {
        has_tap |= tap * p.dilation[kAxis] - p.padding[kAxis] == at;
      }
      all &= has_tap;
    }
    const std::string what = "one voxel: " + describe(p);
    expect(is_one_voxel_product(p) == all, what);
    ++(all ? products : others);
    Problem wider = p, grouped = p, returned = p;
    wider.in[0] = 2, grouped.groups = 2;
    returned.tail.returns_conv = returned.has_bias = true;
    for (const Problem& other : {wider, grouped, returned}) expect(!is_one_voxel_product(other), what);
  }
  expect(products > 50 && others > 50, "products of one voxel: " + std::to_string(products));
  Problem latent = headline();
  latent.in = {1, 1, 1}, latent.kernel = {4, 2, 3}, latent.stride = {2, 1, 5};
  const std::optional<Problem> product = product_of_one_voxel(latent);
  expect(product && product->k == latent.k * 24 && product->kernel == Extent3{1, 1, 1} &&
             product->out() == Extent3{1, 1, 1},
         "a channel per output and tap");
  latent.k = std::int64_t{1} << 28;
  expect(!product_of_one_voxel(latent), "more channels than 31 bits count");
  latent.k = 128, latent.n = 1, latent.c = std::int64_t{1} << 20;
  expect(!product_of_one_voxel(latent), "more weights than 31 bits count");
}

void test_rules() {
  const auto with = [](const std::function<void(Arguments&)>& change) {
    return [change] {
      Arguments a = arguments();
      change(a);
      make_problem(a);
    };
  };
  make_problem(arguments());
  with([](Arguments& a) { a.output_padding = {0, 1, 0}, a.dilation = {1, 2, 1}; })();  // of a dilation, too
  expect_violation<RuleViolation>(with([](Arguments& a) { a.input = tensor({4, 3, 3}); }),
                                  "input.shape=[4, 3, 3]", "rank");
  expect_violation<RuleViolation>(with([](Arguments& a) { a.input = tensor({2, 5, 3, 3, 3}); }),
                                  "weight.size(0)", "channel mismatch");
  expect_violation<RuleViolation>(with([](Arguments& a) { a.num_groups = 4; }), "Divisors: 1, 2, 3, 6.",
                                  "divisors");
  expect_violation<RuleViolation>(with([](Arguments& a) { a.num_groups = 0; }), "num_groups=0",
                                  "num_groups 0");
  expect_violation<RuleViolation>(with([](Arguments& a) { a.groups = 3; }), "groups=3, C=4", "groups");
  expect_violation<RuleViolation>(with([](Arguments& a) { a.stride = {1, 0, 1}; }), "stride=(1, 0, 1)",
                                  "stride 0");
  expect_violation<RuleViolation>(with([](Arguments& a) { a.stride = {1, 1, std::int64_t{1} << 30}; }),
                                  "less than 2^30", "stride 2^30");
  expect_violation<RuleViolation>(with([](Arguments& a) {
                                    a.weight.sizes[1] = (std::int64_t{1} << 62) + 3;
                                    a.groups = 4;
                                  }),
                                  "groups is out of range", "a product that wraps to 12 channels");
  expect_violation<RuleViolation>(with([](Arguments& a) { a.dilation = {1, 1, -1}; }), "dilation",
                                  "dilation");
  expect_violation<RuleViolation>(with([](Arguments& a) { a.padding = {-1, 0, 0}; }), "padding", "padding");
  expect_violation<RuleViolation>(with([](Arguments& a) { a.output_padding = {0, 1, 0}; }),
                                  "output_padding=(0, 1, 0)", "output_padding");
  expect_violation<RuleViolation>(with([](Arguments& a) { a.padding = {3, 0, 0}; }), "must be positive",
                                  "output size");
  expect_violation<RuleViolation>(with([](Arguments& a) { a.weight = tensor({4, 6, 0, 3, 3}); }),
                                  "kernel size", "kernel");
  expect_violation<RuleViolation>(with([](Arguments& a) { a.bias = tensor({5}); }), "bias.shape=[5]", "bias");
  expect_violation<RuleViolation>(with([](Arguments& a) { a.norm_weight = tensor({6, 1}); }), "norm_weight",
                                  "norm_weight");
  expect_violation<RuleViolation>(with([](Arguments& a) { a.weight.dtype = "float64"; }),
                                  "weight.dtype=float64", "dtypes");
  expect_violation<RuleViolation>(with([](Arguments& a) { a.weight.device = "cuda:1"; }), "cuda:1",
                                  "devices");
  expect_violation<RuleViolation>(with([](Arguments& a) { a.weight.layout = "sparse_coo"; }), "to_dense",
                                  "sparse");
  expect_violation<RuleViolation>(with([](Arguments& a) { a.input.sizes[0] = std::int64_t{1} << 58; }),
                                  "2^59", "indices");
  expect_violation<RuleViolation>(with([](Arguments& a) {
                                    constexpr std::int64_t kLong = std::int64_t{1} << 29;
                                    a.input = tensor({0, 4, kLong, kLong, kLong});
                                    a.padding = {kLong / 2, kLong / 2, kLong / 2};
                                  }),
                                  "2^59", "indices of a sample, of which there are none");
  expect_violation<UnsupportedViolation>(with([](Arguments& a) { a.input.dtype = a.weight.dtype = "int32"; }),
                                         "int32", "integers");
  expect_violation<ValueViolation>(with([](Arguments& a) { a.precision = "fast"; }), "\"fast\"", "precision");
  expect_violation<ValueViolation>(with([](Arguments& a) { a.eps = 1.0 / 0.0; }), "eps", "eps");
}

void test_formats() {
  Arguments a = arguments();
  expect(make_problem(a).y_layout == Layout::kNCDHW, "contiguous in, contiguous out");
  a.weight.strides = dense_strides(a.weight.sizes, Layout::kNDHWC);
  expect(make_problem(a).y_layout == Layout::kNDHWC, "a channels_last_3d weight decides too");
  expect(make_problem(a).x_layout == Layout::kNCDHW, "but says nothing of x");
  a = arguments();
  a.input.strides = dense_strides(a.input.sizes, Layout::kNDHWC);
  a.input.data_ptr_mod16 = 4;
  const Problem p = make_problem(a);
  expect(p.x_layout == Layout::kNDHWC && p.y_layout == Layout::kNDHWC && !p.x_aligned,
         "channels_last_3d, misaligned");
  expect(!suggests_channels_last_3d({2, 4, 1, 1, 1}, {4, 1, 1, 1, 1}),
         "[N,C,1,1,1] contiguous stays contiguous");
  expect(!suggests_channels_last_3d({0, 4, 3, 3, 3}, {108, 1, 36, 12, 4}),
         "an empty tensor suggests nothing");
  expect(!suggests_channels_last_3d({4, 1, 1, 1, 1}, {1, 1, 1, 1, 1}), "nor one whose formats are the same");
  expect(!suggests_channels_last_3d({2, 4, 3, 3, 3}, {27, 0, 9, 3, 1}), "nor one that is expanded");
  a = arguments();
  a.input.data_ptr_mod16 = 4, a.input.strides[4] = 2;
  expect(make_problem(a).x_aligned, "what is copied first is aligned then");
  // The added axis of one sample has the stride of unsqueeze, which has a say in such a format.
  a = arguments();
  a.input = tensor({4, 1, 1, 1}), a.input.strides = {1, 4, 4, 4};
  expect(make_problem(a).y_layout == Layout::kNDHWC, "one voxel in channels_last_3d, unbatched");
  a.input = tensor({2, 1, 3, 3, 3}), a.weight = tensor({1, 6, 3, 3, 3});
  expect(make_problem(a).x_layout == Layout::kNCDHW, "one channel lies in both orders");
  a.weight.strides = dense_strides(a.weight.sizes, Layout::kNDHWC);
  expect(make_problem(a).x_layout == Layout::kNDHWC, "and counts for that of y");
}

void test_sm90_selection() {
  const Plan bf16 = select_plan(headline(), hopper(), all_compiled());
  expect(bf16.algorithm == Algorithm::kSm90ImplicitGemm && !bf16.pack_x && bf16.activation_in_y,
         "headline, bf16");
  expect(bf16.split_axes == 0 && bf16.share_taps, "the headline shape's inside shares loads");
  expect(bf16.tiles == slab_tiles(tap_sharing_slabs(headline()), bf16.tile_positions),
         "tiles of the headline shape");
  expect(bf16.stages == std::vector<std::string>{"pack_operands", bf16.instance->name},
         "channels_last_3d ends with the SM90 kernel");
  Problem p = headline(DType::kFloat32, Layout::kNCDHW);
  const Plan ieee = select_plan(p, hopper(), all_compiled());
  expect(ieee.instance && ieee.instance->products == 3 && ieee.pack_x && !ieee.activation_in_y,
         "headline, float32 ieee");
  expect(ieee.stages.back() == "group_norm_normalize", "NCDHW is transposed by a stage of its own");
  expect(!ieee.share_taps && ieee.split_axes == 3, "three products leave no room for shared loads");
  p.precision = Precision::kTF32;
  const Plan tf32 = select_plan(p, hopper(), all_compiled());
  expect(tf32.instance->products == 1 && tf32.instance->stored_bits == 16 && stores_steps(tf32),
         "headline, float32 tf32: 16 bit until the transposing stage");
  expect(tf32.share_taps, "on the tile of the 16-bit dtypes, cut as theirs");
  expect(describe(tf32).find("stores float32 in 16 bits with a step, NDHWC beside y") != std::string::npos,
         "which the plan says");
  p.y_layout = Layout::kNDHWC;
  const Plan in_place = select_plan(p, hopper(), all_compiled());
  expect(in_place.instance->stored_bits == 16 && in_place.activation_in_y,
         "where the kernel normalizes, float32 at TF32's accuracy is stored in 16 bit too");
  p.k = 100, p.num_groups = 25;
  const Plan plain = select_plan(p, hopper(), all_compiled());
  expect(plain.instance->stored_bits == 32 && !stores_steps(plain) &&
             describe(plain).find("stores float32 NDHWC beside y") != std::string::npos,
         "rows that are no chunks are normalized by a kernel that knows no steps");
  p = headline();
  p.k = 64;
  const Plan few_outputs = select_plan(p, hopper(), all_compiled());
  expect(few_outputs.share_taps && few_outputs.split_axes == 0,
         "tiles that wait for shared memory share loads of x");
  p = headline();
  p.x_aligned = false;
  expect(select_plan(p, hopper(), all_compiled()).pack_x, "misaligned x is packed");
  p = headline();
  p.w_channels_last = true;
  const Plan lying = select_plan(p, hopper(), all_compiled());
  expect(lying.w_in_place && lying.stages == std::vector<std::string>{lying.instance->name},
         "w that lies channels last is not packed");
  p = headline();
  p.n = 0;
  select_plan(p, hopper(), all_compiled());
}

/// What select_plan cuts is within im2col's corners: a slab's upper corner is what its taps reach beyond it.
void test_splits_within_im2col() {
  for (const Extent3 kernel : {Extent3{19, 3, 3}, Extent3{3, 19, 1}, Extent3{18, 1, 1}, Extent3{17, 3, 3}}) {
    Problem p = headline();
    p.kernel = kernel;
    p.padding = {kernel[0] / 2, kernel[1] / 2, kernel[2] / 2};
    const Plan plan = select_plan(p, hopper(), all_compiled());
    expect(plan.algorithm == Algorithm::kSm90ImplicitGemm, "long kernels run on the SM90 kernel");
    for (int axis = 0; axis < plan.split_axes; ++axis) {
      expect(kernel[axis] - 1 <= 16, concat("a cut axis keeps its corner within -16: ", describe(p)));
    }
  }
}

void test_library_selection() {
  const auto reason = [](const std::function<void(Problem&, Device&)>& change) {
    Problem p = headline();
    Device device = hopper();
    change(p, device);
    const Plan plan = select_plan(p, device, all_compiled());
    return plan.algorithm == Algorithm::kCudaLibrary ? plan.reason : std::string("not the library");
  };
  const auto has = has_part;
  expect(has(reason([](Problem& p, Device&) { p.stride = {4, 4, 5}; }), "stride (4, 4, 5) makes 80 phases"),
         "stride");
  expect(!has(reason([](Problem& p, Device&) { p.stride = {4, 4, 4}; }), "stride"), "64 phases");
  expect(has(reason([](Problem& p, Device&) { p.dilation = {16, 1, 1}; }), "im2col"), "taps 32 inputs apart");
  expect(has(reason([](Problem& p, Device&) { p.groups = 64; }), "groups 64 leave 2 output channels each"),
         "groups of 2 output channels");
  expect(has(reason([](Problem& p, Device&) { p.dtype = DType::kFloat64; }), "float64"), "float64");
  expect(has(reason([](Problem&, Device& d) { d.compute_capability = 75; }), "7.5 is below 8.0"), "Turing");
  expect(has(reason([](Problem& p, Device&) { p.kernel = {18, 3, 3}; }), "im2col"), "lower corner -17");
  expect(!has(reason([](Problem& p, Device&) { p.kernel = {17, 3, 3}; }), "im2col"), "lower corner -16");
  expect(!has(reason([](Problem& p, Device&) { p.padding = {17, 0, 0}, p.in = {64, 32, 32}; }), "im2col"),
         "padding 17 leaves out the volume's own border");
  expect(has(select_plan(headline(), hopper(), {}).reason, "no kernel"), "nothing compiled");
  const Plan cpu = select_plan(headline(), Device{.max_threads = 2});
  expect(cpu.algorithm == Algorithm::kCpuLibrary && !cpu.instance, "CPU");
  Problem p = headline();
  p.n = 64, p.c = 2048, p.k = 512, p.in = {2, 2, 2}, p.kernel = {4, 4, 4}, p.stride = {2, 2, 2};
  p.padding = {1, 1, 1}, p.w_channels_last = true;
  const auto expect_empty = [](const Plan& plan, const std::string& what) {
    expect(plan.algorithm == Algorithm::kCudaLibrary && has_part(plan.reason, "is expected to need"),
           "8 positions per phase leave most of a tile empty, " + what + ": " + plan.reason);
  };
  expect_empty(select_training_plan(p, hopper(), all_compiled()), "in training");
  const Plan tiny = select_plan(p, hopper(), all_compiled());
  expect(tiny.algorithm == Algorithm::kCudaLibrary && tiny.instead_of_sm90,
         "130 us, the SM90 plan 2100: " + tiny.reason);
  p.dtype = DType::kFloat32;
  expect_empty(select_plan(p, hopper(), all_compiled()), "at float32's accuracy");
}

struct CountedLaunch : RememberedLaunch {
  int runs = 0;
};

void test_launch_memo() {
  LaunchMemo memo;
  int made = 0;
  const auto make = [&] {
    ++made;
    return std::make_unique<CountedLaunch>();
  };
  LaunchMemo::run<CountedLaunch>(&memo, make, [](CountedLaunch& launch) { ++launch.runs; });
  LaunchMemo::run<CountedLaunch>(&memo, make, [&](CountedLaunch& launch) {
    expect(++launch.runs == 2, "a launch is remembered");
    std::thread([&] {
      LaunchMemo::run<CountedLaunch>(
          &memo, make, [](CountedLaunch& other) { expect(other.runs == 0, "one of its own while in use"); });
    }).join();
  });
  const auto failing = [](CountedLaunch&) { throw std::runtime_error("refused"); };
  expect_violation<std::runtime_error>([&] { LaunchMemo::run<CountedLaunch>(&memo, make, failing); },
                                       "refused", "a launch that fails");
  LaunchMemo::run<CountedLaunch>(&memo, make,
                                 [](CountedLaunch& launch) { expect(launch.runs == 0, "is forgotten"); });
  LaunchMemo::run<CountedLaunch>(nullptr, make,
                                 [](CountedLaunch& launch) { expect(launch.runs == 0, "no memo"); });
  expect(made == 4, "launches made");
}

}  // namespace
}  // namespace upconv3d

int main() {
  try {
    upconv3d::test_launch_memo();
    upconv3d::test_problem();
    upconv3d::test_idle_taps();
    upconv3d::test_one_voxel();
    upconv3d::test_rules();
    upconv3d::test_formats();
    upconv3d::test_sm90_selection();
    upconv3d::test_splits_within_im2col();
    upconv3d::test_library_selection();
  } catch (const std::exception& error) {
    upconv3d::expect(false, error.what());
  }
  if (upconv3d::failures == 0) std::cout << "core: all passed\n";
  return upconv3d::failures == 0 ? 0 : 1;
}
