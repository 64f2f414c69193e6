# SPDX-License-Identifier: Apache-2.0
"""A call of the family whose arguments are checked: by upconv3d's kernels, or by PyTorch's operators."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, NoReturn

import torch
from torch import Tensor
from torch.autograd import forward_ad

from . import _C
from ._autocast import autocast_dtype, cast_tensors, computes_in_float32
from ._autograd import AUTOCAST_KEYS
from ._facts import is_concrete
from ._geometry import surely
from ._out_of_memory import raise_out_of_memory
from ._plan_questions import SMALL_BLOCK_VALUES, about_values
from ._recorded_casts import cast_leaves, casts_leaves
from ._tail import autocast_result_dtype, composite, is_apart, keeps_operand, settings_of_kept
from ._tail_arguments import refuse_broken_rule, runs_kernels
from ._tail_op import numbered_tail, public_tail, record_tail, tail_number
from .functional import (
    _autocast_enabled,
    _BelowAutograd,
    _dispatch_modes,
    _dynamo_compiling,
    _profiling,
    _tracing,
    _transforms_active,
    is_overridden,
    is_recorded,
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


class CudaCall(NamedTuple):
    """How a call on CUDA is computed, without torch.func's transforms, forward-mode AD or __torch_function__.

    Attributes:
        settings: with the precision that the kernels get.
        number: tail_number of settings, spares_host and what the operator casts; of settings_of_kept, where
            autograd records the call.
        low: what autocast casts to; None without it.
        casts: what is cast to it or, for "input", to float32; for "parameters" input, and the others by the
            operator; for "all" those of a recorded call by one of their own, where casts_leaves; None where
            PyTorch's operators are to run.
        dtype: of the result under autocast.
        recording: whether autograd records the call.
        spares_host: as of tail_number.
    """

    settings: tuple[Any, ...]
    number: int | None
    low: torch.dtype | None
    casts: Literal["nothing", "input", "parameters", "all"] | None
    dtype: torch.dtype | None
    recording: bool
    spares_host: bool

    def run(self, tensors: tuple[Any, ...]) -> Pair | None:
        """None where PyTorch's operators are to run. Raises: RuntimeError."""
        casts = self.casts
        if casts == "nothing":
            return self._run_kernels(tensors)
        if casts is None:
            return None
        assert self.low is not None
        cast: tuple[Tensor | None, ...] | None = None
        if casts == "input":
            tensors = (tensors[0].float(), *tensors[1:])
        elif casts == "parameters" and self.number is not None and not self._is_watched():
            tensors = (tensors[0].to(self.low), *tensors[1:])
        elif self.recording and self.number is not None and casts_leaves(tensors, self.low):
            tensors = (tensors[0].to(self.low), *tensors[1:])
            cast = cast_leaves(tensors)
        else:
            tensors = cast_tensors(tensors, self.low, self.recording)
        with torch._C._ExcludeDispatchKeyGuard(AUTOCAST_KEYS):
            pair = self._run_kernels(tensors, cast)
        if pair is None or pair[0].dtype is self.dtype:
            return pair
        return pair[0].to(self.dtype), pair[1]

    def _is_watched(self) -> bool:
        """Whether somebody watches operators, who is to see the public one. For a block that spares the host
        that one would choose another plan: a profile shows what runs without it."""
        return _tracing() or _dispatch_modes() > 0 or (_profiling() and not self.spares_host)

    def _run_kernels(
        self, tensors: tuple[Any, ...], cast: tuple[Tensor | None, ...] | None = None
    ) -> Pair | None:
        """The call by upconv3d's kernels, without autocast; None where PyTorch's operators are to run."""
        number = self.number
        if self.recording:
            # A mode is to see what PyTorch's calls show it; of other calls the operator itself sees to that.
            if number is None or (keeps_operand(tensors, self.settings) and _dispatch_modes() > 0):
                return None
            return record_tail(tensors, self.settings, number, cast)
        if number is not None and not self._is_watched():
            pair: Pair = numbered_tail(*tensors, number)
            return pair
        with _BelowAutograd():
            return public_tail(tensors, self.settings)


def keeps_nothing(tensors: tuple[Any, ...], settings: tuple[Any, ...]) -> bool:
    """Whether no plan keeps anything for a backward of the call, or autograd could not keep its skip, which
    PyTorch's addition has no need of: a tensor of inference_mode."""
    skip = tensors[6]
    if skip is not None and skip.is_inference():
        return True
    bare = settings[5] == 0
    return (bare or is_apart(tensors, settings)) and not keeps_operand(tensors, settings)


def is_recorded_by_pytorch(tensors: tuple[Any, ...], settings: tuple[Any, ...], precise: bool) -> bool:
    """Whether autograd is to record PyTorch's own calls: where keeps_nothing, and of small blocks without a
    norm, whose steps wait for the host, which ours took 1.5 to 1.8 times as long (perf/NOTES.md, "Small
    blocks without a norm, trained"), unless UPCONV3D_PLAN asks for a plan of ours.

    precise: as in composite(), by which float32's convolution is a node in Python, too.
    """
    if keeps_nothing(tensors, settings):
        return True
    input = tensors[0]
    if settings[5] > 0 or (precise and input.dtype is torch.float32):
        return False
    if _tracing():  # whose sizes cannot be compared
        return False
    is_small = about_values(input, tensors[1], settings[0], settings[3]) <= SMALL_BLOCK_VALUES
    return is_small and not (_C.forced_plan() or torch.cuda.is_current_stream_capturing())


def _casts_parameters(tensors: tuple[Any, ...], low: torch.dtype) -> bool:
    """Whether the operator can cast all that is to be cast to `low` but the input."""
    for tensor in tensors[1:6]:
        if tensor is not None and tensor.dtype is not torch.float32 and tensor.dtype is not low:
            return False
    return tensors[6] is None or tensors[6].dtype is low


