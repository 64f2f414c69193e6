# SPDX-License-Identifier: Apache-2.0
"""Backward of the block.

    grad_a      = native_group_norm_backward(grad_y, a, mean, rstd, gamma),      a = relu(c)
    grad_c      = grad_a where a > 0
    grad_x, ... = convolution_backward(grad_c, x, w)

Where the forward ran the SM90 plan, our kernels compute this from a and its moments, which the forward kept,
or which the backward computes again (`recompute`, and under torch.compile with dynamic shapes). Where it ran
the library plan, they compute all but convolution_backward from c, as PyTorch returned it, kept or computed
again. Elsewhere it is written in PyTorch's operators, from c, which the CPU's forward keeps and other plans'
backward computes again.

It is one operator of its own, upconv3d::conv_transpose3d_relu_group_norm_backward, so that torch.compile runs
it as it stands, with the precision that was asked for. With create_graph=True the same gradient is written in
operators that PyTorch can differentiate again; what differentiates those follows PyTorch's precision setting.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from . import _C
from ._convolution import BlockArguments, aligned, convolution, convolution_backward
from ._facts import block_facts, is_concrete, kept_of
from ._geometry import batched, dense_as, in_formats_of, memory_format_of
from ._graphs import differentiates_again, is_traced, may_consume, record_operator, record_plainly
from ._numbered import numbered_block_for_training
from ._out_of_memory import raise_out_of_memory
from ._recorded_casts import in_float32, keep_leaves, tied

_NAME = "conv_transpose3d_relu_group_norm"
_aten = torch.ops.aten
_recomputed_op = torch.ops.upconv3d.conv_transpose3d_relu_group_norm_recomputed.default
_training_op = torch.ops.upconv3d.conv_transpose3d_relu_group_norm_for_training.default
# Without OpOverload.__call__, a function in Python that passes its arguments on.
_numbered_backward = torch.ops.upconv3d._numbered_tail_backward.default._op
_is_batched = torch._C._functorch.is_batchedtensor
_is_legacy_batched = torch._C._functorch.is_legacy_batchedtensor
_autocast_enabled = torch._C._is_any_autocast_enabled
AUTOCAST_KEYS = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU) | torch._C.DispatchKeySet(
    torch._C.DispatchKey.AutocastCUDA
)
_library = torch.library.Library("upconv3d", "FRAGMENT")  # type: ignore[no-untyped-call]  # keeps registrations alive


def as_backward(backward: Callable[..., Any]) -> Callable[..., Any]:
    """`backward` as PyTorch's own nodes run: outside of autocast, for they compute in the dtypes of what
    their forwards got when they run inside of it, too; and out of memory by its own exception."""

    @wraps(backward)
    def run(*arguments: Any) -> Any:
        try:
            if not _autocast_enabled():
                return backward(*arguments)
            with torch._C._ExcludeDispatchKeyGuard(AUTOCAST_KEYS):
                return backward(*arguments)
        except RuntimeError as error:
            raise_out_of_memory(error)
            raise

    return run


def _native_backward(
    grad_y: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    args: BlockArguments,
    mask: Sequence[bool],
    conv: Tensor | None = None,
) -> list[Tensor | None]:
    """Gradients of x, weight, bias, norm_weight, norm_bias; x and grad_y are batched.

    conv: the convolution, where the CPU's forward kept it; in float32 and float64 without the bias.
    """
    # Contiguous, which is all that the GPU's native_group_norm and its backward read. The CPU's read
    # channels_last_3d too, but their sums over its positions lose the variance of a large mean, their result
    # is no sooner there, and without grad_input they end the process.
    grad_y = grad_y.contiguous()
    if conv is None:
        a = convolution(x, weight, bias, args).contiguous()
    elif bias is not None and x.dtype in (torch.float32, torch.float64):
        a = conv.contiguous()
        per_channel = bias.view(1, -1, 1, 1, 1)
        a = a + per_channel if a is conv else a.add_(per_channel)
    else:
        a = conv.contiguous()
    a = _aten.relu.default(a) if a is conv else _aten.relu_.default(a)
    gamma = None if norm_weight is None else norm_weight.contiguous()
    n, k, positions = a.shape[0], a.shape[1], a.shape[2] * a.shape[3] * a.shape[4]
    mean, rstd = _aten.native_group_norm.default(a, gamma, None, n, k, positions, args.num_groups, args.eps)[
        1:
    ]
    conv_mask = list(mask[:3])
    # On the CPU the operator cannot take the bias's gradient where there is no weight.
    sums_apart = gamma is None and mask[4]
    norm_mask = [any(conv_mask), mask[3], mask[4] and not sums_apart]
    grad_a, grad_norm_weight, grad_norm_bias = _aten.native_group_norm_backward.default(
        grad_y, a, mean, rstd, gamma, n, k, positions, args.num_groups, norm_mask
    )
    if sums_apart:
        grad_norm_bias = grad_y.sum((0, 2, 3, 4))
    if not any(conv_mask):
        return [None, None, None, grad_norm_weight, grad_norm_bias]
    # Modes of PyTorch's own take "out" for every result's name, and autograd, which sees these operators
    # where the backward one is called by its name (a graph that is run again), refuses "out".
    if torch._C._len_torch_dispatch_stack() > 0 or grad_a.requires_grad:
        grad_c = _aten.threshold_backward.default(grad_a, a, 0)
    else:  # in place: these are the largest tensors of a training step
        grad_c = _aten.threshold_backward.grad_input(grad_a, a, 0, grad_input=grad_a)
    del a
    return [*convolution_backward(grad_c, x, weight, args, conv_mask), grad_norm_weight, grad_norm_bias]


def _differentiable_backward(
    grad_y: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    args: BlockArguments,
    mask: Sequence[bool],
) -> list[Tensor | None]:
    """The same gradients, in operators that autograd can differentiate.

    With xhat = (a - mean)*rstd and g = grad_y*gamma, over each norm group of m values:
        grad_a = rstd * (g - sum(g)/m - xhat*sum(g*xhat)/m)
    """
    c = convolution(x, weight, bias, args)
    grouped = (c.shape[0], args.num_groups, c.shape[1] // args.num_groups * c.shape[2:].numel())
    # Squares of what float16 holds are beyond it, and PyTorch's norm computes in float32, too.
    wide = torch.promote_types(c.dtype, torch.float32)
    a = torch.relu(c).to(wide).reshape(grouped)
    centered = a - a.mean(-1, keepdim=True)
    rstd = torch.rsqrt(centered.square().mean(-1, keepdim=True) + args.eps)
    xhat = centered * rstd
    per_channel = (0, 2, 3, 4)
    grad_y = grad_y.to(wide)
    g = grad_y if norm_weight is None else grad_y * norm_weight.view(1, -1, 1, 1, 1)
    g = g.reshape(grouped)
    grad_a = rstd * (g - g.mean(-1, keepdim=True) - xhat * (g * xhat).mean(-1, keepdim=True))
    grad_c = grad_a.reshape(c.shape).to(c.dtype) * (c > 0)
    grad_norm_weight = (grad_y * xhat.reshape(c.shape)).sum(per_channel).to(c.dtype) if mask[3] else None
    grad_norm_bias = grad_y.sum(per_channel).to(c.dtype) if mask[4] else None
    return [*convolution_backward(grad_c, x, weight, args, mask[:3]), grad_norm_weight, grad_norm_bias]


def _keep_again(
    x: Tensor, weight: Tensor, bias: Tensor | None, norm_weight: Tensor | None, args: BlockArguments
) -> Tensor | None:
    """What a forward that is not recomputed keeps; None where its plan keeps nothing."""
    arguments = (x, weight, bias, *args[:6], norm_weight, None, args.eps, args.precision)
    plan = _C.explain(block_facts(*arguments) | {"training": True})["plan"]
    # PyTorch's alone, without what follows it; col2im's is to be had of the operator only.
    if plan["keeps_conv"] and plan["algorithm"] == "cuda_library":
        conv = convolution(x, weight, None, args)
        return conv.contiguous(memory_format=memory_format_of(x, weight))
    if not plan["keeps_activation"] and not plan["keeps_conv"]:
        return None
    saved: Tensor = _training_op(*arguments)[1]
    return saved


def _fused_backward(
    grad_y: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    args: BlockArguments,
    mask: Sequence[bool],
    saved: Tensor,
    consume_saved: bool,
    number: int | None,
) -> list[Tensor | None]:
    """_native_backward by our kernels, from what the forward kept.

    Where they cannot compute the convolution's gradients, they end with grad_c.

    consume_saved: whether `saved` may be overwritten.
    number: settings_number of `args`, or None.
    """
    a, b, c, d, e = mask  # a generator expression takes longer
    bits = a | b << 1 | c << 2 | d << 3 | e << 4
    gradients: list[Tensor | None]
    if number is not None:
        *gradients, _, grad_c = _numbered_backward(
            grad_y, x, weight, bias, norm_weight, None, None, saved, number, bits, consume_saved
        )
    else:
        *gradients, grad_c = torch.ops.upconv3d.fused_backward.default(
            *(grad_y, x, weight, bias, *args[:6], norm_weight),
            *(args.eps, args.precision, saved, bits, consume_saved),
        )
        # In the place of one that is not wanted is an empty tensor.
        gradients = [gradient if wanted else None for gradient, wanted in zip(gradients, mask, strict=True)]
    if grad_c is not None and grad_c.numel() > 0:
        wanted = [mask[0], mask[1], False]
        gradients[:2] = convolution_backward(grad_c, aligned(x), weight, args, wanted)[:2]
    return gradients


def _kernel_gradients(
    grad_y: Tensor,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    args: BlockArguments,
    mask: Sequence[bool],
    saved: Tensor | None,
    consume_saved: bool,
    number: int | None = None,
) -> list[Tensor | None]:
    """Each gradient in the sizes and the memory format of what it belongs to; None where `mask` says so.

    saved: what the forward kept; empty where that is nothing; None where it is to be computed again.
    number: settings_number of `args`, or None.
    """
    x = batched(input)
    block = (x, weight, bias, norm_weight, args)
    if saved is None and x.is_cuda and x.numel() > 0 and any(mask):
        saved, consume_saved = _keep_again(*block), True
    if saved is None or saved.numel() == 0:
        gradients = _native_backward(batched(grad_y), *block, mask)
    elif x.is_cuda:
        gradients = _fused_backward(batched(grad_y), *block, mask, saved, consume_saved, number)
    else:
        gradients = _native_backward(batched(grad_y), *block, mask, saved)
    outputs = []
    for gradient, owner in zip(gradients, (x, weight), strict=False):
        # Strides first: what else a memory format asks for is questions in Python, for 3 us.
        if gradient is not None and not dense_as(gradient, owner):
            gradient = gradient.contiguous(memory_format=memory_format_of(owner))
        outputs.append(gradient)
    if outputs[0] is not None and input.dim() == 4:
        outputs[0] = outputs[0].squeeze(0)
    outputs += gradients[2:]
    return [gradient if wanted else None for gradient, wanted in zip(outputs, mask, strict=True)]


def _backward_kernel(
    grad_y: Tensor,
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
    eps: float,
    precision: str,
    output_mask: Sequence[bool],
    saved: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """The backward operator: empty tensors for what is not asked for. It leaves its arguments as they are."""
    args = BlockArguments(stride, padding, output_padding, groups, dilation, num_groups, eps, precision)
    gradients = _kernel_gradients(
        grad_y, input, weight, bias, norm_weight, args, output_mask, saved, consume_saved=False
    )
    return tuple(input.new_empty((0,)) if gradient is None else gradient for gradient in gradients)


def kept_vector(vector: Tensor | None) -> Tensor | None:
    """What can be saved of a vector [K]. PyTorch's calls save a bias nowhere, and take one of
    inference_mode."""
    return vector.clone() if vector is not None and vector.is_inference() else vector


def _setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
    """output: the block, or of the operator for training the block and what it keeps."""
    input, weight, bias, stride, padding, output_padding, groups, dilation = inputs[:8]
    num_groups, norm_weight, _, eps, precision = inputs[8:]
    saved = None if isinstance(output, Tensor) else output[1]
    ctx.save_for_backward(input, weight, kept_vector(bias), norm_weight, saved)
    ctx.block = (stride, padding, output_padding, groups, dilation, num_groups, eps, precision)


def _is_transformed(grad_y: Tensor) -> bool:
    """Whether others than kernels see grad_y: is_grads_batched's vmap, and compilers of a backward pass."""
    # Compilers first: Dynamo, which compiled autograd asks to trace this, cannot ask the others.
    return is_traced(grad_y) or _is_mapped(grad_y)


