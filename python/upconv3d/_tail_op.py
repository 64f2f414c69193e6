# SPDX-License-Identifier: Apache-2.0
"""torch.ops.upconv3d.conv_transpose3d_norm_act: schema, kernels, fake kernels, autograd, autocast, vmap.

On CUDA its kernels are the internal operators of the compiled module, which take what is no tensor as one
number (see _numbered.py); where those are not, and on the CPU, PyTorch's operators (_tail.py). Eager calls
record a node of their own, by record_tail, where our kernels keep what a backward reads.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from . import _C
from ._autograd import _convolution_backward, _is_transformed, record_block, without_autocast
from ._facts import Kept, empty_kept, is_concrete, kept_of
from ._geometry import batched, empty_in_format_of, memory_format_of, output_extent
from ._graphs import record_operator
from ._numbered import settings_number
from ._tail import (
    ACTIVATIONS,
    ORDERS,
    Settings,
    Tensors,
    composite,
    differentiable_backward,
    in_format_of_result,
    in_sizes_of,
    reachable,
    reads_returned,
    tail_backward,
)
from ._tail_arguments import NUMBERS, TENSORS, facts_of, join, runs_kernels, split
from ._tail_graph import backward_is_ours, gradients_in_graph, inference_in_graph, training_in_graph
from ._tail_graph import register as register_graph_operators
from ._transforms import batch_slices

_library = torch.library.Library("upconv3d", "FRAGMENT")  # type: ignore[no-untyped-call]  # keeps registrations alive
_ops = torch.ops.upconv3d
_BelowAutograd = torch._C._AutoDispatchBelowAutograd
_keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph

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
_KERNEL_ACTIVATIONS = tuple("none" if name is None else name for name in ACTIVATIONS)

# Without OpOverload.__call__, a function in Python that passes its arguments on.
numbered_tail, _numbered_tail_for_training, _numbered_tail_backward = (
    getattr(_ops, name).default._op for name in _INTERNAL
)

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


def _require_names(s: Settings) -> None:
    for name, value, known in (
        ("order", s.order, ORDERS),
        ("activation", s.activation, _KERNEL_ACTIVATIONS),
    ):
        if value not in known:
            raise ValueError(f"upconv3d: {name} must be one of {', '.join(known)}; got {name}={value!r}.")


def _forward_kernel(*arguments: Any) -> tuple[Tensor, Tensor]:
    """The operator on the CPU and on CUDA; conv is [0] where it is not asked for."""
    tensors, settings = split(arguments)
    number = plain_number(tensors, settings)
    if number is not None:
        y, conv = numbered_tail(*tensors, number)
        return y, tensors[0].new_empty(0) if conv is None else conv
    t, s = Tensors(*tensors), Settings(*settings)
    _require_names(s)
    y, conv = composite(t, s, precise=True)
    y = in_format_of_result(y, t)
    if conv is None:
        return y, t.input.new_empty(0)
    return y, y.clone() if conv is y else in_format_of_result(conv, t)


def _training_kernel(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    """The operator with what the backward one takes as `saved`: [bytes], empty where nothing is kept."""
    tensors, settings = split(arguments)
    number = plain_number(tensors, settings)
    if number is not None:
        y, saved = _numbered_tail_for_training(*tensors, number)
        if y is not None:
            return y, y.new_empty(0), saved
    return *_forward_kernel(*arguments), tensors[0].new_empty(0, dtype=torch.uint8)


def _fake_forward(*arguments: Any) -> tuple[Tensor, Tensor]:
    tensors, settings = split(arguments)
    t, s = Tensors(*tensors), Settings(*settings)
    _require_names(s)
    # Symbolic shapes are checked by the real kernel: the rules in C++ take numbers.
    if is_concrete(*(v for v in t if v is not None), *settings):
        _C.validate(facts_of(t, s))
    x = batched(t.input)
    sizes = [x.shape[0], t.weight.shape[1] * s.groups]
    sizes += output_extent(t.input, t.weight, s.stride, s.padding, s.output_padding, s.dilation)
    dtype = x.dtype if t.skip is None else torch.promote_types(x.dtype, t.skip.dtype)
    memory_format = memory_format_of(x, t.weight)

    def result(of: torch.dtype) -> Tensor:
        out = torch.empty(sizes, dtype=of, device=x.device, memory_format=memory_format)
        return out.squeeze(0) if t.input.dim() == 4 else out

    return result(dtype), result(x.dtype) if s.return_conv else t.input.new_empty(0)


def _kept(tensors: Sequence[Any], settings: Sequence[Any]) -> Kept | None:
    """What _training_kernel keeps; None where that is nothing, or not known before the call."""
    input, skip = tensors[0], tensors[6]
    if input.device.type != "cuda" or (skip is not None and skip.dtype is not input.dtype):
        return None
    if settings[-1]:  # what the backward reads is returned
        return None
    if not is_concrete(*(v for v in tensors if v is not None), *settings):
        return None
    if plain_number(tensors, settings) is None:  # the kernel keeps nothing where too many are remembered
        return None
    kept = kept_of(facts_of(tensors, settings))
    return None if kept is None or kept.size == 0 else kept


def _keeps(*arguments: Any) -> bool:
    return _kept(*split(arguments)) is not None


def _fake_training(*arguments: Any) -> tuple[Tensor, Tensor, Tensor]:
    y, conv = _fake_forward(*arguments)
    tensors, settings = split(arguments)
    return y, conv, empty_kept(_kept(tensors, settings), batched(y), tensors[0].dtype)


def _fused_backward(
    grad_y: Tensor,
    t: Sequence[Any],
    number: int,
    mask: Sequence[bool],
    saved: Tensor,
    consume_saved: bool,
    as_computed: bool = False,
) -> Sequence[Tensor | None]:
    """tail_backward by our kernels, where a forward kept `saved` (as none that adds a skip does today).

    Where they cannot compute the convolution's gradients, they end with grad_c.

    t: the fields of Tensors. as_computed: whether gradients that are all our kernels' may have other strides
    than a weight that does not lie dense, as autograd takes them.
    """
    x, weight, bias, gamma, beta, slopes, _ = t
    x = batched(x)
    # Written out, here and below: generator expressions over so few values take twice as long.
    a, b, c, d, e, f, g = mask
    bits = a | b << 1 | c << 2 | d << 3 | e << 4 | f << 5 | g << 6
    gradients = _numbered_tail_backward(
        batched(grad_y), x, weight, bias, gamma, beta, slopes, saved, number, bits, consume_saved
    )
    grad_c = gradients[6]
    if grad_c is None and as_computed and x is t[0]:
        return gradients  # type: ignore[no-any-return]
    if grad_c is not None:
        grad_x, grad_w, grad_bias = gradients[:3]
        left = (a and grad_x is None, b and grad_w is None, c and grad_bias is None)
        found = _convolution_backward(grad_c, x, weight, _settings[number], left)
        grad_x = found[0] if left[0] else grad_x
        grad_w = found[1] if left[1] else grad_w
        grad_bias = found[2] if left[2] else grad_bias
        gradients = (grad_x, grad_w, grad_bias, *gradients[3:])
    return in_sizes_of(t, gradients, mask)


def _backward_from_conv(
    grad_y: Tensor,
    grad_conv: Tensor | None,
    tensors: Sequence[Any],
    settings: Sequence[Any],
    mask: Sequence[bool],
    conv: Tensor,
    number: int,
) -> list[Tensor | None]:
    """tail_backward by our kernels up to the convolution's gradient, from the returned convolution."""
    input, weight, _, gamma, beta, slopes, _ = tensors
    x = batched(input)
    wants_conv = any(mask[:3])
    bits = wants_conv | mask[3] << 3 | mask[4] << 4 | mask[5] << 5
    # conv has the bias in it. Hooks of saved tensors may have laid it out anew.
    conv = batched(conv).contiguous(memory_format=memory_format_of(x, weight))
    _, _, _, *norms, grad_c = _numbered_tail_backward(
        batched(grad_y), x, weight, None, gamma, beta, slopes, conv, number, bits, False
    )
    grads: Sequence[Tensor | None] = (None, None, None)
    if wants_conv:
        if grad_conv is not None:
            grad_c = grad_c.add_(batched(grad_conv))
        grads = _convolution_backward(grad_c, x, weight, settings, list(mask[:3]))
    return in_sizes_of(tensors, [*grads, *norms, None], mask)


