# SPDX-License-Identifier: Apache-2.0
"""Random calls of the whole family, values and gradients against float64, from a printed seed.

Every argument of the convolution, both orders, norms, activations, skips, returned convolutions, dtypes,
memory formats and autocast, drawn together: what the tests of each alone do not meet.

A failure names UPCONV3D_SEED and the call; UPCONV3D_PROBLEMS sets how many are drawn on a GPU.
"""

import contextlib
import math
import random
from collections import Counter
from dataclasses import replace

import pytest
import torch
from conftest import SEED
from oracles import ERROR_FACTOR
from tails import COMBINATIONS, KINKED, Call, gradients, outputs
from test_random_problems import (
    BATCHES,
    CHANNELS,
    CONV_GROUPS,
    GPU_PROBLEMS,
    LARGEST_EXTENT,
    bits,
    deterministic_cudnn,
    random_axis,
)
from test_random_problems import outputs as outputs_of_axis

CPU_CALLS = 60
LONG_EXTENT = 40  # on a GPU, where it takes several tiles of every kernel
MOST_POSITIONS = 1 << 18  # of an output
MOST_PRODUCTS = 1 << 32  # of a sample: a second of PyTorch's float64
# dtype, precision, and whether autocast makes bfloat16 of it
KINDS = [
    (torch.bfloat16, None, False),
    (torch.float16, None, False),
    (torch.float32, "tf32", False),
    (torch.float32, "ieee", False),
    (torch.float64, None, False),
    (torch.float32, None, True),
]
FORMATS = ["NCDHW", "NDHWC", "input NDHWC", "weight NDHWC", "every other"]


