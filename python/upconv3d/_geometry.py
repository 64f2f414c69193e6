# SPDX-License-Identifier: Apache-2.0
"""Sizes and memory formats, for concrete and for symbolic shapes alike."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import guard_or_false


def surely(condition: Any) -> bool:
    """Whether a comparison of sizes holds; of sizes that only data says, whether it does for all of them.

    While torch.jit.trace runs, sizes are tensors; of NumPy's integers, comparisons are NumPy's.
    """
    return guard_or_false(condition) if isinstance(condition, (bool, torch.SymBool)) else bool(condition)


def batched(input: Tensor) -> Tensor:
    """[N, C, D, H, W], where a [C, D, H, W] input counts as one sample."""
    return input.unsqueeze(0) if input.dim() == 4 else input


def output_extent(
    input: Tensor,
    weight: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    output_padding: Sequence[int],
    dilation: Sequence[int],
) -> list[int]:
    """Z, P, Q: (in-1)*stride - 2*padding + dilation*(kernel-1) + output_padding + 1, per axis."""
    return [
        (input.shape[axis - 3] - 1) * stride[axis]
        - 2 * padding[axis]
        + dilation[axis] * (weight.shape[axis - 3] - 1)
        + output_padding[axis]
        + 1
        for axis in range(3)
    ]


def suggests_channels_last_3d(tensor: Tensor) -> bool:
    """Whether the strides of a [N, C, D, H, W] tensor are those of channels_last_3d, by PyTorch's own rule.

    Of sizes that only data says, it is False where they decide, and none of them counts as 0.

    Source: is_channels_last_strides_3d_s5 in PyTorch's c10/core/MemoryFormat.h, which
    Tensor.suggest_memory_format asks and which Python cannot call.
    """
    if tensor.dim() != 5 or tensor.layout != torch.strided:
        return False
    sizes, strides = tensor.shape, tensor.stride()
    # The first part says again what the loop finds, of contiguous tensors at once.
    if not surely(strides[4] >= strides[1]) or surely(strides[1] == 0):
        return False
    least: Any = 0
    for axis in (1, 4, 3, 2, 0):
        if surely(sizes[axis] == 0) or not surely(strides[axis] >= least):
            return False
        # N111 and NCDHW with C = 1 satisfy both formats; they count as contiguous.
        if axis == 0 and surely(least == strides[1]):
            return False
        least = strides[axis] * sizes[axis]
    return True


def memory_format_of(*tensors: Tensor) -> torch.memory_format:
    """channels_last_3d where any of the [N, C, D, H, W] tensors suggests it, else contiguous."""
    if any(suggests_channels_last_3d(tensor) for tensor in tensors):
        return torch.channels_last_3d
    return torch.contiguous_format


def empty_in_format_of(tensor: Tensor) -> Tensor:
    """A dense tensor of the sizes, dtype and format of `tensor`, [N, C, D, H, W] or [C, D, H, W]."""
    whole = batched(tensor)
    out = torch.empty(
        whole.shape, dtype=tensor.dtype, device=tensor.device, memory_format=memory_format_of(whole)
    )
    return out.squeeze(0) if tensor.dim() == 4 else out


def _in_format_of(strides: tuple[int, ...], tensor: Tensor) -> Tensor:
    before = torch.empty_strided(tensor.shape, strides, device="meta")
    whole = batched(tensor).contiguous(memory_format=memory_format_of(batched(before)))
    return whole if tensor.dim() == 5 else whole.squeeze(0)


def in_formats_of(strides: Sequence[tuple[int, ...]], tensors: Sequence[Any]) -> Sequence[Any]:
    """The tensors, of which the first two, [N, C, D, H, W] or [C, D, H, W], are in the memory formats that
    they had with these two's strides.

    Hooks of saved tensors may have lost them (torch.autograd.graph.save_on_cpu does, with pinned memory), and
    by them a backward pass chooses the plan that says what its forward kept.
    """
    x, weight = tensors[:2]
    of_x, of_weight = strides
    if x.stride() == of_x and weight.stride() == of_weight:
        return tensors
    return [_in_format_of(of_x, x), _in_format_of(of_weight, weight), *tensors[2:]]


def dense_as(gradient: Tensor, tensor: Tensor) -> bool:
    """Whether `gradient`, [N, C, D, H, W] and dense in a memory format, lies as `tensor` does."""
    dense = gradient.is_contiguous() or gradient.is_contiguous(memory_format=torch.channels_last_3d)
    return dense and gradient.stride() == tensor.stride()
