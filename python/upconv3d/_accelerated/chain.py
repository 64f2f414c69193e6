# SPDX-License-Identifier: Apache-2.0
"""The blocks in a chain of modules, each of which is called with what the one before returned.

Found from the modules as they are now: hooks that came, a norm that was exchanged, train() or eval().
"""

from collections.abc import Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.modules.lazy import LazyModuleMixin

from ..functional import _dynamo_compiling
from .block import Block

# What forwards of torch.nn's modules call of their classes, which a subclass may have of its own.
_CALLED_BY_FORWARDS = (
    *("_check_input_dim", "_apply_instance_norm", "_handle_no_batch_input", "_get_no_batch_dim"),
    "_output_padding",
)


def runs_forward_of(module: nn.Module, cls: type[nn.Module]) -> bool:
    """Whether module is a cls, or of a subclass, that computes what cls computes, by cls's code."""
    kind = type(module)
    if not isinstance(module, cls) or kind.forward is not cls.forward or "forward" in module.__dict__:
        return False
    for name in _CALLED_BY_FORWARDS:
        if getattr(kind, name, None) is not getattr(cls, name, None):
            return False
    return is_called_plainly(kind)


def is_called_plainly(cls: type[nn.Module]) -> bool:
    """Whether a call of a cls is hooks and forward."""
    return cls.__call__ is nn.Module.__call__ and cls._call_impl is nn.Module._call_impl


def why_watched(module: nn.Module) -> str | None:
    """Who else takes part in a call of module, or None."""
    if (
        module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
    ):
        if isinstance(module, LazyModuleMixin):
            return f"{type(module).__name__} has no parameters before its first call, after which it is found"
        return f"{type(module).__name__} has hooks (spectral_norm, weight_norm and prune add them too)"
    if module.__dict__.get("_compiled_call_impl") is not None:
        return f"{type(module).__name__} was compiled by itself"
    return None


