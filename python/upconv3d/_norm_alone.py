# SPDX-License-Identifier: Apache-2.0
"""Norm and activation by our kernels, of values that something else has computed: a node for autograd."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from ._autograd import _is_transformed, as_backward, kept_vector
from ._geometry import memory_format_of
from ._graphs import differentiates_again
from ._out_of_memory import raise_out_of_memory
from ._tail import Settings, Tensors, _activate, _normalize
from ._tail_gradients import _numbered_tail_backward
from ._tail_op import tail_number
from .functional import (
    _PLAIN_TYPES,
    _BelowAutograd,
    _dispatch_modes,
    _dynamo_compiling,
    _tracing,
    _transforms_active,
    is_recorded,
)

_numbered_norm_act = torch.ops.upconv3d._numbered_norm_act.default._op

# Of a convolution that changes no sizes, which is what the kernels take the values' for.
_POINTWISE = ((1, 1, 1), (0, 0, 0), (0, 0, 0), 1, (1, 1, 1))


def settings_of_norm(num_groups: int, eps: float, activation: str, parameter: float) -> tuple[Any, ...]:
    """Settings of a norm and, behind it, an activation ("none" for none)."""
    return (*_POINTWISE, num_groups, eps, "ieee", "norm_act", activation, parameter, True)


class NormAct(torch.autograd.Function):
    """y, which was computed before, and its gradients, of what was normalized and of the vectors."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Tensor:
        """arguments: what is normalized, norm_weight, norm_bias, slopes, a tuple of y, settings_of_norm, and
        their number."""
        value, gamma, beta, slopes, (y,), settings, number = arguments
        # Without an activation behind it, a norm's gradients do not depend on its bias, which may be changed.
        ctx.keeps_beta, ctx.has_beta = Settings(*settings).activation != "none", beta is not None
        kept_beta = kept_vector(beta) if ctx.keeps_beta else None
        ctx.save_for_backward(value, kept_vector(gamma), kept_beta, slopes)
        ctx.settings, ctx.number = settings, number
        return y  # type: ignore[no-any-return]

    @staticmethod
    @as_backward
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Any, ...]:
        value, gamma, beta, slopes = ctx.saved_tensors
        mask = ctx.needs_input_grad[:4]
        if ctx.has_beta and not ctx.keeps_beta:
            beta = value.new_zeros(value.size(1), requires_grad=mask[2])
        vectors = (gamma, beta, slopes)
        gradients: Sequence[Tensor | None]
        if differentiates_again(grad_y) or _is_transformed(grad_y):
            gradients = _differentiated(grad_y, (value, *vectors), ctx.settings, mask)
        else:
            # Hooks of saved tensors may have laid it out anew.
            operand = value.contiguous(memory_format=memory_format_of(value))
            channels = value.size(1)
            # Nothing is read of it but its sizes: one value stands for all.
            weight = value.new_empty((1, 1, 1, 1, 1)).expand(channels, channels, 1, 1, 1)
            bits = mask[0] | mask[1] << 3 | mask[2] << 4 | mask[3] << 5
            tensors = (grad_y, operand, weight, None, *vectors, operand)
            found = _numbered_tail_backward(*tensors, ctx.number, bits, False)
            gradients = (found[6], *found[3:6])
        kept = (g if wanted else None for g, wanted in zip(gradients, mask, strict=True))
        return (*kept, None, None, None)


# Function.apply without what it does for torch.func's transforms, under which this node is not used.
_record: Callable[..., Any] = super(torch.autograd.Function, NormAct).apply


def _differentiated(
    grad_y: Tensor, tensors: Sequence[Any], settings: Sequence[Any], mask: Sequence[bool]
) -> list[Tensor | None]:
    """Gradients of what was normalized and of the vectors, in operators that autograd can differentiate."""
    twice, numbers = torch.is_grad_enabled(), Settings(*settings)
    with torch.enable_grad():
        # Views cut off what else the tensors may depend on.
        views: list[Any] = [None if t is None else t.view_as(t) for t in tensors]
        value, gamma, beta, slopes = views
        vectors = Tensors(value, value, None, gamma, beta, slopes, None)
        y = _normalize(value, vectors, numbers, instance=False)
        y = _activate(y, numbers, slopes, in_place=False)
        wanted_views = [view for view, wanted in zip(views, mask, strict=True) if wanted]
        found = iter(torch.autograd.grad(y, wanted_views, grad_y, create_graph=twice))
    return [next(found) if wanted else None for wanted in mask]


def is_watched(tensors: Sequence[Any]) -> bool:
    """Whether others than autograd have to do with the call, to whom PyTorch's operators are known: modes,
    transforms, graphs, and tensors of classes of their own."""
    return (
        not _PLAIN_TYPES.issuperset(map(type, tensors))
        or _dynamo_compiling()
        or _tracing()
        or _transforms_active()
        or _dispatch_modes() > 0
        or forward_ad._current_level >= 0
    )


def norm_act(
    value: Tensor, gamma: Tensor | None, beta: Tensor | None, slopes: Tensor | None, settings: tuple[Any, ...]
) -> Tensor | None:
    """activation(norm(value)) by our kernels, recorded by autograd; None where the settings have no number.

    Not where is_watched.

    Args:
        value: [N, K, Z, P, Q], on CUDA; float32 or 16 bit, as the vectors.
        gamma, beta: [K]; slopes: [1] or [K], of a PReLU.
        settings: settings_of_norm.
    """
    number = tail_number(settings)
    if number is None:
        return None
    try:
        with _BelowAutograd():
            y: Tensor = _numbered_norm_act(value, gamma, beta, slopes, number)
    except RuntimeError as error:
        raise_out_of_memory(error)
        raise
    return record_norm_act(y, value, gamma, beta, slopes, settings, number)


def record_norm_act(
    y: Tensor,
    value: Tensor,
    gamma: Tensor | None,
    beta: Tensor | None,
    slopes: Tensor | None,
    settings: tuple[Any, ...],
    number: int,
) -> Tensor:
    """y, which was computed of the others below autograd, as autograd knows it."""
    if not is_recorded(value, gamma, beta, slopes):
        return y
    recorded: Tensor = _record(value, gamma, beta, slopes, (y,), settings, number)
    return recorded
