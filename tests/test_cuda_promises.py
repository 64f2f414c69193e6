# SPDX-License-Identifier: Apache-2.0
"""What Hopper's plans promise beyond right values: the same bits on every run, CUDA graphs, few launches,
little memory, little host time, no hang on a crowded GPU. And right values on random stride-1 shapes.

`pytest -s` shows the figures.
"""

import gc
import math
import os
import random
import statistics
import subprocess
import sys
import threading
import time
from dataclasses import replace

import pytest
import torch
import upconv3d
from conftest import PROMISE_CASES, SEED
from oracles import Block, check_like_eager, check_sm90_or_small, make_block
from torch.profiler import ProfilerActivity, profile

# dtype and precision; precision concerns float32 alone.
KINDS = {
    "bfloat16": (torch.bfloat16, "ieee"),
    "float16": (torch.float16, "ieee"),
    "tf32": (torch.float32, "tf32"),
    "ieee": (torch.float32, "ieee"),
}
LAYOUTS = ("NCDHW", "NDHWC")
# (n, c, k, extent, kernel, num_groups): less than one wave of tiles, of few and of more channels, and several
# waves with borders cut off.
SMALL = (1, 64, 64, 8, 3, 8)
WIDE = (1, 256, 128, 12, 3, 8)
LARGE = (2, 64, 128, 32, 3, 8)

RUNS = 1000
CROWD_SECONDS = 120  # a crowd takes about a second, its process some ten to start

both_layouts = pytest.mark.parametrize("layout", LAYOUTS)
every_kind = pytest.mark.parametrize("kind", KINDS)


def expected_plan(shape, kind, layout) -> str:
    """Small blocks run cuDNN's convolution and a launch after it, in NCDHW one before it too. A product and a
    gather take its place for few channels, and always for "ieee"; but where 16 bit lies as it is wanted, the
    kernel that holds its result does."""
    if shape not in (SMALL, WIDE):
        return "sm90_implicit_gemm"
    half = KINDS[kind][0] is not torch.float32
    as_it_lies = half and layout == "NDHWC"
    if as_it_lies and shape == SMALL:
        return "sm90_implicit_gemm"
    return "cuda_library" if as_it_lies or (shape == WIDE and kind != "ieee") else "cuda_col2im"


def promised_block(shape, kind, layout, device, any_plan=False, **overrides) -> Block:
    n, c, k, extent, kernel, num_groups = shape
    dtype, precision = KINDS[kind]
    block = make_block(
        n, c, k, extent, kernel, num_groups=num_groups, device=device, dtype=dtype, **overrides
    )
    block = replace(block, precision=precision)
    block = block.channels_last() if layout == "NDHWC" else block
    plan = block.plan()
    assert any_plan or plan.algorithm == expected_plan(shape, kind, layout), plan
    return block


def bits(y: torch.Tensor) -> torch.Tensor:
    """The same memory as integers: NaN equals itself, and 0 differs from -0."""
    return y.view(torch.int16 if y.element_size() == 2 else torch.int32)


class BusyStream:
    """A second stream that keeps multiprocessors and memory occupied, each time by another amount."""

    SIZES = (256, 2048, 512, 3072, 1024)  # of square bfloat16 matmuls: from one block to many waves, 0.1 ms

    def __init__(self, device):
        self.stream = torch.cuda.Stream(device)
        self.matrices = [torch.randn(n, n, device=device, dtype=torch.bfloat16) for n in self.SIZES]
        self.products = [torch.empty_like(matrix) for matrix in self.matrices]
        self.calls = 0
        self.stream.wait_stream(torch.cuda.current_stream(device))

    def enqueue(self):
        index = self.calls % len(self.SIZES)
        self.calls += 1
        with torch.cuda.stream(self.stream):
            torch.mm(self.matrices[index], self.matrices[index], out=self.products[index])


@every_kind
@both_layouts
@pytest.mark.parametrize("shape", [SMALL, WIDE, LARGE], ids=["small", "wide", "large"])
@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside-a-busy-stream"])
def test_same_bits_on_every_run(hopper, beside, shape, layout, kind):
    block = promised_block(shape, kind, layout, hopper)
    expected = bits(block.ours()).clone()
    busy = BusyStream(hopper) if beside else None
    differing = torch.zeros((), dtype=torch.int64, device=hopper)
    for run in range(RUNS):
        if busy is not None:
            busy.enqueue()
        differing += (bits(block.ours()) != expected).any()
        if run % 100 == 99:
            assert int(differing) == 0, f"{int(differing)} of the first {run + 1} runs differ from the first"


