# SPDX-License-Identifier: Apache-2.0
"""Gradients of a call of the family by our kernels, from what its forward kept; see _tail.tail_backward."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ._convolution import aligned, convolution_backward
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
        found = convolution_backward(grad_c, aligned(x), weight, settings, left)
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
    operand: Tensor | None,
    number: int,
    consume_operand: bool,
) -> list[Tensor | None]:
    """tail_backward by our kernels up to the convolution's gradient, of a call that keeps_operand.

    operand: None where nothing but grad_y is read: there is neither a norm nor an activation.
    number: of settings_of_kept.
    """
    input, weight, bias, gamma, beta, slopes, _ = tensors
    x = batched(input)
    wants_skip = mask[6]
    # PyTorch's sums of a volume in channels_last_3d take several times as long as reading it.
    sums_bias = mask[2] and grad_conv is None
    left = [mask[0], mask[1], mask[2] and not sums_bias]
    wants_conv = any(left)
    is_alone = operand is None
    memory_format = memory_format_of(x, weight)
    gradient = batched(grad_y)
    if operand is None:
        operand = gradient = gradient.contiguous(memory_format=memory_format)
    else:  # hooks of saved tensors may have laid it out anew
        operand = batched(operand).contiguous(memory_format=memory_format)
    bits = sums_bias << 2 | mask[3] << 3 | mask[4] << 4 | mask[5] << 5
    bits |= (wants_conv or wants_skip) and not is_alone
    found: Sequence[Tensor | None] = (None,) * 7
    if bits:
        found = _numbered_tail_backward(
            *(gradient, x, weight, bias, gamma, beta, slopes, operand, number, bits),
            consume_operand and not is_alone,
        )
    _, _, grad_bias, *norms, grad_operand = found
    grad_operand = gradient if is_alone else grad_operand
    grad_x = grad_w = None
    if wants_conv:
        assert grad_operand is not None
        grad_c = grad_operand
        if grad_conv is not None:
            both = batched(grad_conv)
            is_own = not (wants_skip or is_alone)
            grad_c = grad_operand.add_(both) if is_own else grad_operand + both
        volumes = (aligned(grad_c), aligned(x), weight)
        grad_x, grad_w, of_bias = convolution_backward(*volumes, settings, left)
        grad_bias = grad_bias if sums_bias else of_bias
    gradients = [grad_x, grad_w, grad_bias, *norms, grad_operand if wants_skip else None]
    return in_sizes_of(tensors, gradients, mask)