def _is_mapped(grad_y: Tensor) -> bool:
    """Whether is_grads_batched's vmap, of either kind, sees grad_y."""
    return _is_legacy_batched(grad_y) or _is_batched(grad_y)


@as_backward
def _gradients(
    ctx: Any, grad_y: Tensor, mask: Sequence[bool], number: int | None = None
) -> Iterator[Tensor | None]:
    """Gradients of input, weight, bias, norm_weight and norm_bias; None where `mask` asks for none."""
    input, weight, bias, norm_weight, saved = ctx.saved_tensors
    args = BlockArguments(*ctx.block)
    if differentiates_again(grad_y):
        weight, bias, norm_weight = tied(ctx, (weight, bias, norm_weight))
        gradients = _differentiable_backward(
            batched(grad_y), batched(input), weight, bias, norm_weight, args, mask
        )
        if gradients[0] is not None:
            gradients[0] = gradients[0].reshape(input.shape)
    elif saved is not None and not _is_transformed(grad_y) and saved.numel() > 0:
        strides = getattr(ctx, "strides", None)  # nodes of operators by their public names keep none
        if strides is not None:
            input, weight = in_formats_of(strides, (input, weight))
        block = (input, weight, bias, norm_weight, args)
        # grad_c takes relu(conv)'s place.
        consume_saved = saved.is_cuda and may_consume(ctx)
        gradients = _kernel_gradients(grad_y, *block, mask, saved, consume_saved, number)
    else:
        op = torch.ops.upconv3d.conv_transpose3d_relu_group_norm_backward.default
        gradients = list(
            op(grad_y, input, weight, bias, *args[:6], norm_weight, args.eps, args.precision, mask, saved)
        )
    return (gradient if wanted else None for gradient, wanted in zip(gradients, mask, strict=True))


