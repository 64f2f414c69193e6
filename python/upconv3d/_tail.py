# SPDX-License-Identifier: Apache-2.0
"""What follows the convolution, as data and in PyTorch's operators, with its gradients.

    c = conv_transpose3d(x, weight, bias)
    act_norm:  y = norm(activation(c + skip))
    norm_act:  y = activation(norm(c + skip))

Instance norm is group norm with as many groups as channels. This is what runs on the CPU, and on CUDA where
upconv3d's kernels do not: autograd records the very operators that a model without upconv3d has.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor

from ._autograd import _is_batched
from ._convolution import BlockArguments, convolution, convolution_backward, precision_matters
from ._geometry import batched, dense_as, memory_format_of, surely

_aten = torch.ops.aten

ORDERS: tuple[str, ...] = ("norm_act", "act_norm")
NORMS: tuple[str | None, ...] = ("group", "instance", None)
ACTIVATIONS: tuple[str | None, ...] = (
    "relu",
    "leaky_relu",
    "elu",
    "silu",
    "gelu",
    "gelu_tanh",
    "prelu",
    None,
)
# activation_param where it is not given, as in torch.nn.
DEFAULT_PARAMETERS = {"leaky_relu": 0.01, "elu": 1.0}


class Settings(NamedTuple):
    """What the family's operator takes beside tensors; hot paths pass the same as a plain tuple."""

    stride: Sequence[int]
    padding: Sequence[int]
    output_padding: Sequence[int]
    groups: int
    dilation: Sequence[int]
    num_groups: int  # 0: no norm
    eps: float  # activation units squared
    precision: str  # "ieee" or "tf32"
    order: str
    activation: str  # "none": none
    parameter: float  # of "leaky_relu" and "elu"
    return_conv: bool

    def convolution(self) -> BlockArguments:
        return BlockArguments(*self[:8])

    def activation_first(self) -> bool:
        """Whether the activation is applied to c; without a norm there is nothing else to apply it to."""
        return self.order == "act_norm" or self.num_groups == 0


class Tensors(NamedTuple):
    """The operator's tensors in the order of its internal siblings; y's gradient may flow to each."""

    input: Tensor
    weight: Tensor
    bias: Tensor | None
    norm_weight: Tensor | None
    norm_bias: Tensor | None
    slopes: Tensor | None
    skip: Tensor | None


def is_apart(tensors: Sequence[Any], settings: Sequence[Any]) -> bool:
    """Whether others than norm and activation have to do with the convolution: a skip is added to it, or it
    is returned."""
    return settings[-1] or tensors[6] is not None


def is_plain(t: Tensors, s: Settings) -> bool:
    """Whether the call is a convolution, a norm and at most an activation, returned alone."""
    return s.num_groups > 0 and not is_apart(t, s)


def _is_tracing() -> bool:
    """Whether torch.jit.trace runs, whose graph would freeze a comparison of sizes."""
    return bool(torch.jit.is_tracing())  # type: ignore[attr-defined, no-untyped-call]


def _may_overwrite() -> bool:
    """Whether results of operators may be changed in place: not those that a mode sees, which may keep them,
    as a selective checkpoint does."""
    return torch.compiler.is_dynamo_compiling() or torch._C._len_torch_dispatch_stack() == 0


def _formats_are_known() -> bool:
    """Whether tensors can be asked for their memory format, and be given one: not while torch.jit.trace or a
    transform of torch.func runs."""
    if torch.compiler.is_dynamo_compiling():
        return True
    return not (_is_tracing() or torch._C._are_functorch_transforms_active())


def _may_lose_format(value: Tensor, s: Settings) -> bool:
    """Whether PyTorch's operators may return `value` in another memory format than the result is to have: the
    CPU's convolutions do, CUDA's norms, and its convolutions in float64 or without cuDNN. (In a graph the
    caller sees to that on CUDA.)"""
    if value.device.type != "cuda":
        return value.device.type in ("cpu", "meta")
    if torch.compiler.is_dynamo_compiling():
        return False
    return s.num_groups > 0 or value.dtype is torch.float64 or not torch.backends.cudnn.enabled


