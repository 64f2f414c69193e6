# SPDX-License-Identifier: Apache-2.0
"""The block with what PyTorch offers around an operator: export, TorchScript, fx, CUDA graphs, copies."""

import copy
import io
import itertools
import multiprocessing
import pickle
import shutil
import warnings
from dataclasses import replace

import pytest
import torch
import upconv3d
from oracles import NAMES, make_block
from test_values import DTYPES, shape_block
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

# TorchScript is deprecated, and used.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.*:DeprecationWarning")

OP_NAME = "upconv3d::conv_transpose3d_relu_group_norm"

# What torch.testing.assert_close allows by itself, for where an absolute tolerance has to be named.
RTOL = {torch.float32: 1.3e-6, torch.float16: 1e-3, torch.bfloat16: 1.6e-2}


def _module(device, **kwargs):
    kwargs = {"precision": "ieee"} | kwargs
    return upconv3d.ConvTranspose3dReLUGroupNorm(4, 8, 3, 2, device=device, **kwargs)


def _input(device, n=2, extent=3):
    return torch.randn(n, 4, extent, extent + 1, extent + 2, device=device)


def _saved_and_loaded(save, load, saved):
    file = io.BytesIO()
    save(saved, file)
    file.seek(0)
    return load(file)


@pytest.mark.parametrize("layout", ["NCDHW", "NDHWC"])
def test_inductor_with_dynamic_shapes(device, layout):
    """One graph for all sizes, forward and backward."""
    torch._dynamo.reset()
    memory_format = torch.channels_last_3d if layout == "NDHWC" else torch.contiguous_format
    block = _module(device, stride=2).to(memory_format=memory_format)
    counter = CompileCounterWithBackend("inductor")
    counts = set()
    compiled = torch.compile(block, fullgraph=True, dynamic=True, backend=counter)
    for n, extent in ((2, 6), (3, 8), (5, 7)):  # no extent that equals a channel count at first
        x = _input(device, n, extent).contiguous(memory_format=memory_format).requires_grad_()
        y, y_compiled = block(x), compiled(x)
        assert y_compiled.stride() == y.stride()
        torch.testing.assert_close(y_compiled, y, rtol=1e-5, atol=1e-5)
        grads, grads_compiled = (
            torch.autograd.grad(result.sin().sum(), [x, *block.parameters()]) for result in (y, y_compiled)
        )
        torch.testing.assert_close(grads_compiled, grads, rtol=1e-3, atol=1e-3)
        counts.add(counter.frame_count)
    assert len(counts) == 1


def _exported(block, device):
    sizes = {0: torch.export.Dim("n", min=1, max=64), 2: torch.export.Dim("depth", min=2, max=64)}
    return torch.export.export(block, (_input(device),), dynamic_shapes={"input": sizes})


def test_export_round_trip(device):
    block = _module(device).eval()
    program = _saved_and_loaded(torch.export.save, torch.export.load, _exported(block, device))
    assert any(OP_NAME.replace("::", ".") in str(node.target) for node in program.graph.nodes)
    for n, extent in ((1, 3), (2, 2), (5, 6)):
        x = torch.randn(n, 4, extent, 4, 5, device=device)
        torch.testing.assert_close(program.module()(x), block(x))


def _aot_inductor_round_trip(device, package_path):
    block = _module(device).eval()
    with torch.no_grad():
        path = torch._inductor.aoti_compile_and_package(_exported(block, device), package_path=package_path)
        runner = torch._inductor.aoti_load_package(path)
        for n, extent in ((1, 3), (2, 2), (5, 6)):
            x = torch.randn(n, 4, extent, 4, 5, device=device)
            torch.testing.assert_close(runner(x), block(x))


def _aot_inductor_without_us(package_path):
    x = torch.randn(2)
    program = torch.export.export(nn.ReLU(), (x,))
    runner = torch._inductor.aoti_load_package(
        torch._inductor.aoti_compile_and_package(program, package_path=package_path)
    )
    assert torch.equal(runner(x), x.relu())


