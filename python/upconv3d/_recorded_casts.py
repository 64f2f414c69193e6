# SPDX-License-Identifier: Apache-2.0
"""Autocast's casts of a call that autograd records: of its parameters by one operator.

Recorded one by one, they are up to five operators and as many nodes. Here the call's own node takes the
float32 parameters, saves what was cast of them, and casts the gradients, or leaves that to autograd's engine.
So a backward reads what the forward read, whatever the parameters hold by then, as it does of recorded casts.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

# Without OpOverload.__call__, a function in Python that passes its arguments on.
_cast_parameters = torch.ops.upconv3d._cast_parameters.default._op
_library = torch.library.Library("upconv3d", "FRAGMENT")  # type: ignore[no-untyped-call]  # keeps registrations alive
_BelowAutograd = torch._C._AutoDispatchBelowAutograd
_dispatch_modes = torch._C._len_torch_dispatch_stack
_tracing = torch._C._is_tracing

LOW_DTYPES = frozenset({torch.float16, torch.bfloat16})
# Whose casts are known to be PyTorch's: a subclass, as fake tensors are, has its own .to().
OWN_CLASSES = frozenset({Tensor, nn.Parameter})


def is_dense(tensor: Tensor) -> bool:
    """Whether empty_like has the strides that .to() has: not always where axes are permuted or have gaps."""
    return tensor.is_contiguous() or tensor.is_contiguous(memory_format=torch.channels_last_3d)


def copies_in(dtype: torch.dtype, tensors: Sequence[Tensor]) -> list[Tensor]:
    """Every tensor's .to(dtype), of dense ones, by one launch."""
    copies = [torch.empty_like(tensor, dtype=dtype) for tensor in tensors]
    torch._foreach_copy_(copies, list(tensors))
    return copies


def casts_leaves(tensors: Sequence[Any], low: torch.dtype) -> bool:
    """Whether cast_leaves is to cast the parameters of a call on CUDA, the input apart, to `low`.

    Of leaves alone: a second derivative has to know what was cast, and to keep a computed weight for that
    would let it live in a cycle with the result. Nor where somebody looks on, who is to see PyTorch's casts.

    tensors: input, weight, bias, norm_weight and norm_bias; of the family slopes and skip too.
    """
    if low not in LOW_DTYPES or type(tensors[0]) not in OWN_CLASSES or _tracing() or _dispatch_modes() > 0:
        return False
    found = False
    for tensor in tensors[1:6]:
        if tensor is None:
            continue
        dtype = tensor.dtype
        if dtype is torch.float32 and type(tensor) in OWN_CLASSES and tensor.is_leaf:
            # Autograd would not cast its gradient to float32, or a kernel read values without their sign.
            if tensor.grad_dtype is not dtype or tensor.is_neg():
                return False
            found = True
        elif dtype is not low:
            return False
    if not found or (len(tensors) > 6 and tensors[6] is not None and tensors[6].dtype is not low):
        return False
    weight = tensors[1]
    # What it is cast to lies as .to() would lay it, so that kernels and gradients do not depend on the way.
    return weight.layout is torch.strided and is_dense(weight)


def cast_leaves(tensors: Sequence[Any]) -> tuple[Tensor | None, ...]:
    """weight, bias, norm_weight, norm_bias and slopes in the dtype of the input, which is not recorded; those
    that have it already as they are.

    tensors: for which casts_leaves holds, and whose input is 16 bit.
    Raises: RuntimeError where one is on another device.
    """
    slopes = tensors[5] if len(tensors) > 5 else None
    cast: tuple[Tensor | None, ...] = _cast_parameters(*tensors[:5], slopes)
    return cast


def keep_leaves(ctx: Any, parameters: Sequence[Any], cast: Sequence[Any] | None) -> None:
    """Keeps the parameters that were cast for `tied`, as attributes: autograd refuses saved tensors that
    were changed, as by an optimizer's step. None of those that need no gradient, whatever they need later.

    ctx: of a node whose inputs are an input and, behind it, `parameters`. cast: None where nothing was.
    """
    if cast is None:
        ctx.leaves = None
        return
    needed = ctx.needs_input_grad[1:]
    ctx.leaves = [
        given if needs and given is not found else None
        for given, found, needs in zip(parameters, cast, needed, strict=False)
    ]


class CastValues(torch.autograd.Function):
    """What a parameter was cast to, as a recorded cast would depend on it, whatever it holds since."""

    generate_vmap_rule = True

    @staticmethod
    def forward(parameter: Tensor, cast: Tensor) -> Tensor:
        return cast.view_as(cast)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        """The derivative is the identity: nothing is kept."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.float(), None


def _tied(leaf: Tensor | None, value: Tensor | None) -> Tensor | None:
    if leaf is None or value is None:
        return value
    if leaf.requires_grad and leaf.is_leaf:
        return CastValues.apply(leaf, value)  # type: ignore[no-any-return, no-untyped-call]
    # It was frozen since, and no derivative reaches it. The first one is computed all the same.
    return value.detach().requires_grad_()


def tied(ctx: Any, values: Sequence[Tensor | None]) -> Sequence[Any]:
    """What was cast, in a backward whose operators autograd records, so that second derivatives reach what
    keep_leaves kept; others as they are.

    values: as they were saved, weight first.
    """
    leaves = getattr(ctx, "leaves", None)  # nodes of operators by their public names keep none
    if leaves is None:
        return values
    return [_tied(leaf, value) for leaf, value in zip(leaves, values, strict=False)]


def in_float32(ctx: Any, gradients: Sequence[Tensor | None]) -> Sequence[Tensor | None]:
    """Gradients of what keep_leaves kept, cast by one launch; autograd's engine casts them one by one.

    gradients: of the node's inputs, as kernels computed them; none that autograd records.
    """
    if ctx.leaves is None:
        return gradients
    places = [
        place for place, leaf in enumerate(ctx.leaves, 1) if leaf is not None and gradients[place] is not None
    ]
    if len(places) < 2:
        return gradients
    found: list[Any] = list(gradients)
    wide = copies_in(torch.float32, [found[place] for place in places])
    for place, gradient in zip(places, wide, strict=True):
        found[place] = gradient
    return found


def _cast_elsewhere(input: Tensor, *parameters: Tensor | None) -> tuple[Tensor | None, ...]:
    """_cast_parameters where others than a CUDA kernel are to see it."""
    low = input.dtype
    with _BelowAutograd():
        return tuple(
            given if given is None or given.dtype is not torch.float32 else given.to(low)
            for given in parameters
        )


def register() -> None:
    """Says what the dispatcher does with _cast_parameters elsewhere; the package calls it once."""
    _library.impl("_cast_parameters", torch.library.fallthrough_kernel, "Autograd")  # type: ignore[no-untyped-call]
    for key in ("Python", "CompositeExplicitAutograd"):
        _library.impl("_cast_parameters", _cast_elsewhere, key)  # type: ignore[no-untyped-call]
