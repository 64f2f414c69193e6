# SPDX-License-Identifier: Apache-2.0
"""A chain of modules called, its blocks in one call each.

Everything is decided at the call. What is no block runs as it would without us.
"""

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from .._geometry import memory_format_of, surely
from .._graphs import is_exporting
from .._in_graphs import block_in_graph
from .._tail_arguments import runs_kernels
from .._tail_call import run_checked
from .._tail_sum import run_with_sum
from ..functional import (
    _DTYPES,
    _dispatch_modes,
    _dynamo_compiling,
    _tracing,
    conv_transpose3d_relu_group_norm,
    resolve_precision,
)
from ..module import _parameter
from ..norm_act import checked_arguments, conv_transpose3d_norm_act
from .block import Block, Options, Way, three, way_of
from .call import call_of, evaluated
from .chain import find_block, is_plain_number, kind_of

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


def _check_and_run(
    block: Block, x: Tensor, options: Options, settings: tuple[Any, ...] | None, spares_host: bool = False
) -> Any:
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
    # On the CPU, too, this is an operator of ours, of which torch.func's gradients are to take PyTorch's.
    chain = named["order"], named["activation"], named["norm"], block.returns_conv
    if (
        in_graph
        and (x.is_cuda or chain == ("act_norm", "relu", "group", False))
        and options.precision is None
    ):
        tensors, numbers = checked_arguments(*positional, **rest)
        pair = block_in_graph(tensors, numbers, named["norm"])
        return pair if numbers[-1] else (pair[0], pair[0]) if block.returns_conv else pair[0]
    if spares_host:  # as later calls will: of another plan, the same input has other bits
        tensors, numbers = checked_arguments(*positional, **rest)
        result = run_checked(tensors, numbers, named["norm"], options.precision is not None, spares_host)
        y: Any = result if numbers[-1] else result[0]
    else:
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


def _returns_values(conv: Any, x: Tensor) -> bool:
    """Whether the convolution's result has values. Where it has none, PyTorch makes it or says why."""
    padding, kernel = conv.padding, conv.kernel_size
    if type(padding) is tuple and 2 * max(padding) < min(kernel):
        return True  # on any input
    axes = zip(*map(three, (conv.stride, padding, conv.output_padding, conv.dilation, kernel)), strict=False)
    for axis, (stride, before, after, dilation, taps) in enumerate(axes):
        extent = (x.size(axis + 2) - 1) * stride - 2 * before + dilation * (taps - 1) + after
        if surely(extent < 0):
            return False
    return True


def admits(block: Block, x: Tensor) -> bool:
    """Whether one call is to x what the block's modules are, and they are not the ones to say what is wrong.

    PyTorch takes some vectors of another dtype than x, and numbers that are none of Python's. A weight that a
    parametrization computes is not asked for its dtype: where that is not x's, PyTorch refuses, too.
    """
    conv, _, _, norm, normalizer, activation, parameter, *_ = block
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
        if not is_plain_number(normalizer.eps) or not -math.inf < normalizer.eps < math.inf:
            return False
    slopes = None
    if activation == "prelu":
        slopes = _parameter(parameter, "weight")
        if slopes.dim() != 1 or slopes.size(0) not in (1, conv.out_channels):
            return False
    elif parameter is not None and not -math.inf < parameter < math.inf:
        return False
    same = _same_dtype(x, weight, bias, *vectors, slopes)
    return same or torch.is_autocast_enabled(x.device.type)


def _run_norm(norm: Any, x: Tensor) -> Tensor:
    """norm.forward(x), of a GroupNorm or InstanceNorm3d by the operator that it ends with."""
    kind = type(norm)
    groups = norm.num_groups if kind is nn.GroupNorm else x.size(1)
    vectors = weight, bias = _parameter(norm, "weight"), _parameter(norm, "bias")
    plain = type(x) is Tensor and (weight is None or type(weight) is nn.Parameter)
    plain = plain and (bias is None or type(bias) is nn.Parameter)
    # Of single values forward says what is wrong.
    if not plain or x.numel() <= x.size(0) * groups or kind not in (nn.GroupNorm, nn.InstanceNorm3d):
        return norm.forward(x)  # type: ignore[no-any-return]
    cudnn = torch.backends.cudnn.enabled
    if kind is nn.GroupNorm:
        return torch.group_norm(x, groups, *vectors, norm.eps, cudnn)
    return torch.instance_norm(x, *vectors, None, None, True, 0.0, norm.eps, cudnn)


def run_modules(block: Block, modules: Sequence[nn.Module], x: Tensor) -> Tensor:
    """What calling the block's modules one after the other returns, without an inactive dropout's operator.

    Nobody has hooks on these modules (find_block), so their forwards will do: of 40 us that a CPU takes for a
    small block of MONAI's, operators are 17, and nn.Module, an inactive dropout and the norm's checks 20.

    modules: find_block found the block in them as they are, with any dropout inactive.
    """
    if torch._C._len_torch_function_stack() > 0 or _dispatch_modes() > 0:  # who looks on sees every call
        for module in modules:
            x = module(x)
        return x
    for module in modules:
        if module is block.normalizer:
            x = _run_norm(module, x)
        elif kind_of(module) not in ("identity", "dropout"):
            x = module.forward(x)
    return x


class Decision(NamedTuple):
    """What run_block decided about a call, which it decides alike of all calls that are alike.

    Attributes:
        tensors: weight, bias, norm_weight, norm_bias, slopes.
        settings: as of run_checked; None where the block is left to PyTorch.
        spares_host: as of run_checked.
    """

    tensors: tuple[Any, ...]
    settings: tuple[Any, ...] | None
    spares_host: bool = False