def _exit_code(function, *arguments):
    process = multiprocessing.get_context("spawn").Process(target=function, args=arguments)
    process.start()
    process.join()
    return process.exitcode


def test_aot_inductor_round_trip(device, tmp_path):
    """AOTInductor's runtime calls the operator by its schema; upconv3d must be imported where it runs.

    In a process of its own: packages of PyTorch's own operators crash where the C++ compiler (CXX) links
    libstdc++ statically, since facets of two copies of it share their numbers.
    """
    if shutil.which("c++") is None and shutil.which("g++") is None:
        pytest.skip("needs a C++ compiler")
    code = _exit_code(_aot_inductor_round_trip, device, str(tmp_path / "block.pt2"))
    if code < 0 and _exit_code(_aot_inductor_without_us, str(tmp_path / "relu.pt2")) < 0:
        pytest.skip(f"packages of PyTorch's own operators end with signal {-code} here")
    assert code == 0


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("n", [1, 2])
def test_jit_trace(device, n, recompute):
    """Sizes are not frozen, nothing warns that they might be, and gradients flow after a round trip."""
    block = _module(device, stride=2, recompute=recompute)
    with warnings.catch_warnings():
        warnings.simplefilter("error", torch.jit.TracerWarning)
        traced = torch.jit.trace(block, (_input(device, n),))
    traced = _saved_and_loaded(torch.jit.save, torch.jit.load, traced)
    x = _input(device, 4, 2).requires_grad_()
    y = traced(x)
    torch.testing.assert_close(y, block(x))
    assert torch.autograd.grad(y.sin().sum(), x)[0].shape == x.shape


@pytest.mark.parametrize(
    "options",
    [{}, {"bias": False, "affine": False}, {"stride": 2, "padding": 1, "precision": "tf32"}],
    ids=str,
)
def test_jit_script(device, options):
    """Inside a larger model, after a round trip, with gradients, and with the same state dict."""
    model = nn.Sequential(_module(device, **options), nn.Sigmoid())
    scripted = _saved_and_loaded(torch.jit.save, torch.jit.load, torch.jit.script(model))
    assert list(scripted.state_dict()) == list(model.state_dict())
    x = _input(device).requires_grad_()
    # On a GPU another plan may run where gradients are recorded; under "tf32" both round to TF32.
    other_plan = {} if device.type == "cpu" else {"rtol": 1e-3, "atol": 1e-3}
    torch.testing.assert_close(scripted(x), model(x), **other_plan)
    grads = [torch.autograd.grad(f(x).sin().sum(), x)[0] for f in (scripted, model)]
    torch.testing.assert_close(*grads, **other_plan)


def test_jit_script_takes_output_size(device):
    block = _module(device, stride=2)
    x = _input(device)
    for size in ([7, 9, 11], [8, 9, 12]):
        torch.testing.assert_close(torch.jit.script(block)(x, size), block(x, size))


def test_jit_script_without_a_precision(device):
    """TorchScript cannot read torch.backends, and must not choose in silence."""
    scripted = torch.jit.script(_module(device, precision=None))
    if device.type == "cpu":
        assert scripted(_input(device)).shape == (2, 8, 5, 6, 7)
        return
    with pytest.raises(torch.jit.Error, match="precision must be 'ieee' or 'tf32'"):
        scripted(_input(device))


def test_fx(device):
    """Traced as one function, also through a model, and executable."""
    torch.backends.cudnn.deterministic = True  # cuDNN runs blocks of few channels
    model = nn.Sequential(_module(device), nn.Sigmoid())
    traced = torch.fx.symbolic_trace(model)
    targets = [node.target for node in traced.graph.nodes if node.op == "call_function"]
    assert targets == [upconv3d.conv_transpose3d_relu_group_norm]
    x = _input(device)
    assert torch.equal(traced(x), model(x))
    twin = pickle.loads(pickle.dumps(traced))
    assert torch.equal(twin(x), model(x))


