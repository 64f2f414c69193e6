# SPDX-License-Identifier: Apache-2.0
"""An accelerated Sequential as torch.compile records it, with guards on little more than its modules have.

Dynamo guards on whatever the code that it traces reads, functions and tables of ours too, and checks all
of it before every call of the graph, which is time that a small model waits for (perf/NOTES.md). So blocks
are found by a call that Dynamo takes for constant, and what it traces reads of the modules what their own
forwards read: children, classes, attributes and parameters.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .._geometry import surely
from .._graphs import is_exporting
from .._in_graphs import block_in_graph
from .._tail_arguments import runs_kernels
from ..functional import resolve_precision
from .block import Block, Options
from .chain import find_block, is_of_known_class, kind_of

# Names of children, from the Sequential inwards.
Path = tuple[str, ...]
# Of a block: order, norm, activation, and which of its modules are the normalizer, the activation (0 for
# none) and inactive dropouts; whether of one position it makes one.
Spec = tuple[str, str, str, int, int, tuple[int, ...], bool]
# The names of each container's children; and the modules to call one after the other, or together as a block.
# All of it is what Dynamo knows as constants.
Recipe = tuple[tuple[tuple[Path, Path], ...], tuple[tuple[tuple[Path, ...], Spec | None], ...]]

_NUMBERS = {"leaky_relu": "negative_slope", "elu": "alpha"}  # of an activation, the attribute that it takes
_APPROXIMATE = {"gelu": "none", "gelu_tanh": "tanh"}


def _is_finite_number(value: Any) -> bool:
    return type(value) in (int, float) and math.isfinite(value)


def _keeps_one_position(conv: Any) -> bool:
    """Whether the convolution makes one position of an input of one; of more it makes more."""
    axes = zip(conv.kernel_size, conv.dilation, conv.output_padding, conv.padding, strict=True)
    return all(dilation * (taps - 1) + after == 2 * before for taps, dilation, after, before in axes)


def _spec_of(block: Block, modules: Sequence[nn.Module], dtype: torch.dtype) -> Spec | None:
    """How to run the block; None of what run_block asks more about at the call."""
    conv, normalizer, activation = block.conv, block.normalizer, block.activation
    if block.norm not in ("group", "instance") or not all(map(is_of_known_class, modules)):
        return None
    parameters = [p for module in modules for p in module._parameters.values() if p is not None]
    plain = "weight" in conv._parameters and "bias" in conv._parameters
    if not plain or any(type(parameter) is not nn.Parameter for parameter in parameters):
        return None
    alike = all(parameter.dtype is dtype for parameter in parameters) or torch.is_autocast_enabled("cuda")
    padding: Any = conv.padding
    if not alike or any(type(v) is not tuple for v in (padding, conv.dilation, conv.output_padding)):
        return None
    if 2 * max(padding) >= min(conv.kernel_size):
        return None
    if not _is_finite_number(normalizer.eps):
        return None
    if activation == "prelu":
        slopes = block.parameter.weight
        if slopes.dim() != 1 or slopes.size(0) not in (1, conv.out_channels):
            return None
    elif block.parameter is not None and not _is_finite_number(block.parameter):
        return None
    kinds = [kind_of(module) for module in modules]
    passive = ("conv", "identity", "dropout", "group", "instance")
    active = next((at for at, kind in enumerate(kinds) if kind not in passive), 0)
    dropouts = tuple(at for at, kind in enumerate(kinds) if kind == "dropout")
    at = next(at for at, module in enumerate(modules) if module is normalizer)
    keeps_one = _keeps_one_position(conv)
    return block.order, block.norm, activation or "none", at, active, dropouts, keeps_one


def recipe_of(
    places: Sequence[tuple[Path, nn.Module]], children: Sequence[tuple[Path, Path]], dtype: torch.dtype
) -> Recipe | None:
    """How to compute an accelerated Sequential that begins with a block; None of all others.

    places: the modules that it calls one after the other; children: as in Recipe; dtype: of its input.
    """
    paths, chain = [path for path, _ in places], [module for _, module in places]
    block = find_block(chain, 0) if chain and isinstance(chain[0], nn.ConvTranspose3d) else None
    if not isinstance(block, Block) or any(isinstance(module, nn.ConvTranspose3d) for module in chain[1:]):
        return None
    spec = _spec_of(block, chain[: block.length], dtype)
    if spec is None:
        return None
    steps: list[tuple[tuple[Path, ...], Spec | None]] = [(tuple(paths[: block.length]), spec)]
    steps += [((path,), None) for path in paths[block.length :]]
    return tuple(children), tuple(steps)


def _at(module: Any, path: Path) -> Any:
    for name in path:
        module = module._modules[name]
    return module


def _run_block(modules: Sequence[Any], spec: Spec, x: Tensor) -> Any:
    """The block on x; None where an attribute is no longer what the recipe was made from."""
    order, norm, activation, norm_at, activation_at, dropouts, keeps_one = spec
    conv, normalizer, active = modules[0], modules[norm_at], modules[activation_at]
    for module in modules:
        # Reading an attribute is what lets Dynamo guard on the class, of a ReLU or Identity too.
        if not isinstance(module.training, bool):
            return None
    for at in dropouts:
        if modules[at].training and modules[at].p != 0:
            return None
    # Of one position, a norm may refuse the result.
    if keeps_one and surely(x.size(2) == 1) and surely(x.size(3) == 1) and surely(x.size(4) == 1):
        return None
    if conv.padding_mode != "zeros" or (norm == "instance" and normalizer.track_running_stats):
        return None
    if activation in _APPROXIMATE and active.approximate != _APPROXIMATE[activation]:
        return None
    slopes = active.weight if activation == "prelu" else None
    number = getattr(active, _NUMBERS[activation]) if activation in _NUMBERS else 0.0
    groups = normalizer.num_groups if norm == "group" else conv.out_channels
    geometry = (conv.stride, conv.padding, conv.output_padding, conv.groups, conv.dilation)
    numbers = (*geometry, groups, normalizer.eps, resolve_precision(x, None))
    tensors = (x, conv.weight, conv.bias, normalizer.weight, normalizer.bias, slopes, None)
    return block_in_graph(tensors, (*numbers, order, activation, number, False), norm)[0]


def run_in_graph(sequential: Any, x: Any, options: Options) -> Any:
    """The Sequential on x, as Dynamo traces it; None where run_chain is to decide."""
    if options.precision is not None or is_exporting():
        return None
    if not isinstance(x, Tensor) or not runs_kernels(x) or x.dim() != 5:
        return None
    recipe = sequential._upconv3d_recipe(x.dtype)
    if recipe is None:
        return None
    children, steps = recipe
    for path, names in children:
        # Items: Dynamo guards on the order in which a dictionary is gone over.
        found = [name for name, _ in _at(sequential, path)._modules.items()]
        if len(found) != len(names):
            return None
        for at, name in enumerate(names):  # torch 2.11's Dynamo cannot compare tuples that are constants
            if found[at] != name:
                return None
    for paths, spec in steps:
        if spec is None:
            x = _at(sequential, paths[0])(x)
        else:
            x = _run_block([_at(sequential, path) for path in paths], spec, x)
            if x is None:
                return None
    return x
