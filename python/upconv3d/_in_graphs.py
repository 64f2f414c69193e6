# SPDX-License-Identifier: Apache-2.0
"""torch.ops.upconv3d.conv_transpose3d_norm_act_in_graph: a block that accelerate or InductorPass found in the
code that torch.compile compiles. It is no operator of the final graph: while AOTAutograd traces, it becomes
the family's operator, or PyTorch's own calls where Inductor makes as much of them."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import _C
from ._autocast import autocast_dtype, graph_without_casts
from ._facts import is_concrete
from ._graphs import is_traced
from ._tail import Tensors, composite
from ._tail_op import NUMBERS, TENSORS, _in_format_of_result, facts_of, join, public_tail, split

_library = torch.library.Library("upconv3d", "FRAGMENT")  # type: ignore[no-untyped-call]  # keeps registrations alive

_NAME = "conv_transpose3d_norm_act_in_graph"
_SCHEMA = f"{_NAME}({TENSORS}, {NUMBERS}, bool return_conv, str precision) -> (Tensor y, Tensor conv)"

# Output values of a block on the library plan up to which it is the compiler's. That plan and Inductor both
# call cuDNN; on an H200 ours then takes the device 4 to 15 us less (perf/results), and the host 20 us more,
# which plans and calls in turn what Inductor's code has planned. Beyond, passes over the output decide.
_MOST_VALUES = 2**22


def _replays() -> bool:
    """Whether what is compiled becomes a CUDA graph, which costs the host nothing."""
    from torch._inductor import config

    return bool(config.triton.cudagraphs)


def is_left_to_compiler(tensors: Sequence[Any], settings: Sequence[Any]) -> bool:
    """Whether the call is to be PyTorch's own ones: a small block on the library plan, of known sizes."""
    input, weight = tensors[:2]
    if not input.is_cuda or not is_traced(input) or torch.compiler.is_exporting():
        return False
    given = [tensor for tensor in tensors if tensor is not None]
    if not is_concrete(*given, *settings):
        return False
    stride, groups = settings[0], settings[3]
    positions = input.numel() // max(input.size(-4), 1) * stride[0] * stride[1] * stride[2]  # about
    if positions * weight.size(1) * groups > _MOST_VALUES or _replays():
        return False
    facts = facts_of(tensors, settings)
    low = autocast_dtype(input)
    if low is not None:
        if graph_without_casts(tensors, low, settings):
            return False
        dtype = {"dtype": str(low).removeprefix("torch.")}
        facts |= {name: facts[name] | dtype for name in Tensors._fields if facts[name] is not None}
    recording = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in given)
    found: bool = _C.explain(facts | {"training": recording})["plan"]["algorithm"] == "cuda_library"
    return found


def _in_graph(*arguments: Any) -> tuple[Tensor, Tensor]:
    tensors, settings = split(arguments)
    if not is_left_to_compiler(tensors, settings):
        return public_tail(tensors, settings)
    y, conv = composite(tensors, settings, precise=False)
    t = Tensors(*tensors)
    y = _in_format_of_result(y, t)
    return y, t.input.new_empty(0) if conv is None else _in_format_of_result(conv, t)


def block_in_graph(
    tensors: Sequence[Any], settings: Sequence[Any], norm: str | None
) -> tuple[Tensor, Tensor]:
    """The call as torch.compile records it, without a skip; conv is [0] where it is not returned."""
    y, conv = getattr(torch.ops.upconv3d, _NAME).default(*join(tensors, settings))
    low = autocast_dtype(tensors[0])
    # instance_norm returns the dtype that it gets; ours is group_norm, which autocast runs in float32.
    return (y.to(low), conv) if low is not None and norm == "instance" else (y, conv)


def register() -> None:
    """Defines the operator; the package calls it once."""
    _library.define(_SCHEMA)  # type: ignore[no-untyped-call]
    _library.impl(_NAME, _in_graph, "CompositeImplicitAutograd")  # type: ignore[no-untyped-call]