def _backward(ctx: Any, grad_y: Tensor, _: Tensor | None = None) -> tuple[Tensor | None, ...]:
    needs = ctx.needs_input_grad
    mask = [needs[0], needs[1], needs[2], needs[9], needs[10]]
    grad_x, grad_w, grad_bias, grad_norm_weight, grad_norm_bias = _gradients(ctx, grad_y, mask)
    unused = (None,) * 6  # stride, padding, output_padding, groups, dilation, num_groups
    return (grad_x, grad_w, grad_bias, *unused, grad_norm_weight, grad_norm_bias, None, None)


class ConvTranspose3dReLUGroupNorm(torch.autograd.Function):
    """The block as a node of autograd's graph, for calls that nothing but autograd looks at.

    What register() ties to the operator does the same by way of the dispatcher, in three times the host time.
    """

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        norm_weight: Tensor | None,
        norm_bias: Tensor | None,
        block: tuple[Any, ...],
        number: int | None,
        recompute: bool,
        cast: tuple[Any, ...] | None = None,
    ) -> Tensor:
        """`block` holds the fields of BlockArguments; the named tuple itself costs a tenth of this node.

        number: settings_number(block), None where the operator is to be called by its public name.
        cast: what cast_leaves made of the tensors behind `input`, if it did.
        """
        y: Tensor
        saved: Tensor | None = None
        keep_leaves(ctx, (weight, bias, norm_weight, norm_bias), cast)
        if cast is not None:
            weight, bias, norm_weight, norm_bias = cast[:4]
        if number is not None and not recompute:
            y, saved = numbered_block_for_training(input, weight, bias, norm_weight, norm_bias, number)
            ctx.save_for_backward(input, weight, kept_vector(bias), norm_weight, saved)
            ctx.block, ctx.number, ctx.strides = block, number, (input.stride(), weight.stride())
            return y
        stride, padding, output_padding, groups, dilation, num_groups, eps, precision = block
        arguments = (
            input,
            weight,
            bias,
            stride,
            padding,
            output_padding,
            groups,
            dilation,
            num_groups,
            norm_weight,
            norm_bias,
            eps,
            precision,
        )
        with torch._C._AutoDispatchBelowAutograd():
            if recompute:
                y = _recomputed_op(*arguments)
            else:
                y, saved = _training_op(*arguments)
        ctx.save_for_backward(input, weight, kept_vector(bias), norm_weight, saved)
        ctx.block, ctx.number, ctx.strides = block, number, (input.stride(), weight.stride())
        return y

    @staticmethod
    def backward(ctx: Any, grad_y: Tensor) -> tuple[Tensor | None, ...]:
        gradients: Sequence[Tensor | None]
        gradients = list(_gradients(ctx, grad_y, ctx.needs_input_grad[:5], ctx.number))
        if not (differentiates_again(grad_y) or _is_transformed(grad_y)):
            gradients = in_float32(ctx, gradients)
        return (*gradients, None, None, None, None)


