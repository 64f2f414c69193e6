# SPDX-License-Identifier: Apache-2.0
"""A block of an accelerated model, and where PyTorch's own calls of its modules cost less."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .. import _C
from .._autocast import about_values, autocast_dtype
from .._facts import block_facts


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
        returns_conv: whether others read the convolution too, so that a call returns it beside the result.
    """

    conv: nn.ConvTranspose3d
    length: int
    order: str
    norm: str | None
    normalizer: Any
    activation: str | None
    parameter: Any
    returns_conv: bool = False

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
        said = " + ".join(["conv", *after])
        if self.returns_conv:
            alone = "" if self.keeps_returned() else " (PyTorch's calls where gradients are recorded)"
            return f"{said}, convolution returned{alone}"
        return said

    def keeps_returned(self) -> bool:
        """Whether a backward of ours reads the returned convolution, as in _tail.reads_returned"""
        return self.norm is not None and not (self.order == "act_norm" and self.activation == "relu")


# A small block in eager mode is PyTorch's calls: ours take the host some 50 us more, with a node of the graph
# of autograd 100 (on a CPU 300), much of it in Python, and it is not the device that models of such blocks
# wait for. Estimates from an H200: PyTorch's norms run one CUDA block per norm group of a sample, in 0.75 ns
# per value forward and 1.25 backward, which is what ours save; these many values in such a group are 50 us
# and 130 with gradients, and these many in all some more for passes over memory.
_MOST_VALUES_OF_GROUP = 2**16
_MOST_VALUES = 2**22

# Whether the convolution of calls of a kind is cuDNN's. Asking takes longer than what is saved.
_is_library: dict[tuple[Any, ...], bool] = {}
_MOST_KINDS = 1024  # beyond which all are forgotten, as where shapes never repeat


def _asked_for_plan(kind: tuple[Any, ...], block: Block, x: Tensor, weight: Tensor) -> bool:
    conv, norm_groups = block.conv, _norm_groups(block)
    padding: Any = conv.padding
    geometry = (conv.stride, padding, conv.output_padding, conv.groups, conv.dilation)
    facts = block_facts(x, weight, None, *geometry, norm_groups, None, None, 1e-5, "tf32")
    low = autocast_dtype(x)
    if low is not None:
        dtype = {"dtype": str(low).removeprefix("torch.")}
        facts |= {name: facts[name] | dtype for name in ("input", "weight")}
    # In training a block keeps the SM90 plan that is too small for it else.
    found: bool = _C.explain(facts)["plan"]["algorithm"] == "cuda_library"
    if len(_is_library) >= _MOST_KINDS:
        _is_library.clear()
    _is_library[kind] = found
    return found


def _norm_groups(block: Block) -> int:
    groups: int = block.normalizer.num_groups if block.norm == "group" else block.conv.out_channels
    return groups


def is_left_to_pytorch(block: Block, x: Tensor, weight: Tensor) -> bool:
    """Whether the block's modules are to be called themselves, because it is small.

    Not while a CUDA graph is captured, whose replays cost the host nothing.

    x: [N, C, D, H, W]; weight: [C, K/groups, T, R, S].
    """
    if block.norm is None:
        return False
    conv, norm_groups = block.conv, _norm_groups(block)
    stride: Any = conv.stride
    if not isinstance(stride, tuple):  # a number that somebody set, which PyTorch takes too
        return False
    values = about_values(x, weight, stride, conv.groups)
    if values > _MOST_VALUES or not x.is_cuda:
        return values <= _MOST_VALUES
    if values > x.size(0) * norm_groups * _MOST_VALUES_OF_GROUP or torch.cuda.is_current_stream_capturing():
        return False
    tensors = (x.shape, x.stride(), x.dtype, x.device, autocast_dtype(x), weight.shape, weight.stride())
    geometry = (stride, conv.padding, conv.output_padding, conv.groups, conv.dilation)
    kind = (*tensors, *geometry, norm_groups)
    try:
        found = _is_library.get(kind)
    except TypeError:  # of lists, say, which have no hash
        return False
    return _asked_for_plan(kind, block, x, weight) if found is None else found
