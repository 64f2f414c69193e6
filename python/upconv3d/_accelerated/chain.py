# SPDX-License-Identifier: Apache-2.0
"""A chain of modules, each called with what the one before returned, and the blocks in it.

Everything is decided at the call, from the modules as they are then: hooks that came, a norm that was
exchanged, train() or eval(). What is no block runs as it would without us.
"""

import math
from collections.abc import Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from .._graphs import is_exporting
from .._in_graphs import block_in_graph
from ..functional import (
    _DTYPES,
    _dynamo_compiling,
    _tracing,
    conv_transpose3d_relu_group_norm,
    resolve_precision,
)
from ..module import _parameter
from ..norm_act import checked_arguments, conv_transpose3d_norm_act, run_checked
from .block import Block, Options, is_left_to_pytorch
from .call import call_of, evaluated


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


_DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
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
_KINDS = dict(_KNOWN)
_ACTIVATIONS = frozenset({"relu", "prelu", "leaky_relu", "elu", "silu", "gelu"})
_VECTORED = frozenset({"group", "instance", "batch", "prelu"})


def _computes_vectors(module: nn.Module) -> bool:
    """Whether a parametrization computes what a norm or PReLU multiplies with or adds.

    Whether a block takes these depends on their dtype, and asking would be an evaluation of its own.
    """
    names = ("weight",) if isinstance(module, nn.PReLU) else ("weight", "bias")
    # DataParallel and FSDP keep some in __dict__.
    return any(name not in module._parameters and name not in module.__dict__ for name in names)


def kind_of(module: nn.Module) -> str | None:
    """What module computes, as _KNOWN names it; None where it is nothing of that."""
    if not _dynamo_compiling():  # Dynamo is not asked to look up classes
        kind = _KINDS.get(type(module))
        if kind is not None:
            return None if "forward" in module.__dict__ else kind
    for cls, name in _KNOWN:
        if runs_forward_of(module, cls):
            return None if name in _VECTORED and _computes_vectors(module) else name
    return None


def _activation_of(module: nn.Module, kind: str | None) -> tuple[str, Any] | None:
    """Name and parameter of an activation module of that kind, or None where it is none of ours."""
    if kind is None or kind not in _ACTIVATIONS:
        return None
    if kind == "prelu":
        return kind, module
    if kind == "leaky_relu":
        return kind, module.negative_slope
    if kind == "elu":
        return kind, module.alpha
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
        if module.track_running_stats:
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


def find_block(chain: Sequence[nn.Module], at: int, returns_conv: bool = False) -> Block | str:
    """The longest block that begins with the ConvTranspose3d chain[at], or why there is none.

    returns_conv: as in Block; what would change the convolution that others read is no block then.
    """
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
        return f"{type(chain[first]).__name__} follows"
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


def blocks_of(chain: list[nn.Module], at: int = 0, returns_conv: bool = False) -> dict[bool, Block | str]:
    """find_block for train() and for eval()."""
    found = {}
    for mode in (True, False):
        with in_mode(chain, mode):
            found[mode] = find_block(chain, at, returns_conv)
    return found


# Where a batch norm is folded. On a CPU little is gained, and PyTorch's calls keep its last bit.
FOLDING_DEVICES = frozenset({"cuda"})
_DEVICES = frozenset({"cpu", "cuda", "meta"})


def takes(x: Any) -> bool:
    """Whether x is what blocks compute on: a batch of volumes, and no tracer's stand-in for one."""
    return (
        isinstance(x, Tensor)
        and x.dim() == 5
        and x.dtype in _DTYPES
        and (x.is_cuda or x.device.type in _DEVICES)
    )


# The fields of Settings that checked_arguments was once content with.
_checked: set[tuple[Any, ...]] = set()
_MOST_CHECKED = 4096  # of a parameter that changes at every call, nothing more is remembered


