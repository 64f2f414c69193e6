# SPDX-License-Identifier: Apache-2.0
"""PyTorch's convolution and its gradients, in the precision that a call asks for."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

_aten = torch.ops.aten
# Without OpOverload.__call__, a function in Python that passes its arguments on.
_aten_backward = _aten.convolution_backward.default._op
_fp32_precision = torch._C._get_fp32_precision_getter
_set_fp32_precision = torch._C._set_fp32_precision_setter
# Levels of PyTorch's precision: each follows the one before until it is given a value of its own.
_GENERAL, _OF_CUDA, _OF_CONV = ("generic", "all"), ("cuda", "all"), ("cuda", "conv")
_switching = threading.RLock()  # a mode that looks on may call us again
_switched = False  # whether a thread has changed it, who holds the lock
_ONE, _NONE = (1, 1, 1), (0, 0, 0)
_TO_NDHWC, _FROM_NDHWC = (0, 2, 3, 4, 1), (0, 4, 1, 2, 3)


class BlockArguments(NamedTuple):
    """What the forward takes beside tensors."""

    stride: Sequence[int]
    padding: Sequence[int]
    output_padding: Sequence[int]
    groups: int
    dilation: Sequence[int]
    num_groups: int
    eps: float  # activation units squared
    precision: str  # "ieee" or "tf32"


def precision_matters(tensor: Tensor) -> bool:
    return tensor.is_cuda and tensor.dtype is torch.float32


def _setting_is(precision: str) -> bool:
    return bool((_fp32_precision(*_OF_CONV) == "tf32") == (precision == "tf32"))


def _setting_agrees(tensor: Tensor, precision: str) -> bool:
    """Whether PyTorch's convolutions of `tensor` have that precision as its setting is, for all we know."""
    return not precision_matters(tensor) or (not _switched and _setting_is(precision))


def _switch(precision: str) -> tuple[tuple[str, str], str]:
    """Gives convolutions another precision at the level that decides about theirs; returns it and its value.

    What is read of a level that follows another one is the other's: written there, it would follow no more.
    """
    before = _fp32_precision(*_GENERAL)
    _set_fp32_precision(*_GENERAL, precision)
    if _setting_is(precision):
        return _GENERAL, before
    # Convolutions do not follow the general level: by a value of their own, or by one of CUDA's.
    decides = _OF_CONV if _fp32_precision(*_OF_CUDA) == precision else _OF_CUDA
    _set_fp32_precision(*_GENERAL, before)
    before = _fp32_precision(*decides)
    _set_fp32_precision(*decides, precision)
    if not _setting_is(precision):  # CUDA has a value, and convolutions another one
        _set_fp32_precision(*decides, before)
        decides, before = _OF_CONV, _fp32_precision(*_OF_CONV)
        _set_fp32_precision(*decides, precision)
    return decides, before


@contextmanager
def conv_precision(tensor: Tensor, precision: str) -> Iterator[None]:
    """PyTorch's setting for float32 convolutions, for as long as one convolution_backward takes.

    convolution_backward has no argument for it. The setting is touched only where it says something else, and
    is afterwards what it was. It is one for the process: what another thread starts meanwhile sees it too,
    but for another call of this, which waits.
    """
    if _setting_agrees(tensor, precision):
        yield
        return
    global _switched
    with _switching:
        if _setting_is(precision):  # what did not was another thread's
            yield
            return
        around = _switched
        level, before = _switch(precision)
        _switched = True
        try:
            yield
        finally:
            _set_fp32_precision(*level, before)
            _switched = around


def convolution(x: Tensor, weight: Tensor, bias: Tensor | None, args: BlockArguments) -> Tensor:
    """c = conv_transpose3d(x, weight, bias) in the requested precision; [N, K, Z, P, Q]."""
    with conv_precision(x, args.precision):
        c: Tensor = _aten.convolution.default(
            x,
            weight,
            bias,
            args.stride,
            args.padding,
            args.dilation,
            True,
            args.output_padding,
            args.groups,
        )
        return c


def _reaching_taps(
    grad_c: Tensor, x: Tensor, weight: Tensor, args: Sequence[Any]
) -> tuple[slice, slice, slice] | None:
    """Of each axis the taps, one per output, that a convolution of one voxel per sample multiplies by
    (cpp/core/one_voxel.hpp); None where it has groups, or an output no tap."""
    _, padding, _, groups, dilation = args[:5]
    if groups != 1:
        return None
    taps = []
    for out, kernel, begin, step in zip(grad_c.shape[2:], weight.shape[2:], padding, dilation, strict=True):
        if out + begin > kernel or (step > 1 and kernel > 1):
            return None
        taps.append(slice(begin, begin + out))
    return taps[0], taps[1], taps[2]


def _idle_taps(reaching: Sequence[slice], weight: Tensor, is_last: bool) -> list[int]:
    """What torch.nn.functional.pad adds to taps that reach an output, in w's order."""
    idle = [0, 0] if is_last else []
    for taps, kernel in zip(reversed(reaching), reversed(weight.shape[2:]), strict=True):
        idle += [taps.start, kernel - taps.stop]
    return idle


