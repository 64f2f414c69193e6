// SPDX-License-Identifier: Apache-2.0
/// \file
/// Every call of the block asks this first. It takes 0.2 us, where pybind11's conversion of eight arguments
/// takes 1.2, and so do checks of them in Python (on a CPU of 2026).
#include "bindings/settings_number.hpp"

#include <algorithm>
#include <bit>
#include <cstdint>
#include <optional>

#include "bindings/block_settings.hpp"

namespace upconv3d::bindings {
namespace {

/// False for what is no int of Python's own (bool and subclasses too), or beyond 64 bit.
bool read_integer(PyObject* object, std::int64_t& value) {
  if (!PyLong_CheckExact(object)) return false;
  int overflow = 0;
  value = PyLong_AsLongLongAndOverflow(object, &overflow);
  return overflow == 0;
}

/// Three integers from one, or from a tuple of three; false for anything else.
bool read_triple(PyObject* object, std::int64_t* triple) {
  if (PyLong_CheckExact(object)) {
    if (!read_integer(object, triple[0])) return false;
    std::fill(triple + 1, triple + 3, triple[0]);
    return true;
  }
  if (!PyTuple_CheckExact(object) || PyTuple_GET_SIZE(object) != 3) return false;
  for (Py_ssize_t axis = 0; axis < 3; ++axis) {
    if (!read_integer(PyTuple_GET_ITEM(object, axis), triple[axis])) return false;
  }
  return true;
}

bool read_precision(PyObject* object, bool& is_tf32) {
  if (!PyUnicode_CheckExact(object)) return false;
  is_tf32 = PyUnicode_CompareWithASCIIString(object, "tf32") == 0;
  return is_tf32 || PyUnicode_CompareWithASCIIString(object, "ieee") == 0;
}

/// Nothing where an argument is of another kind than the commonest: Python's checks convert it, or say what
/// is wrong with it.
/// \param arguments stride, padding, output_padding, groups, dilation, num_groups, eps, precision
std::optional<BlockNumbers> read_numbers(PyObject* const* arguments) {
  BlockNumbers numbers;
  std::int64_t* const triples = numbers.triples.data();
  if (!read_triple(arguments[0], triples) || !read_triple(arguments[1], triples + 3) ||
      !read_triple(arguments[2], triples + 6) || !read_integer(arguments[3], numbers.groups) ||
      !read_triple(arguments[4], triples + 9) || !read_integer(arguments[5], numbers.num_groups) ||
      !PyFloat_CheckExact(arguments[6]) || !read_precision(arguments[7], numbers.is_tf32)) {
    return std::nullopt;
  }
  numbers.eps_bits = std::bit_cast<std::uint64_t>(PyFloat_AS_DOUBLE(arguments[6]));
  return numbers;
}

PyObject* settings_number(PyObject*, PyObject* const* arguments, Py_ssize_t count) {
  constexpr Py_ssize_t kArguments = 8;
  if (count != kArguments) {
    return PyErr_Format(PyExc_TypeError, "upconv3d: settings_number takes %zd arguments; got %zd.",
                        kArguments, count);
  }
  const std::optional<BlockNumbers> numbers = read_numbers(arguments);
  const std::optional<std::int64_t> number = numbers ? number_of(*numbers) : std::nullopt;
  if (!number) Py_RETURN_NONE;
  return PyLong_FromLongLong(*number);
}

}  // namespace

void add_settings_number(pybind11::module_& module) {
  static PyMethodDef methods[] = {
      // CPython calls a METH_FASTCALL function with the arguments of this type.
      {"settings_number", reinterpret_cast<PyCFunction>(reinterpret_cast<void*>(&settings_number)),
       METH_FASTCALL,
       "settings_number(stride, padding, output_padding, groups, dilation, num_groups, eps, precision): the "
       "number of settings that were remembered, None of others, and where one of them is no plain int, "
       "tuple of three, float, \"ieee\" or \"tf32\"."},
      {nullptr, nullptr, 0, nullptr}};
  if (PyModule_AddFunctions(module.ptr(), methods) != 0) throw pybind11::error_already_set();
}

}  // namespace upconv3d::bindings
