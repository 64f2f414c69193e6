# SPDX-License-Identifier: Apache-2.0
"""A chain of modules, each called with what the one before returned, and the blocks in it.

Everything is decided at the call, from the modules as they are then: hooks that came, a norm that was
exchanged, train() or eval(). What is no block runs as it would without us.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from ..norm_act import conv_transpose3d_norm_act


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
    """

    conv: nn.ConvTranspose3d
    length: int
    order: str
    norm: str | None
    normalizer: Any
    activation: str | None
    parameter: Any

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
        return " + ".join(["conv", *after])


def runs_forward_of(module: nn.Module, cls: type[nn.Module]) -> bool:
    """Whether module is a cls, or of a subclass, that computes what cls computes, by cls's code."""
    return (
        isinstance(module, cls)
        and type(module).forward is cls.forward
        and type(module).__call__ is nn.Module.__call__
        and "forward" not in module.__dict__
    )


def why_watched(module: nn.Module) -> str | None:
    """Who else takes part in a call of module, or None."""
    if (
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    ):
        return f"{type(module).__name__} has hooks (spectral_norm, weight_norm and prune add them too)"
    if module.__dict__.get("_compiled_call_impl") is not None:
        return f"{type(module).__name__} was compiled by itself"
    return None


def _activation_of(module: nn.Module) -> tuple[str, Any] | None:
    """Name and parameter of an activation module, or None where it is none of ours."""
    if runs_forward_of(module, nn.ReLU):
        return "relu", None
    if runs_forward_of(module, nn.PReLU):
        return "prelu", module
    if runs_forward_of(module, nn.LeakyReLU):
        return "leaky_relu", module.negative_slope
    if runs_forward_of(module, nn.ELU):
        return "elu", module.alpha
    if runs_forward_of(module, nn.SiLU):
        return "silu", None
    if runs_forward_of(module, nn.GELU):
        return {"none": "gelu", "tanh": "gelu_tanh"}[str(module.approximate)], None
    return None


_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)


def _is_identity(module: nn.Module) -> bool | str:
    """Whether module returns its input, and why not where it is one that might."""
    if runs_forward_of(module, nn.Identity):
        return True
    for cls in _DROPOUTS:
        if runs_forward_of(module, cls):
            if not module.training or module.p == 0:
                return True
            return f"{type(module).__name__}(p={module.p}) follows, in training"
    return False


def _norm_of(conv: nn.ConvTranspose3d, module: nn.Module) -> str | None:
    """The norm that module is, None where it is none.

    Raises: UnfitError, where it is one that cannot be taken.
    """
    kind: str | None = None
    channels: Any = 0
    if runs_forward_of(module, nn.GroupNorm):
        kind, channels = "group", module.num_channels
    elif runs_forward_of(module, nn.InstanceNorm3d):
        if module.track_running_stats:
            raise UnfitError("InstanceNorm3d has running statistics")
        kind, channels = "instance", module.num_features
    elif runs_forward_of(module, nn.BatchNorm3d):
        if module.training or module.running_mean is None or module.running_var is None:
            raise UnfitError(
                "BatchNorm3d takes the batch's statistics (in training): folded in eval mode only"
            )
        if conv.groups != 1:
            raise UnfitError(
                f"BatchNorm3d is folded into convolutions of one group; got groups={conv.groups}"
            )
        if conv.weight.dtype is torch.float16:
            raise UnfitError("BatchNorm3d is not folded into float16, whose range it may leave")
        kind, channels = "batch", module.num_features
    if kind is not None and channels != conv.out_channels:
        raise UnfitError(
            f"{type(module).__name__} has {channels} channels, the convolution returns {conv.out_channels}"
        )
    return kind


class UnfitError(Exception):
    """Why a module is left alone."""


def _after(chain: Sequence[nn.Module], at: int) -> tuple[int, str | None]:
    """The next module that is no identity; why what stands there cannot be taken, where that is known."""
    while at < len(chain):
        watched = why_watched(chain[at])
        if watched is not None:
            return at, watched
        identity = _is_identity(chain[at])
        if isinstance(identity, str):
            return at, identity
        if not identity:
            return at, None
        at += 1
    return at, "nothing that is known follows"


def find_block(chain: Sequence[nn.Module], at: int) -> Block | str:
    """The longest block that begins with the ConvTranspose3d chain[at], or why there is none."""
    conv = chain[at]
    assert isinstance(conv, nn.ConvTranspose3d)
    if not runs_forward_of(conv, nn.ConvTranspose3d):
        return f"{type(conv).__name__} has a forward of its own"
    why = why_watched(conv)
    if why is not None:
        return why
    if conv.padding_mode != "zeros":
        return f"padding_mode={conv.padding_mode!r} is not defined for it"
    first, why = _after(chain, at + 1)
    try:
        if why is None:
            norm = _norm_of(conv, chain[first])
            if norm is not None:
                return _norm_first(chain, at, first, norm)
            activation = _activation_of(chain[first])
            if activation is not None:
                return _activation_first(chain, at, first, activation)
            why = f"{type(chain[first]).__name__} follows"
    except UnfitError as unfit:
        why = str(unfit)
    return why