def _backward_kernel(grad_y: Tensor | None, grad_conv: Tensor | None, *arguments: Any) -> tuple[Tensor, ...]:
    """The backward operator: empty tensors for what is not asked for. It leaves its arguments as they are."""
    *forward, precision, mask = arguments[:_BACKWARD_ARGUMENTS]
    kept, returned = (*arguments[_BACKWARD_ARGUMENTS:], None, None)[:2]
    tensors, settings = split([*forward, bool(returned), precision])
    t, s = Tensors(*tensors), Settings(*settings)
    gradients: Sequence[Tensor | None] = [None] * len(t)
    mask = reachable(mask, grad_y, grad_conv)
    # Our kernels begin with y's gradient, and with a returned convolution of some samples, or with no other.
    ours = kept.numel() > 0 if returned and kept is not None else grad_conv is None
    number = plain_number(tensors, settings) if ours and grad_y is not None else None
    saved = kept if number is None or kept is not None else _numbered_tail_for_training(*tensors, number)[1]
    if grad_y is not None and number is not None and saved is not None:
        if returned:
            gradients = _backward_from_conv(grad_y, grad_conv, tensors, settings, mask, saved, number)
        else:
            gradients = _fused_backward(grad_y, t, number, mask, saved, consume_saved=kept is None)
    elif any(mask):
        gradients = tail_backward(grad_y, grad_conv, t, s, mask)
    if s.num_groups == 0 and s.activation == "none":  # the skip's gradient is grad_y itself
        of_skip = gradients[6]
        gradients = [*gradients[:6], None if of_skip is None else of_skip.clone()]
    return tuple(t.input.new_empty(0) if gradient is None else gradient for gradient in gradients)


