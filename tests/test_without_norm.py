# SPDX-License-Identifier: Apache-2.0
"""Training without a norm: the backward begins with ReLU's result or with what other activations apply to."""

from dataclasses import replace

import pytest
import torch
import upconv3d
from oracles import relative_error
from tails import ACTIVATIONS, Call, gradients, make_call, outputs
from test_returned_conv import SIZES, check_each_gradient, check_like_eager, laid_out
from test_select_plan import facts, plan_of
from upconv3d import _C, _tail_call
from upconv3d._plan_questions import SMALL_BLOCK_VALUES
from upconv3d._tail_call import is_recorded_by_pytorch

CASES = {
    "relu": {},
    "relu-skip": {"skip": True},
    "relu-skip-conv": {"skip": True, "return_conv": True},
    "leaky": {"activation": "leaky_relu"},
    "prelu-conv": {"activation": "prelu", "return_conv": True},
    "gelu": {"activation": "gelu"},
    "silu-skip": {"activation": "silu", "skip": True},
    "elu-skip-conv": {"activation": "elu", "skip": True, "return_conv": True},
    "alone": {"activation": None},
    "skip-alone": {"activation": None, "skip": True},
    "skip-conv": {"activation": None, "skip": True, "return_conv": True},
}


@pytest.fixture(autouse=True)
def ieee(monkeypatch):
    """PyTorch's calls in float32's accuracy too."""
    if torch.cuda.is_available():
        monkeypatch.setattr(torch.backends.cudnn.conv, "fp32_precision", "ieee")


# Of aligned NDHWC inputs cuDNN's convolution is kept, else the SM90 plan's.
EITHER = {"n": 1, "c": 128, "k": 64, "extent": (32, 32, 32), "kernel": 2, "stride": 2, "padding": 0}


def bare(size="strided", layout="NCDHW", **options) -> Call:
    """Without a norm; layout: as of laid_out."""
    call = make_call(**(EITHER if size == "either" else SIZES[size]), norm=None, **options)
    return laid_out(call, layout)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("layout", ["NCDHW", "NDHWC", "other"])
def test_like_eager(cuda, monkeypatch, layout, case, dtype):
    for size in SIZES:
        call = bare(size, layout, **CASES[case], device=cuda, dtype=dtype)
        check_each_gradient(call, monkeypatch)


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("bias", [True, False])
def test_activations_like_eager(cuda, monkeypatch, bias, activation):
    options = {"activation": activation, "bias": bias, "one_slope": True}
    for size in ("sm90", "library"):
        check_like_eager(bare(size, **options, device=cuda, dtype=torch.float32), monkeypatch)


@pytest.mark.parametrize("layout", ["NCDHW", "NDHWC"])
@pytest.mark.parametrize("activation", ["relu", "prelu", None])
def test_small_integers_are_exact(cuda, layout, activation):
    """Sums of integers below 2^11 in every dtype, whatever their order; slopes are powers of two."""
    call = bare("library", layout, activation=activation, device=cuda, dtype=torch.float32)

    def integers(tensor):
        return torch.randint(-2, 3, tensor.shape, device=cuda).to(tensor.dtype)

    tensors = {name: torch.empty_like(t).copy_(integers(t)) for name, t in call.tensors.items()}
    if activation == "prelu":
        tensors["slopes"] = torch.full_like(tensors["slopes"], 0.5)
    call = replace(call, tensors=tensors)
    seeds = [integers(y) for y in outputs(call.ours())]
    ours, expected = gradients(call, Call.ours, seeds)[1], gradients(call, Call.eager, seeds)[1]
    for name, grad in ours.items():
        assert torch.equal(grad, expected[name]), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("activation", ["relu", "gelu", "prelu"])
@pytest.mark.parametrize("layout", ["NCDHW", "NDHWC"])
def test_what_is_returned_is_what_is_activated(cuda, layout, activation, dtype):
    """To the last bit for ReLU, also where the convolution's bias is added by the pass that activates."""
    for size in ("strided", "library", "unbatched", "sm90"):
        options = {"activation": activation, "return_conv": True, "device": cuda, "dtype": dtype}
        call = bare(size, layout, **options)
        expected = call.to(torch.float64).eager()
        with torch.no_grad():
            y, conv = call.ours()
        tolerance = {torch.float32: 1e-5, torch.bfloat16: 2**-7, torch.float64: 1e-12}[dtype]
        assert relative_error(conv, expected[1]) <= tolerance
        assert relative_error(y, expected[0]) <= tolerance
        assert (y.stride(), y.dtype) == (conv.stride(), conv.dtype)
        if activation == "relu":
            assert torch.equal(y, conv.relu())


