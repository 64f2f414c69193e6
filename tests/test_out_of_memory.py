# SPDX-License-Identifier: Apache-2.0
"""What does not fit into a GPU's memory is refused by PyTorch's own exception, and leaves all as it was."""

import gc
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
import upconv3d
from oracles import make_block
from tails import make_call
from upconv3d import _tail_call, functional
from upconv3d._autograd import as_backward

WORDS = "upconv3d: CUDA out of memory. Allocating [1, 2] float32 on cuda:0 failed: "


def _fails(*_, **__):
    raise RuntimeError(WORDS)


@pytest.mark.parametrize("records", [False, True])
def test_words_of_an_operator_become_an_exception_of_pytorchs(records, monkeypatch):
    """A first call, whose numbers are checked, and one whose numbers are known."""
    block = make_block(2, 4, 6, 3, 3, num_groups=2, eps=2**-5 if records else 2**-6)
    block = block.requires_grad() if records else block
    ours = block.ours()
    monkeypatch.setattr(functional, "record_block" if records else "numbered_block", _fails)
    with pytest.raises(torch.OutOfMemoryError, match="float32 on cuda:0"):
        block.ours()
    with pytest.raises(torch.OutOfMemoryError, match="float32 on cuda:0"):
        replace(block, eps=block.eps / 8).ours()
    monkeypatch.undo()
    assert torch.equal(block.ours(), ours)


def test_words_of_the_familys_operator(monkeypatch):
    monkeypatch.setattr(_tail_call, "composite", _fails)
    with pytest.raises(torch.OutOfMemoryError, match="float32 on cuda:0"):
        make_call().ours()


def test_words_of_a_backward():
    with pytest.raises(torch.OutOfMemoryError, match="float32 on cuda:0"):
        as_backward(_fails)()
    with pytest.raises(RuntimeError, match="other") as raised:
        as_backward(lambda: (_ for _ in ()).throw(RuntimeError("other")))()
    assert type(raised.value) is RuntimeError


@contextmanager
def no_memory_left():
    """As a GPU whose memory is all in use, what PyTorch's allocator has cached too."""
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    total = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    torch.cuda.set_per_process_memory_fraction(torch.cuda.memory_reserved() / total)
    held = []
    try:
        for size in (1 << 22, 1 << 20, 1 << 16, 1 << 9):
            while True:
                try:
                    held.append(torch.empty(size, dtype=torch.uint8, device="cuda"))
                except torch.OutOfMemoryError:
                    break
        yield
    finally:
        held.clear()
        torch.cuda.set_per_process_memory_fraction(1.0)


# Of several plans.
BLOCKS = {
    "3-D": {"c": 64, "k": 64, "kernel": 3, "stride": 2, "padding": 1, "input": (16, 32, 32)},
    "pointwise": {"c": 320, "k": 320, "kernel": 1, "stride": 1, "padding": 0, "input": (20, 20, 20)},
    "few channels": {"c": 4, "k": 6, "kernel": 3, "stride": 2, "padding": 1, "input": (48, 48, 48)},
    "depthwise": {
        "c": 32,
        "k": 32,
        "kernel": 3,
        "stride": 2,
        "padding": 1,
        "input": (24, 24, 24),
        "groups": 32,
    },
}


def _operands(name, device, dtype):
    shape = dict(BLOCKS[name])
    c, k, kernel, extent = (shape.pop(key) for key in ("c", "k", "kernel", "input"))
    groups = shape.get("groups", 1)
    x = torch.randn(2, c, *extent, device=device, dtype=dtype)
    w = torch.randn(c, k // groups, *[kernel] * 3, device=device, dtype=dtype) / (c * kernel**3) ** 0.5
    return [x.requires_grad_(), w.requires_grad_()], shape | {"num_groups": 2}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("op", ["block", "family"])
@pytest.mark.parametrize("name", BLOCKS)
def test_nothing_left(name, op, dtype, cuda):
    """Forward without and with gradients, each as a first call and as another one; then the backward."""
    operands, options = _operands(name, cuda, dtype)
    run = upconv3d.conv_transpose3d_relu_group_norm
    if op == "family":
        run, options = upconv3d.conv_transpose3d_norm_act, options | {"activation": "silu"}
    with no_memory_left():
        for _ in range(2):
            with torch.no_grad(), pytest.raises(torch.OutOfMemoryError, match=r"CUDA out of memory\."):
                run(*operands, **options)
            with pytest.raises(torch.OutOfMemoryError, match=r"CUDA out of memory\."):
                run(*operands, **options)
    for retains in (False, True):
        y = run(*operands, **options)
        seed = torch.randn_like(y)
        with no_memory_left(), pytest.raises(torch.OutOfMemoryError, match=r"CUDA out of memory\."):
            torch.autograd.grad(y, operands, seed, retain_graph=retains)
    again = torch.autograd.grad(y, operands, seed, retain_graph=True)
    for gradient, wanted in zip(again, torch.autograd.grad(y, operands, seed), strict=True):
        torch.testing.assert_close(gradient, wanted)
    # As if nothing had been.
    y = run(*operands, **options)
    expected = F.group_norm(F.relu(F.conv_transpose3d(*operands, **_of_conv(options))), 2)
    if op == "family":
        expected = F.silu(F.group_norm(F.conv_transpose3d(*operands, **_of_conv(options)), 2))
    torch.testing.assert_close(y, expected, rtol=0.02, atol=0.02)
    for ours, theirs in zip(
        torch.autograd.grad(y, operands, seed), torch.autograd.grad(expected, operands, seed), strict=True
    ):
        assert (ours - theirs).norm() <= 0.02 * theirs.norm()


def _of_conv(options):
    return {key: options[key] for key in ("stride", "padding", "groups") if key in options}


def test_more_than_there_is(cuda):
    free, _ = torch.cuda.mem_get_info()
    # y alone is beyond what is free; the input is one expanded value.
    extent = int((free / 64) ** (1 / 3)) + 64
    x = torch.zeros(1, 1, 1, 1, 1, device=cuda).expand(1, 32, extent, extent, extent)
    w = torch.randn(32, 64, 1, 1, 1, device=cuda)
    with pytest.raises(torch.OutOfMemoryError, match=r"CUDA out of memory\."):
        upconv3d.conv_transpose3d_relu_group_norm(x, w, num_groups=2)