@every_kind
@both_layouts
@pytest.mark.parametrize("shape", [SMALL, WIDE, LARGE], ids=["small", "wide", "large"])
def test_cuda_graph(hopper, shape, layout, kind):
    """Two calls in one graph, replayed on new values: the bits of calls outside of it."""
    block = promised_block(shape, kind, layout, hopper)
    other = replace(block, input=torch.randn_like(block.input), weight=torch.randn_like(block.weight) / 40)
    static, static_other = (
        b.map(lambda t: t.clone(memory_format=torch.preserve_format)) for b in (block, other)
    )
    static.ours()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph):
        y = static.ours()
        y_other = static_other.ours()
    for factor in (1, -2, 3):
        static.input.copy_(block.input * factor)
        static_other.input.copy_(other.input * factor)
        graph.replay()
        graph.replay()
        assert torch.equal(bits(y), bits(replace(block, input=static.input).ours()))
        assert torch.equal(bits(y_other), bits(replace(other, input=static_other.input).ours()))


@every_kind
@pytest.mark.parametrize("k", [36, 44, 100, 128])
def test_normalization_beside_the_convolution(hopper, k, kind):
    """What lies beside a sample's values is read before it is this call's: of rows that are no whole
    sectors, two inputs by turns would show what is left of the other one."""
    dtype, precision = KINDS[kind]
    block = make_block(4, 16, k, (32, 64, 64), 2, num_groups=4, device=hopper, dtype=dtype)
    block = replace(block, precision=precision)
    other = replace(block, input=torch.randn_like(block.input) + 1)
    assert block.plan().leaving_blocks > 0, block.plan()
    check_like_eager(block)
    expected = [(one, bits(one.ours()).clone()) for one in (block, other)]
    differing = torch.zeros((), dtype=torch.int64, device=hopper)
    for _ in range(RUNS // 20):
        for one, y in expected:
            differing += (bits(one.ours()) != y).any()
    assert int(differing) == 0


@every_kind
@both_layouts
@pytest.mark.parametrize("shape", [SMALL, WIDE, LARGE], ids=["small", "wide", "large"])
def test_calls_between_other_kernels(hopper, shape, layout, kind):
    """A call reads what was written right before it, and is done with what is overwritten right behind it."""
    block = promised_block(shape, kind, layout, hopper)
    shared = block.map(lambda t: t.clone(memory_format=torch.preserve_format))
    factors = (1, -2, 3, -0.5, 1.5)
    expected = []
    for factor in factors:
        alone = replace(block, input=block.input * factor, weight=block.weight / factor)
        torch.cuda.synchronize()
        expected.append(bits(alone.ours()))
        torch.cuda.synchronize()
    for _ in range(4):
        results = []
        for factor in factors:
            shared.input.copy_(block.input * factor)
            shared.weight.copy_(block.weight / factor)
            results.append(bits(shared.ours()))
            shared.input.fill_(float("nan"))
            shared.weight.fill_(float("nan"))
        assert all(torch.equal(y, one) for y, one in zip(results, expected, strict=True))


def device_work(call, runs=4) -> list[str]:
    """Names of what one call puts on the GPU: kernels, copies and fills."""
    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for _ in range(runs):
            call()
        torch.cuda.synchronize()
    names = [
        event.name
        for event in profiler.events()
        if event.device_type == torch.autograd.DeviceType.CUDA and not event.is_user_annotation
    ]
    if not names:
        pytest.skip("the profiler sees no GPU work here: CUPTI is missing or may not trace")
    assert len(names) % runs == 0, f"runs differ in what they launch: {names}"
    return names[: len(names) // runs]


@every_kind
@both_layouts
@pytest.mark.parametrize("shape", [SMALL, WIDE, LARGE], ids=["small", "wide", "large"])
def test_launches_per_forward(hopper, shape, layout, kind):
    block = promised_block(shape, kind, layout, hopper)
    names = device_work(block.ours)
    fills = [name for name in names if name.startswith(("Memset", "Memcpy"))]
    print(
        f"{kind} {layout} N={shape[0]}: {len(names)} launches, {len(fills)} of them fills or copies: {names}"
    )
    if block.plan().algorithm == "cuda_col2im":
        launches = [name for name in names if name not in fills]
        assert len(launches) == 3 and len(names) <= 4, names
        return
    if block.plan().algorithm == "cuda_library":
        copies = ("channels_last_copies",) if layout == "NCDHW" else ()
        assert block.plan().stages == (*copies, "aten::convolution", "activation_group_norm_held")
        last = block.channels_last()
        convolution = device_work(lambda: torch.nn.functional.conv_transpose3d(last.input, last.weight))
        limit = len(copies) + len(convolution) + 1
        assert len(names) <= limit, f"{len(copies)} before and one launch after {convolution}, not {names}"
        return
    # Operands are packed in one launch, 16-bit ones that lie channels last in none; NCDHW is normalized by a
    # kernel of its own.
    plan = block.plan()
    lying = plan.w_in_place and not plan.pack_x
    assert lying == (block.input.element_size() == 2 and layout == "NDHWC")
    limit = int(not lying) + 1 + (layout == "NCDHW")
    assert len(names) <= limit, f"{len(names)} launches, at most {limit} promised: {names}"


@every_kind
@both_layouts
def test_peak_memory(hopper, layout, kind):
    """Above its result, a call takes one 16-bit copy of x at most; two where x is split into halves.

    NCDHW takes relu(conv) as well, which the kernel writes channels last; under "tf32" in 16 bits.
    """
    block = promised_block((8, 64, 128, 32, 3, 8), kind, layout, hopper)
    x = block.input
    assert x.numel() * x.element_size() >= 32 * 10**6
    y = block.ours()
    y_bytes = y.numel() * y.element_size()
    del y
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(hopper)
    torch.cuda.reset_peak_memory_stats(hopper)
    block.ours()
    extra = torch.cuda.max_memory_allocated(hopper) - before - y_bytes
    copies = 2 if kind == "ieee" else 1
    # Weights and moments are 1.3 MB here, and the allocator keeps up to 1 MB with the result.
    limit = copies * x.numel() * 2 + 2_800_000
    if layout == "NCDHW":
        limit += y_bytes // 2 if kind == "tf32" else y_bytes  # relu(conv), which is transposed from there
    print(f"{kind} {layout}: {extra / 1e6:.2f} MB above the result, at most {limit / 1e6:.2f} MB promised")
    assert extra <= limit


def host_microseconds(call, chunks=60, calls=20) -> float:
    """Median host time of one call, with a GPU that is idle at the start of each chunk of calls."""
    for _ in range(3 * calls):
        call()
    times = []
    gc.collect()
    for _ in range(chunks):
        torch.cuda.synchronize()
        begin = time.perf_counter_ns()
        for _ in range(calls):
            call()
        times.append((time.perf_counter_ns() - begin) / calls / 1e3)
    torch.cuda.synchronize()
    return statistics.median(times)


@every_kind
@both_layouts
@pytest.mark.parametrize("stride", [1, 2])
def test_calls_at_other_addresses(hopper, stride, layout, kind):
    """Calls of one plan in turns, at addresses of their own: none may see the tensors of the one before."""
    small = [promised_block(SMALL, kind, layout, hopper, stride=stride) for _ in range(3)]
    for index, block in enumerate(small):
        block.input.mul_(index + 1)
        block.weight.mul_(1 - 2 * (index % 2))
        check_like_eager(block)
    expected = [block.ours() for block in small]
    trained = [block.requires_grad() for block in small]
    gradients = [torch.autograd.grad(block.ours().sum(), list(block.tensors().values())) for block in trained]
    for _ in range(2):
        for block, y, leaf, grads in zip(small, expected, trained, gradients, strict=True):
            assert torch.equal(bits(block.ours()), bits(y))
            again = torch.autograd.grad(leaf.ours().sum(), list(leaf.tensors().values()))
            assert all(torch.equal(a, b) for a, b in zip(again, grads, strict=True))


@every_kind
@both_layouts
def test_host_time(hopper, layout, kind):
    """25 us per call is the aim. A test may insist on twice what was seen on an H200's host, or on twice
    PyTorch's calls, where that host is busy."""
    block = promised_block(SMALL, kind, layout, hopper)
    dtype, precision = KINDS[kind]
    module = upconv3d.ConvTranspose3dReLUGroupNorm(
        64, 64, 3, 8, precision=precision, device=hopper, dtype=dtype
    )
    recorded = replace(block.requires_grad(), input=block.input)
    figures = {}
    with torch.no_grad():
        figures["function"] = host_microseconds(block.ours)
        figures["module"] = host_microseconds(lambda: module(block.input))
        eager = host_microseconds(block.eager)
    figures["function with gradients"] = host_microseconds(recorded.ours)
    figures["module with gradients"] = host_microseconds(lambda: module(block.input))
    text = ", ".join(f"{name} {figure:.1f} us" for name, figure in figures.items())
    text += f"; PyTorch's calls {eager:.1f} us"
    print(f"{kind} {layout}: {text}")
    assert max(figures.values()) <= max(120, 2 * eager), text


def crowd_blocks(any_plan) -> list[Block]:
    return [
        promised_block(shape, kind, layout, torch.device("cuda"), any_plan)
        for shape, kind, layout in (
            (LARGE, "bfloat16", "NDHWC"),
            (LARGE, "ieee", "NCDHW"),
            (SMALL, "tf32", "NDHWC"),
            (LARGE, "float16", "NCDHW"),
        )
    ]


def capture(any_plan) -> None:
    """Each block in a CUDA graph, captured before any other call; replayed, it gives the bits of a call."""
    for block in crowd_blocks(any_plan):
        graph = torch.cuda.CUDAGraph()
        with torch.no_grad(), torch.cuda.graph(graph):
            y = block.ours()
        y.fill_(math.nan)
        graph.replay()
        assert torch.equal(bits(y), bits(block.ours())), block.plan()


def crowd(any_plan) -> None:
    """Calls from several threads, each on a stream of its own, while matmuls hold multiprocessors.

    They end, and with the bits of calls alone. Blocks of one kernel that wait for each other would hang where
    not all of them are resident.
    """
    device = torch.device("cuda")
    blocks = crowd_blocks(any_plan)
    expected = [bits(block.ours()).clone() for block in blocks]
    differing = torch.zeros(len(blocks), dtype=torch.int64, device=device)
    matrix = torch.randn(8192, 8192, device=device, dtype=torch.bfloat16)  # a product takes 2 ms
    torch.cuda.synchronize()
    done = []

    def call(index):
        with torch.cuda.stream(torch.cuda.Stream(device)):
            for _ in range(50):
                differing[index] += (bits(blocks[index].ours()) != expected[index]).any()
            torch.cuda.current_stream().synchronize()
        done.append(index)

    def multiply():
        with torch.cuda.stream(torch.cuda.Stream(device)):
            for _ in range(50):
                torch.mm(matrix, matrix)
            torch.cuda.current_stream().synchronize()
        done.append("matmul")

    threads = [threading.Thread(target=call, args=(index,)) for index in range(len(blocks))]
    threads += [threading.Thread(target=multiply) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(done) == len(threads), f"a thread ended early; those that ended well: {done}"
    assert not differing.any(), f"runs that differ, per block: {differing.tolist()}"


def test_no_hang_on_a_crowded_gpu(hopper):
    # A process of its own: a hung kernel cannot be stopped from within.
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    try:
        run = subprocess.run(
            [sys.executable, __file__], env=environment, timeout=CROWD_SECONDS, capture_output=True, text=True
        )
    except subprocess.TimeoutExpired as error:
        pytest.fail(f"calls on several streams do not end within {CROWD_SECONDS} s: {error.stderr!r}")
    assert run.returncode == 0, run.stderr


def random_block(index, device) -> tuple[str, Block]:
    """A stride-1 problem that the SM90 kernels can run, and its description for messages."""
    rng = random.Random(f"{SEED}/{index}")
    kernel = [rng.randint(1, 5) for _ in range(3)]
    padding = [rng.randint(0, 2) for _ in range(3)]
    extent = [rng.randrange(1, 16, 2) for _ in range(3)]
    # Output positions per axis: extent + kernel - 1 - 2*padding; at least 2, so that groups have a variance.
    extent = [max(e, 3 + 2 * p - t) for e, p, t in zip(extent, padding, kernel, strict=True)]
    n, c, k = rng.randint(1, 5), *(max(8, rng.choice([1, 8]) * rng.randint(1, 25)) for _ in range(2))
    num_groups = rng.choice([g for g in range(1, k + 1) if k % g == 0])
    numbers = {
        "num_groups": num_groups,
        "padding": tuple(padding),
        "bias": rng.random() < 0.5,
        "affine": rng.random() < 0.7,
    }
    kind = rng.choice(list(KINDS))
    layout = rng.choice(["NCDHW", "NDHWC", "input NDHWC", "weight NDHWC"])
    dtype, precision = KINDS[kind]
    torch.manual_seed(SEED + index)
    block = make_block(n, c, k, extent, kernel, device=device, dtype=dtype, **numbers)
    both = block.channels_last()
    block = replace(
        block,
        precision=precision,
        input=both.input if layout in ("NDHWC", "input NDHWC") else block.input,
        weight=both.weight if layout in ("NDHWC", "weight NDHWC") else block.weight,
    )
    text = f"N={n} C={c} K={k} in={extent} kernel={kernel} {numbers} {kind} {layout}, UPCONV3D_SEED={SEED}"
    return text, block


@pytest.mark.parametrize("index", range(PROMISE_CASES))
def test_random_stride_1_shapes(hopper, index):
    text, block = random_block(index, hopper)
    print(text)
    plan = block.plan()
    check_sm90_or_small(plan, block.weight.shape[1])
    check_like_eager(block)
    if "tiles are filled" in plan.reason:  # by PyTorch's convolution, where its own settings apply
        torch.backends.cudnn.deterministic = True
    assert torch.equal(bits(block.ours()), bits(block.ours()))


if __name__ == "__main__":
    print(torch.cuda.get_device_properties(0).multi_processor_count)
    # As test_mps.py asks, whose contexts are granted less of a GPU.
    what = capture if "capture" in sys.argv else crowd
    what(any_plan="any-plan" in sys.argv)
