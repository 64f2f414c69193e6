# SPDX-License-Identifier: Apache-2.0
"""torch.ops.upconv3d.conv_transpose3d_norm_act: schema, kernels, fake kernels, autograd, autocast, vmap.

On CUDA its kernels are the internal operators of the compiled module, which take what is no tensor as one
number (see _numbered.py); where those are not, and on the CPU, PyTorch's operators (_tail.py). Eager calls
record a node of their own, by record_tail, where our kernels keep what a backward reads.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from . import _C
from ._autograd import _is_mapped, as_backward, kept_vector, record_block
from ._facts import Kept, empty_kept, is_concrete, kept_of
from ._geometry import batched, empty_in_format_of, in_formats_of, memory_format_of, output_extent
from ._graphs import differentiates_again, is_traced, may_consume, record_operator
from ._numbered import settings_number
from ._recorded_casts import in_float32, keep_leaves, tied
from ._tail import (
    Settings,
    Tensors,
    begins_with_result,
    composite,
    differentiable_backward,
    in_format_of_result,
    is_apart,
    keeps_operand,
    operand_of,
    reachable,
    reads_returned,
    settings_of_kept,
    tail_backward,
)
from ._tail_arguments import (
    NUMBERS,
    TENSORS,
    facts_of,
    join,
    require_known_settings,
    runs_kernels,
    split,
)
from ._tail_gradients import gradients_from_operand, gradients_from_saved
from ._tail_graph import (
    backward_is_ours,
    gradients_by_operator,
    gradients_in_graph,
    inference_in_graph,
    training_in_graph,
)
from ._tail_graph import register as register_graph_operators
from ._transforms import batch_slices

_library = torch.library.Library("upconv3d", "FRAGMENT")  # type: ignore[no-untyped-call]  # keeps registrations alive
_ops = torch.ops.upconv3d
_BelowAutograd = torch._C._AutoDispatchBelowAutograd

_NAME = "conv_transpose3d_norm_act"
_SCHEMA = (
    f"{_NAME}({TENSORS}, {NUMBERS}, bool return_conv, str precision) -> (Tensor y, Tensor conv)",
    f"{_NAME}_for_training({TENSORS}, {NUMBERS}, bool return_conv, str precision) "
    "-> (Tensor y, Tensor conv, Tensor saved)",
    f"{_NAME}_backward(Tensor? grad_y, Tensor? grad_conv, {TENSORS}, {NUMBERS}, str precision, "
    "bool[] output_mask, Tensor? saved=None, bool returned=False) -> "
    f"({', '.join(['Tensor'] * len(Tensors._fields))})",
)
_BACKWARD_ARGUMENTS = 19  # of the backward operator behind its gradients; `saved`, `returned` follow, or not
_INTERNAL = ("_numbered_tail", "_numbered_tail_for_training", "_numbered_tail_backward")

# Without OpOverload.__call__, a function in Python that passes its arguments on.
numbered_tail, _numbered_tail_for_training = (getattr(_ops, name).default._op for name in _INTERNAL[:2])

_numbers: dict[tuple[Any, ...], int] = {}
_settings: dict[int, tuple[Any, ...]] = {}
_casting: set[int] = set()  # numbers whose operator casts parameters


def tail_number(
    settings: tuple[Any, ...], spares_host: bool = False, casts_parameters: bool = False
) -> int | None:
    """The number under which the compiled module remembers the fields of Settings.

    None where too many are remembered already, or one is no plain number.

    spares_host: whether a small block's plan is to be the one that takes the host least.
    casts_parameters: whether the operator casts what is float32 and no volume to the dtype of a 16-bit input.
    """
    key = (*settings, spares_host, casts_parameters) if spares_host or casts_parameters else settings
    try:
        number = _numbers.get(key)
    except TypeError:  # a symbolic number, which has no hash
        return None
    return _remember(key) if number is None else number


def _remember(key: tuple[Any, ...]) -> int | None:
    # A tensor as eps or parameter is equal to itself whatever its value.
    if not isinstance(key[6], (int, float)) or not isinstance(key[10], (int, float)):
        return None
    number: int | None = _C.remember_settings(key)
    if number is not None:
        _numbers[key] = number
        _settings[number] = key[: len(Settings._fields)]
        if key[-1] is True and len(key) > len(Settings._fields):
            _casting.add(number)
    return number


def public_tail(tensors: Sequence[Any], settings: Sequence[Any]) -> tuple[Tensor, Tensor]:
    """The operator by its public name."""
    pair: tuple[Tensor, Tensor] = getattr(_ops, _NAME).default(*join(tensors, settings))
    return pair


def plain_number(tensors: Sequence[Any], settings: Sequence[Any]) -> int | None:
    """tail_number of lists and tuples alike, and None where a skip's dtype promotes what it is added to."""
    input, skip = tensors[0], tensors[6]
    if not runs_kernels(input) or (skip is not None and skip.dtype is not input.dtype):
        return None
    return tail_number(tuple(tuple(v) if isinstance(v, (list, tuple)) else v for v in settings))


