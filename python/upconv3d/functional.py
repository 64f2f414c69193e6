# SPDX-License-Identifier: Apache-2.0
"""The block as a function."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

IntOrTriple = int | Sequence[int]

_op = torch.ops.upconv3d.conv_transpose3d_relu_group_norm.default
# What the property torch.backends.cudnn.conv.fp32_precision calls: 0.14 us where the property takes 1.1 us.
_fp32_precision = torch._C._get_fp32_precision_getter
_any_requires_grad = torch._C._any_requires_grad
_BelowAutograd = torch._C._AutoDispatchBelowAutograd


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _torch_conv_precision() -> str:
    """PyTorch's own rule for a float32 convolution on CUDA: TF32 exactly where the setting reads "tf32"."""
    return "tf32" if _fp32_precision("cuda", "conv") == "tf32" else "ieee"


def resolve_precision(input: Tensor, precision: str | None) -> str:
    """ "ieee" or "tf32" for what a caller passed as `precision`.

    Raises: ValueError where precision is none of None, "ieee" and "tf32".
    """
    if precision is None:
        if input.dtype is torch.float32 and input.is_cuda:
            setting: str = _torch_conv_precision()
            return setting
        return "ieee"
    if precision == "ieee" or precision == "tf32":
        return precision
    raise ValueError(
        f"upconv3d: precision must be 'ieee', 'tf32' or None; got precision={precision!r}. "
        f"None is what torch.backends.cudnn.conv.fp32_precision says."
    )


def triple(value: IntOrTriple, name: str) -> Sequence[int]:
    """Three values, depth first, from an int or from a list of 1 or 3, as F.conv_transpose3d takes them.

    Raises:
        TypeError: not an integer and not a sequence of integers.
        RuntimeError: a sequence of another length.
    """
    if type(value) is int:
        return (value, value, value)
    if type(value) is tuple and len(value) == 3:
        return value
    return _triple_of_sequence(value, name)


def _triple_of_sequence(value: Any, name: str) -> Sequence[int]:
    if isinstance(value, (int, torch.SymInt)):
        return (value, value, value)  # type: ignore[return-value]
    if not isinstance(value, (tuple, list, torch.Size)) or not all(
        isinstance(v, (int, torch.SymInt)) for v in value
    ):
        raise TypeError(
            f"upconv3d: {name} must be an integer or a list of integers; got {name}={value!r} "
            f"({type(value).__name__})."
        )
    if len(value) == 1:
        return (value[0], value[0], value[0])
    if len(value) != 3:
        raise RuntimeError(
            f"upconv3d: {name} must be one integer or three, for depth, height and width; "
            f"got {name}={list(value)}."
        )
    return tuple(value)


def _check_values_per_group(
    input: Tensor,
    weight: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    output_padding: Sequence[int],
    groups: int,
    dilation: Sequence[int],
    num_groups: int,
) -> None:
    """Raises F.group_norm's ValueError where a norm group holds one value: it has no variance."""
    if weight.dim() != 5 or weight.size(1) * groups != num_groups:
        return
    for axis in range(3):
        extent = (
            (input.size(axis - 3) - 1) * stride[axis]
            - 2 * padding[axis]
            + dilation[axis] * (weight.size(axis + 2) - 1)
            + output_padding[axis]
        )
        if extent != 0:
            return
    raise ValueError(
        f"upconv3d: a norm group needs more than one value; got num_groups={num_groups}, which is also the "
        f"number of output channels, for one sample with a single output position. Remedy: fewer norm groups."
    )


def conv_transpose3d_relu_group_norm(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: IntOrTriple = 1,
    padding: IntOrTriple = 0,
    output_padding: IntOrTriple = 0,
    groups: int = 1,
    dilation: IntOrTriple = 1,
    *,
    num_groups: int,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    eps: float = 1e-5,
    precision: str | None = None,
) -> Tensor:
    """group_norm(relu(conv_transpose3d(input, weight, bias)), num_groups) as one differentiable op.

    Args:
        input: [N, C, D, H, W] or [C, D, H, W] (one sample); float32, bfloat16, float16 or float64;
            any strides, channels_last_3d is quickest.
        weight: [C, K/groups, T, R, S], dtype and device of input, any strides.
        bias: [K], or None; added before the ReLU.
        stride, padding, output_padding, dilation: positions; one, or three for depth, height, width.
        groups: of the convolution.
        num_groups: of the normalization; divides K.
        norm_weight, norm_bias: [K], or None for 1 and 0.
        eps: added to the variance (activation units squared).
        precision: concerns float32 input on CUDA. "ieee": float32's error; "tf32": at most TF32's error
            (operands of a 10-bit mantissa); None: what torch.backends.cudnn.conv.fp32_precision says at the
            call (under torch.compile: when the graph is compiled, for PyTorch has no guard on that setting).

    Returns:
        [N, K, Z, P, Q] or [K, Z, P, Q], dtype of input; Z = (D-1)*stride - 2*padding + dilation*(T-1)
        + output_padding + 1, likewise P and Q. channels_last_3d where input or weight is, else contiguous.

    Raises:
        RuntimeError: shapes, strides, dtypes, devices or counts break a rule; states rule, value and remedy.
        ValueError: unknown precision, eps not finite, or a norm group of one single value.
        TypeError: an argument is of the wrong kind.

    Under autocast all tensors are cast to its dtype, as for conv_transpose3d alone; the result is float32 on
    CUDA and of that dtype on the CPU, as it is from the three calls.

    Source: GroupNorm, Wu & He, arXiv:1803.08494.
    """
    if not isinstance(input, Tensor) or not isinstance(weight, Tensor):
        raise TypeError(
            f"upconv3d: input and weight must be tensors; got {type(input).__name__} and "
            f"{type(weight).__name__}."
        )
    precision = resolve_precision(input, precision)
    # Comparisons, not math.isfinite: torch.compile traces them for a symbolic eps too.
    if not -math.inf < eps < math.inf:
        raise ValueError(f"upconv3d: eps must be a finite number (activation units squared); got eps={eps}.")
    stride = triple(stride, "stride")
    padding = triple(padding, "padding")
    output_padding = triple(output_padding, "output_padding")
    dilation = triple(dilation, "dilation")
    dims = input.dim()
    if dims == 4 or (dims == 5 and input.size(0) == 1):
        _check_values_per_group(input, weight, stride, padding, output_padding, groups, dilation, num_groups)
    arguments = (
        input,
        weight,
        bias,
        stride,
        padding,
        output_padding,
        groups,
        dilation,
        num_groups,
        norm_weight,
        norm_bias,
        eps,
        precision,
    )
    # Autograd of a custom operator runs in Python: 11 us a call, also where there is nothing to record.
    if torch.compiler.is_compiling() or (torch.is_grad_enabled() and _any_requires_grad(*arguments)):
        y: Tensor = _op(*arguments)
        return y
    with _BelowAutograd():
        y = _op(*arguments)
    return y
