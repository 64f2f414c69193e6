# SPDX-License-Identifier: Apache-2.0
"""Blocks in a graph of torch functions, as Dynamo records it, in one call of upconv3d's operators each.

Such a graph is not functional: values are changed in place, and autocast and gradient modes are switched by
nodes. A block is therefore taken only where its calls follow one another with nothing of effect between.
"""

import operator
from collections.abc import Iterator, Set
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.amp.autocast_mode import _enter_autocast, _exit_autocast
from torch.autograd import forward_ad
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from .._geometry import memory_format_of, suggests_channels_last_3d
from .._tail_arguments import join
from ..functional import is_finite, resolve_precision, triple
from .functions import activation_of, arguments_of

_ops = torch.ops.upconv3d
_CONV = ("input", "weight", "bias", "stride", "padding", "output_padding", "groups", "dilation")
_GROUP_NORM = ("input", "num_groups", "weight", "bias", "eps")
_INSTANCE_NORM = ("input", "running_mean", "running_var", "weight", "bias", "use_input_stats", "momentum")
_DROPOUTS = (F.dropout, F.dropout2d, F.dropout3d, F.alpha_dropout)
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class Norm(NamedTuple):
    """A normalization; num_groups 0 is one group per channel. weight and bias are nodes or None."""

    num_groups: int
    weight: Any
    bias: Any
    eps: Any


class Match(NamedTuple):
    """A convolution and the calls behind it, in the graph's order: norm, activation, inactive dropouts."""

    nodes: tuple[fx.Node, ...]
    conv: dict[str, Any]
    norm: Norm
    activation: str
    parameter: Any
    order: str


def _norm_of(node: fx.Node) -> Norm | None:
    if node.op != "call_function":
        return None
    if node.target in (F.group_norm, torch.group_norm):
        # cudnn_enabled, of torch.group_norm alone, is ignored by PyTorch.
        given = arguments_of(node, (*_GROUP_NORM, "cudnn_enabled"))
        if given is None or type(given.get("num_groups")) is not int:
            return None
        num_groups = given["num_groups"]
    elif node.target is F.instance_norm:
        given = arguments_of(node, (*_INSTANCE_NORM, "eps"))
        if given is None or given.get("use_input_stats", True) is not True:
            return None
        if given.get("running_mean") is not None or given.get("running_var") is not None:
            return None
        num_groups = 0
    else:
        return None
    return Norm(num_groups, given.get("weight"), given.get("bias"), given.get("eps", 1e-5))


def _only_user(node: fx.Node) -> fx.Node | None:
    """Who alone reads node, as its first argument and nowhere else."""
    if len(node.users) != 1:
        return None
    (user,) = node.users
    values = [*user.args, *user.kwargs.values()]
    first = user.args[0] if user.args else user.kwargs.get("input")
    return user if first is node and sum(value is node for value in values) == 1 else None


def _is_identity(node: fx.Node) -> bool:
    """Whether node is a dropout that drops nothing."""
    if node.op != "call_function" or node.target not in _DROPOUTS:
        return False
    given = arguments_of(node, ("input", "p", "training", "inplace"))
    if given is None:
        return False
    p = given.get("p", 0.5)
    return given.get("training", True) is False or (isinstance(p, (int, float)) and p == 0)


def _follow(node: fx.Node) -> tuple[fx.Node, ...]:
    """What reads node, each the only reader of the one before: dropouts that drop nothing, then another."""
    user = _only_user(node)
    if user is None:
        return ()
    if not _is_identity(user):
        return (user,)
    following = _follow(user)
    return (user, *following) if following else ()


def _without_effect(node: fx.Node) -> bool:
    """Whether it makes no difference if node runs before or after the calls of a block."""
    return node.op in ("placeholder", "get_attr") or (node.op == "call_method" and node.target == "item")


def _adjacent(nodes: tuple[fx.Node, ...]) -> bool:
    node = nodes[0].next
    while node is not nodes[-1]:
        if node not in nodes and not _without_effect(node):
            return False
        node = node.next
    return True


def _match(conv: fx.Node) -> Match | None:
    given = arguments_of(conv, _CONV)
    to_first = _follow(conv)
    to_second = _follow(to_first[-1]) if to_first else ()
    if given is None or not to_second:
        return None
    first, second = to_first[-1], to_second[-1]
    norm, activation, order = _norm_of(first), activation_of(second), "norm_act"
    if norm is None:
        norm, activation, order = _norm_of(second), activation_of(first), "act_norm"
    nodes = (conv, *to_first, *to_second)
    if norm is None or activation is None or not _adjacent(nodes):
        return None
    return Match(nodes, given, norm, *activation, order)


def _tensors(match: Match) -> tuple[Any, ...]:
    """Nodes of the operator's tensors, None for those that are not there, as Tensors names them."""
    slopes = match.parameter if match.activation == "prelu" else None
    return (
        match.conv.get("input"),
        match.conv.get("weight"),
        match.conv.get("bias"),
        match.norm.weight,
        match.norm.bias,
        slopes,
        None,
    )


def _example(value: Any) -> Any:
    return value.meta.get("example_value") if isinstance(value, fx.Node) else value