def _forward_kernel(*arguments: Any) -> tuple[Tensor, Tensor]:
    """The operator on the CPU and on CUDA; conv is [0] where it is not asked for."""
    tensors, settings = split(arguments)
    number = plain_number(tensors, settings)
    if number is not None:
        y, conv = numbered_tail(*tensors, number)
        return y, tensors[0].new_empty((0,)) if conv is None else conv
    t, s = Tensors(*tensors), Settings(*settings)
    require_known_settings(s)
    y, conv = composite(t, s, precise=True)
    y = in_format_of_result(y, t)
    if conv is None:
        return y, t.input.new_empty((0,))
    return y, y.clone() if conv is y else in_format_of_result(conv, t)


def _with_operand(
    tensors: Sequence[Any], settings: Sequence[Any], number: int
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """y, the convolution where it is returned, and the operand, None where none is read; y is None where
    nothing is computed.

    number: of settings_of_kept.
    """
    if begins_with_result(settings):
        y, conv = numbered_tail(*tensors, number)
        return y, conv, y if settings[9] == "relu" else None
    if not settings[-1]:
        y, operand = _numbered_tail_for_training(*tensors, number)
        return y, None, operand
    y, conv = numbered_tail(*tensors, number)
    return y, conv, operand_of(conv, tensors, settings)


def _training_kernel(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The operator with what the backward one takes as `saved`: [bytes] or what the norm applies to, [0]
    where nothing is kept, or what is kept is returned."""
    tensors, settings = split(arguments)
    keeps_own = keeps_operand(tensors, settings) and not begins_with_result(settings)
    if keeps_own and not reads_returned(tensors, settings):
        number = plain_number(tensors, settings_of_kept(tensors, settings))
        if number is not None:
            y, conv, operand = _with_operand(tensors, settings, number)
            if y is not None and operand is not None:
                return y, y.new_empty((0,)) if conv is None else conv, operand
    number = plain_number(tensors, settings)
    if number is not None:
        y, saved = _numbered_tail_for_training(*tensors, number)
        if y is not None:
            return y, y.new_empty((0,)), saved
    return *_forward_kernel(*arguments), tensors[0].new_empty((0,), dtype=torch.uint8)


def _result_sizes(t: Tensors, s: Settings) -> list[int]:
    """N, K, Z, P, Q."""
    extent = output_extent(t.input, t.weight, s.stride, s.padding, s.output_padding, s.dilation)
    return [batched(t.input).shape[0], t.weight.shape[1] * s.groups, *extent]


def _fake_forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    tensors, settings = split(arguments)
    t, s = Tensors(*tensors), Settings(*settings)
    require_known_settings(s)
    # Symbolic shapes are checked by the real kernel: the rules in C++ take numbers.
    if is_concrete(*(v for v in t if v is not None), *settings):
        _C.validate(facts_of(t, s))
    x, sizes = batched(t.input), _result_sizes(t, s)
    dtype = x.dtype if t.skip is None else torch.promote_types(x.dtype, t.skip.dtype)
    memory_format = memory_format_of(x, t.weight)

    def result(of: torch.dtype) -> Tensor:
        out = torch.empty(sizes, dtype=of, device=x.device, memory_format=memory_format)
        return out.squeeze(0) if t.input.dim() == 4 else out

    return result(dtype), result(x.dtype) if s.return_conv else t.input.new_empty((0,))


def _kept_beside(tensors: Sequence[Any], settings: Sequence[Any]) -> Kept | None:
    """operand_of beside a returned convolution, of known sizes; None without any values."""
    values = math.prod(_result_sizes(Tensors(*tensors), Settings(*settings)))
    return Kept(True, values * tensors[0].element_size()) if values > 0 else None


def _kept(tensors: Sequence[Any], settings: Sequence[Any]) -> Kept | None:
    """What _training_kernel keeps; None where that is nothing, or not known before the call."""
    input, skip = tensors[0], tensors[6]
    if input.device.type != "cuda" or (skip is not None and skip.dtype is not input.dtype):
        return None
    apart = settings[5] == 0 or is_apart(tensors, settings)
    if apart and not keeps_operand(tensors, settings):
        return None
    if reads_returned(tensors, settings) or begins_with_result(settings):
        return None
    if not is_concrete(*(v for v in tensors if v is not None), *settings):
        return None
    # The kernel keeps nothing where too many are remembered.
    if plain_number(tensors, settings_of_kept(tensors, settings)) is None:
        return None
    if settings[-1]:  # beside the convolution, what an explanation does not know of
        return _kept_beside(tensors, settings)
    kept = kept_of(facts_of(tensors, settings))
    return None if kept is None or kept.size == 0 else kept


def _keeps(*arguments: Any) -> bool:
    return _kept(*split(arguments)) is not None


def _fake_training(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    y, conv = _fake_forward(*arguments)
    tensors, settings = split(arguments)
    return y, conv, empty_kept(_kept(tensors, settings), batched(y), tensors[0].dtype)


def _operand_gradients(
    grad_y: Tensor,
    grad_conv: Tensor | None,
    tensors: Sequence[Any],
    settings: Sequence[Any],
    mask: Sequence[bool],
    kept: Tensor | None,
) -> list[Tensor | None] | None:
    """gradients_from_operand, of one that is computed again where it was not kept; None where our kernels
    compute no such call, or there is nothing to compute.

    settings: settings_of_kept.
    """
    number = plain_number(tensors, settings) if keeps_operand(tensors, settings) else None
    if number is None or grad_y.numel() == 0:
        return None
    operand = kept
    if operand is None and begins_with_result(settings):
        operand = None if settings[9] == "none" else numbered_tail(*tensors, number)[0]
    elif operand is None:
        returns = settings[-1] and tensors[6] is None
        compute = numbered_tail if returns else _numbered_tail_for_training
        operand = compute(*tensors, number)[1]
        if operand is None:
            return None
    gradients = (grad_y, grad_conv)
    return gradients_from_operand(*gradients, tensors, settings, mask, operand, number, kept is None)


def _backward_kernel(grad_y: Tensor | None, grad_conv: Tensor | None, *arguments: Any) -> tuple[Tensor, ...]:
    """The backward operator: empty tensors for what is not asked for. It leaves its arguments as they are."""
    *forward, precision, mask = arguments[:_BACKWARD_ARGUMENTS]
    kept, returned = (*arguments[_BACKWARD_ARGUMENTS:], None, None)[:2]
    tensors, settings = split([*forward, bool(returned), precision])
    t, s = Tensors(*tensors), Settings(*settings)
    mask = reachable(mask, grad_y, grad_conv)
    gradients: Sequence[Tensor | None] | None = None
    if grad_y is not None and any(mask):  # our kernels begin with y's gradient
        bare = s.num_groups == 0
        if returned or t.skip is not None or grad_conv is not None or bare:
            operand = kept if returned or bare else None
            # Without a norm, a convolution that is kept but not returned has no bias in it.
            with_conv = bool(returned) or t.skip is not None
            settings = (*settings[:-1], with_conv and not begins_with_result(settings) if bare else True)
            gradients = _operand_gradients(grad_y, grad_conv, tensors, settings, mask, operand)
        else:
            number = plain_number(tensors, settings)
            saved = kept
            if number is not None and saved is None:
                saved = _numbered_tail_for_training(*tensors, number)[1]
            if number is not None and saved is not None:
                gradients = gradients_from_saved(grad_y, t, s, mask, saved, number, kept is None)
    if gradients is None:
        gradients = tail_backward(grad_y, grad_conv, t, s, mask) if any(mask) else [None] * len(t)
    if s.num_groups == 0 and s.activation == "none":  # the skip's gradient is grad_y itself
        of_skip = gradients[6]
        gradients = [*gradients[:6], None if of_skip is None else of_skip.clone()]
    return tuple(t.input.new_empty((0,)) if gradient is None else gradient for gradient in gradients)


def _fake_backward(grad_y: Tensor | None, grad_conv: Tensor | None, *arguments: Any) -> tuple[Tensor, ...]:
    *forward, precision, mask = arguments[:_BACKWARD_ARGUMENTS]
    t = Tensors(*split([*forward, False, precision])[0])
    mask = reachable(mask, grad_y, grad_conv)
    return tuple(
        t.input.new_empty((0,))
        if tensor is None or not wanted
        else empty_in_format_of(tensor)
        if tensor.dim() > 1
        else torch.empty_like(tensor)
        for tensor, wanted in zip(t, mask, strict=True)
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    tensors, ctx.settings = split(inputs)
    kept = output[2] if len(output) > 2 and output[2].numel() > 0 else None
    promotes = tensors[6] is not None and tensors[6].dtype is not tensors[0].dtype
    reads = runs_kernels(tensors[0]) and not promotes and keeps_operand(tensors, ctx.settings)
    if kept is None and reads:
        if reads_returned(tensors, ctx.settings):
            kept = output[1]
        elif begins_with_result(ctx.settings) and ctx.settings[9] == "relu":
            kept = output[0]
    ctx.save_for_backward(*tensors[:2], *map(kept_vector, tensors[2:5]), *tensors[5:], kept)
    ctx.set_materialize_grads(False)


@as_backward
def _backward(ctx: Any, grad_y: Tensor | None, grad_conv: Tensor | None, _: None = None) -> tuple[Any, ...]:
    """Autograd of the operators by their public names; c is computed again where it was not kept."""
    (*tensors, kept), settings = ctx.saved_tensors, ctx.settings
    grad_conv = grad_conv if settings[-1] else None
    # Positions of the tensors among the operator's arguments.
    needs = [ctx.needs_input_grad[index] for index in (0, 1, 2, 10, 11, 15, 16)]
    mask = [needed and tensor is not None for needed, tensor in zip(needs, tensors, strict=True)]
    mask = reachable(mask, grad_y, grad_conv)
    gradients: Sequence[Tensor | None]
    if not any(mask):
        gradients = [None] * len(mask)
    elif differentiates_again(grad_y, grad_conv):
        gradients = differentiable_backward(grad_y, grad_conv, tensors, settings, mask)
    elif grad_conv is None and backward_is_ours(grad_y, tensors, settings, kept):
        assert grad_y is not None
        gradients = gradients_in_graph(grad_y, tensors, settings, mask, kept)
    else:
        kept_apart = settings[5] > 0 or reads_returned(tensors, settings)
        returned = kept is not None and kept_apart and keeps_operand(tensors, settings)
        gradients = gradients_by_operator(grad_y, grad_conv, tensors, settings, mask, kept, returned)
    return join(gradients, (None,) * len(Settings._fields))


class ConvTranspose3dNormAct(torch.autograd.Function):
    """A call of the family as a node of autograd's graph, for calls that nothing but autograd looks at."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Any:
        """arguments: Tensors, what was computed, Settings, and the number that the kernels get.

        Computed were y, the convolution where it is returned, and what is kept: what
        _numbered_tail_for_training returned, or the operand, where one is read; with them is what
        cast_leaves made of the parameters, if it did. They come as one tuple, so that autograd does not take
        them for arguments.
        """
        *tensors, (y, conv, saved, cast), settings, number = arguments
        keep_leaves(ctx, tensors[1:6], cast)
        if cast is not None:
            tensors[1:6] = cast
        ctx.save_for_backward(*tensors[:2], *map(kept_vector, tensors[2:5]), *tensors[5:], saved)
        ctx.settings, ctx.number = settings, number
        ctx.strides = tensors[0].stride(), tensors[1].stride()
        ctx.begins_with_operand = keeps_operand(tensors, settings)
        ctx.saved_is_returned = saved is conv or saved is y
        ctx.set_materialize_grads(False)
        if conv is None:
            return y
        if not any(ctx.needs_input_grad[:3]):  # it depends on nothing that has a gradient
            ctx.mark_non_differentiable(conv)
        return y, conv

    @staticmethod
    @as_backward
    def backward(ctx: Any, grad_y: Tensor | None, grad_conv: Tensor | None = None) -> tuple[Any, ...]:
        *tensors, saved = ctx.saved_tensors
        mask, settings = ctx.needs_input_grad[: len(tensors)], ctx.settings
        if grad_y is None:  # else all are reached
            mask = reachable(mask, grad_y, grad_conv)
        gradients: Sequence[Tensor | None]
        if not any(mask):
            gradients = [None] * len(tensors)
        elif differentiates_again(grad_y, grad_conv):
            tensors[1:6] = tied(ctx, tensors[1:6])
            gradients = differentiable_backward(grad_y, grad_conv, tensors, settings, mask)
        elif is_traced(grad_conv if grad_y is None else grad_y):  # by compiled autograd
            gradients = gradients_by_operator(grad_y, grad_conv, tensors, settings, mask)
        elif (
            grad_y is None
            or _is_mapped(grad_y)
            or (grad_conv is not None and _is_mapped(grad_conv))
            or (ctx.begins_with_operand and grad_y.numel() == 0)
        ):
            gradients = tail_backward(grad_y, grad_conv, tensors, settings, mask)
        elif ctx.begins_with_operand:
            consume_saved = not ctx.saved_is_returned and may_consume(ctx)
            what = (in_formats_of(ctx.strides, tensors), settings, mask, saved, ctx.number)
            gradients = in_float32(ctx, gradients_from_operand(grad_y, grad_conv, *what, consume_saved))
        else:
            what = (in_formats_of(ctx.strides, tensors), settings, mask, saved, ctx.number)
            found = gradients_from_saved(grad_y, *what, may_consume(ctx), as_computed=True)
            gradients = in_float32(ctx, found)
        return (*gradients, None, None, None)


# Function.apply without what it does for torch.func's transforms, under which this node is not used.
_record: Callable[..., Any] = super(torch.autograd.Function, ConvTranspose3dNormAct).apply


def _is_block(tensors: tuple[Any, ...], settings: tuple[Any, ...]) -> bool:
    """Whether the call is conv_transpose3d_relu_group_norm's, whose backward needs nothing kept."""
    order, activation, _, return_conv = settings[8:]
    plain = settings[5] > 0 and tensors[6] is None and not return_conv
    return plain and order == "act_norm" and activation == "relu"


def record_tail(
    tensors: tuple[Any, ...],
    settings: tuple[Any, ...],
    number: int,
    cast: tuple[Tensor | None, ...] | None = None,
) -> tuple[Tensor, Tensor | None] | None:
    """y by our kernels, recorded by autograd; None where they keep nothing for a backward.

    And the convolution, where that is returned.

    number: CudaCall's. cast: of cast_leaves, which the kernels get in the place of the parameters.
    """
    given = tensors if cast is None else (tensors[0], *cast, tensors[6])
    if keeps_operand(tensors, settings):
        with _BelowAutograd():
            computed = _with_operand(given, settings, number)
        if computed[0] is None:
            return None
        recorded = _record(*tensors, (*computed, cast), settings, number)
        return recorded if settings[-1] else (recorded, None)
    with _BelowAutograd():
        y, saved = _numbered_tail_for_training(*given, number)
    if y is not None:
        return _record(*tensors, (y, None, saved, cast), settings, number), None
    if _is_block(tensors, settings):
        numbers = settings[:8]
        return record_block(*tensors[:5], numbers, settings_number(numbers), False, cast), None
    return None


def batch_tail(info: Any, in_dims: tuple[Any, ...], *arguments: Any) -> tuple[Any, Any]:
    """vmap's rule for the operator by its name; the function upconv3d has no need of it."""
    return batch_slices(getattr(_ops, _NAME).default, info, in_dims, *arguments)


def _numbered_elsewhere(*arguments: Any) -> tuple[Tensor, Tensor]:
    """_numbered_tail where others than a kernel are to see it: modes, subclasses, autocast."""
    *tensors, number = arguments
    if number in _casting:
        low = tensors[0].dtype
        tensors[1:6] = [None if tensor is None else tensor.to(low) for tensor in tensors[1:6]]
    return public_tail(tensors, _settings[number])


def _nothing_kept(*arguments: Any) -> tuple[None, None]:
    """_numbered_tail_for_training there: it computes nothing, and PyTorch's operators are recorded."""
    return None, None


def register() -> None:
    """Defines the operators and ties all of this to them; the package calls it once."""
    for schema in _SCHEMA:
        _library.define(schema)  # type: ignore[no-untyped-call]
    for key in ("CPU", "CUDA"):
        _library.impl(_NAME, _forward_kernel, key)  # type: ignore[no-untyped-call]
        _library.impl(f"{_NAME}_for_training", _training_kernel, key)  # type: ignore[no-untyped-call]
        _library.impl(f"{_NAME}_backward", _backward_kernel, key)  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"upconv3d::{_NAME}", _fake_forward)
    torch.library.register_fake(f"upconv3d::{_NAME}_for_training", _fake_training)
    torch.library.register_fake(f"upconv3d::{_NAME}_backward", _fake_backward)
    register_graph_operators(_fake_forward, _fake_training)
    record_operator(
        *(_library, _NAME, _setup_context, _backward, _keeps), inference_in_graph, training_in_graph
    )
    torch.library.register_vmap(f"upconv3d::{_NAME}", batch_tail)
    for name in _INTERNAL:
        _library.impl(name, torch.library.fallthrough_kernel, "Autograd")  # type: ignore[no-untyped-call]
    elsewhere = (("_numbered_tail", _numbered_elsewhere), ("_numbered_tail_for_training", _nothing_kept))
    for name, kernel in elsewhere:
        for key in ("Python", "AutocastCPU", "AutocastCUDA", "CompositeExplicitAutograd"):
            _library.impl(name, kernel, key)  # type: ignore[no-untyped-call]