def _check_and_run(block: Block, x: Tensor, options: Options, settings: tuple[Any, ...] | None) -> Any:
    """run_block by the public function; `settings` are remembered if it makes them of its arguments."""
    if not admits(block, x):
        return None
    positional, named = call_of(block, x, options)
    rest: Any = {
        "num_groups": None,
        "norm_weight": None,
        "norm_bias": None,
        "eps": 1e-5,
        "skip": None,
    } | named
    in_graph = _dynamo_compiling() and not is_exporting()  # programs are for others to read
    if in_graph and x.is_cuda and options.precision is None:
        tensors, numbers = checked_arguments(*positional, **rest)
        pair = block_in_graph(tensors, numbers, named["norm"])
        return pair if numbers[-1] else (pair[0], pair[0]) if block.returns_conv else pair[0]
    y = conv_transpose3d_norm_act(*positional, **named)
    remember = settings is not None and len(_checked) < _MOST_CHECKED
    if remember and checked_arguments(*positional, **rest)[1] == settings:
        _checked.add(settings)
    return y


def _same_dtype(x: Tensor, *tensors: Any) -> bool:
    # A loop: a generator expression over these takes twice as long.
    dtype = x.dtype
    for tensor in tensors:  # noqa: SIM110
        if tensor is not None and tensor.dtype is not dtype:
            return False
    return True


def _three(number: Any) -> Any:
    return (number,) * 3 if isinstance(number, int) else number


def _returns_values(conv: Any, x: Tensor) -> bool:
    """Whether the convolution's result has values. Where it has none, PyTorch makes it or says why."""
    padding, kernel = conv.padding, conv.kernel_size
    if type(padding) is tuple and 2 * max(padding) < min(kernel):
        return True  # on any input
    axes = zip(*map(_three, (conv.stride, padding, conv.output_padding, conv.dilation, kernel)), strict=False)
    for axis, (stride, before, after, dilation, taps) in enumerate(axes):
        if (x.size(axis + 2) - 1) * stride - 2 * before + dilation * (taps - 1) + after < 0:
            return False
    return True


def admits(block: Block, x: Tensor) -> bool:
    """Whether one call is to x what the block's modules are, and they are not the ones to say what is wrong.

    PyTorch takes some vectors of another dtype than x, and numbers that are none of Python's. A weight that a
    parametrization computes is not asked for its dtype: where that is not x's, PyTorch refuses, too.
    """
    conv, _, _, norm, normalizer, activation, parameter, _ = block
    if not _returns_values(conv, x):
        return False
    weight, bias = conv._parameters.get("weight"), conv._parameters.get("bias")
    if norm == "batch" and (
        x.device.type not in FOLDING_DEVICES
        or (weight is None and x.dtype is torch.float16)  # as in _norm_of
    ):
        return False
    vectors: Any = (None, None)
    if norm is not None and norm != "batch":
        vectors = (_parameter(normalizer, "weight"), _parameter(normalizer, "bias"))
        if not -math.inf < normalizer.eps < math.inf:
            return False
    slopes = None
    if activation == "prelu":
        slopes = _parameter(parameter, "weight")
        if slopes.dim() != 1 or slopes.size(0) not in (1, conv.out_channels):
            return False
    elif parameter is not None and not (
        isinstance(parameter, (int, float)) and -math.inf < parameter < math.inf
    ):
        return False
    same = _same_dtype(x, weight, bias, *vectors, slopes)
    return same or torch.is_autocast_enabled(x.device.type)


