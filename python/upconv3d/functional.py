# SPDX-License-Identifier: Apache-2.0
"""The block as a function."""

import math
import numbers
import operator
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.overrides import handle_torch_function
from torch.utils._device import DeviceContext

from ._autocast import block_under_autocast, three_calls
from ._autograd import record_block
from ._geometry import surely
from ._numbered import known_blocks, known_number, numbered_block, settings_number
from ._out_of_memory import raise_out_of_memory
from ._transforms import differentiated, takes_tangents, transformed_block

IntOrTriple = int | Sequence[int]

_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16, torch.float64})
_INT64_MIN, _INT64_MAX = -(2**63), 2**63 - 1

_op = torch.ops.upconv3d.conv_transpose3d_relu_group_norm.default
_recomputed_op = torch.ops.upconv3d.conv_transpose3d_relu_group_norm_recomputed.default
# What the property torch.backends.cudnn.conv.fp32_precision calls: 0.14 us where the property takes 1.1 us.
_fp32_precision = torch._C._get_fp32_precision_getter
_any_requires_grad = torch._C._any_requires_grad
_BelowAutograd = torch._C._AutoDispatchBelowAutograd
_has_torch_function = torch._C._has_torch_function
_transforms_active = torch._C._are_functorch_transforms_active
_autocast_enabled = torch._C._is_any_autocast_enabled
_tracing = torch._C._is_tracing
_grad_enabled = torch.is_grad_enabled
_inference_mode = torch.is_inference_mode_enabled
_dynamo_compiling = torch.compiler.is_dynamo_compiling
_compiling = torch.compiler.is_compiling
_profiling = torch._C._autograd._profiler_enabled
_dispatch_modes = torch._C._len_torch_dispatch_stack
_PLAIN_TYPES = frozenset({type(None), Tensor, torch.nn.Parameter})


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


def integer(value: Any, name: str) -> Any:
    """An int or SymInt from anything with __index__.

    Raises: TypeError where value is none (bool too); ValueError beyond 64 bit.
    """
    found = value if type(value) is int else _integer(value)
    if found is None:
        raise TypeError(
            f"upconv3d: {name} must be an integer; got {name}={value!r} ({type(value).__name__}). Remedy: "
            f"an int, or what has __index__, as NumPy's integers."
        )
    if type(found) is int and not _INT64_MIN <= found <= _INT64_MAX:
        raise ValueError(f"upconv3d: {name} must fit in 64 bit; got {name}={found}.")
    return found


def triple(value: IntOrTriple, name: str) -> Sequence[int]:
    """Three values, depth first, from an int or from a list of 1 or 3, as F.conv_transpose3d takes them.

    Raises:
        TypeError: not an integer and not a sequence of integers.
        ValueError: an integer beyond 64 bit.
        RuntimeError: a sequence of another length.
    """
    if type(value) is int:
        if _INT64_MIN <= value <= _INT64_MAX:
            return (value, value, value)
    elif type(value) is tuple and len(value) == 3:
        # Written out: a generator expression over three values takes three times as long.
        a, b, c = value
        if (
            type(a) is int
            and type(b) is int
            and type(c) is int
            and _INT64_MIN <= a <= _INT64_MAX
            and _INT64_MIN <= b <= _INT64_MAX
            and _INT64_MIN <= c <= _INT64_MAX
        ):
            return value
    return _triple_of_sequence(value, name)


def _integer(value: Any) -> Any:
    """An int or SymInt of anything with __index__, as NumPy's integers; None of all else, bool too."""
    if isinstance(value, bool):
        return None
    if isinstance(value, (int, torch.SymInt)):
        return value
    try:
        return operator.index(value)
    except TypeError:
        return None


