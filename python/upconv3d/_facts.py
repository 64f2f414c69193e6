# SPDX-License-Identifier: Apache-2.0
"""The arguments of the block as plain data, which is what _C.validate and _C.explain take."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from . import _C
from ._graphs import tag_multiprocessors

_TMA_ALIGNMENT = 16  # bytes: what the hardware's tensor copies ask of a base address


def tensor_facts(tensor: Tensor | None) -> dict[str, Any] | None:
    """Sizes, strides, dtype, device, layout and the alignment of the data of one tensor."""
    if tensor is None:
        return None
    strided = tensor.layout == torch.strided
    # Subclasses (fake and functional tensors of a compiler among them) need not have data.
    plain = type(tensor) in (Tensor, torch.nn.Parameter)
    # Those that torch.func's transforms wrap are plain to Python, and have no storage.
    plain = plain and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)
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


class Kept(NamedTuple):
    """What a training forward keeps on CUDA.

    Attributes:
        convolution: whether that is the convolution, or its sum with a skip, in the result's format.
        size: bytes.
    """

    convolution: bool
    size: int


def kept_of(facts: dict[str, Any]) -> Kept | None:
    """What a call keeps, for torch.compile; None where that depends on where input or weight begin."""
    if "device" not in facts:  # of this process, not a described one
        tag_multiprocessors()
    kept = set()
    for unaligned in ((), ("input",), ("weight",), ("input", "weight")):
        variant = facts | {name: facts[name] | {"data_ptr_mod16": 2} for name in unaligned}
        explained = _C.explain(variant | {"training": True})
        plan = explained["plan"]
        kept.add(Kept(plan["keeps_conv"] or plan["keeps_sum"], explained["saved_bytes"]))
    return kept.pop() if len(kept) == 1 else None


def empty_kept(kept: Kept | None, y: Tensor, dtype: torch.dtype) -> Tensor:
    """A tensor without values in the place of what is kept beside y; [0] where that is not known."""
    if kept is not None and kept.convolution:
        return torch.empty_like(y, dtype=dtype)
    return y.new_empty((0 if kept is None else kept.size,), dtype=torch.uint8)
