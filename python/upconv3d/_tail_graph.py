# SPDX-License-Identifier: Apache-2.0
"""What graphs of torch.compile call in the place of the family's operators, where all that runs is ours:
operators of the compiled module, which take the host a tenth of what those in Python take."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from . import _C
from ._facts import is_concrete, kept_of
from ._geometry import empty_in_format_of
from ._graphs import is_exporting, is_traced
from ._tail_arguments import facts_of, join, runs_kernels, split

_library = torch.library.Library("upconv3d", "FRAGMENT")  # type: ignore[no-untyped-call]  # keeps registrations alive
_ops = torch.ops.upconv3d
_OPERATORS = ("_tail", "_tail_for_training", "_tail_backward")


def inference_in_graph(*arguments: Any) -> tuple[Tensor, Tensor] | None:
    """The operator in a graph that differentiates nothing.

    None where PyTorch's operators may have to run, and in torch.export, whose programs others read.
    """
    tensors, settings = split(arguments)
    input, skip = tensors[0], tensors[6]
    if not runs_kernels(input) or (skip is not None and skip.dtype is not input.dtype):
        return None
    if not is_concrete(*settings) or is_exporting():
        return None
    pair: tuple[Tensor, Tensor] = _ops._tail.default(*arguments)
    return pair


def training_in_graph(*arguments: Any) -> tuple[Tensor, Tensor, Tensor] | None:
    """The operator for training; None where it keeps the convolution alone, or maybe nothing, and in
    torch.export.

    arguments: those of a call that keeps something, of which a compiler knows how much.
    """
    tensors, settings = split(arguments)
    if not runs_kernels(tensors[0]) or settings[-1] or is_exporting():
        return None
    kept = kept_of(facts_of(tensors, settings))
    if kept is None or kept.size == 0 or (kept.convolution and tensors[6] is None):
        return None
    results: tuple[Tensor, Tensor, Tensor] = _ops._tail_for_training.default(*arguments)
    return results


def _lies_as_its_gradient(tensor: Tensor) -> bool:
    return tensor.dim() == 5 and empty_in_format_of(tensor).stride() == tensor.stride()


def gradients_by_operator(
    grad_y: Tensor | None,
    grad_conv: Tensor | None,
    tensors: Sequence[Any],
    settings: Sequence[Any],
    mask: Sequence[bool],
    kept: Tensor | None = None,
    returned: bool = False,
) -> list[Tensor | None]:
    """The backward operator's gradients, None where `mask` asks for none.

    kept, returned: what the forward kept, and whether that is the convolution that it returned.
    """
    *forward, _, precision = join(tensors, settings)
    op = _ops.conv_transpose3d_norm_act_backward.default
    found = op(grad_y, grad_conv, *forward, precision, mask, kept, returned)
    return [gradient if wanted else None for gradient, wanted in zip(found, mask, strict=True)]


def backward_is_ours(
    grad_y: Tensor | None, tensors: Sequence[Any], settings: Sequence[Any], kept: Tensor | None
) -> bool:
    """Whether gradients_in_graph takes the backward of a call that kept `kept`."""
    input, weight = tensors[:2]
    if grad_y is None or kept is None or kept.dtype is not torch.uint8 or settings[-1]:
        return False
    if not runs_kernels(input) or not is_traced(grad_y) or is_exporting():
        return False
    if not _lies_as_its_gradient(input) or not _lies_as_its_gradient(weight):
        return False
    stages = _C.explain(facts_of(tensors, settings) | {"training": True})["backward_stages"]
    return "aten::convolution_backward" not in stages


def gradients_in_graph(
    grad_y: Tensor, tensors: Sequence[Any], settings: Sequence[Any], mask: Sequence[bool], kept: Tensor
) -> list[Tensor | None]:
    """Gradients of Tensors, None where `mask` asks for none."""
    *forward, _, _, precision = join(tensors, settings)  # without skip and return_conv
    wanted = sum(1 << i for i, one in enumerate(mask) if one)
    found = _ops._tail_backward.default(grad_y, *forward, precision, kept, wanted)
    return [gradient if one else None for gradient, one in zip((*found, None), mask, strict=True)]


def _fake_backward(grad_y: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    *forward, precision, _, wanted = arguments
    tensors, _ = split([*forward, None, False, precision])
    return tuple(
        tensors[0].new_empty((0,))
        if tensor is None or not wanted >> i & 1
        else empty_in_format_of(tensor)
        if tensor.dim() > 1
        else torch.empty_like(tensor)
        for i, tensor in enumerate(tensors[:6])
    )


def register(fake_forward: Callable[..., Any], fake_training: Callable[..., Any]) -> None:
    """Ties fake kernels to the operators, those of the family's by their public names among them."""
    for name, fake in zip(_OPERATORS, (fake_forward, fake_training, _fake_backward), strict=True):
        torch.library.register_fake(f"upconv3d::{name}", fake)
        _library.impl(name, torch.library.fallthrough_kernel, "Autograd")  # type: ignore[no-untyped-call]
