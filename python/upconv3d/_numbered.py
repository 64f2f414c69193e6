# SPDX-License-Identifier: Apache-2.0
"""The operators once more, with one integer for all that is no tensor.

Four lists, a float and a string cost an operator 3 us on their way through PyTorch's dispatcher; one integer
that stands for them costs next to nothing. upconv3d._C remembers what a number stands for, for good.

Only CPU and CUDA kernels take such a call. Autograd does not see it (its caller records what is to be
recorded), and everything else that the dispatcher knows (autocast, modes, tensor subclasses, fake and meta
tensors, other devices) gets the public operator in its place.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import _C

_library = torch.library.Library("upconv3d", "FRAGMENT")  # type: ignore[no-untyped-call]  # keeps registrations alive
_ops = torch.ops.upconv3d

# The operators without OpOverload.__call__, a function in Python that passes its arguments on: 0.3 us.
numbered_block = _ops._numbered_block.default._op
numbered_block_for_training = _ops._numbered_block_for_training.default._op

_PUBLIC = {
    "_numbered_block": _ops.conv_transpose3d_relu_group_norm.default,
    "_numbered_block_for_training": _ops.conv_transpose3d_relu_group_norm_for_training.default,
}

# settings_number, of the same arguments one by one, where an earlier call has had them: None for others, and
# where one of them is no plain int, tuple of three ints, float or str.
known_number: Callable[..., int | None] = _C.settings_number  # type: ignore[has-type]

# The settings of each number.
known_blocks: dict[int | None, tuple[Any, ...]] = {}


def settings_number(settings: tuple[Any, ...]) -> int | None:
    """The number of (stride, padding, output_padding, groups, dilation, num_groups, eps, precision).

    None where they are not remembered: too many others are already, or one is no plain number.
    """
    number: int | None = known_number(*settings)
    return number if number in known_blocks else _remember(settings)


def _remember(settings: tuple[Any, ...]) -> int | None:
    stride, padding, output_padding, groups, dilation, num_groups, eps, _ = settings
    # Neither symbolic integers nor a tensor as eps, whose value may change behind the number.
    integers = (*stride, *padding, *output_padding, groups, *dilation, num_groups)
    if not isinstance(eps, (int, float)) or any(type(value) is not int for value in integers):
        return None
    number: int | None = _C.remember_settings(settings)
    if number is not None:
        known_blocks.setdefault(number, settings)
    return number


def _public(name: str) -> Callable[..., Any]:
    op = _PUBLIC[name]

    def call(
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        norm_weight: Tensor | None,
        norm_bias: Tensor | None,
        settings: int,
    ) -> Any:
        *numbers, eps, precision = _C.remembered_settings(settings)
        return op(input, weight, bias, *numbers, norm_weight, norm_bias, eps, precision)

    return call


def register() -> None:
    """Says what the dispatcher does with a numbered call elsewhere; the package calls it once."""
    for name in _PUBLIC:
        _library.impl(name, torch.library.fallthrough_kernel, "Autograd")  # type: ignore[no-untyped-call]
        for key in ("Python", "AutocastCPU", "AutocastCUDA", "CompositeExplicitAutograd"):
            _library.impl(name, _public(name), key)  # type: ignore[no-untyped-call]
