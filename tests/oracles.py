# SPDX-License-Identifier: Apache-2.0
"""What a right answer is.

1. Small integers: conv + ReLU is exact in every dtype, so it is compared exactly, the normalization undone.
2. Error against float64 at most twice PyTorch's error in the same precision (FlashAttention's rule). Beyond
   that, sums over positions may be off by the rounding of their terms (reference_gradients).
3. ReLU's gradient jumps at 0: elements of the convolution so close to 0 that rounding decides their gate may
   go either way, and the gradients may differ by what those elements can contribute, no more.
"""

import gc
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import pytest
import torch
import torch.nn.functional as F
import upconv3d
from torch import Tensor

ERROR_FACTOR = 2.0
NAMES = ("input", "weight", "bias", "norm_weight", "norm_bias")


@dataclass
class Block:
    """One call: tensors and numbers."""

    input: Tensor
    weight: Tensor
    bias: Tensor | None = None
    stride: int | tuple[int, ...] = 1
    padding: int | tuple[int, ...] = 0
    output_padding: int | tuple[int, ...] = 0
    groups: int = 1
    dilation: int | tuple[int, ...] = 1
    num_groups: int = 1
    norm_weight: Tensor | None = None
    norm_bias: Tensor | None = None
    eps: float = 1e-5
    precision: str | None = field(default="ieee")

    def tensors(self) -> dict[str, Tensor]:
        return {name: getattr(self, name) for name in NAMES if getattr(self, name) is not None}

    def map(self, function) -> "Block":
        return replace(self, **{name: function(tensor) for name, tensor in self.tensors().items()})

    def to(self, dtype) -> "Block":
        return self.map(lambda tensor: tensor.detach().to(dtype))

    def requires_grad(self) -> "Block":
        return self.map(
            lambda tensor: tensor.detach().clone(memory_format=torch.preserve_format).requires_grad_()
        )

    def channels_last(self) -> "Block":
        def convert(tensor: Tensor) -> Tensor:
            if tensor.dim() == 4:
                return tensor.unsqueeze(0).contiguous(memory_format=torch.channels_last_3d).squeeze(0)
            return tensor.contiguous(memory_format=torch.channels_last_3d)

        return replace(self, input=convert(self.input), weight=convert(self.weight))

    def conv(self) -> Tensor:
        """[N, K, Z, P, Q], also for an unbatched input."""
        x = self.input.unsqueeze(0) if self.input.dim() == 4 else self.input
        return F.conv_transpose3d(
            x,
            self.weight,
            self.bias,
            self.stride,
            self.padding,
            self.output_padding,
            self.groups,
            self.dilation,
        )

    def norm(self, a: Tensor) -> Tensor:
        y = F.group_norm(a, self.num_groups, self.norm_weight, self.norm_bias, self.eps)
        return y.squeeze(0) if self.input.dim() == 4 else y

    def eager(self) -> Tensor:
        """PyTorch's three calls, in the precision of the block."""
        if self.precision is not None and self.input.is_cuda and self.input.dtype == torch.float32:
            before = torch.backends.cudnn.conv.fp32_precision
            torch.backends.cudnn.conv.fp32_precision = self.precision
            try:
                return self.norm(F.relu(self.conv()))
            finally:
                torch.backends.cudnn.conv.fp32_precision = before
        return self.norm(F.relu(self.conv()))

    def arguments(self) -> tuple[tuple, dict]:
        args = (
            self.input,
            self.weight,
            self.bias,
            self.stride,
            self.padding,
            self.output_padding,
            self.groups,
        )
        args += (self.dilation,)
        names = ("num_groups", "norm_weight", "norm_bias", "eps", "precision")
        return args, {name: getattr(self, name) for name in names}

    def ours(self) -> Tensor:
        args, kwargs = self.arguments()
        return upconv3d.conv_transpose3d_relu_group_norm(*args, **kwargs)

    def plan(self) -> upconv3d.Plan:
        args, kwargs = self.arguments()
        return upconv3d.explain(*args, **kwargs)


