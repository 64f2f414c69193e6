# SPDX-License-Identifier: Apache-2.0
"""What Python asks about a block before it calls an operator: how large it is, and what its plan would be."""

from collections.abc import Callable, Hashable, Sequence

from torch import Tensor

FEW_CHANNELS_KERNEL = "conv_transpose_few_channels_sm80"

# Output values up to which a block is small: it can be PyTorch's own calls where those cost the host less, in
# a compiled graph or a module that accelerate() changed. On an H200 such a block takes the device 4 to 15 us
# less by our library plan (perf/results), and the host 20 to 60 more, in eager mode with gradients 100, which
# is what models of such blocks wait for. Beyond, passes over the output decide.
SMALL_BLOCK_VALUES = 2**22


def about_values(input: Tensor, weight: Tensor, stride: Sequence[int], groups: int) -> int:
    """Values of the result [N, K, Z, P, Q], as if each axis were `stride` times input's [N, C, D, H, W]."""
    positions = input.numel() // max(input.size(-4), 1) * stride[0] * stride[1] * stride[2]
    return positions * weight.size(1) * groups


class PlanQuestion:
    """A question about the plans of calls of a kind, whose answer is remembered: asking the planner takes the
    host longer than the block itself.

    ask: answers it; kinds: that are remembered, beyond which all are forgotten, as where shapes never repeat.
    """

    def __init__(self, ask: Callable[..., bool], kinds: int = 1024) -> None:
        self._ask = ask
        self._kinds = kinds
        self._answers: dict[Hashable, bool] = {}

    def __call__(self, kind: tuple[object, ...], *arguments: object) -> bool:
        """ask(*arguments), which the kind tells from all other calls. Of a kind that has no hash (a symbolic
        size, a list where PyTorch takes one) it is not asked: False."""
        try:
            found = self._answers.get(kind)
        except TypeError:
            return False
        if found is None:
            found = self._ask(*arguments)
            if len(self._answers) >= self._kinds:
                self._answers.clear()
            self._answers[kind] = found
        return found