# Function.apply without what it does for torch.func's transforms, under which this node is not used.
record_block: Callable[..., Tensor] = super(torch.autograd.Function, ConvTranspose3dReLUGroupNorm).apply


def _keeps(*arguments: Any) -> bool:
    """Whether a compiler can be told what the forward keeps; on a CPU it is the convolution, in any sizes."""
    if arguments[0].device.type != "cuda":
        return True
    return is_concrete(*arguments[:-1]) and kept_of(block_facts(*arguments)) is not None


def register() -> None:
    """Defines the backward operator and ties it to the forward; the package calls it once."""
    _library.define(  # type: ignore[no-untyped-call]
        "conv_transpose3d_relu_group_norm_backward(Tensor grad_y, Tensor input, Tensor weight, Tensor? bias, "
        "SymInt[] stride, SymInt[] padding, SymInt[] output_padding, SymInt groups, SymInt[] dilation, "
        "SymInt num_groups, "
        "Tensor? norm_weight, float eps, str precision, bool[] output_mask, Tensor? saved=None) "
        "-> (Tensor, Tensor, Tensor, Tensor, Tensor)"
    )
    for key in ("CPU", "CUDA"):
        _library.impl(  # type: ignore[no-untyped-call]
            "conv_transpose3d_relu_group_norm_backward", _backward_kernel, key
        )
    record_operator(_library, _NAME, _setup_context, _backward, _keeps)
    record_plainly(_library, f"{_NAME}_recomputed", _setup_context, _backward)
