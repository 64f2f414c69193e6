# SPDX-License-Identifier: Apache-2.0
"""Gradients of a call of the family by our kernels, from what its forward kept; see _tail.tail_backward."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ._autograd import _convolution_backward
from ._geometry import batched, memory_format_of
from ._tail import in_sizes_of

# Without OpOverload.__call__, a function in Python that passes its arguments on.
_numbered_tail_backward = torch.ops.upconv3d._numbered_tail_backward.default._op


def gradients_from_saved(
    grad_y: Tensor,
    tensors: Sequence[Any],
    settings: Sequence[Any],
    mask: Sequence[bool],
    saved: Tensor,
    number: int,
    consume_saved: bool,
    as_computed: bool = False,
) -> Sequence[Tensor | None]:
    """tail_backward by our kernels, of a call without a skip whose forward kept `saved`.

    Where they cannot compute the convolution's gradients, they end with grad_c.

    as_computed: whether gradients that are all our kernels' may have other strides than a weight that does
    not lie dense, as autograd takes them.
    """
    x, weight, bias, gamma, beta, slopes, _ = tensors
    x = batched(x)
    # Written out, here and below: generator expressions over so few values take twice as long.
    a, b, c, d, e, f, g = mask
    bits = a | b << 1 | c << 2 | d << 3 | e << 4 | f << 5 | g << 6
    gradients = _numbered_tail_backward(
        batched(grad_y), x, weight, bias, gamma, beta, slopes, saved, number, bits, consume_saved
    )
    grad_c = gradients[6]
    if grad_c is None and as_computed and x is tensors[0]:
        return gradients  # type: ignore[no-any-return]
    if grad_c is not None:
        grad_x, grad_w, grad_bias = gradients[:3]
        left = (a and grad_x is None, b and grad_w is None, c and grad_bias is None)
        found = _convolution_backward(grad_c, x, weight, settings, left)
        grad_x = found[0] if left[0] else grad_x
        grad_w = found[1] if left[1] else grad_w
        grad_bias = found[2] if left[2] else grad_bias
        gradients = (grad_x, grad_w, grad_bias, *gradients[3:])
    return in_sizes_of(tensors, gradients, mask)


def gradients_from_operand(
    grad_y: Tensor,
    grad_conv: Tensor | None,
    tensors: Sequence[Any],
    settings: Sequence[Any],
    mask: Sequence[bool],
    operand: Tensor,
    number: int,
    consume_operand: bool,
) -> list[Tensor | None]:
    """tail_backward by our kernels up to the convolution's gradient, from operand_of.

    number: of settings that return the convolution.
    """
    input, weight, _, gamma, beta, slopes, _ = tensors
    x = batched(input)
    wants_conv, wants_skip = any(mask[:3]), mask[6]
    bits = (wants_conv or wants_skip) | mask[3] << 3 | mask[4] << 4 | mask[5] << 5
    # The operand has the bias in it. Hooks of saved tensors may have laid it out anew.
    operand = batched(operand).contiguous(memory_format=memory_format_of(x, weight))
    _, _, _, *norms, grad_operand = _numbered_tail_backward(
        batched(grad_y), x, weight, None, gamma, beta, slopes, operand, number, bits, consume_operand
    )
    grads: Sequence[Tensor | None] = (None, None, None)
    if wants_conv:
        grad_c = grad_operand
        if grad_conv is not None:
            both = batched(grad_conv)
            grad_c = grad_operand + both if wants_skip else grad_operand.add_(both)
        grads = _convolution_backward(grad_c, x, weight, settings, list(mask[:3]))
    return in_sizes_of(tensors, [*grads, *norms, grad_operand if wants_skip else None], mask)
