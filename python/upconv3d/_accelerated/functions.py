# SPDX-License-Identifier: Apache-2.0
"""Calls of PyTorch's functions in an FX graph: their arguments by name, and which activations they are."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from .._tail import DEFAULT_PARAMETERS

# Functions and methods that apply an activation to their first argument, by their parameters' names. What
# works in place is none else here: callers match values that nobody but the activation reads.
_RELU = ("relu", ("input", "inplace"))
_LEAKY_RELU = ("leaky_relu", ("input", "negative_slope", "inplace"))
_ELU = ("elu", ("input", "alpha", "inplace"))
_FUNCTIONS: dict[Any, tuple[str, tuple[str, ...]]] = {
    F.relu: _RELU,
    torch.relu: ("relu", ("input",)),
    torch.relu_: ("relu", ("input",)),
    F.leaky_relu: _LEAKY_RELU,
    F.leaky_relu_: ("leaky_relu", ("input", "negative_slope")),
    F.elu: _ELU,
    F.elu_: ("elu", ("input", "alpha")),
    F.silu: ("silu", ("input", "inplace")),
    F.gelu: ("gelu", ("input", "approximate")),
    F.prelu: ("prelu", ("input", "weight")),
}
_METHODS: dict[Any, tuple[str, tuple[str, ...]]] = {
    "relu": ("relu", ("input",)),
    "relu_": ("relu", ("input",)),
    "prelu": ("prelu", ("input", "weight")),
}
_PARAMETERS = {"leaky_relu": "negative_slope", "elu": "alpha", "prelu": "weight"}


def arguments_of(node: fx.Node, names: Sequence[str]) -> dict[str, Any] | None:
    """What node passes to a target that takes `names` in this order; None where it passes others."""
    if len(node.args) > len(names):
        return None
    given = dict(zip(names, node.args, strict=False))
    for name, value in node.kwargs.items():
        if name not in names or name in given:
            return None
        given[name] = value
    return given


def activation_of(node: fx.Node) -> tuple[str, Any] | None:
    """Name and parameter, in the words of conv_transpose3d_norm_act, of the activation that node applies.

    The parameter is what the graph passes, a node for the slopes of a PReLU. None where it is none of ours.
    """
    table = {"call_function": _FUNCTIONS, "call_method": _METHODS}.get(node.op, {})
    name, names = table.get(node.target, (None, ()))
    if name is None:
        return None
    given = arguments_of(node, names)
    if given is None:
        return None
    if name == "gelu":
        approximate = given.get("approximate", "none")
        return {"none": ("gelu", None), "tanh": ("gelu_tanh", None)}.get(approximate)
    parameter = _PARAMETERS.get(name)
    return name, None if parameter is None else given.get(parameter, DEFAULT_PARAMETERS.get(name))
