# SPDX-License-Identifier: Apache-2.0
"""What follows the convolution, as data and in PyTorch's operators.

    c = conv_transpose3d(x, weight, bias)
    act_norm:  y = norm(activation(c + skip))
    norm_act:  y = activation(norm(c + skip))

Instance norm is group norm with as many groups as channels.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor

from ._autograd import BlockArguments, _convolution, _convolution_backward, _precision_matters
from ._geometry import batched

ORDERS = ("norm_act", "act_norm")
NORMS = ("group", "instance", None)
ACTIVATIONS = ("relu", "leaky_relu", "elu", "silu", "gelu", "gelu_tanh", "prelu", None)
# activation_param where it is not given, as in torch.nn.
DEFAULT_PARAMETERS = {"leaky_relu": 0.01, "elu": 1.0}


class Tail(NamedTuple):
    """What the family's operator takes beside tensors and the convolution's numbers."""

    order: str
    num_groups: int  # 0: no norm
    eps: float  # activation units squared
    activation: str  # "none": none
    parameter: float  # of "leaky_relu" and "elu"
    return_conv: bool


class PreciseConvolution(torch.autograd.Function):
    """conv_transpose3d whose float32 precision on CUDA is an argument, in its backward too.

    What differentiates the backward once more follows PyTorch's setting.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, *numbers: Any) -> Tensor:
        return _convolution(x, weight, bias, _conv_arguments(*numbers))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, _, *numbers = inputs
        ctx.save_for_backward(x, weight)
        ctx.numbers = numbers

    @staticmethod
    def backward(ctx: Any, grad_c: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        args = _conv_arguments(*ctx.numbers)
        grads = _convolution_backward(grad_c, x, weight, args, ctx.needs_input_grad[:3])
        return (*grads, *(None,) * len(ctx.numbers))


def _conv_arguments(
    stride: Sequence[int],
    padding: Sequence[int],
    output_padding: Sequence[int],
    groups: int,
    dilation: Sequence[int],
    precision: str,
) -> BlockArguments:
    return BlockArguments(stride, padding, output_padding, groups, dilation, 1, 0.0, precision)


def activate(value: Tensor, activation: str, parameter: float, slopes: Tensor | None, fresh: bool) -> Tensor:
    """The activation of [N, K, ...]; in place where `fresh` says that nobody else sees `value` and the
    gradient can be had from the result."""
    if activation == "relu":
        return F.relu(value, inplace=fresh)
    if activation == "leaky_relu":
        return F.leaky_relu(value, parameter, inplace=fresh and parameter > 0)
    if activation == "elu":
        return F.elu(value, parameter, inplace=fresh and parameter > 0)
    if activation == "silu":
        return F.silu(value)
    if activation == "gelu" or activation == "gelu_tanh":
        return F.gelu(value, approximate="none" if activation == "gelu" else "tanh")
    if activation == "prelu":
        assert slopes is not None
        return F.prelu(value, slopes)
    return value


def refuse_skip(skip: Tensor, sizes: Sequence[int]) -> NoReturn:
    raise RuntimeError(
        f"upconv3d: skip must have the sizes of the convolution's output; got skip.size()={list(skip.shape)} "
        f"for an output of {list(sizes)}. Remedy: resize or expand it before the call."
    )


def composite(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    slopes: Tensor | None,
    skip: Tensor | None,
    numbers: tuple[Any, ...],
    tail: Tail,
    precise: bool,
) -> tuple[Tensor, Tensor | None]:
    """y, and c where it is returned, in operators that PyTorch differentiates, casts and traces itself.

    Args:
        numbers: stride, padding, output_padding, groups, dilation, precision.
        precise: whether `precision` is to hold whatever PyTorch's setting says, for float32 on CUDA.
    """
    x = batched(input)
    if precise and _precision_matters(x):
        c: Tensor = PreciseConvolution.apply(x, weight, bias, *numbers)  # type: ignore[no-untyped-call]
    else:
        stride, padding, output_padding, groups, dilation, _ = numbers
        c = torch.conv_transpose3d(x, weight, bias, stride, padding, output_padding, groups, dilation)
    value = c
    if skip is not None:
        summand = batched(skip)
        if summand.shape != c.shape:
            refuse_skip(skip, c.shape if input.dim() == 5 else c.shape[1:])
        value = c + summand
    fresh = skip is not None or not tail.return_conv
    if tail.order == "act_norm" or tail.num_groups == 0:
        value = activate(value, tail.activation, tail.parameter, slopes, fresh)
        if tail.num_groups > 0:
            value = torch.group_norm(value, tail.num_groups, norm_weight, norm_bias, tail.eps)
    else:
        value = torch.group_norm(value, tail.num_groups, norm_weight, norm_bias, tail.eps)
        value = activate(value, tail.activation, tail.parameter, slopes, True)
    conv = c if tail.return_conv else None
    if input.dim() == 4:
        return value.squeeze(0), None if conv is None else conv.squeeze(0)
    return value, conv
