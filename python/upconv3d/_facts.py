# SPDX-License-Identifier: Apache-2.0
"""The arguments of the block as plain data, which is what _C.validate and _C.explain take."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import _C

_TMA_ALIGNMENT = 16  # bytes: what the hardware's tensor copies ask of a base address


def tensor_facts(tensor: Tensor | None) -> dict[str, Any] | None:
    """Sizes, strides, dtype, device, layout and the alignment of the data of one tensor."""
    if tensor is None:
        return None
    strided = tensor.layout == torch.strided
    # Subclasses (fake and functional tensors of a compiler among them) need not have data.
    plain = type(tensor) in (Tensor, torch.nn.Parameter)
    has_data = strided and plain and tensor.device.type in ("cpu", "cuda")
    return {
        "sizes": list(tensor.shape),
        "strides": list(tensor.stride()) if strided else [],
        "dtype": str(tensor.dtype).removeprefix("torch."),
        "device": str(tensor.device),
        "layout": str(tensor.layout).removeprefix("torch."),
        "data_ptr_mod16": tensor.data_ptr() % _TMA_ALIGNMENT if has_data else 0,
    }


def block_facts(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    output_padding: Sequence[int],
    groups: int,
    dilation: Sequence[int],
    num_groups: int,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    eps: float,
    precision: str,
) -> dict[str, Any]:
    """The whole call, in the operator's order of arguments."""
    return {
        "input": tensor_facts(input),
        "weight": tensor_facts(weight),
        "bias": tensor_facts(bias),
        "norm_weight": tensor_facts(norm_weight),
        "norm_bias": tensor_facts(norm_bias),
        "stride": list(stride),
        "padding": list(padding),
        "output_padding": list(output_padding),
        "dilation": list(dilation),
        "groups": groups,
        "num_groups": num_groups,
        "eps": eps,
        "precision": precision,
    }


def is_concrete(*values: Any) -> bool:
    """Whether no size, stride or number among tensors, sequences and scalars is symbolic."""
    for value in values:
        if isinstance(value, Tensor):
            numbers = [*value.shape, *(value.stride() if value.layout == torch.strided else ())]
        elif isinstance(value, Sequence):
            numbers = list(value)
        else:
            numbers = [value]
        if any(isinstance(n, (torch.SymInt, torch.SymFloat)) for n in numbers):
            return False
    return True


def kept_bytes_of(facts: dict[str, Any]) -> int | None:
    """How many bytes a training forward keeps on CUDA; None where that depends on the input's address."""
    facts = facts | {"training": True}
    aligned: int = _C.explain(facts)["saved_bytes"]
    unaligned = facts | {"input": facts["input"] | {"data_ptr_mod16": 2}}
    return aligned if _C.explain(unaligned)["saved_bytes"] == aligned else None


def kept_bytes(arguments: Sequence[Any]) -> int | None:
    """How many bytes a training forward of the mission's operator keeps on CUDA, for torch.compile.

    None where that is not known before the call: a size is symbolic, or it depends on the input's address. On
    a CPU, where the convolution is kept whatever the sizes, 0.
    """
    if arguments[0].device.type != "cuda":
        return 0
    return kept_bytes_of(block_facts(*arguments)) if is_concrete(*arguments[:-1]) else None
