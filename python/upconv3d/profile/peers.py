# SPDX-License-Identifier: Apache-2.0
"""The block, what it is compared with, and its error beside theirs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

import upconv3d

from .cases import Case, Shape, Tensors, conv_arguments
from .measure import errors, poison

COMPILE_MODES = {"default": ["default"], "best": ["default", "max-autotune-no-cudagraphs"], "none": []}
# A float64 reference of more arithmetic than this would take longer than the measurement.
REFERENCE_FLOPS = {"cuda": 2e11, "cpu": 4e9}
# Rounding of the result itself, where eager happens to be exact.
ERROR_FLOOR = {torch.float32: 1e-7, torch.bfloat16: 1e-3, torch.float16: 1e-4, torch.float64: 1e-15}
# Of "tf32": the rounding of an operand to 10 bits. cuDNN, benchmarked, computes some small shapes in float32.
TF32_ERROR_FLOOR = 2.0**-11
# FlashAttention's rule: the error may be this many times eager's in the same precision.
ERROR_FACTOR = 2.0

Call = Callable[[], Tensor]


def set_precision(case: Case) -> None:
    """Makes PyTorch's convolutions compute float32 as the case does.

    Through the older switch, because the compiler reads it and raises once the newer one was set.
    """
    torch.backends.cudnn.allow_tf32 = case.precision == "tf32"


def convolution(t: Tensors, shape: Shape) -> Tensor:
    """The library's convolution alone."""
    return F.conv_transpose3d(t.x, t.w, t.bias, **conv_arguments(shape))


def eager(t: Tensors, shape: Shape) -> Tensor:
    """PyTorch's three calls."""
    a = torch.relu(convolution(t, shape))
    return F.group_norm(a, shape.num_groups, t.gamma, t.beta, shape.eps)


def block_arguments(t: Tensors, case: Case) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of this library's op, and of explain."""
    keywords = conv_arguments(case.shape) | {
        "num_groups": case.shape.num_groups,
        "norm_weight": t.gamma,
        "norm_bias": t.beta,
        "eps": case.shape.eps,
        "precision": case.precision if case.dtype is torch.float32 else None,
    }
    return (t.x, t.w, t.bias), keywords


def block_call(t: Tensors, case: Case) -> Call:
    """A call of this library's op."""
    positional, keywords = block_arguments(t, case)

    def block() -> Tensor:
        return upconv3d.conv_transpose3d_relu_group_norm(*positional, **keywords)

    return block


def compiled_peers(t: Tensors, case: Case, modes: list[str]) -> tuple[dict[str, Call], dict[str, str]]:
    """torch.compile of the three calls in each mode; one that fails to compile is returned as its error."""
    calls: dict[str, Call] = {}
    failures: dict[str, str] = {}
    # A recompilation limit reached by earlier shapes would leave this one uncompiled.
    torch._dynamo.reset()
    for mode in modes:

        def three_calls(t: Tensors = t) -> Tensor:
            return eager(t, case.shape)

        call = torch.compile(three_calls, mode=mode, dynamic=False, fullgraph=True)
        try:
            call()
        except RuntimeError as error:  # what the compiler raises is its result, recorded in the row
            failures[mode] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        else:
            calls[f"compile:{mode}"] = call
    return calls, failures


def check_errors(t: Tensors, case: Case, call: Call, workspace_bytes: int) -> dict[str, Any]:
    """Errors of this block and of eager against float64, on the first and the last sample.

    GroupNorm is per sample, so two samples stand for all; one where two would be too much float64 arithmetic.
    """
    n = case.shape.n
    index = [0, n - 1] if n > 1 else [0]
    per_sample = case.shape.useful_flops / n
    if per_sample * len(index) > REFERENCE_FLOPS[t.x.device.type]:
        index = [n - 1]
    y_eager = eager(t, case.shape)
    size = y_eager.shape
    y_eager = y_eager[index].clone()
    poison(size, case.dtype, t.x.device, workspace_bytes)
    y = call()
    finite = bool(torch.isfinite(y).all())
    y = y[index].clone()
    y64 = eager(t.samples(index, torch.float64), case.shape.with_samples(len(index)))
    err_max, err_rms = errors(y, y64)
    eager_err_max, eager_err_rms = errors(y_eager, y64)
    floor = TF32_ERROR_FLOOR if case.precision == "tf32" else ERROR_FLOOR[case.dtype]
    ok = finite and err_rms <= ERROR_FACTOR * max(eager_err_rms, floor)
    return {
        "err_max": err_max,
        "err_rms": err_rms,
        "eager_err_max": eager_err_max,
        "eager_err_rms": eager_err_rms,
        "check": "ok" if ok else "FAILED",
    }
