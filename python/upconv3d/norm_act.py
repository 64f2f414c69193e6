# SPDX-License-Identifier: Apache-2.0
"""The family around the block: any order of norm and activation, a skip added, the convolution returned."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import handle_torch_function

from . import _C
from ._facts import block_facts
from ._tail import ACTIVATIONS, DEFAULT_PARAMETERS, NORMS, ORDERS, Tail, composite
from .functional import (
    IntOrTriple,
    _check_values_per_group,
    check_kinds,
    conv_transpose3d_relu_group_norm,
    integer,
    resolve_precision,
    triple,
)

_has_torch_function = torch._C._has_torch_function
_dynamo_compiling = torch.compiler.is_dynamo_compiling
_tracing = torch._C._is_tracing


def _require_known(name: str, value: Any, known: Sequence[str | None]) -> None:
    if value not in known:
        raise ValueError(
            f"upconv3d: {name} must be one of {', '.join(map(repr, known))}; got {name}={value!r}."
        )


def _groups_of_norm(norm: str | None, num_groups: Any, channels: Any, vectors: tuple[Any, Any]) -> Any:
    """num_groups of the operator: 0 without a norm, the channels for instance norm.

    Raises: ValueError, TypeError, RuntimeError.
    """
    if norm == "group":
        if num_groups is None:
            raise ValueError(
                "upconv3d: norm='group' needs num_groups; got num_groups=None. Remedy: pass it, or "
                "norm='instance', which has one group per channel."
            )
        groups = integer(num_groups, "num_groups")
        if groups < 1:
            raise RuntimeError(
                f"upconv3d: num_groups must be at least 1; got num_groups={groups}. Remedy: norm=None for no "
                f"normalization."
            )
        return groups
    if num_groups is not None:
        raise ValueError(
            f"upconv3d: num_groups belongs to norm='group'; got num_groups={num_groups!r} with norm={norm!r}."
            f" Remedy: leave it out."
        )
    if norm == "instance":
        return channels
    for name, vector in zip(("norm_weight", "norm_bias"), vectors, strict=True):
        if vector is not None:
            raise ValueError(
                f"upconv3d: {name} belongs to a normalization; got a tensor with norm=None. Remedy: leave it "
                f"out, or fold it into weight and bias."
            )
    return 0


def _parameters_of(activation: str | None, given: Any, channels: Any) -> tuple[Any, Tensor | None]:
    """What activation_param stands for: the operator's activation_param and its slopes.

    Raises: TypeError, ValueError, RuntimeError.
    """
    if activation == "prelu":
        if not isinstance(given, Tensor):
            raise TypeError(
                f"upconv3d: activation='prelu' takes its slopes, a tensor of 1 or one per output channel, as "
                f"activation_param; got {type(given).__name__}. Remedy: nn.PReLU's weight, or "
                f"activation='leaky_relu' for a number."
            )
        if given.dim() > 1 or (given.numel() != 1 and given.numel() != channels):
            raise RuntimeError(
                f"upconv3d: slopes of a PReLU must be [1] or [{channels}], one per output channel; got "
                f"activation_param.size()={list(given.shape)}."
            )
        return 0.0, given
    if given is None:
        return DEFAULT_PARAMETERS.get(activation or "", 0.0), None
    if activation not in DEFAULT_PARAMETERS:
        raise ValueError(
            f"upconv3d: activation={activation!r} has no parameter; got activation_param={given!r}. Remedy: "
            f"leave it out (leaky_relu, elu and prelu have one)."
        )
    if isinstance(given, bool) or not isinstance(given, (int, float, torch.SymInt, torch.SymFloat)):
        raise TypeError(
            f"upconv3d: activation_param of {activation!r} must be a number; got {type(given).__name__}."
        )
    if not -float("inf") < given < float("inf"):
        raise ValueError(f"upconv3d: activation_param must be finite; got activation_param={given}.")
    return given, None


def conv_transpose3d_norm_act(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: IntOrTriple = 1,
    padding: IntOrTriple = 0,
    output_padding: IntOrTriple = 0,
    groups: int = 1,
    dilation: IntOrTriple = 1,
    *,
    order: str = "norm_act",
    norm: str | None = "group",
    num_groups: int | None = None,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    eps: float = 1e-5,
    activation: str | None = "relu",
    activation_param: float | Tensor | None = None,
    skip: Tensor | None = None,
    return_conv: bool = False,
    precision: str | None = None,
) -> Any:
    """conv_transpose3d, then norm and activation in either order, as one differentiable call.

    With c = conv_transpose3d(input, weight, bias), and c + skip in its place where a skip is given:
    "norm_act" is activation(norm(c)), "act_norm" norm(activation(c)).

    Args:
        input, weight, bias, stride, padding, output_padding, groups, dilation, eps, precision: as in
            conv_transpose3d_relu_group_norm.
        order: "norm_act" or "act_norm"; of no consequence where one of the two is None.
        norm: "group", "instance" (statistics of every sample and channel by itself) or None.
        num_groups: of norm="group", and for no other; divides K.
        norm_weight, norm_bias: [K], or None for 1 and 0.
        activation: "relu", "leaky_relu", "elu", "silu", "gelu" (with erf), "gelu_tanh", "prelu" or None.
        activation_param: leaky_relu's negative_slope (None: 0.01), elu's alpha (None: 1), prelu's slopes,
            [1] or [K]; for no other.
        skip: [N, K, Z, P, Q] or [K, Z, P, Q], the sizes of the convolution's output, to which it is added.
        return_conv: whether the convolution's own output, before the skip, is returned too.

    Returns:
        y, [N, K, Z, P, Q] or [K, Z, P, Q] as in conv_transpose3d_relu_group_norm; with return_conv the pair
        of y and conv_transpose3d(input, weight, bias), of the same sizes.

    Raises: as conv_transpose3d_relu_group_norm; ValueError for an unknown order, norm or activation, or an
        argument that does not belong to it.

    Sources: GroupNorm, Wu & He, arXiv:1803.08494; InstanceNorm, Ulyanov et al., arXiv:1607.08022.
    """
    tensors: tuple[Any, ...] = (input, weight, bias, norm_weight, norm_bias, activation_param, skip)
    # torch.fx's proxies are no tensors.
    if not isinstance(tensors[0], Tensor) and _has_torch_function(tensors):
        return handle_torch_function(
            conv_transpose3d_norm_act,
            tensors,
            *(input, weight, bias, stride, padding, output_padding, groups, dilation),
            order=order,
            norm=norm,
            num_groups=num_groups,
            norm_weight=norm_weight,
            norm_bias=norm_bias,
            eps=eps,
            activation=activation,
            activation_param=activation_param,
            skip=skip,
            return_conv=return_conv,
            precision=precision,
        )
    _require_known("order", order, ORDERS)
    _require_known("norm", norm, NORMS)
    _require_known("activation", activation, ACTIVATIONS)
    if (
        activation == "relu"
        and order == "act_norm"
        and norm == "group"
        and num_groups is not None
        and activation_param is None
        and skip is None
        and not return_conv
    ):
        return conv_transpose3d_relu_group_norm(
            *(input, weight, bias, stride, padding, output_padding, groups, dilation),
            num_groups=num_groups,
            norm_weight=norm_weight,
            norm_bias=norm_bias,
            eps=eps,
            precision=precision,
        )
    check_kinds(input, weight, bias, norm_weight, norm_bias, eps)
    if skip is not None and not isinstance(skip, Tensor):
        raise TypeError(f"upconv3d: skip must be a tensor or None; got {type(skip).__name__}.")
    precise = precision is not None
    precision = resolve_precision(input, precision)
    groups = integer(groups, "groups")
    stride = triple(stride, "stride")
    padding = triple(padding, "padding")
    output_padding = triple(output_padding, "output_padding")
    dilation = triple(dilation, "dilation")
    channels = weight.size(1) * groups if weight.dim() == 5 else 0
    norm_groups = _groups_of_norm(norm, num_groups, channels, (norm_weight, norm_bias))
    parameter, slopes = _parameters_of(activation, activation_param, channels)
    compiling = _dynamo_compiling()
    if norm_groups > 0 and (compiling or not _tracing()):
        dims = input.dim()
        if dims == 4 or (dims == 5 and (norm == "instance" or input.size(0) == 1)):
            _check_values_per_group(
                input, weight, stride, padding, output_padding, groups, dilation, norm_groups
            )
    tail = Tail(order, norm_groups, eps, activation or "none", parameter, bool(return_conv))
    numbers = (stride, padding, output_padding, groups, dilation, precision)
    tensors = (input, weight, bias, norm_weight, norm_bias, slopes, skip)
    if compiling:
        y, conv = composite(*tensors, numbers, tail, precise)
    else:
        try:
            y, conv = composite(*tensors, numbers, tail, precise)
        except RuntimeError:
            # PyTorch refused: our rules say so with value and remedy, where they are what is broken.
            _C.validate(_facts_of(tensors, numbers, tail))
            raise
    return (y, conv) if return_conv else y


def _facts_of(tensors: tuple[Any, ...], numbers: tuple[Any, ...], tail: Tail) -> dict[str, Any]:
    input, weight, bias, norm_weight, norm_bias = tensors[:5]
    stride, padding, output_padding, groups, dilation, precision = numbers
    convolution = (stride, padding, output_padding, groups, dilation)
    num_groups = max(tail.num_groups, 1)
    return block_facts(
        input, weight, bias, *convolution, num_groups, norm_weight, norm_bias, tail.eps, precision
    )
