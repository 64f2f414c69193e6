# SPDX-License-Identifier: Apache-2.0
"""What torch.utils.flop_counter counts of our operators: their convolutions, as of PyTorch's."""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

_BLOCK, _FAMILY = "conv_transpose3d_relu_group_norm", "conv_transpose3d_norm_act"
# Their first arguments are input and weight.
_FORWARD = [
    *(_BLOCK, f"{_BLOCK}_for_training", f"{_BLOCK}_recomputed"),
    *(_FAMILY, f"{_FAMILY}_for_training", f"{_FAMILY}_in_graph", "_tail", "_tail_for_training"),
]
# How many gradients come before those; the first two results are their own, without values where not wanted.
_BACKWARD = {
    f"{_BLOCK}_backward": 1,
    f"{_FAMILY}_backward": 2,
    "fused_backward": 1,
    "_tail_backward": 1,
    "_numbered_tail_backward": 1,
}
# Of these a forward that kept nothing is computed again; `saved` is their argument of this place.
_SAVED = {f"{_BLOCK}_backward": 14, f"{_FAMILY}_backward": 21}


def _products(input: Sequence[int], weight: Sequence[int]) -> int:
    """Multiplications and additions of a transposed convolution, with those of padding, as PyTorch counts.

    input: [N,C,D,H,W] or [C,D,H,W]; weight: [C,K/groups,T,R,S].
    """
    return 2 * math.prod(input[:-4]) * math.prod(input[-3:]) * math.prod(weight)


def _forward(input: Sequence[int], weight: Sequence[int], *_: Any, **__: Any) -> int:
    return _products(input, weight)


def _backward(name: str) -> Any:
    first, place = _BACKWARD[name], _SAVED.get(name)

    def count(*arguments: Any, out_shape: Any, saved: Any = None, **_: Any) -> int:
        convolutions = sum(int(shape is not None and math.prod(shape) > 0) for shape in out_shape[:2])
        if place is not None and saved is None and (len(arguments) <= place or arguments[place] is None):
            convolutions += 1
        return convolutions * _products(*arguments[first : first + 2])

    return count


def register() -> None:
    """Registers the formulas; the package calls it once."""
    ops = torch.ops.upconv3d
    register_flop_formula([getattr(ops, name) for name in _FORWARD])(_forward)
    for name in _BACKWARD:
        if hasattr(ops, name):  # a CPU-only build has no fused_backward
            register_flop_formula(getattr(ops, name))(_backward(name))