def run_block(block: Block, x: Tensor, options: Options) -> Any:
    """One call for all modules of the block: the result, or the pair of it and the convolution.

    None where they are to be called themselves (see admits, is_left_to_pytorch).
    """
    conv, _, order, norm, normalizer, activation, parameter, returns_conv = block
    if _dynamo_compiling() or _tracing() or norm == "batch" or forward_ad._current_level >= 0:
        return _check_and_run(block, x, options, None)
    # None where a parametrization computes it, which it does once, when nothing else is to be decided.
    weight, bias, slopes = conv._parameters.get("weight"), conv._parameters.get("bias"), None
    if activation == "prelu":
        slopes, parameter = _parameter(parameter, "weight"), None
    groups, eps, gamma, beta = 0, 1e-5, None, None
    if norm is not None:
        groups = normalizer.num_groups if norm == "group" else conv.out_channels
        eps, gamma, beta = normalizer.eps, _parameter(normalizer, "weight"), _parameter(normalizer, "bias")
    if options.precision is None and is_left_to_pytorch(block, x, weight):
        return None
    precision = resolve_precision(x, options.precision)
    padding: Any = conv.padding  # nn.ConvTranspose3d's is never one of the names that a convolution's may be
    stride, output_padding, dilation = conv.stride, conv.output_padding, conv.dilation
    geometry = (stride, padding, output_padding, conv.groups, dilation)
    if activation == "relu" and order == "act_norm" and norm == "group" and not returns_conv:
        if not admits(block, x):
            return None
        return conv_transpose3d_relu_group_norm(
            *(x, *evaluated(conv, weight, bias), *geometry),
            num_groups=groups,
            norm_weight=gamma,
            norm_bias=beta,
            eps=eps,
            precision=options.precision,
        )
    name = "none" if activation is None else activation
    settings = (
        *geometry,
        groups,
        eps,
        precision,
        order,
        name,
        0.0 if parameter is None else parameter,
        returns_conv,
    )
    try:
        known = settings in _checked
    except TypeError:  # of lists, say, which have no hash
        return _check_and_run(block, x, options, None)
    if not known:
        return _check_and_run(block, x, options, settings)
    # The rest of admits: what it asks of numbers is so of settings that are known.
    if not _same_dtype(x, weight, bias, gamma, beta, slopes) and not torch.is_autocast_enabled(x.device.type):
        return None
    if slopes is not None and (slopes.dim() != 1 or slopes.size(0) not in (1, conv.out_channels)):
        return None
    if 2 * max(padding) >= min(conv.kernel_size) and not _returns_values(conv, x):
        return None
    # A norm group of a single value is refused: only an output of one position has such.
    taps = conv.kernel_size[2] if weight is None else weight.size(4)
    if (
        norm is not None
        and (x.size(4) - 1) * stride[2] - 2 * padding[2] + output_padding[2] + dilation[2] * (taps - 1) == 0
    ):
        return _check_and_run(block, x, options, None)
    tensors = (x, *evaluated(conv, weight, bias), gamma, beta, slopes, None)
    pair = run_checked(tensors, settings, norm, options.precision is not None)
    return pair if returns_conv else pair[0]


def run_chain(chain: Sequence[nn.Module], x: Any, options: Options) -> Any:
    """What calling each module with the result of the one before returns, its blocks in one call each.

    Not for where hooks of all modules are: who calls this has asked.
    """
    at = 0
    while at < len(chain):
        module = chain[at]
        if isinstance(module, nn.ConvTranspose3d) and takes(x):
            block = find_block(chain, at)
            y = run_block(block, x, options) if isinstance(block, Block) else None
            if isinstance(block, Block) and y is not None:
                x, at = y, at + block.length
                continue
        x = module(x)
        at += 1
    return x


def _records(chain: Sequence[nn.Module], x: Tensor) -> bool:
    """Whether autograd records what the chain does with x.

    While torch.jit.trace runs, it is taken to: that repeats a call without gradients, to compare the graphs.
    """
    if not _dynamo_compiling() and _tracing():
        return True
    if not torch.is_grad_enabled():
        return False
    if x.requires_grad:
        return True
    # Those of a parametrized weight lie elsewhere; they are seen where the block is computed.
    for module in chain:
        for parameter in module._parameters.values():
            if parameter is not None and parameter.requires_grad:
                return True
    return False


def _has_backward(block: Block, x: Tensor) -> bool:
    """Whether our kernels have a backward for a block that returns the convolution."""
    return block.keeps_returned() and x.is_cuda and x.dtype is not torch.float64


def run_chain_and_conv(chain: Sequence[nn.Module], x: Any, options: Options) -> tuple[Any, Any]:
    """What run_chain returns, and what the transposed convolution chain[0] does, for others that read it.

    Where gradients are recorded and no backward of ours reads the convolution, the modules themselves are the
    quicker way to PyTorch's operators, unless these are to follow a precision of ours.
    """
    if takes(x):
        block = find_block(chain, 0, returns_conv=True)
        if isinstance(block, Block) and (
            options.precision is not None or _has_backward(block, x) or not _records(chain, x)
        ):
            pair = run_block(block, x, options)
            if pair is not None:
                return run_chain(chain[block.length :], pair[0], options), pair[1]
    y = c = chain[0](x)
    for module in chain[1:]:
        y = module(y)
    return y, c
