# SPDX-License-Identifier: Apache-2.0
"""The family around the block: any order of norm and activation, a skip added, the convolution returned."""

import contextlib
from collections.abc import Callable
from typing import Any, Literal, overload

import torch
from torch import Tensor
from torch.overrides import handle_torch_function

from ._geometry import surely
from ._tail import ACTIVATIONS, DEFAULT_PARAMETERS, NORMS, ORDERS
from ._tail_call import run_checked
from .functional import (
    IntOrTriple,
    _check_values_per_group,
    _dynamo_compiling,
    _has_torch_function,
    _tracing,
    check_kinds,
    conv_transpose3d_relu_group_norm,
    integer,
    is_finite,
    is_number,
    resolve_precision,
    triple,
)


def require_known(order: Any, norm: Any, activation: Any) -> None:
    """Raises ValueError for a name that is none."""
    if order in ORDERS and norm in NORMS and activation in ACTIVATIONS:
        return
    chosen = (("order", order, ORDERS), ("norm", norm, NORMS), ("activation", activation, ACTIVATIONS))
    name, value, known = next((n, v, k) for n, v, k in chosen if v not in k)
    raise ValueError(f"upconv3d: {name} must be one of {', '.join(map(repr, known))}; got {name}={value!r}.")


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


def require_number(activation: str | None, given: Any) -> None:
    """Raises TypeError or ValueError where the activation_param of leaky_relu or elu is no finite number."""
    default = DEFAULT_PARAMETERS.get(activation or "")
    if isinstance(given, (bool, Tensor)) or not is_number(given):
        raise TypeError(
            f"upconv3d: activation_param of {activation!r} must be a number; got {type(given).__name__}. "
            f"Remedy: leave it out for {default}; slopes in a tensor are for activation='prelu'."
        )
    if not is_finite(given):
        raise ValueError(
            f"upconv3d: activation_param must be finite; got activation_param={given}. Remedy: leave it out "
            f"for {default}."
        )


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
        if given.dim() == 0:
            given = given.reshape(1)
        if given.dim() != 1 or (given.size(0) != 1 and given.size(0) != channels):
            raise RuntimeError(
                f"upconv3d: slopes of a PReLU must be [1] or [{channels}], one per output channel; got "
                f"activation_param.size()={list(given.shape)}. Remedy: nn.PReLU(1) or nn.PReLU({channels})."
            )
        return 0.0, given
    if given is None:
        return DEFAULT_PARAMETERS.get(activation or "", 0.0), None
    if activation not in DEFAULT_PARAMETERS:
        raise ValueError(
            f"upconv3d: activation={activation!r} has no parameter; got activation_param={given!r}. Remedy: "
            f"leave it out (leaky_relu, elu and prelu have one)."
        )
    require_number(activation, given)
    known = isinstance(given, (int, float, torch.SymInt, torch.SymFloat))
    return given if known else float(given), None