def cuda_call(
    tensors: tuple[Any, ...],
    settings: tuple[Any, ...],
    low: torch.dtype | None,
    norm: str | None,
    recording: bool,
    spares_host: bool,
) -> CudaCall:
    """What is decided about a call that has a backward of ours, if autograd records it (see
    is_recorded_by_pytorch).

    low: what autocast casts to; None without it. spares_host: as of tail_number.
    """
    casts: Literal["nothing", "input", "parameters", "all"] | None = "nothing"
    dtype: torch.dtype | None = None
    if low is not None:
        castable = not (recording and low is torch.float16)  # see three_calls
        dtype = autocast_result_dtype(low, tensors[0].device.type, norm, settings)
        # From 16 bit to 16 bit, float32 would cast both volumes. A returned convolution has autocast's dtype,
        # and so has a skip.
        uncast = not (is_apart(tensors, settings) or (castable and dtype is low is tensors[0].dtype))
        uncast = uncast and settings[5] > 0 and not keeps_nothing(tensors, settings)
        if uncast and computes_in_float32(tensors, low, settings, recording):
            settings = (*settings[:7], "tf32", *settings[8:])
            casts = "input"
        elif castable:
            # A backward reads what was cast: parameters may have been changed since.
            casts = "parameters" if not recording and _casts_parameters(tensors, low) else "all"
        else:
            casts = None
    # What torch.jit.trace records is the operator that its reader knows.
    numbered = settings_of_kept(tensors, settings) if recording else settings
    number = None if _tracing() else tail_number(numbered, spares_host, casts == "parameters")
    return CudaCall(settings, number, low, casts, dtype, recording, spares_host)


def _run_cuda(
    tensors: tuple[Any, ...],
    settings: tuple[Any, ...],
    low: torch.dtype | None,
    norm: str | None,
    precise: bool,
    spares_host: bool,
) -> Pair:
    """The call on CUDA. low: what autocast casts to; None without it."""
    pair: Pair | None = None
    recording = is_recorded(*tensors)
    # Nobody but autograd knows what to do with operators that are not PyTorch's: transforms of torch.func and
    # forward-mode AD get PyTorch's.
    plain = not _transforms_active() and forward_ad._current_level < 0
    plain = plain and not (recording and is_recorded_by_pytorch(tensors, settings, precise))
    if plain and (is_overridden(tensors) or (recording and _tracing())):
        pair = public_tail(tensors, settings)
    elif plain:
        pair = cuda_call(tensors, settings, low, norm, recording, spares_host).run(tensors)
    return composite(tensors, settings, precise) if pair is None else pair


def _run(
    tensors: tuple[Any, ...],
    settings: tuple[Any, ...],
    norm: str | None,
    precise: bool,
    spares_host: bool,
) -> Pair:
    """The call on any device; arguments as of run_checked."""
    y: Tensor
    conv: Tensor | None
    input, skip = tensors[0], tensors[6]
    low = autocast_dtype(input) if _dynamo_compiling() or _autocast_enabled() else None
    if low is None and skip is None and runs_kernels(input) and not _dynamo_compiling():
        return _run_cuda(tensors, settings, None, norm, precise, spares_host)
    dtype = input.dtype if low is None else low
    summed = dtype if skip is None or skip.dtype is dtype else torch.promote_types(dtype, skip.dtype)
    if runs_kernels(input) and (skip is None or skip.dtype is dtype):
        if _dynamo_compiling():
            y, conv = public_tail(tensors, settings)
        else:
            y, conv = _run_cuda(tensors, settings, low, norm, precise, spares_host)
    else:
        _require_device(input.device, tensors)
        if low is None:
            _require_dtype(summed, *tensors[3:6])
        y, conv = composite(tensors, settings, precise)
        if not (_dynamo_compiling() or _tracing()) and surely(y.numel() == 0):
            refuse_broken_rule(tensors, settings, is_cast=True)  # PyTorch allows samples without positions
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
    spares_host: bool = False,
) -> Pair:
    """What checked_arguments returned, computed; raises RuntimeError.

    precise: as in composite(); spares_host: as of tail_number.
    """
    if _dynamo_compiling():
        return _run(tensors, settings, norm, precise, spares_host)
    try:
        return _run(tensors, settings, norm, precise, spares_host)
    except RuntimeError as error:
        _say_why(error, tensors, settings)
        raise


def _say_why(error: RuntimeError, tensors: tuple[Any, ...], settings: tuple[Any, ...]) -> None:
    """Raises what says more than `error` of a call that it ended: torch.OutOfMemoryError, or RuntimeError
    with value and remedy where PyTorch refused and one of our rules is what is broken."""
    raise_out_of_memory(error)
    # The rules take numbers.
    if is_concrete(*(tensor for tensor in tensors if tensor is not None), *settings):
        refuse_broken_rule(tensors, settings, autocast_dtype(tensors[0]) is not None)


def run_decided(
    tensors: tuple[Any, ...], settings: tuple[Any, ...], norm: str | None, precise: bool, call: CudaCall
) -> Tensor:
    """run_checked's y of a call without a skip, where nothing of all that CudaCall is without is on.

    call: cuda_call of tensors of these kinds.
    """
    try:
        pair = call.run(tensors)
        if pair is not None:
            return pair[0]
        y, _ = composite(tensors, settings, precise)
    except RuntimeError as error:
        _say_why(error, tensors, settings)
        raise
    lowered = call.low is not None and norm == "instance" and y.dtype is not call.low  # see _run
    return y.to(call.low) if lowered else y
