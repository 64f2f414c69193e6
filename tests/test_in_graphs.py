# SPDX-License-Identifier: Apache-2.0
"""Accelerated blocks in compiled graphs: which become our operator, and which PyTorch's own calls."""

import pytest
import torch
import upconv3d
from functorch.compile import make_boxed_func
from test_select_plan import facts, plan_of
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._inductor import config
from upconv3d import _in_graphs
from upconv3d._accelerated.graph import rewrite

HERE = frozenset({"cpu", "cuda"})


@pytest.fixture(autouse=True)
def afresh():
    torch._dynamo.reset()
    torch.backends.cudnn.conv.fp32_precision = "tf32"
    yield
    torch._dynamo.reset()


def _compiled(model, dynamic=False, rewrites=False, which="upconv3d"):
    """The model, compiled, and a list to which each of its graphs adds the names in it that have `which`."""
    names = []

    def keep(graph, _):
        names.append([str(node.target) for node in graph.graph.nodes if which in str(node.target)])
        return make_boxed_func(graph.forward)

    to_graphs = aot_autograd(fw_compiler=keep, bw_compiler=keep)

    def backend(gm, inputs):
        if rewrites:
            assert rewrite(gm.graph, HERE) > 0
            gm.recompile()
        return to_graphs(gm, inputs)

    return torch.compile(model, fullgraph=True, dynamic=dynamic, backend=backend), names


def _decoder(c=8, k=4, device="cpu"):
    torch.manual_seed(1)
    first = [nn.ConvTranspose3d(c, k, 3, 2, 1, 1), nn.ReLU(), nn.GroupNorm(2, k)]
    second = [nn.ConvTranspose3d(k, k, 2, 2, bias=False), nn.InstanceNorm3d(k, affine=True), nn.PReLU(k)]
    return nn.Sequential(*first, *second).to(device)


def _gradients(model, parameters, x, low=None):
    x = x.clone().requires_grad_()
    with torch.autocast(x.device.type, low or torch.bfloat16, enabled=low is not None):
        y = model(x)
    weights = torch.linspace(-1, 1, y.numel(), device=y.device).view(y.shape)
    return y, *torch.autograd.grad((y.float() * weights).sum(), [x, *parameters])


def _close(ours, theirs, tolerance):
    assert ours[0].dtype is theirs[0].dtype and ours[0].shape == theirs[0].shape
    for a, b in zip(ours, theirs, strict=True):
        assert float((a.float() - b.float()).norm()) <= tolerance * float(b.float().norm())


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last_3d], ids=str)
@pytest.mark.parametrize("low", [None, torch.bfloat16], ids=str)
def test_left_blocks_are_pytorchs_calls(device, monkeypatch, low, layout):
    monkeypatch.setattr(_in_graphs, "is_left_to_compiler", lambda *_: True)
    model = _decoder(device=device)
    x = torch.randn(2, 8, 3, 4, 5, device=device).contiguous(memory_format=layout)
    parameters = list(model.parameters())
    expected = _gradients(model, parameters, x, low)
    compiled, names = _compiled(model, rewrites=True)
    _close(_gradients(compiled, parameters, x, low), expected, 1e-3 if low is None else 5e-2)
    assert names == [[], []]


@pytest.mark.parametrize("low", [None, torch.bfloat16], ids=str)
def test_left_blocks_are_the_graph_that_they_were(device, monkeypatch, low):
    """Operator by operator: what is left to the compiler costs what it did."""
    monkeypatch.setattr(_in_graphs, "is_left_to_compiler", lambda *_: True)
    model, x = _decoder(device=device), torch.randn(2, 8, 3, 4, 5, device=device)
    seen = []
    for rewrites in (False, True):
        torch._dynamo.reset()
        compiled, names = _compiled(model, rewrites=rewrites, which="aten")
        _gradients(compiled, list(model.parameters()), x, low)
        seen.append([[name for name in graph if "detach" not in name] for graph in names])
    assert seen[0] == seen[1] and any("batch_norm" in name for name in seen[0][0])