def make_block(
    n, c, k, extent, kernel, *, groups=1, bias=True, affine=True, device="cpu", dtype=torch.float32, **numbers
) -> Block:
    """A random block; `n` None gives an unbatched input. weight's scale keeps activations near 1."""
    extent = (extent,) * 3 if isinstance(extent, int) else tuple(extent)
    kernel = (kernel,) * 3 if isinstance(kernel, int) else tuple(kernel)
    batch = () if n is None else (n,)
    scale = (c // groups * kernel[0] * kernel[1] * kernel[2]) ** -0.5

    def random(*sizes):
        return torch.randn(*sizes, device=device, dtype=torch.float32)

    block = Block(
        input=random(*batch, c, *extent),
        weight=random(c, k // groups, *kernel) * scale,
        bias=random(k) * 0.3 if bias else None,
        groups=groups,
        norm_weight=random(k) * 0.3 + 1 if affine else None,
        norm_bias=random(k) * 0.3 if affine else None,
        **numbers,
    )
    return block.to(dtype)


def alike_blocks(device="cpu", dtype=torch.float32, precision="ieee") -> Iterator[Block]:
    """Constant volumes: whole tiles of a channel are alike, as phases of a stride or as lines amid borders.

    Rounding such values does not average out of their mean. Where the taps of kernel = stride are alike, too,
    y is beta, and a mean that is off by half an ulp of 16 bits moves it by about 1.
    """
    shapes = (((1, 64, 64, 8, 2), {"stride": 2}), ((1, 32, 64, (2, 3, 300), 3), {}))
    for (sizes, numbers), num_groups, taps_alike in itertools.product(shapes, (4, 64), (False, True)):
        options = {"num_groups": num_groups, "device": device, "dtype": dtype, "precision": precision}
        block = make_block(*sizes, **options, **numbers)
        # Operands are exact in TF32, for sums may nearly cancel.
        weight = block.weight.to(torch.bfloat16).to(dtype)
        weight = weight[:, :, :1, :1, :1].expand_as(weight).contiguous() if taps_alike else weight
        yield replace(block, input=torch.full_like(block.input, 3), weight=weight)


def check_alike(block: Block) -> None:
    """Oracle 2. Where y is beta, a scale of 1/sqrt(eps) is what float32's own rounding is multiplied by."""
    in_float32 = block.input.dtype is torch.float32 and block.precision == "ieee"
    check_like_eager(block, floor_factor=block.eps**-0.5 if in_float32 else 1)


def relative_error(value: Tensor, reference: Tensor) -> float:
    """Root mean square of the error over that of the reference."""
    if reference.numel() == 0:
        return 0.0
    value, reference = value.detach(), reference.detach()
    norm = float(reference.norm())
    return float((value.double() - reference).norm()) / (norm if norm > 0 else 1.0)


def error_floor(block: Block) -> float:
    """An error that passes whatever PyTorch's is, for on a small shape that may be exact to the last bit."""
    dtype = block.input.dtype
    if block.input.is_cuda and dtype == torch.float32 and block.precision == "tf32":
        return 2.0**-11  # operands of a 10-bit mantissa, where PyTorch may have taken a float32 kernel
    if dtype == torch.float32:
        # On CUDA float16 in three products (22 bits and their accumulation). On the CPU the error of oneDNN's
        # convolution depends on the memory format, which PyTorch and we choose differently.
        return 4 * torch.finfo(dtype).eps
    if dtype == torch.float64:
        return 8 * torch.finfo(dtype).eps  # PyTorch's result is the reference itself
    return torch.finfo(dtype).eps


def check_sm90_or_small(plan: upconv3d.Plan, channels: int) -> None:
    """The SM90 plan, or another with a reason of its own: a small block, tiles that samples leave empty, a
    convolution that cuDNN is quick with, few channels. test_forced_sm90.py has such blocks by the SM90 plan.

    channels: of the output; the kernel for few channels is for 64 of a convolution group at most.
    """
    reasons = {
        "cuda_library": (
            "a small block",
            "tiles are filled",
            "cuDNN's convolution and what follows it are expected to take",
            "a matmul as it lies",
        ),
        "cuda_direct": ("few channels",),
        "cuda_col2im": ("a matrix product and a gather",),
    }
    if plan.algorithm == "sm90_implicit_gemm":
        return
    assert any(reason in plan.reason for reason in reasons[plan.algorithm]), plan
    assert plan.algorithm != "cuda_direct" or channels <= 64 * plan.problem["groups"], plan


def check_like_eager(block: Block, floor_factor: float = 1) -> None:
    """Shape, dtype, device, and oracle 2 on the values; floor_factor widens error_floor."""
    y, y_eager = block.ours(), block.eager()
    assert y.shape == y_eager.shape
    assert y.dtype == y_eager.dtype
    assert y.device == y_eager.device
    reference = block.to(torch.float64).eager()
    on_cpu = not y_eager.is_cuda and y_eager.dtype is torch.bfloat16
    if on_cpu and not y_eager.isfinite().all() and reference.isfinite().all():
        # oneDNN's in torch 2.11, for some paddings
        pytest.skip(f"PyTorch's own convolution is not finite: {block.plan()}")
    error, eager_error = relative_error(y, reference), relative_error(y_eager, reference)
    limit = max(ERROR_FACTOR * eager_error, floor_factor * error_floor(block))
    assert error <= limit, f"error {error:.3e}, PyTorch's {eager_error:.3e}, plan {block.plan()}"


def _takes_tf32(block: Block) -> bool:
    return block.precision == "tf32" and block.input.dtype == torch.float32 and block.input.is_cuda


def reference_gradients(
    block: Block, grad_y: Tensor, band: float
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """float64 gradients, and how much each may move: those of the convolution when every |c| <= band*max|c|
    takes the other gate, sums over positions by the rounding in c, a sum of products, that moves each term.
    """
    wide = block.to(torch.float64).requires_grad()
    c = wide.conv()
    a = F.relu(c).detach().requires_grad_()
    y = wide.norm(a)
    tensors = wide.tensors()
    norm_tensors = [tensors[name] for name in ("norm_weight", "norm_bias") if name in tensors]
    grad_a, *grad_norms = torch.autograd.grad(y, [a, *norm_tensors], grad_y.double())
    conv_names = [name for name in ("input", "weight", "bias") if name in tensors]
    conv_tensors = [tensors[name] for name in conv_names]
    grads = dict(
        zip(
            conv_names, torch.autograd.grad(c, conv_tensors, grad_a * (c > 0), retain_graph=True), strict=True
        )
    )
    grads |= dict(zip([n for n in ("norm_weight", "norm_bias") if n in tensors], grad_norms, strict=True))
    near = (
        (c.detach().abs() <= band * c.detach().abs().amax())
        if c.numel()
        else torch.zeros_like(c, dtype=torch.bool)
    )
    magnitude = wide.map(lambda tensor: tensor.detach().abs()).requires_grad()
    moves = torch.autograd.grad(
        magnitude.conv(), [magnitude.tensors()[name] for name in conv_names], grad_a.abs() * near
    )
    slack = {name: torch.zeros_like(grad) for name, grad in grads.items()}
    slack |= dict(zip(conv_names, moves, strict=True))
    # Terms of either sign may cancel, roundings of them do not. They add up as a random walk.
    eps = torch.finfo(torch.promote_types(block.input.dtype, torch.float32)).eps
    walk = (wide.weight[:, 0].numel() // wide.groups) ** 0.5 * eps
    if block.input.dtype in (torch.float16, torch.bfloat16):
        walk += torch.finfo(block.input.dtype).eps / 2  # c is kept in that dtype, PyTorch's and ours
    if _takes_tf32(block):
        walk += 2.0**-11  # operands are rounded to as many bits, at least by ours
    per_channel = [axis for axis in range(c.dim()) if axis != c.dim() - 4]

    def wander(terms: Tensor) -> Tensor:
        return walk * terms.detach().square().sum(per_channel).sqrt()

    if "norm_weight" in tensors:
        xhat = replace(wide, norm_weight=None, norm_bias=None).norm(a)
        slack["norm_weight"] = wander(grad_y.double().reshape(c.shape) * xhat.reshape(c.shape))
    if "bias" in tensors:
        slack["bias"] = slack["bias"] + wander(grad_a)
    return grads, slack


def check_gradients_like_eager(block: Block) -> None:
    """Oracles 2 and 3 on the gradients of every tensor, and their sizes and dtypes."""
    ours, eager = block.requires_grad(), block.requires_grad()
    y, y_eager = ours.ours(), eager.eager()
    grad_y = torch.randn_like(y)
    y.backward(grad_y)
    before = torch.backends.cudnn.conv.fp32_precision
    if block.precision is not None and before != block.precision:
        torch.backends.cudnn.conv.fp32_precision = block.precision
    y_eager.backward(grad_y)
    if torch.backends.cudnn.conv.fp32_precision != before:
        torch.backends.cudnn.conv.fp32_precision = before
    eps = torch.finfo(block.input.dtype).eps
    if _takes_tf32(block):
        eps = 2.0**-10
    references, slacks = reference_gradients(block, grad_y, band=8 * eps)
    for name, reference in references.items():
        gradient = getattr(ours, name).grad
        other = getattr(eager, name).grad
        assert gradient is not None, name
        assert gradient.shape == reference.shape and gradient.dtype == block.input.dtype, name

        def excess(value, reference=reference, slack=slacks[name]):
            off = ((value.double() - reference).abs() - slack).clamp(min=0)
            return float(off.norm() / reference.norm().clamp(min=1e-300)) if off.numel() else 0.0

        limit = max(ERROR_FACTOR * excess(other), 4 * eps)
        assert excess(gradient) <= limit, f"{name}: {excess(gradient):.3e} against {limit:.3e}"


def integer_block(
    n, c, k, extent, kernel, *, device="cpu", dtype=torch.float32, magnitude=1, **numbers
) -> Block:
    """Sparse small integers, one channel per norm group, no affine: conv + ReLU is exact in any dtype."""
    block = make_block(n, c, k, extent, kernel, device=device, affine=False, num_groups=k, **numbers)

    def integers(tensor: Tensor) -> Tensor:
        values = torch.randint(-magnitude, magnitude + 1, tensor.shape, device=device)
        return (values * (torch.rand(tensor.shape, device=device) < 0.5)).to(dtype)

    return block.map(integers)


def check_exact_relu_conv(block: Block) -> None:
    """Oracle 1: y*sqrt(var + eps) + mean, rounded to an integer, is relu(conv), everywhere."""
    exact = F.relu(block.to(torch.float64).conv())
    assert float(exact.max()) <= 64, "beyond what bfloat16's normalized values can be read back from"
    var, mean = torch.var_mean(exact, dim=(2, 3, 4), correction=0, keepdim=True)
    y = block.ours()
    y = y.unsqueeze(0) if y.dim() == 4 else y
    recovered = y.double() * torch.sqrt(var + block.eps) + mean
    assert torch.equal(recovered.round(), exact)


def peak_memory_bytes(call: Callable[[], object]) -> int:
    """Peak of PyTorch's CUDA allocator in one warm call, what it returns included, in bytes.

    Whatever ran before: tensors that it left in cycles would be freed meanwhile, and of cached pieces up to
    1 MiB more than was asked for counts as taken.
    """
    call()
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before
