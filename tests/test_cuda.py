# SPDX-License-Identifier: Apache-2.0
"""What only a GPU has: streams, other devices, CUDA graphs, the SM90 plan's edges."""

from dataclasses import replace

import pytest
import torch
from oracles import check_exact_relu_conv, check_like_eager, check_sm90_or_small, integer_block, make_block
from test_values import shape_block


def test_non_default_stream(cuda):
    block = shape_block("padding", device=cuda)
    expected = block.ours()
    stream = torch.cuda.Stream()
    doubled = block.input.clone()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)  # a kernel on another stream would overtake the multiplication
        doubled.mul_(2).div_(2)
        y = replace(block, input=doubled).ours()
        total = y.sum()
    stream.synchronize()
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(total, expected.sum(), rtol=1e-3, atol=1e-2)


def test_second_gpu(cuda):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    block = shape_block("padding", device="cuda:0")
    expected = block.ours()
    assert torch.cuda.current_device() == 0
    other = block.map(lambda tensor: tensor.to("cuda:1"))
    y = other.requires_grad().ours()
    assert y.device == torch.device("cuda:1") and torch.cuda.current_device() == 0
    torch.testing.assert_close(y.cpu(), expected.cpu(), rtol=1e-4, atol=1e-4)
    y.sum().backward()


def test_cuda_graph(cuda):
    block = shape_block("padding", device=cuda)
    block.ours()
    static = replace(block, input=block.input.clone())
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            static.ours()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = static.ours()
    static.input.copy_(block.input * 3 + 1)
    graph.replay()
    torch.testing.assert_close(y, static.ours(), rtol=1e-5, atol=1e-5)


def test_does_not_wait_for_the_gpu(cuda):
    """A call returns while the GPU is still busy: nothing synchronizes."""
    block = shape_block("padding", device=cuda)
    block.ours()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        block.ours()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    "channels",
    [(8, 8), (72, 136), (136, 72), (256, 64), (3, 100), (64, 2), (100, 3), (20, 20), (48, 100), (100, 24)],
)
@pytest.mark.parametrize("extent", [(1, 1, 3), (9, 4, 17)])
def test_channels_around_the_tile(hopper, channels, extent, dtype):
    c, k = channels
    num_groups = 4 if k % 4 == 0 else 1
    block = make_block(2, c, k, extent, 3, num_groups=num_groups, device=hopper, dtype=dtype)
    check_sm90_or_small(block.plan(), k)
    check_like_eager(block)
    check_like_eager(block.channels_last())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("channels", [(128, 256), (128, 96), (32, 64), (20, 128), (40, 272), (256, 128)])
@pytest.mark.parametrize("groups", [2, 4])
def test_convolution_groups(hopper, channels, groups, dtype):
    """By whatever plan; by the SM90 plan in test_forced_sm90.py."""
    c, k = channels
    block = make_block(2, c, k, (4, 5, 9), 3, num_groups=4, groups=groups, device=hopper, dtype=dtype)
    for precision in ("ieee", "tf32"):
        case = replace(block, precision=precision)
        check_like_eager(case)
        check_like_eager(case.channels_last())