def test_other_blocks_are_our_operator(device, monkeypatch):
    monkeypatch.setattr(_in_graphs, "is_left_to_compiler", lambda *_: False)
    # Of so few values the roundings of "tf32" open other gates than PyTorch's.
    torch.backends.cudnn.conv.fp32_precision = "ieee"
    model = _decoder(device=device)
    x = torch.randn(2, 8, 3, 4, 5, device=device)
    compiled, names = _compiled(model, rewrites=True)
    _close(
        _gradients(compiled, list(model.parameters()), x),
        _gradients(model, list(model.parameters()), x),
        1e-3,
    )
    (forward, backward) = names
    assert len(forward) == len(backward) == 2
    ours = ("upconv3d.conv_transpose3d_", "upconv3d._tail_for_training")
    assert all(name.startswith(ours) and "in_graph" not in name for name in forward)


def test_the_operator_outside_of_graphs(device):
    """Called by its name, it is the family's operator."""
    x, w = torch.randn(2, 4, 3, 4, 5, device=device), torch.randn(4, 6, 2, 2, 2, device=device)
    arguments = (x, w, None, [2] * 3, [0] * 3, [0] * 3, 1, [1] * 3, "norm_act", 2, None, None, 1e-5, "silu")
    arguments += (0.0, None, None, True, "ieee")
    ours = torch.ops.upconv3d.conv_transpose3d_norm_act_in_graph(*arguments)
    for a, b in zip(ours, torch.ops.upconv3d.conv_transpose3d_norm_act(*arguments), strict=True):
        torch.testing.assert_close(a, b)


def _is_small_kind(model, x, training):
    """Whether a plan of the block's, in training or else, is one that is left."""
    conv, norm = model[0], model[2]

    def plan(training):
        return upconv3d.explain_norm_act(
            *(x, conv.weight, conv.bias, conv.stride, conv.padding, conv.output_padding),
            order="act_norm",
            num_groups=norm.num_groups,
            norm_weight=norm.weight,
            norm_bias=norm.bias,
            training=training,
        )

    plans = (plan(False), plan(training))
    few = "conv_transpose_few_channels_sm80"
    return any(p.algorithm in ("cuda_library", "cuda_col2im") or few in p.stages for p in plans)


@pytest.mark.parametrize(("precision", "is_left"), [("tf32", True), ("ieee", False)])
def test_few_channels_are_left_but_at_float32s_accuracy(precision, is_left):
    """By the plan alone, without a GPU."""
    block = {"n": 1, "c": 16, "k": 8, "extent": (32, 32, 32), "stride": [2, 2, 2], "padding": [1, 1, 1]}
    plan = plan_of(facts(**block, dtype="float32", precision=precision))
    kind = {"algorithm": plan.algorithm, "stages": plan.stages}
    assert "conv_transpose_few_channels_sm80" in plan.stages
    assert _in_graphs._is_small_kind(kind, precision == "ieee") == is_left


def test_col2im_is_left_unless_it_spares_the_device_enough():
    """By the plan alone, without a GPU."""
    block = {"n": 1, "c": 256, "k": 1, "num_groups": 1, "stride": [2, 2, 2], "padding": [1, 1, 1]}
    for extent, is_left in ((16, True), (48, False)):
        plan = plan_of(facts(**block, extent=(extent,) * 3))
        assert plan.algorithm == "cuda_col2im"
        kind = {"algorithm": plan.algorithm, "stages": plan.stages, "saves_us": plan.saves_us}
        assert _in_graphs._is_small_kind(kind, False) == is_left
        assert not _in_graphs._is_small_kind(kind, True)


