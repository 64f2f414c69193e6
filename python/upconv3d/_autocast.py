# SPDX-License-Identifier: Apache-2.0
"""The block under autocast: as PyTorch runs the three calls, or, where that is quicker, without any cast."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from . import _C
from ._autograd import AUTOCAST_KEYS, record_block
from ._facts import block_facts, is_concrete
from ._geometry import batched, memory_format_of
from ._graphs import is_traced
from ._numbered import numbered_block, settings_number
from ._plan_questions import FEW_CHANNELS_KERNEL, PlanQuestion, about_values
from ._recorded_casts import LOW_DTYPES, OWN_CLASSES, cast_leaves, casts_leaves, copies_in, is_dense
from ._tail import composite

_forward_op = torch.ops.upconv3d.conv_transpose3d_relu_group_norm.default
_library = torch.library.Library("upconv3d", "FRAGMENT")  # type: ignore[no-untyped-call]  # keeps registrations alive


def autocast_dtype(input: Tensor) -> torch.dtype | None:
    """What the block's tensors are cast to; None where autocast is off for the device, or for the dtype."""
    device_type = input.device.type
    if device_type not in ("cpu", "cuda") or input.dtype is torch.float64:
        return None
    return torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None


# Outputs up to which 16 bit with its casts was compared with float32 on the direct plan's tensor cores.
_FEW_OUTPUTS = 64


def _plans_are_quicker_in_float32(
    input: Tensor, weight: Tensor, settings: tuple[Any, ...], inference_dtype: torch.dtype | None
) -> bool:
    stride, padding, output_padding, groups, dilation, num_groups, eps = settings[:7]
    convolution = (stride, padding, output_padding, groups, dilation)
    facts = block_facts(input, weight, None, *convolution, num_groups, None, None, eps, "tf32")
    facts["input"]["dtype"] = "float32"
    # The plan that a backward pass follows is the one that is more often the library's.
    trained = _C.explain(facts | {"training": True})["plan"]
    found: bool = trained["algorithm"] == "sm90_implicit_gemm" or trained["instead_of_sm90"]
    if found and inference_dtype is not None and weight.size(1) * groups <= _FEW_OUTPUTS:
        dtype = {"dtype": str(inference_dtype).removeprefix("torch.")}
        low = facts | {"input": facts["input"] | dtype, "weight": facts["weight"] | dtype}
        # Of few channels, 16 bit is quicker with its casts too (1, 16 > 8, 96x64x80: 134 us, float32 187).
        found = FEW_CHANNELS_KERNEL not in _C.explain(low)["plan"]["stages"]
    return found


_quicker_in_float32 = PlanQuestion(_plans_are_quicker_in_float32)


def _is_quicker_in_float32(
    input: Tensor, weight: Tensor, settings: tuple[Any, ...], inference_dtype: torch.dtype | None
) -> bool:
    """Whether the call is quicker in float32 "tf32".

    inference_dtype: what the casts are to; None where gradients are recorded.
    """
    shapes = (input.shape, input.stride(), weight.shape, weight.stride())
    kind = (shapes, input.device, settings, inference_dtype)
    return _quicker_in_float32(kind, input, weight, settings, inference_dtype)


# Output values of a block up to which the casts of its tensors are expected to take longer, on the host, than
# float32 costs the device. An estimate: on an H200 a strided block of 2^26 takes 0.44 ms in float32 and 0.3
# in bfloat16, and the casts of a call 0.15 to 0.45 of host time.
_MOST_FLOAT32_VALUES = 2**25
# The same of a compiled graph, whose casts cost the host 40 us a call and the device 6. An estimate: a block
# of 3.5 million values takes as long in float32 as with its casts, one of 10 million 20 us longer.
_MOST_FLOAT32_VALUES_OF_GRAPHS = 2**22


def _has_float32_parameters(tensors: Sequence[Tensor | None], low: torch.dtype) -> bool:
    input, *others = tensors
    assert input is not None
    if input.dtype is not torch.float32 and input.dtype is not low:
        return False
    return all(tensor is None or tensor.dtype is torch.float32 for tensor in others)


