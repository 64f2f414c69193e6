# SPDX-License-Identifier: Apache-2.0
"""A call of the family whose arguments are checked: by upconv3d's kernels, or by PyTorch's operators."""

from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import _C
from ._autocast import _AUTOCAST_KEYS, autocast_dtype, cast_tensors, computes_in_float32
from ._tail import autocast_result_dtype, composite, reads_returned
from ._tail_arguments import facts_of, refuse_empty, runs_kernels
from ._tail_op import numbered_tail, public_tail, record_tail, tail_number
from .functional import (
    _any_requires_grad,
    _autocast_enabled,
    _BelowAutograd,
    _dispatch_modes,
    _dynamo_compiling,
    _grad_enabled,
    _has_torch_function,
    _profiling,
    _tracing,
    _transforms_active,
)

Pair = tuple[Tensor, Tensor | None]


def _refuse_dtype(name: str, tensor: Tensor, expected: torch.dtype) -> NoReturn:
    raise RuntimeError(
        f"upconv3d: {name} must have the dtype of what it is applied to, that of input (and skip); got "
        f"{tensor.dtype} for {expected}. Remedy: {name}.to({expected}), or torch.autocast."
    )


def _require_dtype(expected: torch.dtype, norm_weight: Any, norm_bias: Any, slopes: Any) -> None:
    """Raises RuntimeError for a vector of another dtype; PyTorch takes some, on some devices."""
    if norm_weight is not None and norm_weight.dtype is not expected:
        _refuse_dtype("norm_weight", norm_weight, expected)
    if norm_bias is not None and norm_bias.dtype is not expected:
        _refuse_dtype("norm_bias", norm_bias, expected)
    if slopes is not None and slopes.dtype is not expected:
        _refuse_dtype("activation_param", slopes, expected)


def _require_device(device: torch.device, tensors: Sequence[Any]) -> None:
    """Raises RuntimeError for a tensor on another device; PyTorch takes some meta tensors."""
    for tensor in tensors:
        if tensor is not None and tensor.device != device:
            raise RuntimeError(
                f"upconv3d: all tensors must be on one device; got {device} and {tensor.device}. Remedy: "
                f"move them there."
            )


def _run_kernels(tensors: tuple[Any, ...], settings: tuple[Any, ...], recording: bool) -> Pair | None:
    """The call on CUDA by upconv3d's kernels, without autocast; None where PyTorch's operators are to run."""
    if recording:
        # A mode is to see what PyTorch's calls show it; of other calls the operator itself sees to that.
        number = None if settings[11] and _dispatch_modes() > 0 else tail_number(settings)
        return None if number is None else record_tail(tensors, settings, number)
    # Who watches operators is to see the one that he knows.
    watched = _tracing() or _profiling() or _dispatch_modes() > 0
    number = None if watched else tail_number(settings)
    if number is not None:
        pair: Pair = numbered_tail(*tensors, number)
        return pair
    with _BelowAutograd():
        return public_tail(tensors, settings)


class CudaCall(NamedTuple):
    """How upconv3d's kernels compute a call.

    Attributes:
        settings: with the precision that the kernels get.
        low: what autocast casts to; None without it.
        uncast: whether the input is made float32 instead, and the parameters stay as they are.
        dtype: of the result under autocast.
    """

    settings: tuple[Any, ...]
    low: torch.dtype | None
    uncast: bool
    dtype: torch.dtype | None

    def run(self, tensors: tuple[Any, ...], recording: bool) -> Pair | None:
        """None where PyTorch's operators are to run. Raises: RuntimeError."""
        if self.low is None:
            return _run_kernels(tensors, self.settings, recording)
        if self.uncast:
            tensors = (tensors[0].float(), *tensors[1:])
        else:
            tensors = cast_tensors(tensors, self.low, recording)
        with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST_KEYS):
            pair = _run_kernels(tensors, self.settings, recording)
        return None if pair is None else (pair[0].to(self.dtype), pair[1])


def _keeps_nothing(tensors: tuple[Any, ...], settings: tuple[Any, ...]) -> bool:
    """Whether no plan keeps anything for a backward of the call."""
    returned = settings[11] and not reads_returned(tensors, settings)
    return settings[5] == 0 or tensors[6] is not None or returned