def test_same_bits(cuda):
    for case in CASES:
        call = bare("sm90", "NDHWC", **CASES[case], device=cuda, dtype=torch.bfloat16)
        names = [name for name in ("bias", "slopes", "skip") if name in call.tensors]
        # What PyTorch's convolution_backward returns is its own.
        first, second = (gradients(call, Call.ours)[1] for _ in range(2))
        for name in names:
            assert torch.equal(first[name], second[name]), (case, name)


@pytest.mark.parametrize("case", ["relu", "gelu", "prelu-conv", "silu-skip", "skip-alone"])
def test_twice(cuda, case):
    """A graph that is kept, and what the caller holds: nothing takes a tensor's place but its own."""
    call = bare("library", **CASES[case], device=cuda, dtype=torch.float32).leaves()
    results, tensors = outputs(call.ours()), list(call.tensors.values())
    before = [tensor.detach().clone() for tensor in (*results, *tensors)]
    seeds = [torch.randn_like(r) for r in results]
    held = [seed.clone() for seed in seeds]
    first = torch.autograd.grad(results, tensors, seeds, retain_graph=True)
    second = torch.autograd.grad(results, tensors, seeds, retain_graph=True)
    (once,) = torch.autograd.grad(results[0].square().sum(), call.tensors["weight"], create_graph=True)
    assert once.requires_grad
    last = torch.autograd.grad(results, tensors, seeds)
    for one, *others in zip(first, second, last, strict=True):
        for other in others:
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    for tensor, kept in zip((*results, *tensors, *seeds), (*before, *held), strict=True):
        assert torch.equal(tensor, kept)


@pytest.mark.parametrize("wanted", ["input", "weight", "bias", "slopes", "skip"])
@pytest.mark.parametrize("layout", ["NCDHW", "NDHWC"])
def test_only_what_is_asked_for(cuda, layout, wanted):
    options = {"activation": "prelu"} if wanted == "slopes" else {"activation": "relu", "skip": True}
    call = bare("strided", layout, **options, device=cuda, dtype=torch.float32)

    def gradient(run):
        leaf = call.tensors[wanted].detach().clone().requires_grad_()
        y = run(replace(call, tensors=call.tensors | {wanted: leaf}))
        (grad,) = torch.autograd.grad(y.square().sum(), leaf)
        return grad

    assert relative_error(gradient(Call.ours), gradient(Call.eager)) <= 1e-4


def test_expanded_gradient(cuda):
    """That of sum(): one value, at every position."""
    for case in ("relu", "alone", "gelu"):
        for layout in ("NCDHW", "NDHWC"):
            grads = []
            for run in (Call.ours, Call.eager):
                call = bare("strided", layout, **CASES[case], device=cuda, dtype=torch.float32).leaves()
                torch.manual_seed(0)
                for tensor in call.tensors.values():
                    tensor.data.normal_()
                run(call).sum().backward()
                grads.append([tensor.grad for tensor in call.tensors.values()])
            for ours, theirs in zip(*grads, strict=True):
                assert relative_error(ours, theirs) <= 1e-4


def test_changed_in_place(cuda):
    """As with PyTorch's calls, which keep ReLU's result, and of others what they apply to."""
    relu = bare(device=cuda, dtype=torch.float32).leaves()
    for run in (Call.ours, Call.eager):
        y = run(relu)
        y.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()
    leaky = bare(activation="leaky_relu", device=cuda, dtype=torch.float32).leaves()
    grads = []
    for run in (Call.ours, Call.eager):
        leaky.tensors["weight"].grad = None
        run(leaky).add_(1).sum().backward()
        grads.append(leaky.tensors["weight"].grad)
    assert relative_error(*grads) <= 1e-3


def test_no_samples(cuda):
    for case in ("relu", "gelu", "alone"):
        call = bare("strided", **CASES[case], device=cuda, dtype=torch.float32)
        empty = replace(call, tensors=call.tensors | {"input": call.tensors["input"][:0]}).leaves()
        empty.ours().sum().backward()
        assert not any(tensor.grad.any() for tensor in empty.tensors.values())


