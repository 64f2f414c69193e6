# SPDX-License-Identifier: Apache-2.0
"""A block of an accelerated model, and where PyTorch's own calls of its modules cost less."""

from dataclasses import dataclass
from enum import Enum
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .. import _C
from .._autocast import autocast_dtype
from .._facts import block_facts
from .._plan_questions import SMALL_BLOCK_VALUES, PlanQuestion, about_values
from ..functional import resolve_precision


@dataclass(frozen=True)
class Options:
    """What accelerate() was told, kept by every container that it changed."""

    precision: str | None = None


class Block(NamedTuple):
    """A transposed convolution and what follows it, as conv_transpose3d_norm_act takes them.

    Attributes:
        length: modules of the chain that it stands for.
        norm: "group", "instance", "batch" (in eval mode: folded into the weight) or None.
        normalizer: the module of `norm`.
        activation, parameter: names and numbers of conv_transpose3d_norm_act; for "prelu" the module.
        returns_conv: whether others read the convolution too or, with a skip, its sum with that, so that a
            call returns it beside the result.
        adds_skip: whether a skip is added to the convolution before what follows.
    """

    conv: nn.ConvTranspose3d
    length: int
    order: str
    norm: str | None
    normalizer: Any
    activation: str | None
    parameter: Any
    returns_conv: bool = False
    adds_skip: bool = False

    def describe(self) -> str:
        """As conv, norm, activation in the order in which they apply."""
        norms = {
            "group": f"group norm ({getattr(self.normalizer, 'num_groups', 0)})",
            "instance": "instance norm",
            "batch": "batch norm (folded on CUDA)",
        }
        norm = [norms[self.norm]] if self.norm is not None else []
        activation = [self.activation] if self.activation is not None else []
        after = norm + activation if self.order == "norm_act" else activation + norm
        said = " + ".join(["conv", *(["skip"] if self.adds_skip else []), *after])
        if self.adds_skip:
            returned = ", sum returned" if self.returns_conv else ""
            return f"{said}{returned} (PyTorch's calls on the CPU)"
        if self.returns_conv:
            alone = "" if self.keeps_returned() else " (PyTorch's calls where gradients are recorded)"
            return f"{said}, convolution returned{alone}"
        return said

    def keeps_returned(self) -> bool:
        """Whether a backward of ours begins with the returned convolution, as in _tail.keeps_operand."""
        return self.norm in ("group", "instance") or (self.norm is None and self.activation is not None)


# Output values per norm group of a sample up to which a small block's calls are PyTorch's in eager mode. An
# estimate from an H200: PyTorch's norms run one CUDA block per such group, in 0.75 ns per value forward and
# 1.25 backward, which is what ours save: so many values are 50 us and, with gradients, 130.
_MOST_VALUES_OF_GROUP = 2**16


def three(number: Any) -> Any:
    """A number per axis, of what a convolution keeps: one may stand for all, by itself or in a tuple."""
    if isinstance(number, int):
        return (number,) * 3
    return number * 3 if len(number) == 1 else number


class Way(Enum):
    """How a block is computed.

    Attributes:
        PLANNED: by our call, as planned for the device.
        SPARING: by our call, of whose plans a small block gets the one that spares the host.
        MODULES: by PyTorch's own calls, because it is small and its plan would be cuDNN's convolution.
    """

    PLANNED = "planned"
    SPARING = "sparing"
    MODULES = "modules"


def _plan_is_library(block: Block, x: Tensor, weight: Tensor, precision: str, recording: bool) -> bool:
    """Whether the convolution is cuDNN's though the host is to be spared, in inference or as recorded."""
    conv, norm_groups = block.conv, _norm_groups(block)
    padding: Any = conv.padding
    geometry = (conv.stride, padding, conv.output_padding, conv.groups, conv.dilation)
    facts = block_facts(x, weight, None, *geometry, norm_groups, None, None, 1e-5, "tf32")
    facts["weight"] = facts["weight"] | {"device": facts["input"]["device"]}  # a sized_weight has none
    low = autocast_dtype(x)
    if low is not None:
        dtype = {"dtype": str(low).removeprefix("torch.")}
        facts |= {name: facts[name] | dtype for name in ("input", "weight")}
    # Of three products the SM90 plan takes the device longer than was compared with the host.
    one_product = precision == "tf32" or (x.dtype if low is None else low) is not torch.float32
    asked = facts | {"spares_host": one_product}
    plans = [_C.explain(asked | {"training": training})["plan"] for training in {recording, False}]
    # Of one voxel per sample ours is a matrix product, of which cuDNN makes 20 to 330 us more of the device's
    # time; recorded, it takes the host as long as PyTorch's calls and more (perf/NOTES.md, "One voxel, and
    # half tiles" and "Few inputs and many outputs").
    if not recording and (not block.returns_conv or conv.bias is None):
        plans = [plan for plan in plans if not plan["one_voxel"]]
    return any(plan["algorithm"] == "cuda_library" for plan in plans)


_is_library = PlanQuestion(_plan_is_library)


def sized_weight(conv: nn.ConvTranspose3d, x: Tensor, device: torch.device | str) -> Tensor:
    """conv's weight or, where a parametrization would compute it, a tensor of its sizes without values.

    Such a weight is evaluated once in a forward, by who convolves with it: it may draw random numbers, or
    count its evaluations, as spectral_norm's power iteration does.

    Returns: [C, K/groups, T, R, S], without values in x's dtype and on device.
    """
    weight = conv._parameters.get("weight")
    if weight is not None:
        return weight
    sizes = (conv.in_channels, conv.out_channels // conv.groups, *conv.kernel_size)
    return torch.empty(sizes, dtype=x.dtype, device=device)


def _norm_groups(block: Block) -> int:
    groups: int = block.normalizer.num_groups if block.norm == "group" else block.conv.out_channels
    return groups


def way_of(block: Block, x: Tensor, weight: Tensor | None) -> Way:
    """How the block is to be computed in eager mode, where small blocks wait for the host.

    While a CUDA graph is captured, what is computed by our call stays as it is, so that a call before warms
    what is captured; none is left to PyTorch, for replays cost the host nothing.

    x: [N, C, D, H, W]; weight: [C, K/groups, T, R, S], None where a parametrization would compute it.
    """
    if block.norm is None:
        return Way.PLANNED
    conv, norm_groups = block.conv, _norm_groups(block)
    if weight is None:
        weight = sized_weight(conv, x, "meta")
    stride: Any = conv.stride
    if not isinstance(stride, tuple):  # a number that somebody set, which PyTorch takes too
        return Way.PLANNED
    stride = three(stride)
    values: Any = about_values(x, weight, stride, conv.groups)
    # A program that torch.export makes of sizes that are not known is for small and large ones.
    if isinstance(values, torch.SymInt) or values > SMALL_BLOCK_VALUES:
        return Way.PLANNED
    if not x.is_cuda:
        return Way.MODULES
    if not block.adds_skip:  # that plan is always the library's
        # Gradients may be wanted, whoever wants them.
        precision, recording = resolve_precision(x, None), torch.is_grad_enabled()
        tensors = (x.shape, x.stride(), x.dtype, x.device, autocast_dtype(x), weight.shape, weight.stride())
        geometry = (stride, conv.padding, conv.output_padding, conv.groups, conv.dilation)
        kind = (*tensors, *geometry, norm_groups, precision, recording)
        if not _is_library(kind, block, x, weight, precision, recording):
            return Way.SPARING
    few = values <= x.size(0) * norm_groups * _MOST_VALUES_OF_GROUP
    return Way.MODULES if few and not torch.cuda.is_current_stream_capturing() else Way.PLANNED