def _laid_out(tensor: Tensor, memory_format: torch.memory_format) -> Tensor:
    """tensor.contiguous(memory_format=memory_format) of [N, K, Z, P, Q]; in a graph, which may hold a vmap
    that has no such operator, by axes in another order."""
    if memory_format == torch.contiguous_format or not torch.compiler.is_dynamo_compiling():
        return tensor.contiguous(memory_format=memory_format)
    if memory_format_of(tensor) == memory_format:
        return tensor
    return tensor.permute(0, 2, 3, 4, 1).contiguous().permute(0, 4, 1, 2, 3)


class PreciseConvolution(torch.autograd.Function):
    """conv_transpose3d whose float32 precision on CUDA is an argument, in its backward too.

    What differentiates the backward once more follows PyTorch's setting.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None, args: BlockArguments) -> Tensor:
        return convolution(x, weight, bias, args)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, weight, _, ctx.args = inputs
        ctx.save_for_backward(x, weight)

    @staticmethod
    def backward(ctx: Any, grad_c: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        return (*convolution_backward(grad_c, x, weight, ctx.args, ctx.needs_input_grad[:3]), None)


def _activate(value: Tensor, s: Settings, slopes: Tensor | None, in_place: bool) -> Tensor:
    """The activation of [N, K, Z, P, Q].

    in_place: whether `value` may be overwritten, which is done where its gradient can be had from the result.
        (Autograd keeps ReLU's result either way. That of the others it keeps only where they run in place:
        then a caller could not change it. A trace may be run with gradients.)
    """
    activation = s.activation
    overwrite = in_place and s.parameter > 0 and not (value.requires_grad or _is_tracing())
    if activation == "relu":
        return F.relu(value, inplace=in_place)
    if activation == "leaky_relu":
        return F.leaky_relu(value, s.parameter, inplace=overwrite)
    if activation == "elu":
        return F.elu(value, s.parameter, inplace=overwrite)
    if activation == "silu":
        return F.silu(value)
    if activation == "gelu":
        return F.gelu(value)
    if activation == "gelu_tanh":
        return F.gelu(value, approximate="tanh")
    if activation == "prelu":
        assert slopes is not None
        return F.prelu(value, slopes)
    return value


def _normalize(value: Tensor, t: Tensors, s: Settings, instance: bool) -> Tensor:
    vectors = (t.norm_weight, t.norm_bias)
    if instance:
        return torch.instance_norm(
            value, *vectors, None, None, True, 0.1, s.eps, torch.backends.cudnn.enabled
        )
    if value.device.type == "cpu":
        # Of channels_last_3d the sums of group_norm lose the variance of a large mean.
        value = value.contiguous()
        # group_norm is up to 4 times as quick as instance_norm, but its backward takes sums of products less
        # their expectation, which costs accuracy where a mean is large; instance_norm's subtracts it first.
        # It takes no empty batch that has a norm weight, nor sizes that only data says. The backward of
        # group_norm fails where norm_bias alone, without a norm_weight, has a gradient.
        of_bias = t.norm_weight is None and t.norm_bias is not None and t.norm_bias.requires_grad
        if (
            not _is_tracing()
            and (value.requires_grad or of_bias)
            and s.num_groups == value.shape[1]
            and surely(value.numel() > 0)
        ):
            return torch.instance_norm(value, *vectors, None, None, True, 0.1, s.eps, False)
    return torch.group_norm(value, s.num_groups, *vectors, s.eps)


def in_format_of_result(tensor: Tensor, t: Tensors) -> Tensor:
    """channels_last_3d where input or weight is, which PyTorch's operators do not return on every device."""
    memory_format = memory_format_of(batched(t.input), t.weight)
    whole = batched(tensor).contiguous(memory_format=memory_format)
    return whole if tensor.dim() == 5 else whole.squeeze(0)


def refuse_skip(skip: Tensor, sizes: Sequence[int]) -> NoReturn:
    raise RuntimeError(
        f"upconv3d: skip must have the sizes of the convolution's output; got skip.size()={list(skip.shape)} "
        f"for an output of {list(sizes)}. Resize or expand it first."
    )