def _triple_of_sequence(value: Any, name: str) -> Sequence[int]:
    # Sequences first: Dynamo of torch 2.11 cannot be asked whether a tuple is an integer.
    values = [_integer(v) for v in (value if isinstance(value, (tuple, list)) else [value])]
    if any(v is None for v in values):
        raise TypeError(
            f"upconv3d: {name} must be an integer or a list of integers; got {name}={value!r} "
            f"({type(value).__name__}). Remedy: one int, or three for depth, height and width."
        )
    checked: list[int] = [integer(v, name) for v in values]
    if len(checked) == 1:
        return (checked[0],) * 3
    if len(values) != 3:
        raise RuntimeError(
            f"upconv3d: {name} must be one integer or three, for depth, height and width; "
            f"got {name}={values}."
        )
    return tuple(checked)


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
    """Raises F.group_norm's ValueError where a norm group holds one value: it has no variance.

    Of sizes that only data says, the operator has to say so.
    """
    if weight.dim() != 5 or weight.size(1) * groups != num_groups or num_groups < 1:
        return
    # Each size that is asked for takes 0.1 us, and the first axis mostly decides.
    for axis in range(3):
        extent = (
            (input.size(axis - 3) - 1) * stride[axis]
            - 2 * padding[axis]
            + dilation[axis] * (weight.size(axis + 2) - 1)
            + output_padding[axis]
        )
        if not surely(extent == 0):
            return
    if weight.size(0) != input.size(-4):
        return  # the operator says what is wrong
    raise ValueError(
        f"upconv3d: a norm group needs more than one value; got num_groups={num_groups}, which is also the "
        f"number of output channels (as of instance norm), for a single output position. Remedy: fewer norm "
        f"groups, or a larger input."
    )


def is_number(value: Any) -> bool:
    """Whether PyTorch's operators take `value` as a float: a number, NumPy's too, or a tensor of one."""
    if isinstance(value, Tensor):
        return value.dim() == 0 and not value.requires_grad and not value.is_complex()
    if isinstance(value, (int, float, torch.SymInt, torch.SymFloat)):
        return True
    return isinstance(value, numbers.Real) and hasattr(value, "dtype")


def _value_at_call(number: Any) -> Any:
    """A number as it is now, as a tensor may change before a backward pass; a traced one is the graph's."""
    is_number = not isinstance(number, Tensor)
    return number if is_number or _dynamo_compiling() or _tracing() else float(number)


def is_finite(number: Any) -> bool:
    """Whether a number of is_number's is neither infinite nor NaN, nor an integer that no float holds.

    Comparisons, not math.isfinite: torch.compile traces them for a symbolic number too.
    """
    too_large = type(number) is int and abs(number) > sys.float_info.max
    return -math.inf < number < math.inf and not too_large


def _refuse_vector(name: str, vector: Any) -> None:
    raise TypeError(
        f"upconv3d: {name} must be a tensor or None; got {type(vector).__name__}. Remedy: a tensor [K], one "
        f"value per output channel."
    )


def check_kinds(input: Any, weight: Any, bias: Any, norm_weight: Any, norm_bias: Any, eps: float) -> None:
    """What the operator's schema would refuse in its own words, and dtypes with PyTorch's exception.

    Raises: TypeError, NotImplementedError, ValueError.
    """
    if not isinstance(input, Tensor) or not isinstance(weight, Tensor):
        raise TypeError(
            f"upconv3d: input and weight must be tensors; got {type(input).__name__} and "
            f"{type(weight).__name__}. Remedy: a module's weight, not the module; torch.as_tensor for arrays."
        )
    if bias is not None and not isinstance(bias, Tensor):
        _refuse_vector("bias", bias)
    if norm_weight is not None and not isinstance(norm_weight, Tensor):
        _refuse_vector("norm_weight", norm_weight)
    if norm_bias is not None and not isinstance(norm_bias, Tensor):
        _refuse_vector("norm_bias", norm_bias)
    if input.dtype not in _DTYPES:
        raise NotImplementedError(
            f"upconv3d: input must be float32, bfloat16, float16 or float64; got input.dtype={input.dtype}. "
            f"Convert it, and the other tensors with it."
        )
    if type(eps) is not float and not is_number(eps):
        raise TypeError(
            f"upconv3d: eps must be a number (activation units squared); got eps={eps!r} "
            f"({type(eps).__name__}). Remedy: leave it out for PyTorch's default, 1e-5."
        )
    if not is_finite(eps):
        raise ValueError(
            f"upconv3d: eps must be a finite number (activation units squared); got eps={eps}. Remedy: leave "
            f"it out for PyTorch's default, 1e-5."
        )


