# SPDX-License-Identifier: Apache-2.0
"""A block with a skip whose sum others read too, as two nodes of autograd's graph:

    s = conv_transpose3d(input, weight, bias) + skip
    y = activation(norm(s))

As with PyTorch's calls the first keeps no skip, which an addition does not read, and the second keeps s. So
what a model may change in place before its backward is what it may change without upconv3d.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ._autocast import autocast_dtype, cast_tensors
from ._autograd import (
    AUTOCAST_KEYS,
    _aligned,
    _convolution_backward,
    _is_transformed,
    without_autocast,
)
from ._geometry import memory_format_of, output_extent
from ._tail import Settings, Tensors, _activate, _normalize, autocast_result_dtype, differentiable_backward
from ._tail_arguments import runs_kernels
from ._tail_gradients import _numbered_tail_backward
from ._tail_op import _numbered_tail_for_training, numbered_tail, tail_number
from .functional import (
    _any_requires_grad,
    _autocast_enabled,
    _BelowAutograd,
    _dispatch_modes,
    _dynamo_compiling,
    _grad_enabled,
    _has_torch_function,
    _tracing,
    _transforms_active,
)


def _convolution_alone(settings: Sequence[Any]) -> Settings:
    """Settings of the same convolution without anything behind it."""
    s = Settings(*settings)
    return s._replace(num_groups=0, order="norm_act", activation="none", parameter=0.0, return_conv=False)


class ConvTranspose3dPlusSkip(torch.autograd.Function):
    """s, which was computed before, and its gradients."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        """arguments: input, weight, bias and skip, a tuple of s, Settings."""
        input, weight, bias, _, (s,), settings = arguments
        ctx.save_for_backward(input, weight, bias)
        ctx.settings = settings
        return s  # type: ignore[no-any-return]

    @staticmethod
    @without_autocast
    def backward(ctx: Any, grad_s: Tensor) -> tuple[Any, ...]:
        x, weight, bias = ctx.saved_tensors
        *mask, of_skip, _, _ = ctx.needs_input_grad
        gradients: Sequence[Tensor | None]
        if torch.is_grad_enabled():
            alone, nothing = _convolution_alone(ctx.settings), [None] * 4
            tensors = (x, weight, bias, *nothing)
            wanted = [*mask, *[False] * 4]
            gradients = differentiable_backward(grad_s, None, tensors, alone, wanted)[:3]
        elif any(mask):
            volumes = (grad_s, x) if _is_transformed(grad_s) else (_aligned(grad_s), _aligned(x))
            gradients = _convolution_backward(volumes[0], volumes[1], weight, ctx.settings, mask)
        else:
            gradients = (None,) * 3
        return (*gradients, grad_s if of_skip else None, None, None)


class NormActOfSum(torch.autograd.Function):
    """y, which was computed before, and its gradients, of s and the vectors."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        """arguments: s, norm_weight, norm_bias, slopes; input, weight and bias, of which sizes alone are
        read, a tuple of y, Settings, and the number that the kernels get."""
        *tensors, (y,), settings, number = arguments
        ctx.save_for_backward(*tensors)
        ctx.settings, ctx.number = settings, number
        return y  # type: ignore[no-any-return]

    @staticmethod
    @without_autocast
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Any, ...]:
        s, gamma, beta, slopes, x, weight, bias = ctx.saved_tensors
        mask = ctx.needs_input_grad[:4]
        vectors = (gamma, beta, slopes)
        gradients: Sequence[Tensor | None]
        if torch.is_grad_enabled() or _is_transformed(grad_y):
            gradients = _differentiated(grad_y, (s, *vectors), ctx.settings, mask)
        else:
            # Hooks of saved tensors may have laid it out anew.
            operand = s.contiguous(memory_format=memory_format_of(x, weight))
            bits = mask[0] | mask[1] << 3 | mask[2] << 4 | mask[3] << 5
            tensors = (grad_y, x, weight, bias, *vectors, operand)
            found = _numbered_tail_backward(*tensors, ctx.number, bits, False)
            gradients = (found[6], *found[3:6])
        kept = (g if wanted else None for g, wanted in zip(gradients, mask, strict=True))
        return (*kept, *[None] * 6)


def _differentiated(
    grad_y: Tensor, tensors: Sequence[Any], settings: Sequence[Any], mask: Sequence[bool]
) -> list[Tensor | None]:
    """Gradients of s, norm_weight, norm_bias and slopes, in operators that autograd can differentiate."""
    twice, numbers = torch.is_grad_enabled(), Settings(*settings)
    with torch.enable_grad():
        # Views cut off what else the tensors may depend on.
        views: list[Any] = [None if t is None else t.view_as(t) for t in tensors]
        s, gamma, beta, slopes = views
        vectors = Tensors(s, s, None, gamma, beta, slopes, None)
        y = _activate(_normalize(s, vectors, numbers, instance=False), numbers, slopes, in_place=False)
        wanted_views = [view for view, wanted in zip(views, mask, strict=True) if wanted]
        found = iter(torch.autograd.grad(y, wanted_views, grad_y, create_graph=twice))
    return [next(found) if wanted else None for wanted in mask]


def _is_watched(tensors: Sequence[Any]) -> bool:
    """Whether others than autograd have to do with the call, to whom PyTorch's operators are known."""
    return (
        _dynamo_compiling()
        or _tracing()
        or _transforms_active()
        or _dispatch_modes() > 0
        or forward_ad._current_level >= 0
        or _has_torch_function(tensors)
    )