def test_copies_on_the_device(device):
    torch.backends.cudnn.deterministic = True  # cuDNN runs blocks of few channels
    block = _module(device, stride=2)
    x = _input(device)
    for twin in (
        copy.deepcopy(block),
        _saved_and_loaded(torch.save, lambda file: torch.load(file, weights_only=False), block),
    ):
        assert torch.equal(twin(x), block(x))
    other = _module(device, stride=2)
    other.load_state_dict(_saved_and_loaded(torch.save, torch.load, block.state_dict()))
    assert torch.equal(other(x), block(x))
    assert block.double()(x.double()).dtype == torch.float64


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", ["NCDHW", "NDHWC"])
def test_deterministic_algorithms(device, layout, dtype, monkeypatch):
    """The same bits twice, gradients too; the mode also fills uninitialized memory with NaN."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    block = shape_block("kernelbench-small", device=device, dtype=dtype)
    block = block.channels_last() if layout == "NDHWC" else block
    grad_y = torch.randn_like(block.ours())
    torch.use_deterministic_algorithms(True)
    try:
        runs = []
        for _ in range(2):
            leaf = block.requires_grad()
            y = leaf.ours()
            y.backward(grad_y)
            runs.append([y, *(tensor.grad for tensor in leaf.tensors().values())])
    finally:
        torch.use_deterministic_algorithms(False)
    for one, two in zip(*runs, strict=True):
        assert torch.equal(one, two) and not one.isnan().any()


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("low", [None, torch.bfloat16], ids=["float32", "autocast"])
def test_checkpoint(device, use_reentrant, low):
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.conv.fp32_precision = "ieee"
    block = _module(device)
    x = _input(device)
    gradients = []
    for recomputed in (False, True):
        leaf = x.clone().requires_grad_()
        with torch.autocast(device.type, dtype=low, enabled=low is not None):
            y = checkpoint(block, leaf, use_reentrant=use_reentrant) if recomputed else block(leaf)
        block.zero_grad()
        y.float().sin().sum().backward()  # reentrant checkpoints refuse autograd.grad
        gradients.append([leaf.grad, *(parameter.grad for parameter in block.parameters())])
    # A reentrant one computes y as inference does, on a GPU maybe by another plan than where gradients are
    # recorded.
    other_plan = {"rtol": 1e-3, "atol": 3e-4} if use_reentrant and device.type == "cuda" else {}
    torch.testing.assert_close(*gradients, **other_plan)


@pytest.mark.parametrize("skip", [False, True], ids=["plain", "skip"])
@pytest.mark.parametrize(
    ("kept", "arguments"),
    [
        ("aten.convolution", {"norm": None}),
        ("aten.convolution", {"norm": "instance", "order": "act_norm"}),
        ("aten.native_group_norm", {"num_groups": 2}),
        ("aten.add", {"num_groups": 2, "order": "act_norm"}),
        ("", {"num_groups": 2, "order": "act_norm"}),
    ],
)
def test_selective_checkpoint(device, kept, arguments, skip):
    """What a policy keeps of a call's operators stays as they returned it."""
    block = shape_block("kernelbench-small", dtype=torch.float64, device=device).requires_grad()
    tensors = (block.input, block.weight)

    def call(x, w):
        named = dict(arguments)
        if skip:
            named["skip"] = torch.nn.functional.conv_transpose3d(x, w).detach().sin()
        return upconv3d.conv_transpose3d_norm_act(x, w, **named)

    def policy(_, op, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if kept in str(op) else CheckpointPolicy.PREFER_RECOMPUTE

    def contexts():
        return create_selective_checkpoint_contexts(policy)

    y = checkpoint(call, *tensors, use_reentrant=False, context_fn=contexts)
    found = torch.autograd.grad(y.sin().sum(), tensors)
    expected = torch.autograd.grad(call(*tensors).sin().sum(), tensors)
    torch.testing.assert_close(found, expected)


def test_autocast_takes_the_short_way_into_autograd(device):
    """The node that keeps what the backward needs; casts are nodes around it, where there are any.

    On the CPU they would cost the norm's gradients accuracy: there PyTorch's calls are recorded.
    """
    block = shape_block("kernelbench-small", device=device).requires_grad()
    with torch.autocast(device.type, dtype=torch.bfloat16):
        y = block.ours()
    nodes = [y.grad_fn, y.grad_fn.next_functions[0][0]]
    names = [type(node).__name__ for node in nodes]
    assert ("ConvTranspose3dReLUGroupNormBackward" in names) == (device.type == "cuda")
    if device.type == "cuda":
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert block.ours().dtype == torch.float32


class _BackwardMasks(TorchDispatchMode):
    """output_mask of every backward operator of the block that runs."""

    def __init__(self):
        super().__init__()
        self.masks = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.name().startswith(f"{OP_NAME}_backward"):
            self.masks.append(list(args[13]))
        return func(*args, **(kwargs or {}))


SUBSETS = [names for size in range(1, 6) for names in itertools.combinations(NAMES, size)]


@pytest.mark.parametrize("wanted", SUBSETS, ids="+".join)
def test_every_subset_of_gradients(device, wanted):
    """Those asked for are the ones of a full backward; the others are None."""
    torch.backends.cudnn.deterministic = True
    block = shape_block("padding", device=device, dtype=torch.float64)
    full = block.requires_grad()
    full.ours().sin().sum().backward()
    some = replace(block, **{name: getattr(block, name).clone().requires_grad_() for name in wanted})
    some.ours().sin().sum().backward()
    for name in NAMES:
        if name in wanted:
            torch.testing.assert_close(getattr(some, name).grad, getattr(full, name).grad)
        else:
            assert getattr(some, name).grad is None


@pytest.mark.parametrize("wanted", SUBSETS, ids="+".join)
def test_what_is_not_asked_for_is_not_computed(wanted):
    block = shape_block("padding")
    leaf = replace(block, **{name: getattr(block, name).clone().requires_grad_() for name in wanted})
    args, kwargs = leaf.arguments()
    # So that the backward is the operator, whose mask can be seen, and not computed from what was kept.
    y = upconv3d.conv_transpose3d_relu_group_norm(*args, **kwargs, recompute=True)
    profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU])
    with profile as profiler, _BackwardMasks() as seen:
        y.sum().backward()
    assert seen.masks == [[name in wanted for name in NAMES]]
    names = {event.name for event in profiler.events()}
    if not {"input", "weight", "bias"} & set(wanted):
        assert "aten::convolution_backward" not in names
        assert "aten::threshold_backward" not in names