def cuda_call(
    tensors: tuple[Any, ...],
    settings: tuple[Any, ...],
    low: torch.dtype | None,
    norm: str | None,
    recording: bool,
) -> CudaCall | None:
    """What is decided about a call; None where PyTorch's operators are to run."""
    if low is None:
        return CudaCall(settings, None, False, None)
    castable = not (recording and low is torch.float16)  # see three_calls
    dtype = autocast_result_dtype(low, tensors[0].device.type, norm, settings)
    # From 16 bit to 16 bit, float32 would cast both volumes. A returned convolution has autocast's dtype.
    uncast = not (settings[11] or (castable and dtype is low is tensors[0].dtype))
    uncast = uncast and not _keeps_nothing(tensors, settings)
    uncast = uncast and computes_in_float32(tensors, low, settings, recording)
    if uncast:
        return CudaCall((*settings[:7], "tf32", *settings[8:]), low, True, dtype)
    return CudaCall(settings, low, False, dtype) if castable else None


def _run_cuda(
    tensors: tuple[Any, ...],
    settings: tuple[Any, ...],
    low: torch.dtype | None,
    norm: str | None,
    precise: bool,
    known: CudaCall | None,
) -> Pair:
    """The call on CUDA. low: what autocast casts to; None without it."""
    pair: Pair | None = None
    recording = _grad_enabled() and _any_requires_grad(*tensors)
    # Nobody but autograd knows what to do with operators that are not PyTorch's: transforms of torch.func and
    # forward-mode AD get PyTorch's.
    plain = not _transforms_active() and forward_ad._current_level < 0
    plain = plain and not (recording and _keeps_nothing(tensors, settings))
    if plain and (_has_torch_function(tensors) or (recording and _tracing())):
        pair = public_tail(tensors, settings)
    elif plain:
        call = known
        if call is None or recording or call.low is not low:
            call = cuda_call(tensors, settings, low, norm, recording)
        pair = None if call is None else call.run(tensors, recording)
    return composite(tensors, settings, precise) if pair is None else pair


def _run(
    tensors: tuple[Any, ...],
    settings: tuple[Any, ...],
    norm: str | None,
    precise: bool,
    known: CudaCall | None,
) -> Pair:
    """The call on any device; arguments as of run_checked."""
    y: Tensor
    conv: Tensor | None
    input, skip = tensors[0], tensors[6]
    low = autocast_dtype(input) if _dynamo_compiling() or _autocast_enabled() else None
    if low is None and skip is None and runs_kernels(input) and not _dynamo_compiling():
        return _run_cuda(tensors, settings, None, norm, precise, known)
    dtype = input.dtype if low is None else low
    summed = dtype if skip is None or skip.dtype is dtype else torch.promote_types(dtype, skip.dtype)
    if runs_kernels(input) and (skip is None or skip.dtype is dtype):
        if _dynamo_compiling():
            y, conv = public_tail(tensors, settings)
        else:
            y, conv = _run_cuda(tensors, settings, low, norm, precise, known)
    else:
        _require_device(input.device, tensors)
        if low is None:
            _require_dtype(summed, *tensors[3:6])
        y, conv = composite(tensors, settings, precise)
        if not (_dynamo_compiling() or _tracing()) and y.numel() == 0:
            refuse_empty(tensors, settings)
    # instance_norm returns the dtype that it gets; ours is group_norm, which autocast runs in float32.
    if low is not None and norm == "instance":
        expected = low if settings[9] == "prelu" else summed
        y = y if y.dtype is expected else y.to(expected)
    return y, conv


def run_checked(
    tensors: tuple[Any, ...],
    settings: tuple[Any, ...],
    norm: str | None,
    precise: bool,
    known: CudaCall | None = None,
) -> Pair:
    """What checked_arguments returned, computed; raises RuntimeError.

    precise: as in composite(). known: cuda_call of tensors of these kinds, without gradients recorded.
    """
    if _dynamo_compiling():
        return _run(tensors, settings, norm, precise, None)
    try:
        return _run(tensors, settings, norm, precise, known)
    except RuntimeError:
        # PyTorch refused. Where one of our rules is what is broken, that says so with value and remedy.
        _C.validate(facts_of(tensors, settings))
        raise