def run_block(block: Block, x: Tensor, options: Options, told: list[Decision] | None = None) -> Any:
    """One call for all modules of the block: the result, or the pair of it and the convolution.

    None where they are to be called themselves (see admits, way_of).

    told: gets the decision, where calls that are alike can be computed by it.
    """
    conv, _, order, norm, normalizer, activation, parameter, returns_conv, _ = block
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
    way = Way.PLANNED if options.precision is not None else way_of(block, x, weight)
    if way is Way.MODULES:
        if told is not None:
            told.append(Decision((weight, bias, gamma, beta, slopes), None))
        return None
    precision = resolve_precision(x, options.precision)
    padding: Any = conv.padding  # nn.ConvTranspose3d's is never one of the names that a convolution's may be
    stride, output_padding, dilation = conv.stride, conv.output_padding, conv.dilation
    geometry = (stride, padding, output_padding, conv.groups, dilation)
    is_block = activation == "relu" and order == "act_norm" and norm == "group" and not returns_conv
    if is_block and not runs_kernels(x):  # there its own operator keeps the convolution for a backward
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
    spares_host = way is Way.SPARING
    if not known:
        return _check_and_run(block, x, options, settings, spares_host)
    # The rest of admits: what it asks of numbers is so of settings that are known.
    if not _same_dtype(x, weight, bias, gamma, beta, slopes) and not torch.is_autocast_enabled(x.device.type):
        return None
    if slopes is not None and (slopes.dim() != 1 or slopes.size(0) not in (1, conv.out_channels)):
        return None
    if 2 * max(padding) >= min(conv.kernel_size) and not _returns_values(conv, x):
        return None
    # A norm group of a single value is refused: only an output of one position has such.
    taps = conv.kernel_size[2] if weight is None else weight.size(4)
    last = (x.size(4) - 1) * stride[2] - 2 * padding[2] + output_padding[2] + dilation[2] * (taps - 1)
    if norm is not None and surely(last == 0):
        return _check_and_run(block, x, options, None)
    tensors = (x, *evaluated(conv, weight, bias), gamma, beta, slopes, None)
    if told is not None:
        told.append(Decision(tensors[1:6], settings, spares_host))
    pair = run_checked(tensors, settings, norm, options.precision is not None, spares_host)
    return pair if returns_conv else pair[0]


def run_chain(
    chain: Sequence[nn.Module], x: Any, options: Options, told: list[Decision] | None = None
) -> Any:
    """What calling each module with the result of the one before returns, its blocks in one call each.

    Not for where hooks of all modules are: who calls this has asked.

    told: gets the decisions, as from run_block.
    """
    at = 0
    while at < len(chain):
        module = chain[at]
        if isinstance(module, nn.ConvTranspose3d) and takes(x):
            block = find_block(chain, at)
            if isinstance(block, Block):
                y = run_block(block, x, options, told)
                if y is None and not (_dynamo_compiling() or _tracing()):
                    y = run_modules(block, chain[at : at + block.length], x)
                if y is not None:
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
    if not torch.is_grad_enabled() or (not _dynamo_compiling() and torch.is_inference_mode_enabled()):
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


def add(operation: str, conv: Any, skip: Any) -> Any:
    """What a forward that was traced does with a convolution and a skip: "add", "iadd" or "radd"."""
    if operation == "iadd":
        conv += skip
        return conv
    return conv + skip if operation == "add" else skip + conv


def run_block_with_skip(block: Block, x: Tensor, skip: Tensor, operation: str, options: Options) -> Any:
    """run_block, of a block that adds a skip: the pair of the result and the sum, where others read it.

    None where the modules and their addition are to be called themselves: on the CPU, in graphs, for a skip
    that would be broadcast, promote the sum, or have it lie otherwise.
    """
    if _dynamo_compiling() or _tracing() or not runs_kernels(x) or not admits(block, x):
        return None
    conv = block.conv
    weight = conv._parameters.get("weight")
    # One that a parametrization computes is evaluated once in a forward, by who surely convolves with it.
    if weight is None or "bias" not in conv._parameters:
        return None
    if options.precision is None and way_of(block, x, weight) is Way.MODULES:
        return None
    # PyTorch's sum lies as its first summand does.
    if operation == "radd" and not skip.is_contiguous(memory_format=memory_format_of(x, weight)):
        return None
    positional, named = call_of(block, x, options)
    rest: Any = {"num_groups": None} | named | {"skip": skip, "return_conv": False}
    return run_with_sum(*checked_arguments(*positional, **rest), named["norm"], block.returns_conv)


def _convolve(conv: Any, x: Any, options: Options) -> Any:
    """conv(x), in the precision that options say."""
    block = find_block([conv, nn.ReLU()], 0)
    if takes(x) and isinstance(block, Block):
        y = run_block(block._replace(length=1, activation=None), x, options)
        if y is not None:
            return y
    return conv(x)


def run_chain_with_skip(
    chain: Sequence[nn.Module], x: Any, skip: Any, operation: str, options: Options, returns_sum: bool
) -> tuple[Any, Any]:
    """What run_chain returns where a skip is added to the transposed convolution chain[0], and the sum, for
    others that read it."""
    if takes(x) and isinstance(skip, Tensor):
        block = find_block(chain, 0, returns_sum, adds_skip=True)
        if isinstance(block, Block):
            pair = run_block_with_skip(block, x, skip, operation, options)
            if pair is not None:
                return run_chain(chain[block.length :], pair[0], options), pair[1]
    c = chain[0](x) if options.precision is None else _convolve(chain[0], x, options)
    y = total = add(operation, c, skip)
    for module in chain[1:]:
        y = module(y)
    return y, total


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
