# SPDX-License-Identifier: Apache-2.0
"""Group and instance norms of volumes that stand by themselves in a model, by our kernels.

PyTorch's run one CUDA block per norm group of a sample, of which a volume has few; ours run on the whole GPU.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from .._autocast import autocast_dtype
from .._norm_alone import is_watched, norm_act, settings_of_norm
from .._plan_questions import SMALL_BLOCK_VALUES
from .._tail_arguments import runs_kernels
from ..functional import _dynamo_compiling, is_recorded
from .chain import is_of_known_class, kind_of
from .swap import _OPTIONS, MIXINS, Accelerated, why_not_swapped

# Values of a norm group of a sample from which on ours run, where autograd records nothing and where it does.
# PyTorch's take 0.75 ns per value, and 1.25 backward (block.py): so many are 12 us, what a launch of ours
# takes of a small volume, and 130 us.
LEAST_VALUES_OF_GROUP = {False: 2**14, True: 2**16}
# The same of volumes up to SMALL_BLOCK_VALUES, whose models wait for their host: there a norm of ours
# was seen to cost a step 0.2 ms more than PyTorch's (perf/NOTES.md, "Whole models with a skip before the
# norm, and norms by themselves"). 200 us, and 2 ms.
LEAST_OF_SMALL = {False: 2**18, True: 2**20}
# What ours compute: somebody may give the classes other forwards.
_FORWARDS = {cls: cls.forward for cls in (nn.GroupNorm, nn.InstanceNorm3d)}
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class AcceleratedNorm(Accelerated):
    """A GroupNorm or InstanceNorm3d; what ours do not compute, and on the CPU, its own forward does."""

    @staticmethod
    def _upconv3d_forward(base: Any) -> Callable[..., Any]:
        _upconv3d_base, _upconv3d_run = base, _run_or_leave

        def forward(self: Any, input: Any) -> Any:
            return _upconv3d_run(_upconv3d_base, self, input)

        return forward


def _run_or_leave(base: Any, norm: nn.Module, input: Any) -> Any:
    """What an accelerated norm, whose own class is base, returns."""
    y = run_norm(norm, input) if _OPTIONS in norm.__dict__ else None
    return base.forward(norm, input) if y is None else y


MIXINS.append(AcceleratedNorm)


def norms_to_swap(model: nn.Module, taken: set[int]) -> list[tuple[str, nn.Module]]:
    """The norms of a model that ours may run, by name, without those that blocks have taken, by id."""
    return [
        (name, module)
        for name, module in model.named_modules()
        if id(module) not in taken
        and is_of_known_class(module)
        and kind_of(module) in ("group", "instance")
        and not _keeps_statistics(module)
        and why_not_swapped(module, AcceleratedNorm) is None
    ]


def _keeps_statistics(norm: Any) -> bool:
    """Whether norm is an InstanceNorm3d with running statistics, which each call updates or reads."""
    tracks: bool = getattr(norm, "track_running_stats", False)
    return tracks or norm._buffers.get("running_mean") is not None


def _cast(x: Tensor, vectors: Sequence[Tensor | None], is_group: bool) -> tuple[Any, ...] | None:
    """x, weight and bias in the dtype in which PyTorch computes; None where that is several.

    Under autocast group norms run in float32, as what they return; instance norms take vectors of float32,
    whose gradients would leave float16's range.
    """
    low = autocast_dtype(x) is not None
    dtype = torch.float32 if low and is_group else x.dtype
    taken = {dtype}
    if low and is_group:
        taken = set(_DTYPES)
    elif low and not (dtype is torch.float16 and torch.is_grad_enabled()):
        taken |= {torch.float32}
    if any(vector is not None and vector.dtype not in taken for vector in vectors):
        return None
    return tuple(None if tensor is None else tensor.to(dtype) for tensor in (x, *vectors))


def run_norm(norm: Any, x: Any) -> Tensor | None:
    """norm(x) by our kernels; None where its own forward is to run."""
    if _dynamo_compiling() or not isinstance(x, Tensor) or not runs_kernels(x):
        return None
    vectors = (norm._parameters.get("weight"), norm._parameters.get("bias"))
    # First of all: where sizes are symbols, to compare one would be a guard.
    if is_watched((x, *vectors)) or x.dim() != 5 or x.dtype not in _DTYPES or _keeps_statistics(norm):
        return None
    base = norm._upconv3d_base
    is_group = base is nn.GroupNorm
    channels, groups = x.size(1), norm.num_groups if is_group else x.size(1)
    if base.forward is not _FORWARDS[base] or type(groups) is not int:
        return None
    recording = is_recorded(x, *vectors)
    is_small = x.numel() <= SMALL_BLOCK_VALUES
    least = (LEAST_OF_SMALL if is_small else LEAST_VALUES_OF_GROUP)[recording]
    if x.numel() < least * x.size(0) * groups or x.size(0) == 0:
        return None
    if channels != (norm.num_channels if is_group else norm.num_features) or channels % groups != 0:
        return None
    if not isinstance(norm.eps, (int, float)) or not math.isfinite(norm.eps):
        return None
    if "weight" not in norm._parameters or "bias" not in norm._parameters:
        return None  # a parametrization computes one, which its own forward does once
    given = _cast(x, vectors, is_group)
    if given is None:
        return None
    value, gamma, beta = given
    return norm_act(value, gamma, beta, None, settings_of_norm(groups, float(norm.eps), "none", 0.0))