def checked_arguments(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: IntOrTriple,
    padding: IntOrTriple,
    output_padding: IntOrTriple,
    groups: int,
    dilation: IntOrTriple,
    order: str,
    norm: str | None,
    num_groups: int | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    eps: float,
    activation: str | None,
    activation_param: float | Tensor | None,
    skip: Tensor | None,
    return_conv: bool,
    precision: str | None,
) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Tensors and Settings, as plain tuples, of conv_transpose3d_norm_act's arguments; raises as it does.

    order, norm and activation are known ones.
    """
    eps = 1e-5 if norm is None else eps  # without a norm nothing reads it
    check_kinds(input, weight, bias, norm_weight, norm_bias, eps)
    if skip is not None and not isinstance(skip, Tensor):
        raise TypeError(
            f"upconv3d: skip must be a tensor or None; got {type(skip).__name__}. Remedy: a tensor of the "
            f"sizes of the convolution's output."
        )
    precision = resolve_precision(input, precision)
    groups = integer(groups, "groups")
    stride = triple(stride, "stride")
    padding = triple(padding, "padding")
    output_padding = triple(output_padding, "output_padding")
    dilation = triple(dilation, "dilation")
    channels = weight.size(1) * groups if weight.dim() == 5 else 0
    norm_groups = _groups_of_norm(norm, num_groups, channels, (norm_weight, norm_bias))
    parameter, slopes = _parameters_of(activation, activation_param, channels)
    dims = input.dim()
    # While torch.jit.trace runs, sizes are traced tensors, and a comparison would be frozen into the graph.
    if norm_groups > 0 and (_dynamo_compiling() or not _tracing()):  # noqa: SIM102
        if dims == 4 or (dims == 5 and (norm == "instance" or surely(input.size(0) == 1))):
            _check_values_per_group(
                input, weight, stride, padding, output_padding, groups, dilation, norm_groups
            )
    # The convolution itself is one tensor, not two.
    returns_conv = bool(return_conv) and not (norm is None and activation is None and skip is None)
    numbers = (stride, padding, output_padding, groups, dilation, norm_groups, eps, precision)
    tensors = (input, weight, bias, norm_weight, norm_bias, slopes, skip)
    return tensors, (*numbers, order, activation or "none", parameter, returns_conv)


@overload
def conv_transpose3d_norm_act(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = ...,
    stride: IntOrTriple = ...,
    padding: IntOrTriple = ...,
    output_padding: IntOrTriple = ...,
    groups: int = ...,
    dilation: IntOrTriple = ...,
    *,
    order: str = ...,
    norm: str | None = ...,
    num_groups: int | None = ...,
    norm_weight: Tensor | None = ...,
    norm_bias: Tensor | None = ...,
    eps: float = ...,
    activation: str | None = ...,
    activation_param: float | Tensor | None = ...,
    skip: Tensor | None = ...,
    return_conv: Literal[False] = ...,
    precision: str | None = ...,
) -> Tensor: ...


@overload
def conv_transpose3d_norm_act(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = ...,
    stride: IntOrTriple = ...,
    padding: IntOrTriple = ...,
    output_padding: IntOrTriple = ...,
    groups: int = ...,
    dilation: IntOrTriple = ...,
    *,
    order: str = ...,
    norm: str | None = ...,
    num_groups: int | None = ...,
    norm_weight: Tensor | None = ...,
    norm_bias: Tensor | None = ...,
    eps: float = ...,
    activation: str | None = ...,
    activation_param: float | Tensor | None = ...,
    skip: Tensor | None = ...,
    return_conv: Literal[True],
    precision: str | None = ...,
) -> tuple[Tensor, Tensor]: ...


@overload
def conv_transpose3d_norm_act(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = ...,
    stride: IntOrTriple = ...,
    padding: IntOrTriple = ...,
    output_padding: IntOrTriple = ...,
    groups: int = ...,
    dilation: IntOrTriple = ...,
    *,
    order: str = ...,
    norm: str | None = ...,
    num_groups: int | None = ...,
    norm_weight: Tensor | None = ...,
    norm_bias: Tensor | None = ...,
    eps: float = ...,
    activation: str | None = ...,
    activation_param: float | Tensor | None = ...,
    skip: Tensor | None = ...,
    return_conv: bool,
    precision: str | None = ...,
) -> Tensor | tuple[Tensor, Tensor]: ...


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
        num_groups: number of groups of norm="group", which needs it; None for other norms. Divides K.
        norm_weight, norm_bias: [K], or None for 1 and 0; None without a norm.
        activation: "relu", "leaky_relu", "elu", "silu", "gelu" (with erf), "gelu_tanh", "prelu" or None.
        activation_param: leaky_relu's negative_slope (None: 0.01), elu's alpha (None: 1), or prelu's slopes,
            a tensor [1] or [K], which it needs; None for other activations.
        skip: [N, K, Z, P, Q] or [K, Z, P, Q], the sizes of the convolution's output, to which it is added.
            Another dtype than input's promotes as PyTorch's + does, and PyTorch computes the call. As input
            and weight, it is kept for the backward.
        return_conv: whether the convolution's own output, before the skip, is returned too.

    Returns:
        y, [N, K, Z, P, Q] or [K, Z, P, Q] as in conv_transpose3d_relu_group_norm; with return_conv the pair
        of y and conv_transpose3d(input, weight, bias), of the same sizes.

    Raises: as conv_transpose3d_relu_group_norm, and
        ValueError: an unknown order, norm or activation, an argument that does not belong to the norm or
            activation, or one that it needs and does not get; an activation_param that is not finite.
        RuntimeError: slopes or a skip of other sizes.
        TypeError: an activation_param or skip of the wrong kind, a prelu without slopes among them.

    Sources: GroupNorm, Wu & He, arXiv:1803.08494; InstanceNorm, Ulyanov et al., arXiv:1607.08022; PReLU, He
    et al., arXiv:1502.01852; ELU, Clevert et al., arXiv:1511.07289; GELU, Hendrycks & Gimpel,
    arXiv:1606.08415; SiLU, Elfwing et al., arXiv:1702.03118.
    """
    tensors: tuple[Any, ...] = (input, weight, bias, norm_weight, norm_bias, activation_param, skip)
    # torch.fx's proxies are no tensors.
    overrides = not _dynamo_compiling() and _has_torch_function(tensors)
    if overrides and any(not isinstance(t, (Tensor, int, float, type(None))) for t in tensors):
        function: Callable[..., Any] = conv_transpose3d_norm_act  # whichever overload
        return handle_torch_function(
            function,
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
    require_known(order, norm, activation)
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
    tensors, settings = checked_arguments(
        *(input, weight, bias, stride, padding, output_padding, groups, dilation),
        *(order, norm, num_groups, norm_weight, norm_bias, eps),
        *(activation, activation_param, skip, return_conv, precision),
    )
    y, conv = run_checked(tensors, settings, norm, precision is not None)
    if not return_conv:
        return y
    return y, conv if settings[-1] else y


# Settings by the numbers that they were made of. An entry takes 1 KB.
_settings_of: dict[tuple[Any, ...], tuple[Any, ...]] = {}
_MOST_SETTINGS = 4096


def _remembered_settings(key: tuple[Any, ...]) -> tuple[Any, ...] | None:
    try:
        return _settings_of.get(key)
    except TypeError:  # a list or a symbolic number, which have no hash
        return None


def _remember_settings(key: tuple[Any, ...], settings: tuple[Any, ...]) -> None:
    with contextlib.suppress(TypeError):  # no hash: a list or a symbolic number
        _settings_of[key] = settings


def _is_one_slope(slopes: Any) -> bool:
    return isinstance(slopes, Tensor) and slopes.dim() == 1 and slopes.size(0) == 1


def run_module(
    tensors: tuple[Any, ...],
    convolution: tuple[Any, ...],
    normalization: tuple[Any, ...],
    activation: tuple[Any, ...],
    return_conv: bool,
    precision: str | None,
) -> Any:
    """conv_transpose3d_norm_act of a module, whose numbers mostly are those of a call before.

    They need no check then; equal ones are taken for the same, as 1 and True. What the tensors may change is
    asked at every call.

    Args:
        tensors: input, weight, bias, norm_weight, norm_bias, skip.
        convolution: stride, padding, output_padding, groups, dilation.
        normalization: order, norm, num_groups, eps.
        activation: its name, and activation_param.
    """
    input, weight, bias, norm_weight, norm_bias, skip = tensors
    order, norm, num_groups, eps = normalization
    name, parameter = activation
    slopes, number = (parameter, None) if name == "prelu" else (None, parameter)
    # The block's own function runs "act_norm" with ReLU; what is no tensor, others do.
    elsewhere = (name == "relu" and order == "act_norm") or _dynamo_compiling() or _tracing()
    key: tuple[Any, ...] | None = None
    if not (elsewhere or not isinstance(input, Tensor) or not isinstance(weight, Tensor)):
        resolved = resolve_precision(input, precision)
        key = (convolution, normalization, name, number, return_conv, skip is None, weight.shape, resolved)
    settings = None if key is None else _remembered_settings(key)
    checked = name != "prelu" or _is_one_slope(slopes)
    if settings is None or not checked or not (skip is None or isinstance(skip, Tensor)):
        y = conv_transpose3d_norm_act(
            *(input, weight, bias, *convolution),
            order=order,
            norm=norm,
            num_groups=num_groups,
            norm_weight=norm_weight,
            norm_bias=norm_bias,
            eps=eps,
            activation=name,
            activation_param=parameter,
            skip=skip,
            return_conv=return_conv,
            precision=precision,
        )
        if key is not None and settings is None and len(_settings_of) < _MOST_SETTINGS:
            vectors = (norm_weight, norm_bias)
            numbers: tuple[Any, ...] = (
                order,
                norm,
                num_groups,
                *vectors,
                eps,
                name,
                parameter,
                skip,
                return_conv,
                precision,
            )
            _remember_settings(key, checked_arguments(input, weight, bias, *convolution, *numbers)[1])
        return y
    check_kinds(input, weight, bias, norm_weight, norm_bias, eps)
    norm_groups = settings[5]
    dims = input.dim()
    if norm_groups > 0 and (dims == 4 or (dims == 5 and (norm == "instance" or surely(input.size(0) == 1)))):
        stride, padding, output_padding, groups, dilation = settings[:5]
        _check_values_per_group(input, weight, stride, padding, output_padding, groups, dilation, norm_groups)
    y, conv = run_checked(
        (input, weight, bias, norm_weight, norm_bias, slopes, skip), settings, norm, precision is not None
    )
    if not return_conv:
        return y
    return y, conv if settings[-1] else y