def _fake_backward(grad_y: Tensor | None, grad_conv: Tensor | None, *arguments: Any) -> tuple[Tensor, ...]:
    *forward, precision, mask = arguments[:_BACKWARD_ARGUMENTS]
    t = Tensors(*split([*forward, False, precision])[0])
    mask = reachable(mask, grad_y, grad_conv)
    return tuple(
        t.input.new_empty(0)
        if tensor is None or not wanted
        else empty_in_format_of(tensor)
        if tensor.dim() > 1
        else torch.empty_like(tensor)
        for tensor, wanted in zip(t, mask, strict=True)
    )


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    tensors, ctx.settings = split(inputs)
    kept = output[2] if len(output) > 2 and output[2].numel() > 0 else None
    if kept is None and runs_kernels(tensors[0]) and reads_returned(tensors, ctx.settings):
        kept = output[1]
    ctx.save_for_backward(*tensors, kept)
    ctx.set_materialize_grads(False)


@without_autocast
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
    elif torch.is_grad_enabled():
        gradients = differentiable_backward(grad_y, grad_conv, tensors, settings, mask)
    elif grad_conv is None and backward_is_ours(grad_y, tensors, settings, kept):
        assert grad_y is not None
        gradients = gradients_in_graph(grad_y, tensors, settings, mask, kept)
    else:
        *forward, _, precision = join(tensors, settings)
        op = getattr(_ops, f"{_NAME}_backward").default
        returned = kept is not None and settings[-1]
        found = op(grad_y, grad_conv, *forward, precision, mask, kept, returned)
        gradients = [gradient if wanted else None for gradient, wanted in zip(found, mask, strict=True)]
    return join(gradients, (None,) * len(Settings._fields))


class ConvTranspose3dNormAct(torch.autograd.Function):
    """A call of the family as a node of autograd's graph, for calls that nothing but autograd looks at."""

    @staticmethod
    def forward(ctx: Any, *arguments: Any) -> Any:
        """arguments: Tensors, y and what is kept, Settings, their number.

        What is kept is what _numbered_tail_for_training returned, or the convolution, where that is returned.
        Both come as one tuple, so that autograd does not take them for arguments.
        """
        *tensors, (y, saved), settings, number = arguments
        ctx.save_for_backward(*tensors, saved)
        ctx.settings, ctx.number = settings, number
        ctx.set_materialize_grads(False)
        if not settings[-1]:
            return y
        if not any(ctx.needs_input_grad[:3]):  # it depends on nothing that has a gradient
            ctx.mark_non_differentiable(saved)
        return y, saved

    @staticmethod
    @without_autocast
    def backward(ctx: Any, grad_y: Tensor | None, grad_conv: Tensor | None = None) -> tuple[Any, ...]:
        *tensors, saved = ctx.saved_tensors
        mask, settings = ctx.needs_input_grad[: len(tensors)], ctx.settings
        if grad_y is None:  # else all are reached
            mask = reachable(mask, grad_y, grad_conv)
        gradients: Sequence[Tensor | None]
        if not any(mask):
            gradients = [None] * len(tensors)
        elif torch.is_grad_enabled():
            gradients = differentiable_backward(grad_y, grad_conv, tensors, settings, mask)
        elif (
            grad_y is None
            or _is_transformed(grad_y)
            or (grad_conv is not None and _is_transformed(grad_conv))
            or (settings[-1] and saved.numel() == 0)
        ):
            gradients = tail_backward(grad_y, grad_conv, tensors, settings, mask)
        elif settings[-1]:
            gradients = _backward_from_conv(grad_y, grad_conv, tensors, settings, mask, saved, ctx.number)
        else:
            # Where the graph is not kept, nobody reads `saved` again.
            consume_saved = not _keeps_graph()
            gradients = _fused_backward(grad_y, tensors, ctx.number, mask, saved, consume_saved, True)
        return (*gradients, None, None, None)


# Function.apply without what it does for torch.func's transforms, under which this node is not used.
_record: Callable[..., Any] = super(torch.autograd.Function, ConvTranspose3dNormAct).apply


def _is_block(tensors: tuple[Any, ...], settings: tuple[Any, ...]) -> bool:
    """Whether the call is conv_transpose3d_relu_group_norm's, whose backward needs nothing kept."""
    order, activation = settings[8:10]
    return settings[5] > 0 and tensors[6] is None and order == "act_norm" and activation == "relu"


def record_tail(
    tensors: tuple[Any, ...], settings: tuple[Any, ...], number: int
) -> tuple[Tensor, Tensor | None] | None:
    """y by our kernels, recorded by autograd; None where they keep nothing for a backward.

    And the convolution, where that is returned.
    """
    if settings[-1]:
        if not reads_returned(tensors, settings):
            return None
        with _BelowAutograd():
            pair = numbered_tail(*tensors, number)
        y, conv = _record(*tensors, pair, settings, number)
        return y, conv
    with _BelowAutograd():
        computed = _numbered_tail_for_training(*tensors, number)
    if computed[0] is not None:
        return _record(*tensors, computed, settings, number), None
    if _is_block(tensors, settings):
        numbers = settings[:8]
        return record_block(*tensors[:5], numbers, settings_number(numbers), False), None
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