def composite(
    tensors: Sequence[Any], settings: Sequence[Any], precise: bool, instance: bool = False
) -> tuple[Tensor, Tensor | None]:
    """y, and c where it is returned, in operators that PyTorch differentiates, casts and traces itself.

    Args:
        tensors, settings: the fields of Tensors and of Settings.
        precise: whether settings' precision is to hold whatever PyTorch's own setting says, which concerns
            float32 on CUDA. (Where it was taken from that setting, a backward pass shall follow it too.)
        instance: whether a norm of as many groups as channels is to be PyTorch's instance_norm.
    """
    t, s = Tensors(*tensors), Settings(*settings)
    x = batched(t.input)
    if precise and precision_matters(x) and not torch.is_autocast_enabled("cuda"):
        convolve = PreciseConvolution.apply if torch.is_grad_enabled() else convolution
        c: Tensor = convolve(x, t.weight, t.bias, s.convolution())
    else:
        c = torch.conv_transpose3d(
            x, t.weight, t.bias, s.stride, s.padding, s.output_padding, s.groups, s.dilation
        )
    value = c
    overwrites = _may_overwrite()
    if t.skip is not None:
        summand = batched(t.skip)
        if not _is_tracing() and summand.shape != c.shape:
            refuse_skip(t.skip, c.shape if t.input.dim() == 5 else c.shape[1:])
        value = c + summand
    if s.activation_first():
        is_own = t.skip is not None or not s.return_conv
        value = _activate(value, s, t.slopes, in_place=is_own and overwrites)
    if s.num_groups > 0:
        value = _normalize(value, t, s, instance)
    if not s.activation_first():
        value = _activate(value, s, t.slopes, in_place=overwrites)
    conv = c if s.return_conv else None
    if _may_lose_format(value, s) and _formats_are_known():
        memory_format = memory_format_of(x, t.weight)
        value = _laid_out(value, memory_format)
        conv = None if conv is None else _laid_out(conv, memory_format)
    if t.input.dim() == 4:
        return value.squeeze(0), None if conv is None else conv.squeeze(0)
    return value, conv


def autocast_result_dtype(
    low: torch.dtype, device_type: str, norm: str | None, settings: Sequence[Any]
) -> Any:
    """The dtype that PyTorch's own calls return under autocast to `low`.

    conv_transpose3d and prelu run in it, group_norm in float32 on CUDA; the others, and instance_norm, in
    the dtype of what they get.
    """
    order, activation = settings[8:10]
    lowered = order == "norm_act" and activation == "prelu"
    return torch.float32 if norm == "group" and device_type == "cuda" and not lowered else low


def begins_with_result(settings: Sequence[Any]) -> bool:
    """Whether the backward of a call without a norm reads the result, which is ReLU's, or nothing but its
    gradient, as there is no activation."""
    return settings[5] == 0 and settings[9] in ("relu", "none")


def keeps_operand(tensors: Sequence[Any], settings: Sequence[Any]) -> bool:
    """Whether the backward of a call on CUDA begins with its operand: of a norm whose convolution is
    returned, or has a skip added to it, what the norm or the activation before it applies to (operand_of); of
    calls without a norm what their activation applies to or, where begins_with_result, what it made."""
    if tensors[0].dtype is torch.float64:
        return False
    if settings[5] > 0:
        return is_apart(tensors, settings)
    # With nothing but the convolution, that would be returned twice.
    return settings[9] != "none" or not settings[-1] or tensors[6] is not None


def reads_returned(tensors: Sequence[Any], settings: Sequence[Any]) -> bool:
    """Whether that is the very convolution that the call returned.

    Of ReLU before a norm PyTorch reads its result: there a caller may change the convolution in place.
    """
    relu_first = settings[9] == "relu" and (settings[8] == "act_norm" or settings[5] == 0)
    return settings[-1] and tensors[6] is None and not relu_first and keeps_operand(tensors, settings)


def settings_of_kept(tensors: Sequence[Any], settings: Sequence[Any]) -> tuple[Any, ...]:
    """The settings of which kernels get the number, forward and backward, of a call that keeps_operand: where
    that is an operand_of, those of a call that returns its convolution."""
    bare = begins_with_result(settings) or (settings[5] == 0 and tensors[6] is None)
    return tuple(settings) if bare or not keeps_operand(tensors, settings) else (*settings[:-1], True)


