# SPDX-License-Identifier: Apache-2.0
"""Fake kernels: exact sizes and strides of what the operators return, without data (meta, torch.compile)."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import _C
from ._facts import block_facts, empty_kept, is_concrete, kept_of
from ._geometry import batched, empty_in_format_of, memory_format_of, output_extent


def _forward(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    output_padding: Sequence[int],
    groups: int,
    dilation: Sequence[int],
    num_groups: int,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    eps: float,
    precision: str,
) -> Tensor:
    numbers = (stride, padding, output_padding, groups, dilation, num_groups)
    # Symbolic shapes are checked by the real kernel: the rules in C++ take numbers.
    if is_concrete(input, weight, bias, *numbers, norm_weight, norm_bias, eps):
        _C.validate(block_facts(input, weight, bias, *numbers, norm_weight, norm_bias, eps, precision))
    x = batched(input)
    sizes = [x.shape[0], weight.shape[1] * groups]
    sizes += output_extent(input, weight, stride, padding, output_padding, dilation)
    y = torch.empty(sizes, dtype=input.dtype, device=input.device, memory_format=memory_format_of(x, weight))
    return y.squeeze(0) if input.dim() == 4 else y


def _for_training(input: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
    y = _forward(input, *arguments)
    if input.device.type == "cpu":  # the convolution
        return y, torch.empty_like(batched(y))
    # A compiler asks only where this is known; to others, who pass it on, it is of no consequence.
    known = is_concrete(input, *arguments[:-1]) and input.device.type == "cuda"
    kept = kept_of(block_facts(input, *arguments)) if known else None
    return y, empty_kept(kept, batched(y), input.dtype)


def _backward(
    grad_y: Tensor,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    output_padding: Sequence[int],
    groups: int,
    dilation: Sequence[int],
    num_groups: int,
    norm_weight: Tensor | None,
    eps: float,
    precision: str,
    output_mask: Sequence[bool],
    saved: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    channels = weight.shape[1] * groups
    vectors = [input.new_empty((channels if wanted else 0,)) for wanted in output_mask[2:]]
    return (
        empty_in_format_of(input) if output_mask[0] else input.new_empty((0,)),
        empty_in_format_of(weight) if output_mask[1] else input.new_empty((0,)),
        vectors[0],
        vectors[1],
        vectors[2],
    )


def register() -> None:
    """Ties the fake kernels to their operators; called once, by the package."""
    for name in ("conv_transpose3d_relu_group_norm", "conv_transpose3d_relu_group_norm_recomputed"):
        torch.library.register_fake(f"upconv3d::{name}", _forward)
    torch.library.register_fake("upconv3d::conv_transpose3d_relu_group_norm_for_training", _for_training)
    torch.library.register_fake("upconv3d::conv_transpose3d_relu_group_norm_backward", _backward)