def _multiplies_strictly(x: Tensor, precision: str) -> bool:
    """Whether torch.mm is wanted, and set, to have float32's accuracy: cuDNN's pointwise gradients of x took
    1.2 ms then where it took 0.05 (perf/results/h200_one_voxel.txt, part 2)."""
    if x.dtype is not torch.float32 or precision != "ieee":
        return False
    # Of cuBLAS, PyTorch wants a setting of the environment where its algorithms are to be deterministic.
    return _fp32_precision("cuda", "matmul") != "tf32" and not torch.are_deterministic_algorithms_enabled()


def _product_backward(
    grad_c: Tensor, x: Tensor, weight: Tensor, args: Sequence[Any], mask: Sequence[bool]
) -> Sequence[Tensor | None] | None:
    """convolution_backward of an x of one voxel, where the convolution is a matrix product; None where it is
    not, or w lies in neither order."""
    # On the CPU float32 is float32, whatever the setting of matrix products says.
    if not (x.is_cuda or x.dtype is not torch.float32):
        return None
    n, c = x.size(0), x.size(1)
    reaching = _reaching_taps(grad_c, x, weight, args)
    is_dense = weight.is_contiguous()
    is_last = not is_dense and weight.is_contiguous(memory_format=torch.channels_last_3d)
    if n == 0 or reaching is None or not (is_dense or is_last):
        return None
    if x.is_cuda and weight.data_ptr() % 16:  # as aligned has it
        return None
    whole = grad_c.shape[2:] == weight.shape[2:]
    index = (slice(None), slice(None), *reaching)
    # An operator takes a host as long as a product takes the device: none is called that changes nothing.
    reached = weight if whole else weight[index]
    ordered = reached.permute(_TO_NDHWC) if is_last else reached
    rows = (grad_c.permute(_TO_NDHWC) if is_last else grad_c).reshape(n, -1)
    taps = ordered.reshape(c, -1)
    grad_x: Tensor | None = None
    grad_w: Tensor | None = None
    # On the CPU, oneDNN's pointwise gradients take up to 6 times as long in 16 bit as those of all taps.
    if not x.is_cuda or _multiplies_strictly(x, args[7]):
        grad_x = torch.mm(rows, taps.t()).view(n, c, 1, 1, 1) if mask[0] else None
        grad_w = torch.mm(x.reshape(n, c).t(), rows) if mask[1] else None
    else:  # where float32's convolutions and matrix products have a setting each
        outputs = taps.size(1)
        pointwise = rows.view(n, outputs, 1, 1, 1), x, taps.view(c, outputs, 1, 1, 1), [outputs]
        grad_x, grad_w, _ = _aten_backward(*pointwise, _ONE, _NONE, _ONE, True, _NONE, 1, mask)
    if grad_w is not None:
        grad_w = grad_w.reshape(ordered.shape)
        if not whole:
            grad_w = torch.nn.functional.pad(grad_w, _idle_taps(reaching, weight, is_last))
        grad_w = grad_w.permute(_FROM_NDHWC) if is_last else grad_w
    return grad_x, grad_w, grad_c.sum((0, 2, 3, 4)) if mask[2] else None


def convolution_backward(
    grad_c: Tensor, x: Tensor, weight: Tensor, args: Sequence[Any], mask: Sequence[bool]
) -> Sequence[Tensor | None]:
    """grad_x, grad_w and grad_bias, those that `mask` asks for. args: begins with BlockArguments' fields."""
    if not any(mask):
        return None, None, None
    stride, padding, output_padding, groups, dilation = args[:5]
    grads: Sequence[Tensor | None]

    def computed() -> Sequence[Tensor | None]:
        # Asked here, since so few calls are: a function of Python's costs a host more than the question.
        # Where gradients are recorded, autocast would cast those of torch.mm, not those of a convolution.
        if not torch.is_grad_enabled() and x.shape[2:] == _ONE:
            product = _product_backward(grad_c, x, weight, args, mask)
            if product is not None:
                return product
        outputs = [grad_c.size(1)]
        grads = _aten_backward(
            *(grad_c, x, weight, outputs, stride, padding, dilation, True, output_padding, groups, mask)
        )
        return grads  # type: ignore[no-any-return]

    if not torch.compiler.is_dynamo_compiling():
        # A context manager written in Python costs a host as much as the operator's way to its kernel.
        if _setting_agrees(x, args[7]):
            return computed()
        with conv_precision(x, args[7]):
            return computed()
    lists = (stride, padding, dilation, True, output_padding, groups, mask)
    with conv_precision(x, args[7]):
        grads = _aten.convolution_backward.default(grad_c, x, weight, [grad_c.shape[1]], *lists)
    return grads


def aligned(tensor: Tensor) -> Tensor:
    """The tensor, or a copy that begins on 16 bytes, on CUDA.

    In torch 2.11 a gradient of float32 in channels_last_3d ends in a misaligned address where a tensor does
    not begin so: the kernels that cuDNN chose read 16 bytes at a time.
    """
    return tensor.clone() if tensor.data_ptr() % 16 else tensor