@pytest.mark.parametrize("low", [None, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("training", [False, True])
def test_small_blocks_are_left(hopper, training, low):
    """Of an accelerated model; not where sizes are symbolic, or a CUDA graph replays what is compiled."""
    seen = []
    for c, k, extent in ((320, 320, 4), (32, 2, 40), (64, 64, 40)):
        model = _decoder(c, k, hopper)[:3].train(training)
        x = torch.randn(1, c, extent, extent, extent, device=hopper, requires_grad=training)
        seen.append(_is_small_kind(model, x, training))
        upconv3d.accelerate(model)
        for dynamic, replayed in ((False, False), (False, True), (True, False)):
            torch._dynamo.reset()
            compiled, names = _compiled(model, dynamic)
            with (
                torch.set_grad_enabled(training),
                config.patch({"triton.cudagraphs": replayed}),
                torch.autocast("cuda", low or torch.bfloat16, enabled=low is not None),
            ):
                torch.testing.assert_close(compiled(x), model(x), rtol=3e-2, atol=3e-2)
            left = seen[-1] and not dynamic and not replayed
            # Of float16 whose gradients are recorded, PyTorch's calls also where no plan of ours is better.
            if left or not (training and low is torch.float16):
                assert (names[0] == []) == left, (extent, dynamic, replayed, names)
    assert seen == [True, True, False]


@pytest.mark.parametrize("low", [None, torch.bfloat16], ids=str)
def test_folded_batch_norms_in_graphs(device, low):
    """Of an accelerated model in eval mode."""
    torch.manual_seed(2)
    model = nn.Sequential(nn.ConvTranspose3d(16, 8, 2, 2), nn.BatchNorm3d(8), nn.ELU()).to(device).eval()
    x = torch.randn(2, 16, 5, 6, 7, device=device)
    with torch.no_grad(), torch.autocast(device.type, torch.bfloat16, enabled=low is not None):
        expected = model(x)
        upconv3d.accelerate(model)
        y = _compiled(model)[0](x)
    assert y.dtype is expected.dtype
    torch.testing.assert_close(y, expected, rtol=3e-2, atol=3e-2)


def test_vmap(device):
    """As the operator that is recorded, in one call where that takes one."""
    x, w = torch.randn(3, 2, 4, 3, 4, 5, device=device), torch.randn(4, 6, 2, 2, 2, device=device)
    for order, activation in (("act_norm", "relu"), ("norm_act", "silu")):
        numbers = (None, [2] * 3, [0] * 3, [0] * 3, 1, [1] * 3, order, 2, None, None, 1e-5, activation)

        def call(v, numbers=numbers):
            op = torch.ops.upconv3d.conv_transpose3d_norm_act_in_graph
            return op(v, w, *numbers, 0.0, None, None, False, "ieee")[0]

        torch.testing.assert_close(torch.vmap(call)(x), torch.stack([call(v) for v in x]))


@pytest.mark.parametrize("strict", [False, True])
def test_exported_programs_hold_operators_that_others_know(hopper, strict):
    model = _decoder(64, 8, hopper).eval()
    x = torch.randn(1, 64, 4, 5, 6, device=hopper)
    with torch.no_grad():
        expected = model(x)
        upconv3d.accelerate(model)
        program = torch.export.export(model, (x,), strict=strict)
        torch.testing.assert_close(program.module()(x), expected, rtol=1e-2, atol=1e-2)
    targets = [str(node.target) for node in program.graph.nodes if "upconv3d" in str(node.target)]
    assert len(targets) == 2 and not any("in_graph" in target or "_tail" in target for target in targets)


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16], ids=str)
def test_strides_do_not_depend_on_what_is_left(hopper, low):
    """CUDA graphs are asked for where Inductor runs: by then Dynamo has taken the strides down."""
    model = _decoder(16, 8, hopper)[:3]
    upconv3d.accelerate(model)
    x = torch.randn(2, 16, 3, 4, 5, device=hopper).contiguous(memory_format=torch.channels_last_3d)

    def function(x):
        return model(x).permute(0, 2, 3, 4, 1).view(-1, 8)

    def backend(gm, inputs):
        with config.patch({"triton.cudagraphs": True}):
            return aot_autograd(fw_compiler=lambda g, _: make_boxed_func(g.forward))(gm, inputs)

    with torch.autocast("cuda", low):
        y = torch.compile(function, fullgraph=True, dynamic=False, backend=backend)(x)
        torch.testing.assert_close(y, model(x).permute(0, 2, 3, 4, 1).reshape(-1, 8), rtol=3e-2, atol=3e-2)
    y.float().square().sum().backward()