def _grad_layouts(dense):
    """grad_y as autograd may hand it over; every layout with the values of `dense`."""
    wide = torch.zeros(*dense.shape[:-1], 2 * dense.shape[-1], device=dense.device, dtype=dense.dtype)
    wide[..., ::2] = dense
    return {
        "contiguous": dense,
        "channels_last_3d": dense.contiguous(memory_format=torch.channels_last_3d),
        "transposed": dense.transpose(2, 4).contiguous().transpose(2, 4),
        "batch inside": dense.movedim(0, -1).contiguous().movedim(-1, 0),
        "strided": wide[..., ::2],
    }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("layout", ["NCDHW", "NDHWC"])
def test_grad_y_in_any_layout(device, layout, dtype):
    torch.backends.cudnn.deterministic = True
    block = shape_block("padding", device=device, dtype=dtype)
    block = (block.channels_last() if layout == "NDHWC" else block).requires_grad()
    y = block.ours()
    owners = list(block.tensors().values())
    dense = torch.randn(y.shape, device=device).to(dtype)
    expected = torch.autograd.grad(y, owners, dense, retain_graph=True)
    for grad_y in _grad_layouts(dense).values():
        gradients = torch.autograd.grad(y, owners, grad_y, retain_graph=True)
        for gradient, owner, other in zip(gradients, owners, expected, strict=True):
            assert gradient.stride() == owner.stride()
            # Layouts add the norm's sums up in orders of their own, whose last bits decide how what comes
            # between norm and convolution is rounded: in a gradient that cancels, a rounding of its terms.
            atol = max(1e-5, torch.finfo(dtype).eps * float(other.abs().max()))
            torch.testing.assert_close(gradient, other, rtol=RTOL[dtype], atol=atol)
    constant = torch.full((), 0.5, device=device, dtype=dtype).expand(y.shape)
    gradients = torch.autograd.grad(y, owners, constant, retain_graph=True)
    expected = torch.autograd.grad(y, owners, constant.contiguous())
    for gradient, other in zip(gradients, expected, strict=True):
        torch.testing.assert_close(gradient, other)


