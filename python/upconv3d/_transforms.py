# SPDX-License-Identifier: Apache-2.0
"""The block under torch.func's transforms: batching rules for vmap, and a node that grad and vjp can take.

vmap over the input alone is the same call with more samples, because every sample is normalized by itself.
Where weights or per-channel vectors are batched too (an ensemble of models), samples of one call would need
several weights, so the rule calls the operator once per slice.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import TransformType, get_interpreter_stack

from ._autocast import autocast_dtype, three_calls, under_autocast
from ._autograd import _backward, _setup_context
from ._graphs import has_tangent

_MASK = 13  # the backward operator's output_mask among its arguments; `saved` follows, or not

_forward_op = torch.ops.upconv3d.conv_transpose3d_relu_group_norm.default
_recomputed_op = torch.ops.upconv3d.conv_transpose3d_relu_group_norm_recomputed.default


def _backward_op(*arguments: Any) -> tuple[Tensor, ...]:
    """The operator that _autograd.register() defines, which is after this module is read."""
    gradients: tuple[Tensor, ...] = torch.ops.upconv3d.conv_transpose3d_relu_group_norm_backward(*arguments)
    return gradients


def _fold(tensor: Tensor, dim: int | None, batch_size: int) -> Tensor:
    """[B*N, ...] of a [N, ...] tensor that is batched along `dim`, or of one for all where dim is None.

    One unbatched [C, D, H, W] sample per slice makes a batch as it is.
    """
    if dim is None:
        dim, tensor = 0, tensor.unsqueeze(0).expand(batch_size, *tensor.shape)
    slices = tensor.movedim(dim, 0)
    return slices.flatten(0, 1) if slices.dim() == 6 else slices


def _unfold(result: Tensor, of: Tensor, dim: int | None, batch_size: int) -> Tensor:
    """The inverse on a result that has the samples of `of`, which was folded along `dim`."""
    sizes = list(of.shape)
    if dim is not None:
        del sizes[dim]
    return result.view(batch_size, sizes[0], *result.shape[1:]) if len(sizes) == 5 else result


def _slice(arguments: Sequence[Any], dims: Sequence[Any], index: int) -> list[Any]:
    """Slice `index` of every tensor that is batched, all else as it is."""
    return [
        value.select(dim, index) if isinstance(value, Tensor) and dim is not None else value
        for value, dim in zip(arguments, dims, strict=True)
    ]


def batch_slices(
    op: Any, info: Any, in_dims: tuple[Any, ...], *arguments: Any, **named: Any
) -> tuple[Any, tuple[int, ...]]:
    """vmap's rule for an operator of several results that is called once per slice."""
    slices = [op(*_slice(arguments, in_dims, index), **named) for index in range(info.batch_size)]
    results = tuple(torch.stack(of_slices) for of_slices in zip(*slices, strict=True))
    return results, (0,) * len(results)


def batch_block(
    info: Any, in_dims: tuple[Any, ...], *arguments: Any, op: Any = _forward_op
) -> tuple[Tensor, int]:
    """vmap's rule for the operator `op`; arguments are those of its schema."""
    input, *others = arguments
    others_batched = any(
        isinstance(value, Tensor) and dim is not None for value, dim in zip(others, in_dims[1:], strict=True)
    )
    if others_batched:
        slices = [op(*_slice(arguments, in_dims, index)) for index in range(info.batch_size)]
        return torch.stack(slices), 0
    y = op(_fold(input, in_dims[0], info.batch_size), *others)
    return _unfold(y, input, in_dims[0], info.batch_size), 0


def _batch_backward(
    info: Any, in_dims: tuple[Any, ...], *arguments: Any
) -> tuple[tuple[Tensor, ...], tuple[int, ...]]:
    """vmap's rule for the backward operator. Gradients of weights are sums over the samples of one slice.

    What a forward kept is of no use to samples that it did not see: with it, slices are computed one by one.
    """
    grad_y, input, *others = arguments
    mask, kept = arguments[_MASK], arguments[_MASK + 1] if len(arguments) > _MASK + 1 else None
    apart = any(mask[1:]) or not mask[0] or (kept is not None and kept.numel() > 0)
    apart = apart or any(
        isinstance(value, Tensor) and dim is not None for value, dim in zip(others, in_dims[2:], strict=True)
    )
    if apart:
        slices = [_backward_op(*_slice(arguments, in_dims, index)) for index in range(info.batch_size)]
        return tuple(torch.stack(gradients) for gradients in zip(*slices, strict=True)), (0,) * 5
    folded = (
        _fold(value, dim, info.batch_size) for value, dim in zip((grad_y, input), in_dims[:2], strict=True)
    )
    grad_x, *empty = _backward_op(*folded, *arguments[2 : _MASK + 1])
    nothing = (tensor.expand(info.batch_size, 0) for tensor in empty)
    return (_unfold(grad_x, input, in_dims[1], info.batch_size), *nothing), (0,) * 5


class TransformedBlock(torch.autograd.Function):
    """The block as torch.func's grad, vjp and jacrev see it; arguments are those of the operator's schema.

    generate_vmap_rule makes vmap run these methods on batched tensors, and so the rules above.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(*arguments: Any) -> Tensor:
        y: Tensor = _forward_op(*arguments)
        return y

    setup_context = staticmethod(_setup_context)
    backward = staticmethod(_backward)


def _inside(*kinds: TransformType) -> bool:
    """Whether one of the transforms around the caller is of these kinds."""
    return any(level.key() in kinds for level in get_interpreter_stack() or ())


def differentiated() -> bool:
    """Whether one of the transforms around the caller is grad, vjp, jvp or what is made of them."""
    return _inside(TransformType.Grad, TransformType.Jvp)


def takes_tangents(tensors: Sequence[Tensor | None]) -> bool:
    """Whether the caller is inside of jvp or what is made of it, or a tensor has a tangent without that."""
    return _inside(TransformType.Jvp) or has_tangent(tensors)


def transformed_block(*arguments: Any) -> Tensor:
    """TransformedBlock; under autocast with the casts outside of it, so that they are differentiated too."""
    input, weight, bias, *numbers, norm_weight, norm_bias, eps, precision = arguments

    def run(x: Tensor, w: Tensor, b: Any, gamma: Any, beta: Any) -> Tensor:
        y: Tensor = TransformedBlock.apply(  # type: ignore[no-untyped-call]
            x, w, b, *numbers, gamma, beta, eps, precision
        )
        return y

    tensors = (input, weight, bias, norm_weight, norm_bias)
    if input.device.type == "cpu" and autocast_dtype(input) is not None:
        return three_calls(tensors, (*numbers, eps, precision))
    return under_autocast(run, tensors)


def register() -> None:
    """Ties the batching rules to their operators; called once, by the package."""
    name = "upconv3d::conv_transpose3d_relu_group_norm"
    torch.library.register_vmap(name, batch_block)
    torch.library.register_vmap(f"{name}_recomputed", partial(batch_block, op=_recomputed_op))
    torch.library.register_vmap(f"{name}_backward", _batch_backward)
