# SPDX-License-Identifier: Apache-2.0
"""A block with a skip, whose sum others may read too, as two nodes of autograd's graph:

    s = conv_transpose3d(input, weight, bias) + skip
    y = activation(norm(s))

As with PyTorch's calls the first keeps neither skip nor bias, and nothing where the convolution has no
gradients; the second keeps s. So what a model may change in place before its backward is what it may change
without upconv3d, but for the norm's own vectors.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ._autocast import autocast_dtype, cast_tensors
from ._autograd import AUTOCAST_KEYS, _is_transformed, as_backward
from ._convolution import aligned, convolution_backward
from ._geometry import memory_format_of, output_extent
from ._norm_alone import is_watched, record_norm_act, settings_of_norm
from ._tail import Settings, autocast_result_dtype, differentiable_backward
from ._tail_arguments import runs_kernels
from ._tail_op import _numbered_tail_for_training, numbered_tail, tail_number
from .functional import _autocast_enabled, _BelowAutograd, is_recorded


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
        if any(ctx.needs_input_grad[:3]):
            ctx.save_for_backward(input, weight)
        ctx.settings, ctx.has_bias = settings, bias is not None
        return s  # type: ignore[no-any-return]

    @staticmethod
    @as_backward
    def backward(ctx: Any, grad_s: Tensor) -> tuple[Any, ...]:
        *mask, of_skip, _, _ = ctx.needs_input_grad
        gradients: Sequence[Tensor | None] = (None,) * 3
        if any(mask):
            x, weight = ctx.saved_tensors
            if torch.is_grad_enabled():
                # The bias's value does not matter to its gradient.
                bias = weight.new_zeros(grad_s.size(1), requires_grad=mask[2]) if ctx.has_bias else None
                tensors, wanted = (x, weight, bias, *[None] * 4), [*mask, *[False] * 4]
                alone = _convolution_alone(ctx.settings)
                gradients = differentiable_backward(grad_s, None, tensors, alone, wanted)[:3]
            else:
                volumes = (grad_s, x) if _is_transformed(grad_s) else (aligned(grad_s), aligned(x))
                gradients = convolution_backward(volumes[0], volumes[1], weight, ctx.settings, mask)
        return (*gradients, grad_s if of_skip else None, None, None)


def _fits(skip: Any, x: Tensor, weight: Tensor, settings: Sequence[Any], dtype: torch.dtype) -> bool:
    """Whether skip has the convolution's sizes, dtype and device, and values as they are in memory: PyTorch
    broadcasts, promotes, and adds what is sparse or marked as negated."""
    if skip.dtype is not dtype or skip.device != x.device:
        return False
    if skip.layout is not torch.strided or skip.is_neg():
        return False
    s = Settings(*settings)
    extent = output_extent(x, weight, s.stride, s.padding, s.output_padding, s.dilation)
    return tuple(skip.shape) == (x.size(0), weight.size(1) * s.groups, *extent)


# As _norm_alone's.
_record: Callable[..., Any] = super(torch.autograd.Function, ConvTranspose3dPlusSkip).apply


class _Call(NamedTuple):
    """What is decided about a call.

    Attributes:
        number: of its settings; where the sum is kept, of those that say that the convolution is returned.
        keeps_sum: whether the kernels are to keep the sum.
        recording: whether autograd records the call.
        norm, norm_number: settings_of_norm, and their number; read where it does.
    """

    settings: tuple[Any, ...]
    number: int
    keeps_sum: bool
    recording: bool
    norm: tuple[Any, ...]
    norm_number: int

    def run(self, tensors: tuple[Any, ...]) -> tuple[Tensor, Tensor | None] | None:
        """y and the sum, which is None where it is not kept; None where the kernels keep nothing."""
        with _BelowAutograd():
            if not self.keeps_sum:
                return numbered_tail(*tensors, self.number)[0], None
            y, s = _numbered_tail_for_training(*tensors, self.number)
        if y is None or s is None:
            return None
        input, weight, bias, gamma, beta, slopes, skip = tensors
        s = s.contiguous(memory_format=memory_format_of(input, weight))  # it lies as the convolution made it
        if self.recording:
            s = _record(input, weight, bias, skip, (s,), self.settings)
            y = record_norm_act(y, s, gamma, beta, slopes, self.norm, self.norm_number)
        return y, s


def _call_of(tensors: tuple[Any, ...], settings: tuple[Any, ...], returns_sum: bool) -> _Call | None:
    """None where the compiled module remembers no more settings."""
    recording = is_recorded(*tensors)
    keeps_sum, s = recording or returns_sum, Settings(*settings)
    of_norm = settings_of_norm(s.num_groups, s.eps, s.activation, s.parameter)
    number = tail_number((*settings[:-1], True) if keeps_sum else settings)
    norm_number = tail_number(of_norm)
    if number is None or norm_number is None:
        return None
    return _Call(settings, number, keeps_sum, recording, of_norm, norm_number)


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
    if not runs_kernels(x) or x.dtype is torch.float64 or is_watched(tensors):
        return None
    low = autocast_dtype(x) if _autocast_enabled() else None
    if not _fits(skip, x, weight, settings, x.dtype if low is None else low):
        return None
    call = _call_of(tensors, settings, returns_sum)
    # Gradients in float16 under autocast: PyTorch's casts keep their range.
    if call is None or (call.recording and low is torch.float16):
        return None
    if low is None:
        return call.run(tensors)
    tensors = cast_tensors(tensors, low, call.recording)
    with torch._C._ExcludeDispatchKeyGuard(AUTOCAST_KEYS):
        pair = call.run(tensors)
    if pair is None:
        return None
    dtype = low if norm == "instance" else autocast_result_dtype(low, x.device.type, norm, settings)
    y, s = pair
    return (y if y.dtype is dtype else y.to(dtype)), s