def test_double_backward(cuda):
    call = bare("library", activation="gelu", device=cuda, dtype=torch.float32)
    found = []
    for run in (Call.ours, Call.eager):
        leaves = call.leaves()
        weight = leaves.tensors["weight"]
        (once,) = torch.autograd.grad(run(leaves).square().sum(), weight, create_graph=True)
        (twice,) = torch.autograd.grad(once.square().sum(), weight)
        found.append(twice)
    assert relative_error(*found) <= 1e-3


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", ["relu", "gelu", "relu-skip"])
def test_autocast(cuda, case, low):
    call = bare("sm90", **CASES[case], device=cuda, dtype=torch.float32, precision=None)
    if "skip" in call.tensors:
        call = replace(call, tensors=call.tensors | {"skip": call.tensors["skip"].to(low)})
    with torch.autocast("cuda", dtype=low):
        results, ours = gradients(call, Call.ours)
        expected, eager = gradients(call, Call.eager)
    assert results[0].dtype is expected[0].dtype is low
    wide = gradients(call.to(torch.float64), Call.eager)[1]
    for name, right in wide.items():
        error, eager_error = (relative_error(g[name], right) for g in (ours, eager))
        assert ours[name].dtype is call.tensors[name].dtype
        assert error <= max(2 * eager_error, 2.0**-5), f"{name}: {error:.2e}, eager {eager_error:.2e}"


@pytest.mark.parametrize(
    "case", ["relu", "relu-skip-conv", "leaky", "prelu-conv", "silu-skip", "elu-skip-conv", "skip-alone"]
)
@pytest.mark.parametrize("layout", ["NCDHW", "NDHWC"])
def test_compiled(cuda, layout, case):
    call = bare("strided", layout, **CASES[case], device=cuda, dtype=torch.float32)
    torch._dynamo.reset()
    compiled = torch.compile(Call.ours, fullgraph=True, dynamic=False)
    results, ours = gradients(call, compiled)
    expected, eager = gradients(call, Call.eager)
    for y, right in zip(results, expected, strict=True):
        torch.testing.assert_close(y, right, rtol=1e-4, atol=1e-4)
    for name, grad in ours.items():
        assert relative_error(grad, eager[name]) <= 1e-4, name


def test_modes_see_pytorchs_calls(cuda):
    """What counts operations does so of PyTorch's own: it knows no others."""
    from torch.utils.flop_counter import FlopCounterMode

    call = bare("strided", device=cuda, dtype=torch.float32).leaves()
    counts = []
    for run in (Call.ours, Call.eager):
        with FlopCounterMode(display=False) as counter:
            run(call).sum().backward()
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


SAVED = {
    "float32": (torch.float32, "tf32", 1e-3),
    "bfloat16": (torch.bfloat16, None, 2e-2),
}


@pytest.mark.parametrize("way", ["to NDHWC", "to NCDHW", "aligned"])
@pytest.mark.parametrize("dtype", SAVED)
@pytest.mark.parametrize("activation", ["gelu", "leaky_relu", "relu"])
def test_saved_otherwise(cuda, activation, dtype, way):
    """A hook of saved tensors may lay out anew what was kept, and what the backward's plan is chosen by."""
    kind, precision, tolerance = SAVED[dtype]
    options = {"activation": activation, "device": cuda, "dtype": kind, "precision": precision}
    call = bare("either", "NCDHW" if way == "to NDHWC" else "NDHWC", **options)
    call.tensors["bias"].add_(3)
    if way == "aligned":
        x = call.tensors["input"]
        odd = torch.empty(x.numel() + 1, device=cuda, dtype=kind)[1:].as_strided(x.shape, x.stride()).copy_(x)
        call = replace(call, tensors=call.tensors | {"input": odd})
    call = call.map(lambda tensor: tensor.detach().requires_grad_())
    expected = torch.autograd.grad(call.ours().square().sum(), list(call.tensors.values()))
    formats = {"to NDHWC": torch.channels_last_3d, "to NCDHW": torch.contiguous_format}

    def pack(tensor):
        if tensor.dim() != 5:
            return tensor
        return tensor.clone() if way == "aligned" else tensor.contiguous(memory_format=formats[way])

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = call.ours()
    found = torch.autograd.grad(y.square().sum(), list(call.tensors.values()))
    for name, a, b in zip(call.tensors, found, expected, strict=True):
        assert relative_error(a, b) <= tolerance, name


def test_explained():
    def stages(activation="relu", training=True, **options):
        call = facts(dtype="bfloat16", layout="NDHWC", c=64, k=64)
        tail = {"num_groups": 0, "order": "norm_act", "activation": activation, "activation_param": 0.0}
        tail |= {"return_conv": False, "slopes": None, "skip": None, "training": training}
        found = plan_of(call | tail | options)
        return found.algorithm, found.backward_stages

    assert stages(training=False)[1] == ()
    algorithm, backward = stages()
    assert (algorithm, backward) == (
        stages(training=False)[0],
        ("activation_backward", "aten::convolution_backward"),
    )
    # The convolution is kept there, whose plan is the library's, whatever convolves.
    assert stages("gelu") == ("cuda_library", backward)
    assert stages("none")[1] == ("aten::convolution_backward",)  # without a bias