def _is_float(value: Any) -> bool:
    """Whether an operator takes it for a float: not what is known with the data alone."""
    number = _example(value)
    if isinstance(number, torch.SymFloat):
        return not free_unbacked_symbols(number)
    return isinstance(number, (int, float)) and is_finite(number)


def _are_integers(values: Any) -> bool:
    return all(type(v) is int for v in (values if isinstance(values, (tuple, list)) else [values]))


def _takes_dtypes(values: list[Any], results: list[Any]) -> bool:
    """Whether the operator computes in the dtype in which the graph's calls do."""
    x = values[0]
    if torch._C._is_any_autocast_enabled():
        # The operator's autocast casts all to one dtype, as that of the convolution does.
        device_type = x.device.type
        return (
            torch.is_autocast_enabled(device_type)
            and results[0].dtype is torch.get_autocast_dtype(device_type)
            and all(value.dtype is not torch.float64 for value in values)
        )
    return all(value.dtype is x.dtype for value in (*values, *results))


def _is_known(match: Match, devices: Set[str]) -> bool:
    """Whether the example values say that the operator computes what the three calls do."""
    values = [_example(node) for node in _tensors(match) if node is not None]
    results = [_example(node) for node in match.nodes]
    # Wrappers of torch.func's transforms and subclasses are no fake tensors.
    if not all(isinstance(value, FakeTensor) for value in (*values, *results)):
        return False
    x, weight = values[:2]
    if x.dim() != 5 or weight.dim() != 5 or x.device.type not in devices:
        return False
    if any(v.device != x.device or v.dtype not in _DTYPES for v in (*values, *results)):
        return False
    if type(weight.shape[1]) is not int or any(type(s) is int and s == 0 for s in results[0].shape):
        return False
    numbers = [match.conv.get(name, 1) for name in ("stride", "padding", "output_padding", "dilation")]
    if not all(map(_are_integers, [*numbers, match.conv.get("groups", 1)])):
        return False
    if match.activation == "prelu":
        if values[-1].dim() != 1:
            return False
    elif match.parameter is not None and not _is_float(match.parameter):
        return False
    formats = (torch.contiguous_format, torch.channels_last_3d)
    dense = any(results[-1].is_contiguous(memory_format=f) for f in formats)
    return _is_float(match.norm.eps) and dense and _takes_dtypes(values, results)


def _call(graph: fx.Graph, match: Match) -> fx.Node:
    """The operator's call, and y of what it returns."""
    tensors = _tensors(match)
    x, weight = _example(tensors[0]), _example(tensors[1])
    groups = match.conv.get("groups", 1)
    geometry = [
        list(triple(match.conv.get(name, default), name))
        for name, default in (("stride", 1), ("padding", 0), ("output_padding", 0), ("dilation", 1))
    ]
    num_groups = match.norm.num_groups or weight.shape[1] * groups
    precision = resolve_precision(x, None)
    convolution = (*geometry[:3], groups, geometry[3])
    parameter = 0.0 if match.activation == "prelu" or match.parameter is None else match.parameter
    numbers = (*convolution, num_groups, match.norm.eps, precision)
    settings = (*numbers, match.order, match.activation, parameter, False)
    named: dict[str, Any] = {"instance": not match.norm.num_groups}
    op = _ops.conv_transpose3d_norm_act_in_graph.default
    pair = graph.call_function(op, join(tensors, settings), named)
    return graph.call_function(operator.getitem, (pair, 0))


def _replace(graph: fx.Graph, match: Match) -> None:
    last = match.nodes[-1]
    result: Tensor = _example(last)
    x, weight = (_example(node) for node in _tensors(match)[:2])
    with graph.inserting_before(last):
        y = _call(graph, match)
        if result.dtype in (torch.bfloat16, torch.float16):
            # Under autocast, which may be switched on outside of this graph, the operator returns float32
            # where instance norm does not.
            y = graph.call_method("to", (y, result.dtype))
        memory_format = memory_format_of(x, weight)
        if not result.is_contiguous(memory_format=memory_format):
            # What follows was recorded for these strides: a view of them, say.
            last_format = suggests_channels_last_3d(result)
            kept = torch.channels_last_3d if last_format else torch.contiguous_format
            y = graph.call_method("contiguous", (y,), {"memory_format": kept})
    y.meta = dict(last.meta)
    last.replace_all_uses_with(y)
    for node in reversed(match.nodes):
        graph.erase_node(node)


def _outside_autocast(graph: fx.Graph) -> Iterator[fx.Node]:
    """The nodes that no autocast region in the graph holds."""
    depth = 0
    for node in list(graph.nodes):
        if node.target is _enter_autocast:
            depth += 1
        elif node.target is _exit_autocast:
            depth -= 1
        elif depth == 0:
            yield node


def rewrite(graph: fx.Graph, devices: Set[str]) -> int:
    """Replaces the blocks on devices of these types, in place; how many there were."""
    if forward_ad._current_level >= 0:  # tangents, which the operator would drop
        return 0
    found = 0
    for node in _outside_autocast(graph):
        if node.op != "call_function" or node.target is not torch.conv_transpose3d:
            continue
        match = _match(node)
        if match is not None and _is_known(match, devices):
            _replace(graph, match)
            found += 1
    return found