def _norm_first(chain: Sequence[nn.Module], at: int, place: int, norm: str) -> Block:
    conv, normalizer = chain[at], chain[place]
    assert isinstance(conv, nn.ConvTranspose3d)
    second, why = _after(chain, place + 1)
    activation = _activation_of(chain[second]) if why is None else None
    if activation is None:
        return Block(conv, place + 1 - at, "norm_act", norm, normalizer, None, None)
    return Block(conv, second + 1 - at, "norm_act", norm, normalizer, *activation)


def _activation_first(chain: Sequence[nn.Module], at: int, place: int, activation: tuple[str, Any]) -> Block:
    conv = chain[at]
    assert isinstance(conv, nn.ConvTranspose3d)
    second, why = _after(chain, place + 1)
    norm = None
    if why is None:
        try:
            norm = _norm_of(conv, chain[second])
        except UnfitError:
            norm = None  # conv and activation are a block of their own
    if norm is None or norm == "batch":
        return Block(conv, place + 1 - at, "act_norm", None, None, *activation)
    return Block(conv, second + 1 - at, "act_norm", norm, chain[second], *activation)


def fold(conv: nn.ConvTranspose3d, norm: Any) -> tuple[Tensor, Tensor]:
    """Weight and bias of a convolution that is followed by batch norm in eval mode, differentiable.

    Channels are axis 1 of a transposed convolution's weight, as they are of a volume, so that batch_norm
    itself scales it, in one kernel. Computed at every call: a tensor that was changed through .data keeps
    its version, and nothing else would tell.

    Returns: [C, K, T, R, S] and [K].
    """
    mean = norm.running_mean
    zero = torch.zeros_like(mean)
    weight = nn.functional.batch_norm(
        conv.weight, zero, norm.running_var, norm.weight, None, False, 0.0, norm.eps
    )
    bias = zero.to(conv.weight.dtype) if conv.bias is None else conv.bias
    rows = nn.functional.batch_norm(
        bias.unsqueeze(0), mean, norm.running_var, norm.weight, norm.bias, False, 0.0, norm.eps
    )
    return weight, rows.squeeze(0)


def call_of(block: Block, x: Tensor, options: Options) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of conv_transpose3d_norm_act, and those by name, for the block on x."""
    conv, norm, normalizer = block.conv, block.norm, block.normalizer
    if norm == "batch":
        weight, bias = fold(conv, normalizer)
        normalization: dict[str, Any] = {"norm": None}
    else:
        weight, bias = conv.weight, conv.bias  # type: ignore[assignment]
        normalization = {"norm": norm}
        if norm is not None:
            normalization |= {
                "norm_weight": normalizer.weight,
                "norm_bias": normalizer.bias,
                "eps": normalizer.eps,
            }
            if norm == "group":
                normalization["num_groups"] = normalizer.num_groups
    geometry: Any = (conv.stride, conv.padding, conv.output_padding, conv.groups, conv.dilation)
    parameter = block.parameter.weight if block.activation == "prelu" else block.parameter
    named = {
        "order": block.order,
        "activation": block.activation,
        "activation_param": parameter,
        "precision": options.precision,
    }
    return (x, weight, bias, *geometry), named | normalization


def run_block(block: Block, x: Tensor, options: Options) -> Tensor:
    """One call for all modules of the block."""
    positional, named = call_of(block, x, options)
    y: Tensor = conv_transpose3d_norm_act(*positional, **named)
    return y


# Where a batch norm is folded. On a CPU little is gained, and PyTorch's calls keep its last bit.
FOLDING_DEVICES = frozenset({"cuda"})


def takes(x: Any) -> bool:
    """Whether x is what blocks compute on: a batch of volumes, and no tracer's stand-in for one."""
    return isinstance(x, Tensor) and x.dim() == 5


def run_chain(chain: Sequence[nn.Module], x: Any, options: Options) -> Any:
    """What calling each module with the result of the one before returns, its blocks in one call each."""
    at, watched = 0, _has_any_global_hook()  # type: ignore[no-untyped-call]
    while at < len(chain):
        module = chain[at]
        if isinstance(module, nn.ConvTranspose3d) and takes(x) and not watched:
            block = find_block(chain, at)
            if isinstance(block, Block) and (block.norm != "batch" or x.device.type in FOLDING_DEVICES):
                x = run_block(block, x, options)
                at += block.length
                continue
        x = module(x)
        at += 1
    return x