def computes_in_float32(
    tensors: Sequence[Tensor | None],
    low: torch.dtype,
    settings: tuple[Any, ...],
    recording: bool,
    most_values: int = _MOST_FLOAT32_VALUES,
) -> bool:
    """Whether autocast's casts, to `low`, are left out: where float32 "tf32" takes the SM90 plan, or of one
    voxel per sample a matrix product, unless in inference 16 bit takes the direct plan on tensor cores.

    That plan multiplies in 16 bit too, in float16 with scales, which is more exact than either `low`, and its
    result is the float32 that autocast wants of a group norm. Six casts with their gradients are saved. (In
    inference a small block may be cuDNN's TF32 then, which is more exact too.) Where autocast casts to
    float32, "ieee" stays what it is.
    cuDNN's convolution of the library plan is slower in float32, and casts as PyTorch does.

    settings: begins with the fields of BlockArguments. recording: of float16 any size then, see three_calls.
    """
    input, weight = tensors[:2]
    assert input is not None and weight is not None
    if not input.is_cuda or low not in LOW_DTYPES or not _has_float32_parameters(tensors, low):
        return False
    fits = about_values(input, weight, settings[0], settings[3]) <= most_values or (
        recording and low is torch.float16
    )
    return fits and _is_quicker_in_float32(input, weight, settings, None if recording else low)


def records(tensors: Sequence[Tensor | None]) -> bool:
    """functional.is_recorded, which torch.compile can trace."""
    recorded = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
    return recorded and (torch.compiler.is_dynamo_compiling() or not torch.is_inference_mode_enabled())


def casts_cost_gradients(low: torch.dtype, device_type: str) -> bool:
    """Whether casts around our operators would make 16 bit of gradients that PyTorch's norm takes in float32.

    On CUDA float16 overflows where PyTorch's do not, as under a GradScaler. On the CPU, where PyTorch does
    not cast the norm's parameters, both dtypes cost accuracy too.
    """
    return device_type == "cpu" or low is torch.float16


def gradients_lose_range(tensors: Sequence[Tensor | None], low: torch.dtype) -> bool:
    """casts_cost_gradients, where there are any."""
    input: Any = tensors[0]
    return casts_cost_gradients(low, input.device.type) and records(tensors)


def graph_without_casts(tensors: Sequence[Tensor | None], low: torch.dtype, settings: Sequence[Any]) -> bool:
    """computes_in_float32 of a call that a compiler records: there every vector's cast is a kernel of its
    own. Of sizes that are not known, whatever plan they will take, it is so where casts would cost range.

    settings: begins with the fields of BlockArguments.
    """
    input: Any = tensors[0]
    if not is_traced(input):
        return False
    if not is_concrete(*(t for t in tensors if t is not None), *settings):
        return input.is_cuda and gradients_lose_range(tensors, low) and _has_float32_parameters(tensors, low)
    known = tuple(tuple(s) if isinstance(s, Sequence) and not isinstance(s, str) else s for s in settings)
    return computes_in_float32(tensors, low, known, records(tensors), _MOST_FLOAT32_VALUES_OF_GRAPHS)


def cast_tensors(tensors: Sequence[Tensor | None], low: torch.dtype, recording: bool) -> tuple[Any, ...]:
    """Every tensor's .to(low), bit by bit and stride by stride.

    One after the other, three parameters took a host 55 us of a block's 180, and the device next to nothing:
    one launch casts them all, unless autograd records the casts (see casts_leaves), or somebody looks on.

    tensors: input, weight, bias, norm_weight and norm_bias; of the family slopes and skip too.
    """
    alone = recording or torch._C._is_tracing() or torch._C._len_torch_dispatch_stack() > 0
    cast: list[Any] = list(tensors)
    together: list[int] = []
    for index, tensor in enumerate(tensors):
        if tensor is None or tensor.dtype is low:
            continue
        is_parameter = 0 < index < 6 and tensor.dtype is torch.float32 and type(tensor) in OWN_CLASSES
        if alone or not is_parameter or not is_dense(tensor):
            cast[index] = tensor.to(low)
        else:
            together.append(index)
    if len(together) == 1:
        cast[together[0]] = cast[together[0]].to(low)
    elif together:
        results = copies_in(low, [cast[index] for index in together])
        for index, result in zip(together, results, strict=True):
            cast[index] = result
    return tuple(cast)