def is_recorded(*tensors: Tensor | None) -> bool:
    """Whether autograd records what is done with the tensors. In inference_mode it does nothing, even where
    gradients are enabled inside of it."""
    return _grad_enabled() and _any_requires_grad(*tensors) and not _inference_mode()


def is_overridden(tensors: Sequence[Any]) -> bool:
    """Whether others than PyTorch compute functions of the tensors: __torch_function__ of theirs, or a mode.

    Not torch.set_default_device and `with torch.device(...)`: those are modes that make tensors, no more.
    """
    if not _has_torch_function(tensors):
        return False
    modes = map(torch._C._get_function_stack_at, range(torch._C._len_torch_function_stack()))
    return not (
        _PLAIN_TYPES.issuperset(map(type, tensors)) and all(type(mode) is DeviceContext for mode in modes)
    )


def _is_watched(tensors: tuple[Any, ...]) -> bool:
    """Whether others than autograd and kernels are to see a call on these tensors: autocast, a transform, a
    tracer, a profiler, a mode or __torch_function__."""
    return (
        _autocast_enabled()
        or is_overridden(tensors)
        or _transforms_active()
        or forward_ad._current_level >= 0
        or _tracing()
        or _profiling()
        or _compiling()
        or _dispatch_modes() > 0
    )