@pytest.mark.parametrize("kernel", [1, 2, (3, 1, 5), (16, 1, 1), 7])
def test_kernels_and_paddings_of_the_sm90_plan(hopper, kernel):
    extents = (kernel,) * 3 if isinstance(kernel, int) else kernel
    for padding in {(0, 0, 0), tuple((t - 1) // 2 for t in extents)}:
        block = make_block(2, 16, 24, 8, kernel, num_groups=3, padding=padding, device=hopper)
        for precision in ("ieee", "tf32"):
            case = replace(block, precision=precision)
            check_sm90_or_small(case.plan(), 24)
            check_like_eager(case)


@pytest.mark.parametrize("exponent", [-60, -20, 20, 50])
@pytest.mark.parametrize("precision", ["ieee", "tf32"])
def test_float32_range_survives_float16_operands(hopper, precision, exponent):
    """Power-of-two scaling: values far outside float16's range lose nothing."""
    block = make_block(2, 32, 96, 16, 3, num_groups=4, stride=2, dilation=2, device=hopper, bias=False)
    block = replace(block, precision=precision)
    assert block.plan().algorithm == "sm90_implicit_gemm"
    check_like_eager(replace(block, input=block.input * 2.0**exponent, eps=1e-12 * 4.0**exponent))
    check_like_eager(replace(block, weight=block.weight * 2.0**exponent, eps=1e-12 * 4.0**exponent))


def test_samples_and_channels_of_very_different_size(hopper):
    block = replace(
        make_block(3, 16, 24, 5, 3, num_groups=3, device=hopper, bias=False, eps=1e-30), precision="ieee"
    )
    scales = torch.tensor([1e-6, 1.0, 1e6], device=hopper).view(3, 1, 1, 1, 1)
    check_like_eager(replace(block, input=block.input * scales))
    y = replace(block, input=block.input * scales).ours()
    torch.testing.assert_close(y, block.ours(), rtol=1e-3, atol=1e-3)


def test_exact_integers_over_many_tiles(hopper):
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        check_exact_relu_conv(integer_block(3, 16, 136, 12, 2, device=hopper, dtype=dtype).channels_last())


def test_beyond_32_bit_offsets(cuda):
    """y has more than 2^31 elements; the last positions are compared with PyTorch's on a slice."""
    if torch.cuda.mem_get_info()[0] < 40 * 2**30:
        pytest.skip("needs 40 GB of free GPU memory")
    block = make_block(1, 8, 64, 2, 1, num_groups=64, device=cuda, dtype=torch.bfloat16, bias=False)
    x = torch.randn(1, 8, 330, 330, 330, device=cuda, dtype=torch.bfloat16)
    y = replace(block, input=x).ours()
    assert y.numel() > 2**31
    last = block.weight.view(8, 64)[:, -1].float()
    channel = torch.relu(last @ x.view(8, -1).float()).bfloat16().double()
    scale, shift = block.norm_weight[-1].double(), block.norm_bias[-1].double()
    expected = (channel - channel.mean()) * torch.rsqrt(channel.var(correction=0) + block.eps) * scale + shift
    error = (y.view(64, -1)[-1].double() - expected).norm() / expected.norm()
    assert float(error) < 1e-2


@pytest.mark.parametrize("groups", [1, 2])
def test_phases_of_a_large_sample(hopper, groups):
    """Tiles in windows of all phases, where there are enough of them and one convolution group."""
    block = make_block(
        2,
        128,
        128,
        32,
        3,
        groups=groups,
        num_groups=8,
        stride=2,
        padding=1,
        output_padding=1,
        device=hopper,
        dtype=torch.bfloat16,
    )
    for case in (block, block.channels_last()):
        assert case.plan().algorithm == "sm90_implicit_gemm"
        assert ("order: all phases" in str(case.plan())) == (groups == 1)
        check_like_eager(case)
        assert torch.equal(case.ours(), case.ours())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("samples", "outputs"), [(1, 200), (3, 128)])
def test_unequal_phases_of_a_large_sample(hopper, samples, outputs, dtype):
    """Windows in which some phases have no tile; of two channel tiles, or of samples that no block keeps."""
    block = make_block(
        samples,
        128,
        outputs,
        32,
        3,
        num_groups=8,
        stride=2,
        padding=1,
        device=hopper,
        dtype=dtype,
        precision="tf32" if dtype is torch.float32 else "ieee",
    )
    for case in (block, block.channels_last()):
        assert "order: all phases" in str(case.plan())
        check_like_eager(case)
        assert torch.equal(case.ours(), case.ours())


@pytest.mark.parametrize("precision", ["ieee", "tf32"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("stride", [(3, 3, 3), (1, 4, 4), (2, 4, 4), (3, 3, 4), (4, 4, 4)])
def test_strides_of_many_phases_in_ncdhw(hopper, stride, dtype, precision):
    """Of more than 27 phases the convolution takes several launches; partial tiles and whole ones in each."""
    if dtype is not torch.float32 and precision == "tf32":
        pytest.skip("float32's precision")
    block = make_block(
        16,  # smaller ones take the col2im plan, groups are tested in test_forced_sm90.py
        64,
        128,
        (6, 7, 8),
        4,
        stride=stride,
        padding=1,
        num_groups=8,
        device=hopper,
        dtype=dtype,
        precision=precision,
    )
    plan = block.plan()
    assert plan.algorithm == "sm90_implicit_gemm"
    many = stride[0] * stride[1] * stride[2] > 27
    assert many == (plan.twice or "group_norm_finalize_slabs" in plan.stages)
    if precision == "ieee" and dtype is torch.float32:
        assert not plan.twice
    check_like_eager(block)
    assert torch.equal(block.ours(), block.ours())