# nn.Dropout1d refuses volumes.
_DROPOUTS = (nn.Dropout, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
# Modules that blocks are made of, and what each is; no class among them is another's subclass.
_KNOWN: tuple[tuple[type[nn.Module], str], ...] = (
    (nn.Identity, "identity"),
    *((cls, "dropout") for cls in _DROPOUTS),
    (nn.GroupNorm, "group"),
    (nn.InstanceNorm3d, "instance"),
    (nn.BatchNorm3d, "batch"),
    (nn.ReLU, "relu"),
    (nn.PReLU, "prelu"),
    (nn.LeakyReLU, "leaky_relu"),
    (nn.ELU, "elu"),
    (nn.SiLU, "silu"),
    (nn.GELU, "gelu"),
    (nn.ConvTranspose3d, "conv"),
)
# With the forward that computes it: a class may be given another one.
_KINDS = {cls: (kind, cls.forward) for cls, kind in _KNOWN}
_ACTIVATIONS = frozenset({"relu", "prelu", "leaky_relu", "elu", "silu", "gelu"})
_VECTORED = frozenset({"group", "instance", "batch", "prelu"})


def _computes_vectors(module: nn.Module) -> bool:
    """Whether a parametrization, or a subclass, computes what a norm or PReLU multiplies with or adds.

    Whether a block takes these depends on their dtype, and asking would be an evaluation of its own.
    """
    names = ("weight",) if isinstance(module, nn.PReLU) else ("weight", "bias")
    # DataParallel and FSDP keep some in __dict__.
    kept = all(name in module._parameters or name in module.__dict__ for name in names)
    return not kept or any(getattr(type(module), name, None) is not None for name in names)


def kind_of(module: nn.Module) -> str | None:
    """What module computes, as _KNOWN names it; None where it is nothing of that."""
    if not _dynamo_compiling():  # Dynamo is not asked to look up classes
        known = _KINDS.get(type(module))
        if known is not None:
            kind, forward = known
            return kind if type(module).forward is forward and "forward" not in module.__dict__ else None
    for cls, name in _KNOWN:
        if runs_forward_of(module, cls):
            return None if name in _VECTORED and _computes_vectors(module) else name
    return None


def is_of_known_class(module: nn.Module) -> bool:
    """Whether module is of one of these very classes, whose attributes are what they seem."""
    return type(module) in _KINDS


def is_plain_number(value: Any) -> bool:
    """Whether value is one of Python's numbers, which our calls take; PyTorch's modules take further ones."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _activation_of(module: nn.Module, kind: str | None) -> tuple[str, Any] | None:
    """Name and parameter of an activation module of that kind, or None where it is none of ours."""
    if kind is None or kind not in _ACTIVATIONS:
        return None
    if kind == "prelu":
        return kind, module
    if kind == "leaky_relu" or kind == "elu":
        number = module.negative_slope if kind == "leaky_relu" else module.alpha
        return (kind, number) if is_plain_number(number) else None
    if kind == "gelu":
        return {"none": ("gelu", None), "tanh": ("gelu_tanh", None)}.get(str(module.approximate))
    return kind, None


def _norm_of(conv: Any, module: Any, kind: str | None) -> tuple[str | None, str | None]:
    """The norm that module, of that kind, is, None where it is none; and why it cannot be taken, if so.

    No exception says so: torch.compile cannot trace what reads its text.
    """
    channels: Any
    if kind == "group":
        channels = module.num_channels
    elif kind == "instance":
        # Those that there are it updates, whatever the flag says.
        if module.track_running_stats or module._buffers.get("running_mean") is not None:
            return None, "InstanceNorm3d has running statistics"
        channels = module.num_features
    elif kind == "batch":
        if module.training or module.running_mean is None or module.running_var is None:
            return None, "BatchNorm3d takes the batch's statistics (in training): folded in eval mode only"
        if conv.groups != 1:
            return None, f"BatchNorm3d is folded into convolutions of one group; got groups={conv.groups}"
        weight = conv._parameters.get("weight")  # of another, admits asks
        if weight is not None and weight.dtype is torch.float16:
            return None, "BatchNorm3d is not folded into float16, whose range it may leave"
        channels = module.num_features
    else:
        return None, None
    if channels != conv.out_channels:
        return (
            None,
            f"{type(module).__name__} has {channels} channels, the convolution returns {conv.out_channels}",
        )
    return kind, None


def _after(chain: Sequence[nn.Module], at: int) -> tuple[int, str | None, str | None]:
    """The next module that is no identity, and its kind; why it cannot be taken, where that is known."""
    while at < len(chain):
        module = chain[at]
        watched = why_watched(module)
        if watched is not None:
            return at, None, watched
        kind = kind_of(module)
        if kind == "dropout":
            dropout: Any = module
            if dropout.training and dropout.p != 0:
                return at, None, f"{type(module).__name__}(p={dropout.p}) follows, in training"
        elif kind != "identity":
            return at, kind, None
        at += 1
    return at, None, "nothing that is known follows"


def _what_keeps(module: nn.Module) -> str:
    """Why a module that is one of _KNOWN, or of a subclass, is no part of a block; "" for others."""
    for cls, name in _KNOWN:
        if isinstance(module, cls):
            if not runs_forward_of(module, cls):
                return ", with a forward of its own"
            if name in _VECTORED and _computes_vectors(module):
                return ", with a weight or bias that is computed at each call"
    return ""


def find_block(
    chain: Sequence[nn.Module], at: int, returns_conv: bool = False, adds_skip: bool = False
) -> Block | str:
    """The longest block that begins with the ConvTranspose3d chain[at], or why there is none.

    returns_conv, adds_skip: as in Block; what would change the convolution that others read is no block then,
    nor what has a skip and no norm right behind it.
    """
    block = _find_block(chain, at, returns_conv)
    if isinstance(block, str) or not adds_skip:
        return block
    if block.norm not in ("group", "instance") or block.order != "norm_act":
        return "no group or instance norm follows the sum with a skip"
    return block._replace(adds_skip=True)


def _find_block(chain: Sequence[nn.Module], at: int, returns_conv: bool) -> Block | str:
    conv: Any = chain[at]
    if kind_of(conv) != "conv":
        return f"{type(conv).__name__} has a forward of its own"
    why = why_watched(conv)
    if why is not None:
        return why
    if conv.padding_mode != "zeros":
        return f"padding_mode={conv.padding_mode!r} is not defined for it"
    first, kind, why = _after(chain, at + 1)
    if why is not None:
        return why
    norm, why = _norm_of(conv, chain[first], kind)
    if norm is not None:
        if norm == "batch" and returns_conv:
            return "BatchNorm3d is folded into the convolution, which others read too"
        return _norm_first(chain, at, first, norm, returns_conv)
    if why is not None:
        return why
    activation = _activation_of(chain[first], kind)
    if activation is None:
        return f"{type(chain[first]).__name__} follows{_what_keeps(chain[first])}"
    if returns_conv and getattr(chain[first], "inplace", False):
        return f"{type(chain[first]).__name__} changes in place the convolution, which others read too"
    return _activation_first(chain, at, first, activation, returns_conv)


def _norm_first(chain: Sequence[nn.Module], at: int, place: int, norm: str, returns_conv: bool) -> Block:
    conv: Any = chain[at]
    second, kind, why = _after(chain, place + 1)
    activation = _activation_of(chain[second], kind) if why is None else None
    if activation is None:
        return Block(conv, place + 1 - at, "norm_act", norm, chain[place], None, None, returns_conv)
    return Block(conv, second + 1 - at, "norm_act", norm, chain[place], *activation, returns_conv)


def _activation_first(
    chain: Sequence[nn.Module], at: int, place: int, activation: tuple[str, Any], returns_conv: bool
) -> Block:
    conv: Any = chain[at]
    second, kind, why = _after(chain, place + 1)
    norm = None
    if why is None:
        norm, _ = _norm_of(conv, chain[second], kind)
    if norm is None or norm == "batch":  # conv and activation are a block of their own
        return Block(conv, place + 1 - at, "act_norm", None, None, *activation, returns_conv)
    return Block(conv, second + 1 - at, "act_norm", norm, chain[second], *activation, returns_conv)


@contextmanager
def in_mode(modules: list[nn.Module], training: bool) -> Any:
    """Lets `training` of each read as told meanwhile; nothing that a module's own train() does happens."""
    kept = [module.training for module in modules]
    try:
        for module in modules:
            module.training = training
        yield
    finally:
        for module, mode in zip(modules, kept, strict=True):
            module.training = mode


def blocks_of(
    chain: list[nn.Module], at: int = 0, returns_conv: bool = False, adds_skip: bool = False
) -> dict[bool, Block | str]:
    """find_block for train() and for eval()."""
    found = {}
    for mode in (True, False):
        with in_mode(chain, mode):
            found[mode] = find_block(chain, at, returns_conv, adds_skip)
    return found