def random_call(index: int, device: torch.device) -> tuple[str, Call, bool, bool]:
    """A call, its description for messages, whether autocast is on, and whether volumes are to be strided."""
    rng = random.Random(f"{SEED}/calls/{index}")
    largest = LONG_EXTENT if device.type == "cuda" and rng.random() < 0.25 else LARGEST_EXTENT
    axes = [random_axis(rng, largest) for _ in range(3)]
    # Instance norms of fewer positions are next to nothing but eps.
    while not 4 <= math.prod(map(outputs_of_axis, axes)) <= MOST_POSITIONS:
        axes[rng.randrange(3)] = random_axis(rng, largest)
    numbers = {name: tuple(axis[name] for axis in axes) for name in axes[0]}
    extent, kernel = numbers.pop("extent"), numbers.pop("kernel")
    groups, batch = rng.choice(CONV_GROUPS), rng.choice([(), (1,), (2,), (3,)])
    positions, taps = math.prod(map(outputs_of_axis, axes)), math.prod(kernel)
    while True:
        inputs, k = rng.choice(CHANNELS), groups * rng.choice(CHANNELS)
        if inputs * k * taps * positions <= MOST_PRODUCTS:
            break
    c = groups * inputs
    order, norm, activation = rng.choice(COMBINATIONS)
    dtype, precision, autocast = rng.choice(KINDS)
    torch.manual_seed(SEED + index)

    def normal(*sizes, scale=1.0, shift=0.0):
        return (torch.randn(*sizes, device=device) * scale + shift).to(dtype)

    tensors = {
        "input": normal(*batch, c, *extent),
        "weight": normal(c, k // groups, *kernel, scale=(inputs * taps) ** -0.5),
    }
    if rng.random() < 0.5:
        tensors["bias"] = normal(k, scale=0.3)
    if norm is not None and rng.random() < 0.7:
        tensors["norm_weight"] = normal(k, scale=0.3, shift=1)
        tensors["norm_bias"] = normal(k, scale=0.3)
    if activation == "prelu":
        tensors["slopes"] = normal(rng.choice([1, k]), scale=0.3)
    if rng.random() < 0.3:
        tensors["skip"] = normal(*batch, k, *map(outputs_of_axis, axes))
    call = Call(
        tensors,
        numbers | {"groups": groups},
        order=order,
        norm=norm,
        activation=activation,
        return_conv=rng.random() < 0.3,
        num_groups=rng.choice([g for g in range(1, k + 1) if k % g == 0]),
        precision=precision,
    )
    memory = rng.choice(FORMATS)
    if device.type == "cpu" and dtype is not torch.float64 and "NDHWC" in memory:
        # Torch 2.13's gradient of the weight by oneDNN was seen to write where it must not (80 > 96 of 2
        # groups, kernel (7, 4, 1)), and to return what lay in memory (24 > 2, kernel (3, 6, 3), bfloat16).
        memory = "NCDHW"
    if memory != "every other":
        named = {"NCDHW": (), "NDHWC": ("input", "weight", "skip")}
        call = call.channels_last(*named.get(memory, memory.split()[:1]))
    text = (
        f"UPCONV3D_SEED={SEED} call={index}: {list(tensors['input'].shape)} > {k}, kernel={kernel} "
        f"{call.numbers} {order} {norm} {activation} num_groups={call.num_groups} {sorted(tensors)} "
        f"return_conv={call.return_conv} {dtype} {precision} {memory}{' autocast' if autocast else ''}"
    )
    return text, call, autocast, memory == "every other"


def condition(call: Call) -> float:
    """How much of a group's deviation its size is, at most: what a norm magnifies errors by."""
    if call.norm is None:
        return 1.0
    before = call.activation if call.order == "act_norm" else None
    value = replace(call, norm=None, activation=before, return_conv=False, order="norm_act").eager()
    value = value if value.dim() == 5 else value.unsqueeze(0)
    groups = value.shape[1] if call.norm == "instance" else call.num_groups
    grouped = value.reshape(value.shape[0], groups, -1)
    size = grouped.square().mean(-1)
    return float((size / (grouped.var(-1, correction=0) + 1e-5)).max().sqrt().clamp(min=1))


def strided(call: Call) -> Call:
    """The same values, in every other element of memory."""
    volumes = {
        name: call.tensors[name].repeat_interleave(2, dim=-1)[..., ::2]
        for name in ("input", "skip")
        if name in call.tensors
    }
    return replace(call, tensors=call.tensors | volumes)


def at_the_kink(call: Call, eps: float, exact_grads: dict) -> dict[str, float]:
    """By how much each gradient changes, root mean square, where elements so close to the activation's kink
    that rounding decides on which side they lie take the other side."""
    if call.activation not in KINKED:
        return dict.fromkeys(exact_grads, 0.0)

    class Other(Call):
        def _activate(self, value):
            size = value.detach().square().mean().sqrt()
            near = (value.detach() != 0) & (value.detach().abs() <= eps * size)
            # The activation of -value, minus its value, has the derivative of the other side.
            return torch.where(near, -Call._activate(self, -value), Call._activate(self, value))

    other = Other(**vars(call))
    _, grads = gradients(other, Call.eager)
    return {name: float((grads[name] - grad).norm()) for name, grad in exact_grads.items()}


def with_skip(call: Call) -> Call:
    """A skip, so that its gradient is the one at the sum of convolution and skip."""
    if "skip" in call.tensors:
        return call
    sizes = outputs(call.eager())[0].shape
    zeros = torch.zeros(sizes, dtype=torch.float64, device=call.tensors["input"].device)
    return replace(call, tensors=call.tensors | {"skip": zeros})


def error(value: torch.Tensor, reference: torch.Tensor, terms: float = 0.0) -> float:
    """Root mean square over that of the reference, or of the terms that it is a sum of."""
    off = float((value.detach().double() - reference.detach()).norm())
    return off / max(float(reference.norm()), terms, 1e-300)


def check(call: Call, autocast: bool, is_strided: bool) -> bool:
    """Whether the call was compared: not where PyTorch's own results on the CPU are wrong."""
    device, dtype = call.tensors["input"].device, call.tensors["input"].dtype
    torch.backends.cudnn.conv.fp32_precision = call.precision or "tf32"
    casts = torch.autocast(device.type, torch.bfloat16) if autocast else contextlib.nullcontext()

    def ours(leaves: Call):
        return (strided(leaves) if is_strided else leaves).ours()

    # Torch 2.13's bfloat16 convolution by oneDNN was seen to leave outputs unwritten that no tap reaches (136
    # > 72, kernel (3, 4, 1), stride (3, 2, 3), output_padding (1, 0, 1)), and, without upconv3d, its gradient
    # of the input to end in a double free ([2, 16, 4, 9, 11] > 24, kernel 2, stride (2, 4, 1), padding
    # (1, 1, 2), output_padding (1, 1, 0), dilation (1, 1, 2)).
    broken = device.type == "cpu" and (autocast or dtype == torch.bfloat16)
    without = torch.backends.mkldnn.flags(enabled=False) if broken else contextlib.nullcontext()

    with casts, without:
        with torch.no_grad():
            alone, again = outputs(ours(call)), outputs(ours(call))
        results, grads = gradients(call, ours)
        eager, eager_grads = gradients(call, Call.eager)
    wide = with_skip(call.to(torch.float64))
    exact, exact_grads = gradients(wide, Call.eager)
    seeds = float(sum(y.numel() for y in exact)) ** 0.5  # of normal values
    sums = {"bias": max(float(exact_grads["skip"].norm()), seeds if call.return_conv else 0.0)}

    def terms(name: str) -> float:
        """What a gradient is a sum of, where it is one over positions."""
        return sums.get(name, seeds if exact_grads[name].dim() == 1 else 0.0)

    # Where each group is constant, what PyTorch makes of it is rounding alone, magnified.
    sizes = [0.1 * y.numel() ** 0.5 if call.norm is not None else 0.0 for y in exact]
    theirs = [error(*each) for each in zip(eager, exact, sizes, strict=True)]
    theirs += [error(grad, exact_grads[name], terms(name)) for name, grad in eager_grads.items()]
    if device.type == "cpu" and not all(off <= 1 for off in theirs):
        return False  # oneDNN's bfloat16 convolution in torch 2.11: NaN for some paddings
    magnified = condition(wide)
    if autocast:
        eps = torch.finfo(torch.bfloat16).eps
    elif dtype == torch.float64:
        # PyTorch's, whose sums of nearly equal terms may be off by as many roundings, is the reference (seen:
        # 6000 roundings, of 38700 terms of an instance norm). Float32's would be off by far more.
        y = exact[0] if exact[0].dim() == 5 else exact[0].unsqueeze(0)
        norm_groups = y.shape[1] if call.norm == "instance" else call.num_groups
        addends = y.numel() // min(y.shape[0] * norm_groups, y.shape[1])
        eps = min(2.0**-53 * max(1000, addends), 1e-11)
    elif dtype == torch.float32:
        # Of a few values PyTorch's may be exact; on CUDA its convolution may be float32's under "tf32".
        is_exact = device.type == "cpu" or call.precision == "ieee"
        eps = 4 * torch.finfo(dtype).eps if is_exact else 2.0**-10
    else:
        eps = torch.finfo(dtype).eps
    for y, y_again, kept, other, reference, size in zip(
        alone, again, results, eager, exact, sizes, strict=True
    ):
        assert y.dtype == kept.dtype == other.dtype and y.shape == kept.shape == other.shape
        if device.type == "cuda":
            assert torch.equal(bits(y), bits(y_again)), "two calls, two results"
        limit = max(ERROR_FACTOR * error(other, reference, size), 2 * magnified * eps)
        assert math.isfinite(limit), "PyTorch's own result is not finite"
        for what, result in (("y", y), ("y of training", kept)):
            found = error(result, reference, size)
            assert found <= limit, f"{what}: {found:.2e} of {limit:.2e}, condition {magnified:.1f}"
    moves = at_the_kink(wide, magnified * eps, exact_grads)
    for name, reference in exact_grads.items():
        if name not in call.tensors:
            continue
        grad, other = grads[name], eager_grads[name]
        assert grad is not None and grad.shape == other.shape and grad.dtype == other.dtype, name
        size = terms(name)
        moved = moves[name] / max(float(reference.norm()), size, 1e-300)
        limit = max(ERROR_FACTOR * error(other, reference, size), 8 * magnified**2 * eps + moved)
        found = error(grad, reference, size)
        assert found <= limit, f"grad of {name}: {found:.2e} of {limit:.2e}, condition {magnified:.1f}"
    return True


@pytest.mark.parametrize("batch", range(BATCHES))
def test_random_calls(device, batch, monkeypatch):
    deterministic_cudnn(monkeypatch)
    calls = GPU_PROBLEMS if device.type == "cuda" else CPU_CALLS
    wrong, kinds, compared = [], Counter(), 0
    for index in range(batch, calls, BATCHES):
        text, call, autocast, is_strided = random_call(index, device)
        kinds[call.norm, call.activation] += 1
        try:
            compared += check(call, autocast, is_strided)
        except (AssertionError, RuntimeError, ValueError) as error_found:
            wrong.append(f"{text}\n  {type(error_found).__name__}: {error_found}")
    total = sum(kinds.values())
    print(f"UPCONV3D_SEED={SEED}, batch {batch}: {compared} of {total} compared, {dict(kinds)}")
    assert not wrong, f"{len(wrong)} of {total} calls are wrong:\n" + "\n".join(wrong)
    assert compared > 0, "PyTorch's own results are wrong in all calls"