def operand_of(conv: Tensor, tensors: Sequence[Any], settings: Sequence[Any]) -> Tensor:
    """What norm and activation apply to where the convolution is returned, for a backward that begins with
    it: the convolution itself, where reads_returned; else a tensor of its own, [N, K, Z, P, Q] in the
    result's format: the sum with the skip, or ReLU's result, of which ReLU makes nothing else, and which lets
    the same gradients through. (Without a norm the convolution, or nothing.)
    """
    if reads_returned(tensors, settings):
        return conv
    input, weight, skip = tensors[0], tensors[1], tensors[6]
    operand = conv.relu() if skip is None else conv + skip
    return batched(operand).contiguous(memory_format=memory_format_of(batched(input), weight))


def reachable(mask: Sequence[bool], grad_y: Tensor | None, grad_conv: Tensor | None) -> list[bool]:
    """`mask` without what gets no gradient: from the returned convolution none flows to what follows it."""
    flows = [grad_y is not None or grad_conv is not None] * 3 + [grad_y is not None] * (len(mask) - 3)
    return [wanted and flowing for wanted, flowing in zip(mask, flows, strict=True)]


def _activation_backward(
    grad: Tensor, value: Tensor, s: Settings, slopes: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Gradients of what was activated, [N, K, Z, P, Q], and of a PReLU's slopes."""
    activation = s.activation
    result: Tensor = grad
    if activation == "relu":
        result = _aten.threshold_backward.default(grad, value, 0)
    elif activation == "leaky_relu":
        result = _aten.leaky_relu_backward.default(grad, value, s.parameter, False)
    elif activation == "elu":
        result = _aten.elu_backward.default(grad, s.parameter, 1, 1, False, value)
    elif activation == "silu":
        result = _aten.silu_backward.default(grad, value)
    elif activation == "gelu":
        result = _aten.gelu_backward.default(grad, value)
    elif activation == "gelu_tanh":
        result = _aten.gelu_backward.default(grad, value, approximate="tanh")
    elif activation == "prelu":
        assert slopes is not None
        per_channel = slopes.reshape(1, -1, 1, 1, 1).to(value.dtype)
        result, products = _aten._prelu_kernel_backward.default(grad, value, per_channel)
        axes = (0, 2, 3, 4) if slopes.numel() > 1 else (0, 1, 2, 3, 4)
        return result, products.sum(axes).reshape(slopes.shape)
    return result, None


class _NormState(NamedTuple):
    """What native_group_norm computed, and what its backward reads."""

    result: Tensor
    operand: Tensor
    mean: Tensor
    rstd: Tensor
    gamma: Tensor | None


def _norm(value: Tensor, t: Tensors, s: Settings) -> _NormState:
    value = value.contiguous()  # see _native_backward
    gamma, beta = (None if v is None else v.contiguous() for v in (t.norm_weight, t.norm_bias))
    n, k, positions = value.shape[0], value.shape[1], value.shape[2] * value.shape[3] * value.shape[4]
    y, mean, rstd = _aten.native_group_norm.default(value, gamma, beta, n, k, positions, s.num_groups, s.eps)
    return _NormState(y, value, mean, rstd, gamma)


def _norm_backward(
    grad: Tensor, norm: _NormState, s: Settings, mask: Sequence[bool]
) -> tuple[Tensor, Tensor, Tensor]:
    value = norm.operand
    grad = grad.contiguous()
    n, k, positions = value.shape[0], value.shape[1], value.shape[2] * value.shape[3] * value.shape[4]
    mean = norm.mean
    if value.device.type == "cpu" and s.num_groups == k:  # see _normalize
        value, mean = value - mean.view(n, k, 1, 1, 1), torch.zeros_like(mean)
    gradients: tuple[Tensor, Tensor, Tensor] = _aten.native_group_norm_backward.default(
        grad, value, mean, norm.rstd, norm.gamma, n, k, positions, s.num_groups, mask
    )
    return gradients


def tail_backward(
    grad_y: Tensor | None,
    grad_conv: Tensor | None,
    tensors: Sequence[Any],
    settings: Sequence[Any],
    mask: Sequence[bool],
) -> list[Tensor | None]:
    """Gradients of Tensors' fields, None where `mask` asks for none, below autograd; c is computed again.

    At least one of grad_y and grad_conv (of y and of the returned c) is given.
    """
    t, s = Tensors(*tensors), Settings(*settings)
    x, args = batched(t.input), s.convolution()
    grad_slopes: Tensor | None = None
    grad_value: Tensor | None = None
    grad_norms: Sequence[Tensor | None] = (None, None)
    if grad_y is not None:
        grad = batched(grad_y)
        c = convolution(x, t.weight, t.bias, args)
        value = c if t.skip is None else c + batched(t.skip)
        del c  # what is not read again is freed: these are the largest tensors of a training step
        norm_mask = [any(mask[:3]) or mask[5] or mask[6], mask[3], mask[4]]
        if not s.activation_first():
            norm = _norm(value, t, s)
            grad, grad_slopes = _activation_backward(grad.to(value.dtype), norm.result, s, t.slopes)
            grad_value, *grad_norms = _norm_backward(grad, norm, s, norm_mask)
        else:
            if s.num_groups > 0:
                norm = _norm(_activate(value, s, t.slopes, in_place=False), t, s)
                grad, *grad_norms = _norm_backward(grad.to(value.dtype), norm, s, norm_mask)
                del norm
            if norm_mask[0]:
                grad_value, grad_slopes = _activation_backward(grad, value, s, t.slopes)
        del value, grad
    grad_c = None if grad_value is None else grad_value.to(x.dtype)
    if grad_conv is not None:
        grad_c = batched(grad_conv) if grad_c is None else grad_c + batched(grad_conv)
    grads: Sequence[Tensor | None] = (None, None, None)
    if grad_c is not None:
        grads = convolution_backward(grad_c, x, t.weight, args, list(mask[:3]))
    gradients = [*grads, *grad_norms, grad_slopes, grad_value]
    return in_sizes_of(t, gradients, mask)


def in_sizes_of(t: Sequence[Any], gradients: Sequence[Any], mask: Sequence[bool]) -> list[Tensor | None]:
    """Gradients in the sizes, dtype and, of input, weight and skip, memory format of what they belong to.

    t: the fields of Tensors.
    """
    return [
        _in_size_of(tensor, gradient) if wanted and gradient is not None and tensor is not None else None
        for tensor, gradient, wanted in zip(t, gradients, mask, strict=True)
    ]


def _in_size_of(tensor: Tensor, gradient: Tensor) -> Tensor:
    if gradient.dtype is not tensor.dtype:
        gradient = gradient.to(tensor.dtype)
    shape = tensor.shape
    same = gradient.shape == shape
    # Strides first: what else a memory format asks for is questions in Python, for 3 us.
    # vmap's tensors cannot be asked for a format.
    if gradient.dim() == 5 and not _is_batched(gradient) and not (same and dense_as(gradient, tensor)):
        gradient = gradient.contiguous(memory_format=memory_format_of(batched(tensor)))
    return gradient if same else gradient.reshape(shape)


def differentiable_backward(
    grad_y: Tensor | None,
    grad_conv: Tensor | None,
    tensors: Sequence[Any],
    settings: Sequence[Any],
    mask: Sequence[bool],
) -> list[Tensor | None]:
    """The same gradients, in operators that autograd can differentiate, and forward-mode AD; called above
    autograd."""
    twice = torch.is_grad_enabled()
    with torch.enable_grad():
        # Views cut off what else the tensors may depend on: each other, say.
        views = [None if tensor is None else tensor.view_as(tensor) for tensor in tensors]
        y, conv = composite(views, settings, precise=True)
    pairs: list[tuple[Any, Tensor]] = [
        (out, grad)
        for out, grad in ((y, grad_y), (conv, grad_conv))
        if grad is not None and out is not None and out.requires_grad
    ]
    wanted = [view for view, needed in zip(views, mask, strict=True) if needed and view is not None]
    found = iter(
        torch.autograd.grad(
            [out for out, _ in pairs],
            wanted,
            [grad for _, grad in pairs],
            create_graph=twice,
            allow_unused=True,
        )
    )
    return [
        next(found) if needed and view is not None else None for view, needed in zip(views, mask, strict=True)
    ]