def three_calls(tensors: Sequence[Tensor | None], block: tuple[Any, ...], precise: bool = False) -> Tensor:
    """PyTorch's own calls, where autocast would cost gradients their range, and for forward-mode AD.

    block, precise: the fields of BlockArguments, and whether their precision is the caller's.
    """
    settings = (*block, "act_norm", "relu", 0.0, False)
    return composite((*tensors, None, None), settings, precise)[0]


def under_autocast(run: Callable[..., Tensor], tensors: Sequence[Tensor | None], *numbers: Any) -> Tensor:
    """run(*tensors, *numbers) as autocast runs the block: autograd records the casts around it too."""
    input: Any = tensors[0]
    low = autocast_dtype(input)
    if low is not None:
        tensors = [tensor if tensor is None else tensor.to(low) for tensor in tensors]
    with torch._C._ExcludeDispatchKeyGuard(AUTOCAST_KEYS):
        y = run(*tensors, *numbers)
    return y.float() if low is not None and y.is_cuda else y


def block_under_autocast(
    tensors: Sequence[Tensor | None], block: tuple[Any, ...], watched: bool, recording: bool, recompute: bool
) -> Tensor:
    """The block as autocast runs it, where nothing but autograd looks on.

    block: the fields of BlockArguments. watched: whether the operator is to be called by its public name.
    """
    input: Any = tensors[0]
    low = autocast_dtype(input)
    cast: tuple[Any, ...] | None = None
    if low is not None and computes_in_float32(tensors, low, block, recording):
        tensors = [input.float(), *tensors[1:]]
        block = (*block[:7], "tf32")
    elif recording and low is not None and casts_cost_gradients(low, input.device.type):
        return three_calls(tensors, block)
    elif recording and low is not None and casts_leaves(tensors, low):
        tensors = [input.to(low), *tensors[1:]]
        cast = cast_leaves(tensors)
    elif low is not None:
        tensors = cast_tensors(tensors, low, recording)
    number = None if watched else settings_number(block)
    y: Tensor
    with torch._C._ExcludeDispatchKeyGuard(AUTOCAST_KEYS):
        if recording:
            y = record_block(*tensors, block, number, recompute, cast)
        elif number is not None:
            y = numbered_block(*tensors, number)
        else:
            x, weight, bias, gamma, beta = tensors
            with torch._C._AutoDispatchBelowAutograd():
                y = _forward_op(x, weight, bias, *block[:6], gamma, beta, *block[6:])
    return y.float() if low is not None and y.is_cuda else y


def _autocast_kernel(op: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """An operator under autocast: conv_transpose3d in 16 bit; group_norm gives float32 on CUDA."""

    def kernel(*arguments: Any) -> Tensor:
        input, weight, bias, *numbers, norm_weight, norm_bias, eps, precision = arguments

        def run(x: Tensor, w: Tensor, b: Any, gamma: Any, beta: Any) -> Tensor:
            return op(x, w, b, *numbers, gamma, beta, eps, precision)

        tensors = (input, weight, bias, norm_weight, norm_bias)
        low = autocast_dtype(input)
        if low is not None and graph_without_casts(tensors, low, (*numbers, eps)):
            precision = "tf32"
            with torch._C._ExcludeDispatchKeyGuard(AUTOCAST_KEYS):
                return run(input.float(), *tensors[1:])
        if low is not None and gradients_lose_range(tensors, low):
            y = three_calls(tensors, (*numbers, eps, precision))
            whole = batched(y).contiguous(memory_format=memory_format_of(batched(input), weight))
            return whole if y.dim() == 5 else whole.squeeze(0)
        return under_autocast(run, tensors)

    return kernel


def register() -> None:
    """Ties autocast to the forward operators; the package calls it once."""
    for name in ("conv_transpose3d_relu_group_norm", "conv_transpose3d_relu_group_norm_recomputed"):
        kernel = _autocast_kernel(getattr(torch.ops.upconv3d, name).default)
        for key in ("AutocastCPU", "AutocastCUDA"):
            _library.impl(name, kernel, key)  # type: ignore[no-untyped-call]