def test_which_blocks_are_pytorchs(monkeypatch):
    """The rule by itself, of which the tensors' sizes and dtypes are all it takes."""
    capturing = []
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: bool(capturing))
    monkeypatch.setattr(_tail_call, "SMALL_BLOCK_VALUES", SMALL_BLOCK_VALUES)
    forced = [""]
    monkeypatch.setattr(_C, "forced_plan", lambda: forced[0])

    def is_theirs(extent=(8, 16, 16), dtype=torch.bfloat16, num_groups=0, precise=False, **changed):
        x = torch.empty(2, 8, *extent, dtype=dtype, device="meta")
        w = torch.empty(8, 128, 2, 2, 2, dtype=dtype, device="meta")
        numbers = ((2, 2, 2), (0, 0, 0), (0, 0, 0), 1, (1, 1, 1), num_groups, 1e-5, "tf32")
        tensors = (x, w, None, None, None, None, changed.get("skip"))
        return is_recorded_by_pytorch(tensors, (*numbers, "norm_act", "relu", 0.0, False), precise)

    assert is_theirs()  # 2 * 128 * 16 * 32 * 32 values, the most
    assert not is_theirs(extent=(8, 16, 17))
    assert not is_theirs(num_groups=2)
    assert is_theirs(precise=True) and is_theirs(dtype=torch.float32)
    assert not is_theirs(dtype=torch.float32, precise=True)
    large = {"extent": (8, 16, 17), "num_groups": 2}
    assert is_theirs(**large, skip=torch.inference_mode()(torch.zeros)(1)), "which autograd cannot keep"
    assert is_theirs(extent=(8, 16, 17), dtype=torch.float64), "which no kernel of ours trains"
    forced[0] = "library"
    assert not is_theirs()
    forced[0] = ""
    capturing.append(True)
    assert not is_theirs()


def test_small_blocks_are_pytorchs(cuda, monkeypatch):
    """Where steps wait for the host: not of more values, in a graph, or of a precision that is asked for."""
    for case in CASES:
        for low in (None, torch.bfloat16):
            call = bare("library", **CASES[case], device=cuda, dtype=torch.float32, precision=None)
            if low is not None and "skip" in call.tensors:
                call = replace(call, tensors=call.tensors | {"skip": call.tensors["skip"].to(low)})
            found = []
            for limit in (SMALL_BLOCK_VALUES, 0):
                monkeypatch.setattr(_tail_call, "SMALL_BLOCK_VALUES", limit)
                leaves = call.leaves()
                with torch.autocast("cuda", dtype=low, enabled=low is not None):
                    results = outputs(leaves.ours())
                names = [type(result.grad_fn).__name__ for result in results]
                assert any("NormAct" in name for name in names) is (limit == 0), (case, limit, names)
                torch.autograd.backward(results, [torch.ones_like(result) for result in results])
                found.append([*results, *(tensor.grad for tensor in leaves.tensors.values())])
            for a, b in zip(*found, strict=True):
                assert (a.dtype, a.shape) == (b.dtype, b.shape)
                assert relative_error(a, b) <= (2e-3 if low is None else 5e-2), case
    monkeypatch.setattr(_tail_call, "SMALL_BLOCK_VALUES", SMALL_BLOCK_VALUES)
    leaves = bare("library", device=cuda, dtype=torch.float32, precision="ieee").leaves()
    assert "NormAct" in type(leaves.ours().grad_fn).__name__
    leaves = bare("library", device=cuda, dtype=torch.bfloat16).leaves()
    assert "NormAct" not in type(leaves.ours().grad_fn).__name__
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        captured = leaves.ours()
    assert "NormAct" in type(captured.grad_fn).__name__
    with torch.no_grad():
        assert leaves.ours().grad_fn is None


def test_in_an_accelerated_model(cuda):
    """A convolution and an activation without a norm, in training: as PyTorch's own calls."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.ConvTranspose3d(8, 16, 2, 2), torch.nn.ReLU()).to(cuda)
    x = torch.randn(2, 8, 6, 5, 7, device=cuda)
    expected = torch.autograd.grad(model(x).square().sum(), list(model.parameters()))
    report = upconv3d.accelerate(model)
    y = model(x)
    assert "NormAct" in type(y.grad_fn).__name__
    found = torch.autograd.grad(y.square().sum(), list(model.parameters()))
    for ours, theirs in zip(found, expected, strict=True):
        assert relative_error(ours, theirs) <= 2e-3
    report.restore()