def test_inference_records_an_operator_that_is_not_pythons(hopper):
    block = upconv3d.ConvTranspose3dNormAct(16, 32, 3, norm="instance", activation="prelu", device=hopper)
    x = torch.randn(2, 16, 4, 5, 6, device=hopper)
    with torch.no_grad():
        for low in (None, torch.bfloat16):
            torch._dynamo.reset()
            compiled, names = _compiled(block)
            with torch.autocast("cuda", torch.bfloat16, enabled=low is not None):
                torch.testing.assert_close(compiled(x), block(x), rtol=2e-2, atol=2e-2)
            assert names == [["upconv3d._tail.default"]]
        program = torch.export.export(block, (x,))
    assert any("conv_transpose3d_norm_act" in str(node.target) for node in program.graph.nodes)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last_3d], ids=str)
@pytest.mark.parametrize("low", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize("wanted", ["all", "weight"])
def test_training_records_operators_that_are_not_pythons(hopper, wanted, low, layout):
    block = upconv3d.ConvTranspose3dNormAct(64, 64, 2, 2, num_groups=16, activation="prelu", device=hopper)
    x = torch.randn(2, 64, 5, 4, 6, device=hopper).contiguous(memory_format=layout)
    block.requires_grad_(wanted == "all").conv_transpose.weight.requires_grad_()
    parameters = [p for p in block.parameters() if p.requires_grad]

    def gradients(function):
        with torch.autocast("cuda", torch.bfloat16, enabled=low is not None):
            y = function(x)
        return y, *torch.autograd.grad(y.float().square().sum(), parameters)

    compiled, names = _compiled(block)
    _close(gradients(compiled), gradients(block), 1e-4 if low is None else 2e-2)
    assert names == [["upconv3d._tail_for_training.default"], ["upconv3d._tail_backward.default"]]


@pytest.mark.parametrize("family", [False, True], ids=["block", "family"])
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("c", [4, 64])
def test_float16_gradients_keep_float32s_range_in_graphs(hopper, c, dynamic, family):
    """A result's gradient beyond float16, as of a loss scale, that the norm's small weight brings back."""
    if family:
        block = upconv3d.ConvTranspose3dNormAct(c, c, 3, num_groups=4, activation="silu", device=hopper)
    else:
        block = upconv3d.ConvTranspose3dReLUGroupNorm(c, c, 3, 4, device=hopper)
    with torch.no_grad():
        for name, parameter in block.named_parameters():
            if "norm" in name and "weight" in name:
                parameter.fill_(1e-4)
    x = torch.randn(2, c, 9, 8, 10, device=hopper)
    parameters = list(block.parameters())
    scale = 1e6

    def run(call):
        with torch.autocast("cuda", torch.float16):
            y = call(x)
        weights = torch.linspace(-scale, scale, y.numel(), device=y.device).view(y.shape)
        return torch.autograd.grad((y.float() * weights).sum(), parameters)

    compiled, names = _compiled(block, dynamic)
    ours, theirs = run(compiled), run(block)
    assert names
    for a, b in zip(ours, theirs, strict=True):
        assert (
            torch.isfinite(a).all() and float((a - b).norm()) <= 2e-2 * float(b.norm()) + 1e-2 * scale * 1e-4
        )
