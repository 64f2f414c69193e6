// SPDX-License-Identifier: Apache-2.0
/// \file
/// What a broken rule throws. The bases are chosen for what PyTorch's own calls raise in the like case,
/// because pybind11, in PyTorch as in our module, turns std::runtime_error and std::invalid_argument into
/// Python's RuntimeError and ValueError.
#pragma once

#include <stdexcept>

namespace upconv3d {

/// A rule on shapes, kinds or counts is broken: RuntimeError in Python.
class RuleViolation : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

/// A dtype or device that PyTorch's convolution lacks too: NotImplementedError in Python, where it comes from
/// our module; its base class RuntimeError, where it comes through PyTorch's dispatcher.
class UnsupportedViolation : public RuleViolation {
 public:
  using RuleViolation::RuleViolation;
};

/// The value has no meaning (unknown precision, eps not finite, one value per group): ValueError in Python.
class ValueViolation : public std::invalid_argument {
 public:
  using std::invalid_argument::invalid_argument;
};

}  // namespace upconv3d