def test_inference_tensors(device):
    """Parameters made in inference mode, and results of it, are taken outside of it too."""
    with torch.inference_mode():
        block = _module(device)
        y = block(_input(device))
    assert y.is_inference()
    with torch.no_grad():
        assert block(_input(device)).shape == y.shape


def test_graphed_training_step(cuda):
    """make_graphed_callables captures forward and backward; replays see the inputs of the call."""
    torch.backends.cudnn.deterministic = True
    for memory_format in (torch.contiguous_format, torch.channels_last_3d):
        block = _module(cuda).to(memory_format=memory_format)
        sample = _input(cuda).contiguous(memory_format=memory_format)
        graphed = torch.cuda.make_graphed_callables(copy.deepcopy(block), (sample.clone().requires_grad_(),))
        for scale in (1.0, -3.0):
            results = []
            for model in (block, graphed):
                model.zero_grad()
                x = (sample * scale).requires_grad_()
                y = model(x)
                y.sin().sum().backward()
                gradients = [parameter.grad.clone() for parameter in model.parameters()]
                results.append([y.detach().clone(), x.grad.clone(), *gradients])
            torch.testing.assert_close(*results, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_training_on_another_stream(cuda, dtype):
    """Forward and backward follow the current stream, behind work that is still to finish there."""
    torch.backends.cudnn.deterministic = True
    block = make_block(2, 32, 64, 8, 3, num_groups=8, device=cuda, dtype=dtype)
    expected = block.requires_grad()
    grad_y = torch.randn_like(expected.ours())
    expected.ours().backward(grad_y)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    leaf = block.requires_grad()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)  # work on another stream would overtake the products
        late = replace(leaf, input=leaf.input * 2 / 2)
        late.ours().backward(grad_y * 2 / 2)
    stream.synchronize()
    for name, tensor in expected.tensors().items():
        torch.testing.assert_close(getattr(leaf, name).grad, tensor.grad)


class TupleSized(torch.Tensor):
    """As MONAI's MetaTensor, a subclass whose new_empty takes sizes as a tuple alone."""

    def new_empty(self, size, **options):
        assert isinstance(size, (tuple, torch.Size)), size
        return super().new_empty(size, **options)


@pytest.mark.parametrize("wanted", [(True, True), (False, True), (True, False)])
def test_subclasses_that_make_empty_tensors_of_tuples(kernels, wanted):
    """Values and gradients of both functions; the family's by operators, as on CUDA."""
    block = make_block(2, 4, 6, 3, 3, num_groups=2)
    x, w = (t.requires_grad_(on) for t, on in zip((block.input, block.weight), wanted, strict=True))
    for function in (upconv3d.conv_transpose3d_relu_group_norm, upconv3d.conv_transpose3d_norm_act):
        results = []
        for given in (x, x.as_subclass(TupleSized)):
            y = function(given, w, block.bias, num_groups=2)
            grads = torch.autograd.grad(y.sin().sum(), [t for t in (x, w) if t.requires_grad])
            results.append([torch.Tensor(t) for t in (y, *grads)])
        torch.testing.assert_close(*results)


def test_saved_tensors_that_may_be_changed():
    """PyTorch's mode for it takes every tensor that is written into for one called `out`."""
    block = make_block(2, 4, 6, 3, 3, num_groups=2).requires_grad()
    (expected,) = torch.autograd.grad(block.ours().sin().sum(), block.input)
    with torch.autograd.graph.allow_mutation_on_saved_tensors():
        (ours,) = torch.autograd.grad(block.ours().sin().sum(), block.input)
    torch.testing.assert_close(ours, expected)