def _checked_block(
    tensors: tuple[Any, ...],
    stride: Any,
    padding: Any,
    output_padding: Any,
    groups: Any,
    dilation: Any,
    num_groups: Any,
    eps: Any,
    precision: Any,
    recompute: bool,
) -> Tensor:
    """The block by arguments that nobody has looked at yet; for whoever is to see it.

    tensors: input, weight, bias, norm_weight, norm_bias; the others as of conv_transpose3d_relu_group_norm.
    """
    input, weight, bias, norm_weight, norm_bias = tensors
    y: Tensor
    # torch.fx's proxies are no tensors.
    overrides = not _dynamo_compiling() and _has_torch_function(tensors)
    if overrides and any(t is not None and not isinstance(t, Tensor) for t in tensors):
        overridden: Tensor = handle_torch_function(
            conv_transpose3d_relu_group_norm,
            tensors,
            *(input, weight, bias, stride, padding, output_padding, groups, dilation),
            num_groups=num_groups,
            norm_weight=norm_weight,
            norm_bias=norm_bias,
            eps=eps,
            precision=precision,
            recompute=recompute,
        )
        return overridden
    check_kinds(input, weight, bias, norm_weight, norm_bias, eps)
    eps = _value_at_call(eps)
    asked, precision = precision is not None, resolve_precision(input, precision)
    groups = integer(groups, "groups")
    num_groups = integer(num_groups, "num_groups")
    stride = triple(stride, "stride")
    padding = triple(padding, "padding")
    output_padding = triple(output_padding, "output_padding")
    dilation = triple(dilation, "dilation")
    numbers = (stride, padding, output_padding, groups, dilation, num_groups, eps, precision)
    if _dynamo_compiling():  # none of the questions below can be asked in a graph
        recording, whole, transforms, tracing = False, True, False, False
    else:
        if forward_ad._current_level >= 0 and takes_tangents(tensors):
            return three_calls(tensors, numbers, asked)
        transforms = _transforms_active()
        tracing = _tracing()
        recording = is_recorded(*tensors)
        # Autograd of a custom operator runs in Python, which takes tens of microseconds, some of them where
        # there is nothing to record. It has to run where requires_grad does not say what is recorded
        # (torch.func's transforms), and where others than autograd want to see the operator (tracers, and
        # __torch_function__ of the caller's).
        # A trace is checked without gradients, by calls that are to record the same operator.
        whole = transforms or _compiling() or is_overridden(tensors)
        whole = whole or (tracing and (recording or recompute))
    dims = input.dim()
    # While torch.jit.trace runs, sizes are traced tensors, and a comparison would be frozen into the graph.
    if not tracing and (dims == 4 or (dims == 5 and surely(input.size(0) == 1))):
        _check_values_per_group(input, weight, stride, padding, output_padding, groups, dilation, num_groups)
    if not whole:
        # Who watches operators is to see the one that he knows.
        watched = tracing or _profiling() or _dispatch_modes() > 0
        if _autocast_enabled():
            return block_under_autocast(tensors, numbers, watched, recording, recompute)
        number = None if watched else settings_number(numbers)
        if recording:
            y = record_block(*tensors, numbers, number, recompute)
            return y
        if number is not None:
            y = numbered_block(*tensors, number)
            return y
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
    if transforms and differentiated():
        return transformed_block(*arguments)
    if whole:
        y = (_recomputed_op if recompute else _op)(*arguments)
        return y
    with _BelowAutograd():
        y = _op(*arguments)
    return y


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
    recompute: bool = False,
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
        recompute: concerns what is kept for the backward, beside input and weight.
            False: on the SM90 plan relu(conv), in 16 bit or, for precision="ieee", float32; on other plans
            and the CPU the convolution, in the input's dtype.
            True: nothing; the backward computes it again. It does so in any case in float64 on CUDA, and on
            CUDA where torch.compile does not know the sizes.
            On the SM90 plan the gradients have the same bits either way; elsewhere those of PyTorch's
            convolution may differ in the last ones.

    Returns:
        [N, K, Z, P, Q] or [K, Z, P, Q], dtype of input; Z = (D-1)*stride - 2*padding + dilation*(T-1)
        + output_padding + 1, likewise P and Q. channels_last_3d where input or weight is, else contiguous.

    Raises:
        RuntimeError: shapes, strides, dtypes, devices or counts break a rule; the message states the rule,
            the value and a remedy.
        torch.OutOfMemoryError: what the call allocates does not fit into the GPU's memory (inside
            torch.compile: RuntimeError, with the same words).
        ValueError: unknown precision, eps not finite, an integer beyond 64 bit, or a norm group of one single
            value.
        TypeError: an argument is of the wrong kind.
        NotImplementedError: input's dtype is another one, or forward-mode AD is asked for inside
            torch.compile.

    Under autocast all tensors are cast to its dtype, as for conv_transpose3d alone; the result is float32 on
    CUDA and of that dtype on the CPU, as it is from the three calls. Exceptions: on an SM90 GPU a small block
    of float32 parameters is computed as under precision="tf32" instead, which is more exact and saves the
    casts. So is one of any size while gradients are recorded in float16, or PyTorch's calls run, whose norm
    takes gradients in float32. On the CPU PyTorch's calls run while gradients are recorded, whatever
    `recompute` is.

    Forward-mode AD (jvp, jacfwd, hessian, dual tensors) runs PyTorch's calls.

    Source: GroupNorm, Wu & He, arXiv:1803.08494.
    """
    tensors: tuple[Any, ...] = (input, weight, bias, norm_weight, norm_bias)
    y: Tensor
    if not _dynamo_compiling() and isinstance(input, Tensor) and not _is_watched(tensors):
        resolved = resolve_precision(input, precision)
        number = known_number(stride, padding, output_padding, groups, dilation, num_groups, eps, resolved)
        if number in known_blocks:  # these numbers were checked before
            try:
                if is_recorded(*tensors):
                    y = record_block(*tensors, known_blocks[number], number, recompute)
                else:
                    y = numbered_block(*tensors, number)
                return y
            except (RuntimeError, TypeError, ValueError) as error:
                if isinstance(error, RuntimeError):
                    raise_out_of_memory(error)
                # In the words of a first call, which asks this before anything else.
                check_kinds(input, weight, bias, norm_weight, norm_bias, eps)
                if input.dim() == 4 or (input.dim() == 5 and input.size(0) == 1):
                    _check_values_per_group(input, weight, *known_blocks[number][:6])
                raise
    numbers = (stride, padding, output_padding, groups, dilation, num_groups, eps)
    if _dynamo_compiling():
        return _checked_block(tensors, *numbers, precision, recompute)
    try:
        return _checked_block(tensors, *numbers, precision, recompute)
    except RuntimeError as error:
        raise_out_of_memory(error)
        raise