def _fits(skip: Any, x: Tensor, weight: Tensor, settings: Sequence[Any], dtype: torch.dtype) -> bool:
    """Whether skip has the convolution's sizes, dtype and device: PyTorch broadcasts and promotes."""
    if skip.dtype is not dtype or skip.device != x.device:
        return False
    s = Settings(*settings)
    extent = output_extent(x, weight, s.stride, s.padding, s.output_padding, s.dilation)
    return tuple(skip.shape) == (x.size(0), weight.size(1) * s.groups, *extent)


def run_with_sum(
    tensors: tuple[Any, ...], settings: tuple[Any, ...], norm: str, returns_sum: bool
) -> tuple[Tensor, Tensor | None] | None:
    """y and s by our kernels; None where PyTorch's calls are to run. Raises: RuntimeError.

    Args:
        tensors: the fields of Tensors; input [N, C, D, H, W], a skip among them.
        settings: the fields of Settings; the norm comes first, and no convolution is returned.
        norm: "group" or "instance", which differ in the dtype of y under autocast.
        returns_sum: whether s is wanted; without, it is None where nothing keeps it.
    """
    x, weight, skip = tensors[0], tensors[1], tensors[6]
    if not runs_kernels(x) or x.dtype is torch.float64 or _is_watched(tensors):
        return None
    low = autocast_dtype(x) if _autocast_enabled() else None
    if not _fits(skip, x, weight, settings, x.dtype if low is None else low):
        return None
    recording = _grad_enabled() and _any_requires_grad(*tensors)
    keeps_sum = recording or returns_sum
    # What is kept of a call with a skip is the sum where the number says that the convolution is returned.
    number = tail_number((*settings[:-1], True) if keeps_sum else settings)
    # Gradients in float16 under autocast: PyTorch's casts keep their range.
    if number is None or (recording and low is torch.float16):
        return None
    if low is None:
        return _run_kernels(tensors, settings, number, keeps_sum, recording)
    tensors = cast_tensors(tensors, low, recording)
    with torch._C._ExcludeDispatchKeyGuard(AUTOCAST_KEYS):
        pair = _run_kernels(tensors, settings, number, keeps_sum, recording)
    if pair is None:
        return None
    dtype = low if norm == "instance" else autocast_result_dtype(low, x.device.type, norm, settings)
    y, s = pair
    return (y if y.dtype is dtype else y.to(dtype)), s


def _run_kernels(
    tensors: tuple[Any, ...], settings: tuple[Any, ...], number: int, keeps_sum: bool, recording: bool
) -> tuple[Tensor, Tensor | None] | None:
    with _BelowAutograd():
        if not keeps_sum:
            return numbered_tail(*tensors, number)[0], None
        y, s = _numbered_tail_for_training(*tensors, number)
    if y is None or s is None:
        return None
    input, weight, bias, gamma, beta, slopes, skip = tensors
    s = s.contiguous(memory_format=memory_format_of(input, weight))  # it lies as the convolution made it
    if recording:
        s = ConvTranspose3dPlusSkip.apply(input, weight, bias, skip, (s,), settings)  # type: ignore[no-untyped-call]
        of_norm = (s, gamma, beta, slopes, input, weight, bias)
        y = NormActOfSum.apply(*of_norm, (y,), settings, number)  # type: ignore[no-untyped-call]
    return y, s
