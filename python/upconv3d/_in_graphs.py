# SPDX-License-Identifier: Apache-2.0
"""torch.ops.upconv3d.conv_transpose3d_norm_act_in_graph: a block that accelerate or InductorPass found in the
code that torch.compile compiles. It is no operator of the final graph: while AOTAutograd traces, it becomes
the family's operator, or PyTorch's own calls where Inductor makes as much of them."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from . import _C
from ._autocast import autocast_dtype, graph_without_casts, records
from ._facts import is_concrete
from ._graphs import is_exporting, is_traced
from ._plan_questions import FEW_CHANNELS_KERNEL, SMALL_BLOCK_VALUES, about_values
from ._tail import Settings, Tensors, autocast_result_dtype, composite, in_format_of_result, is_plain
from ._tail_arguments import NUMBERS, TENSORS, facts_of, join, split
from ._tail_op import batch_tail, public_tail
from ._transforms import batch_block, batch_slices, differentiated

_library = torch.library.Library("upconv3d", "FRAGMENT")  # type: ignore[no-untyped-call]  # keeps registrations alive

_block_op = torch.ops.upconv3d.conv_transpose3d_relu_group_norm.default
_NAME = "conv_transpose3d_norm_act_in_graph"
_SCHEMA = (
    f"{_NAME}({TENSORS}, {NUMBERS}, bool return_conv, str precision, *, bool instance=False) "
    "-> (Tensor y, Tensor conv)"
)


def _replays() -> bool:
    """Whether what is compiled becomes a CUDA graph, which costs the host nothing."""
    from torch._inductor import config

    return bool(config.triton.cudagraphs)


# By how much a col2im block has to spare the device, in us: as much as the kernel for few channels did at
# most, which took the host longer than the compiler's code. Beside that, col2im's host time was not measured.
_HOST_US = 90


def _is_small_kind(plan: dict[str, Any], is_ieee: bool) -> bool:
    """Whether a small block of this plan is the compiler's. The library plan calls cuDNN, as Inductor does;
    few channels' kernel takes the device up to 90 us less, but the host as much more as the library plan; not
    at float32's accuracy, where it took 425 us of 28 million values and torch.compile 1092. col2im is taken
    for alike, but for few outputs of large inputs, which cuDNN takes up to 5 times as long for."""
    if plan["algorithm"] == "cuda_library":
        return True
    if is_ieee:
        return False
    is_col2im = plan["algorithm"] == "cuda_col2im"
    return FEW_CHANNELS_KERNEL in plan["stages"] or (is_col2im and plan["saves_us"] <= _HOST_US)


def is_left_to_compiler(tensors: Sequence[Any], settings: Sequence[Any]) -> bool:
    """Whether the call is to be PyTorch's own ones: a small block of known sizes, by its plan."""
    t, s = Tensors(*tensors), Settings(*settings)
    if not t.input.is_cuda or not is_traced(t.input) or is_exporting():
        return False
    given = [tensor for tensor in t if tensor is not None]
    if not is_concrete(*given, *s):
        return False
    if about_values(t.input, t.weight, s.stride, s.groups) > SMALL_BLOCK_VALUES or _replays():
        return False
    facts = facts_of(t, s)
    low = autocast_dtype(t.input)
    if low is not None:
        uncast = is_plain(t, s) and graph_without_casts(t, low, s)
        dtype = {"dtype": str(torch.float32 if uncast else low).removeprefix("torch.")}
        facts |= {name: facts[name] | dtype for name in Tensors._fields if facts[name] is not None}
        facts["precision"] = "tf32" if uncast else s.precision
    # In training a block keeps the SM90 plan that is too small for it else.
    plans = (_C.explain(facts | {"training": training})["plan"] for training in {records(t), False})
    is_ieee = facts["input"]["dtype"] == "float32" and facts["precision"] == "ieee"
    return any(_is_small_kind(plan, is_ieee) for plan in plans)


def _is_block(t: Tensors, s: Settings) -> bool:
    return is_plain(t, s) and s.order == "act_norm" and s.activation == "relu"


def _block_arguments(t: Sequence[Any], s: Sequence[Any]) -> tuple[Any, ...]:
    """Those of the block's own operator, of the tensors or of what stands for them."""
    input, weight, bias, norm_weight, norm_bias = t[:5]
    *convolution, num_groups, eps, precision = s[:8]
    return (input, weight, bias, *convolution, num_groups, norm_weight, norm_bias, eps, precision)


def _ours(t: Tensors, s: Settings) -> tuple[Tensor, Tensor]:
    """The operator that is recorded: the block's own in its case, whose kernel takes the host less time."""
    if _is_block(t, s):
        return _block_op(*_block_arguments(t, s)), t.input.new_empty((0,))
    return public_tail(t, s)


def _in_graph(*arguments: Any, instance: bool = False) -> tuple[Tensor, Tensor]:
    """instance: whether the norm was instance_norm, which is then called: another code than group_norm's."""
    tensors, settings = split(arguments)
    t, s = Tensors(*tensors), Settings(*settings)
    # Transforms of torch.func that differentiate take PyTorch's operators alone, as in eager mode.
    if not differentiated() and not is_left_to_compiler(t, s):
        return _ours(t, s)
    y, conv = composite(t, s, precise=False, instance=instance)
    # Strides and dtypes are the same whatever is decided: Dynamo asks before AOTAutograd, maybe under
    # another mode.
    y = in_format_of_result(y, t)
    low = autocast_dtype(t.input)
    if low is not None and instance:
        y = y.to(autocast_result_dtype(low, "cuda", "group", settings))
    return y, t.input.new_empty((0,)) if conv is None else in_format_of_result(conv, t)


def _batched(info: Any, in_dims: tuple[Any, ...], *arguments: Any, instance: bool = False) -> tuple[Any, Any]:
    """vmap's rule: that of the operator which is recorded; where transforms around it differentiate, each
    slice asks again what they are to see."""
    if differentiated():
        op = getattr(torch.ops.upconv3d, _NAME).default
        return batch_slices(op, info, in_dims, *arguments, instance=instance)
    tensors, settings = split(arguments)
    if not _is_block(Tensors(*tensors), Settings(*settings)):
        return batch_tail(info, in_dims, *arguments)
    dims, numbers = split(in_dims)
    y, dim = batch_block(info, _block_arguments(dims, numbers), *_block_arguments(tensors, settings))
    return (y, tensors[0].new_empty((info.batch_size, 0))), (dim, 0)


def block_in_graph(
    tensors: Sequence[Any], settings: Sequence[Any], norm: str | None
) -> tuple[Tensor, Tensor]:
    """The call as torch.compile records it, without a skip; conv is [0] where it is not returned."""
    op = getattr(torch.ops.upconv3d, _NAME).default
    y, conv = op(*join(tensors, settings), instance=norm == "instance")
    low = autocast_dtype(tensors[0])
    # instance_norm returns the dtype that it gets; ours is group_norm, which autocast runs in float32.
    return (y.to(low), conv) if low is not None and norm == "instance" else (y, conv)


def register() -> None:
    """Defines the operator; the package calls it once."""
    _library.define(_SCHEMA)  # type: ignore[no-untyped-call]
    _library.impl(_NAME, _in_graph, "CompositeImplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_vmap(f"upconv3d::{_NAME}", _batched)
