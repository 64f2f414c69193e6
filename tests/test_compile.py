# SPDX-License-Identifier: Apache-2.0
"""The operator as PyTorch's compiler sees it: opcheck, fake tensors, torch.compile."""

import copy
import itertools
import os
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
import upconv3d
from functorch.compile import make_boxed_func
from oracles import make_block
from test_select_plan import HOPPER, facts
from test_values import SHAPES, shape_block
from torch._dynamo.backends.common import aot_autograd
from torch._subclasses.fake_tensor import FakeTensorMode
from upconv3d._facts import kept_of

OP_NAME = "upconv3d::conv_transpose3d_relu_group_norm"


def _op_arguments(block):
    def triple(value):
        return [value] * 3 if isinstance(value, int) else list(value)

    return (
        block.input,
        block.weight,
        block.bias,
        triple(block.stride),
        triple(block.padding),
        triple(block.output_padding),
        block.groups,
        triple(block.dilation),
        block.num_groups,
        block.norm_weight,
        block.norm_bias,
        block.eps,
        block.precision,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", ["NCDHW", "NDHWC"])
@pytest.mark.parametrize("shape", ["padding", "monai-unet", "unbatched", "grouped"])
def test_opcheck(device, shape, layout, dtype):
    block = shape_block(shape, device=device, dtype=dtype)
    block = block.channels_last() if layout == "NDHWC" else block
    op = torch.ops.upconv3d.conv_transpose3d_relu_group_norm.default
    tests = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(op, _op_arguments(block.requires_grad()), test_utils=tests, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("layout", ["NCDHW", "NDHWC"])
def test_opcheck_of_the_backward_operator(device, layout):
    block = shape_block("padding", device=device)
    block = block.channels_last() if layout == "NDHWC" else block
    args = _op_arguments(block)
    args = (torch.randn_like(block.ours()), *args[:10], *args[11:], [True, True, False, True, False])
    op = torch.ops.upconv3d.conv_transpose3d_relu_group_norm_backward.default
    torch.library.opcheck(op, args, test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("layout", ["NCDHW", "NDHWC"])
@pytest.mark.parametrize("shape", ["padding", "monai-unet", "unbatched", "grouped"])
def test_opcheck_of_the_training_operator(device, shape, layout):
    """Also what is kept has the sizes and strides that a compiler was told."""
    block = shape_block(shape, device=device)
    block = block.channels_last() if layout == "NDHWC" else block
    op = torch.ops.upconv3d.conv_transpose3d_relu_group_norm_for_training.default
    torch.library.opcheck(op, _op_arguments(block), test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("x_format", ["NCDHW", "NDHWC", "odd"])
@pytest.mark.parametrize("w_format", ["NCDHW", "NDHWC"])
def test_fake_sizes_and_strides_are_those_of_the_real_kernel(device, shape, x_format, w_format):
    block = shape_block(shape, device=device)
    both = block.channels_last()
    block = replace(block, weight=both.weight if w_format == "NDHWC" else block.weight)
    if x_format == "NDHWC":
        block = replace(block, input=both.input)
    elif x_format == "odd":
        block = replace(block, input=block.input.transpose(-1, -2).contiguous().transpose(-1, -2))
    y = block.ours()
    with FakeTensorMode() as mode:
        fake = block.map(mode.from_tensor).ours()
    assert fake.shape == y.shape and fake.stride() == y.stride() and fake.dtype == y.dtype
    meta = block.map(lambda tensor: tensor.to("meta")).ours()
    assert meta.is_meta and meta.shape == y.shape


def test_fake_tensors_are_checked_too():
    block = make_block(2, 4, 8, 3, 3, num_groups=3)
    with FakeTensorMode() as mode, pytest.raises(RuntimeError, match="num_groups must divide"):
        block.map(mode.from_tensor).ours()


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("layout", ["NCDHW", "NDHWC"])
def test_compile_without_graph_breaks(device, dynamic, layout):
    torch._dynamo.reset()

    def function(x, w, bias, gamma, beta):
        y = upconv3d.conv_transpose3d_relu_group_norm(
            *(x * 2, w, bias, 2, (1,), [0, 1, 0]), num_groups=2, norm_weight=gamma, norm_bias=beta,
            precision="ieee",
        )  # fmt: skip
        return y + 1

    compiled = torch.compile(function, fullgraph=True, dynamic=dynamic, backend="aot_eager")
    for n, extent in ((2, 4), (3, 5)):
        block = make_block(n, 4, 6, extent, 3, num_groups=2, device=device)
        block = block.channels_last() if layout == "NDHWC" else block
        results = []
        for call in (function, compiled):
            leaf = block.requires_grad()
            y = call(*leaf.tensors().values())
            y.square().sum().backward()
            results.append((y, [tensor.grad for tensor in leaf.tensors().values()]))
        (y, grads), (y_compiled, grads_compiled) = results
        assert y_compiled.stride() == y.stride()
        torch.testing.assert_close(y_compiled, y, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(grads_compiled, grads, rtol=1e-3, atol=1e-3)


def test_compile_module_with_inductor(device):
    torch._dynamo.reset()
    torch.manual_seed(0)
    block = upconv3d.ConvTranspose3dReLUGroupNorm(4, 8, 3, 2, device=device, precision="ieee")
    compiled = torch.compile(block, fullgraph=True)
    x = torch.randn(2, 4, 3, 4, 5, device=device, requires_grad=True)
    expected = block(x)
    (grad,) = torch.autograd.grad(expected.square().sum(), x)
    y = compiled(x)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(torch.autograd.grad(y.square().sum(), x)[0], grad, rtol=1e-3, atol=1e-3)


def test_precision_resolution_traces():
    """The CUDA branch of precision=None, which a CPU tensor does not take, breaks no graph either."""
    from upconv3d.functional import _torch_conv_precision

    torch._dynamo.reset()
    torch.backends.cudnn.conv.fp32_precision = "ieee"

    @torch.compile(fullgraph=True, backend="eager")
    def function(x):
        return x + (1 if _torch_conv_precision() == "ieee" else 2)

    assert function(torch.zeros(())) == 1


def test_export(device):
    block = upconv3d.ConvTranspose3dReLUGroupNorm(4, 8, 3, 2, device=device, precision="ieee").eval()
    x = torch.randn(2, 4, 3, 3, 3, device=device)
    program = torch.export.export(block, (x,))
    assert any(OP_NAME.replace("::", ".") in str(node.target) for node in program.graph.nodes)
    torch.testing.assert_close(program.module()(x), block(x))


def _graphs_of(block, x):
    """Outputs, gradients, and the names of our operators in forward's and backward's graph, compiled."""
    names = []

    def keep(graph, _):
        names.append([str(node.target) for node in graph.graph.nodes if "upconv3d" in str(node.target)])
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    compiled = torch.compile(block, fullgraph=True, backend=aot_autograd(fw_compiler=keep, bw_compiler=keep))
    y = compiled(x)
    return (y, *torch.autograd.grad(y.square().sum(), [x, *block.parameters()])), names


@pytest.mark.parametrize("recompute", [False, True], ids=["kept", "recomputed"])
def test_what_a_compiled_forward_keeps(device, recompute):
    """The convolution is not computed again, unless that is asked for."""
    block = upconv3d.ConvTranspose3dReLUGroupNorm(
        16, 32, 3, 2, device=device, precision="ieee", recompute=recompute
    )
    x = torch.randn(2, 16, 4, 5, 6, device=device, requires_grad=True)
    expected = block(x)
    expected = (expected, *torch.autograd.grad(expected.square().sum(), [x, *block.parameters()]))
    found, (forward, backward) = _graphs_of(block, x)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    suffix = "recomputed" if recompute else "for_training"
    assert forward == [f"upconv3d.conv_transpose3d_relu_group_norm_{suffix}.default"]
    assert backward == ["upconv3d.conv_transpose3d_relu_group_norm_backward.default"]


def test_what_a_compiled_forward_of_the_family_keeps(hopper):
    block = upconv3d.ConvTranspose3dNormAct(
        16, 32, 3, norm="instance", activation="prelu", device=hopper, precision="ieee"
    )
    x = torch.randn(2, 16, 4, 5, 6, device=hopper, requires_grad=True)
    expected = block(x)
    expected = (expected, *torch.autograd.grad(expected.square().sum(), [x, *block.parameters()]))
    found, (forward, backward) = _graphs_of(block, x)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert forward == ["upconv3d._tail_for_training.default"]
    assert backward == ["upconv3d._tail_backward.default"]


def _casts_of(block, x):
    """The result of a call under autocast, compiled, and the dtypes that its graphs cast to."""
    dtypes = []

    def keep(graph, _):
        for node in graph.graph.nodes:
            if node.op == "call_function" and "_to_copy" in str(node.target):
                dtypes.append(node.kwargs["dtype"])
        return make_boxed_func(graph.forward)

    torch._dynamo.reset()
    compiled = torch.compile(block, fullgraph=True, backend=aot_autograd(fw_compiler=keep, bw_compiler=keep))
    with torch.autocast(x.device.type, torch.bfloat16):
        y = compiled(x)
    if y.requires_grad:
        y.float().square().sum().backward()
    return y, dtypes


def _autocast_blocks(device):
    block = upconv3d.ConvTranspose3dReLUGroupNorm(24, 40, 3, 8, device=device)
    family = upconv3d.ConvTranspose3dNormAct(24, 40, 3, norm="instance", activation="prelu", device=device)
    return (block, family), torch.randn(2, 24, 8, 9, 10, device=device)


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
def test_autocast_casts_nothing_in_graphs_of_our_kernels(hopper, grad):
    blocks, x = _autocast_blocks(hopper)
    for block in blocks:
        with torch.set_grad_enabled(grad):
            y, dtypes = _casts_of(block, x)
        with torch.autocast("cuda", torch.bfloat16):
            expected = block(x)
        assert y.dtype == expected.dtype
        # An instance norm's result is cast, which in PyTorch's calls is the convolution's dtype.
        assert dtypes.count(torch.bfloat16) == (y.dtype is torch.bfloat16)
        torch.testing.assert_close(y, expected, rtol=2e-2, atol=2e-2)


def test_autocast_without_casts_in_a_graph(monkeypatch):
    """The same by the CPU's kernel, where a plan would want it."""
    (block, _), x = _autocast_blocks("cpu")
    exact = block(x).detach()
    _, dtypes = _casts_of(block, x)
    assert torch.bfloat16 in dtypes
    monkeypatch.setattr(upconv3d._autocast, "computes_in_float32", lambda *_: True)
    y, dtypes = _casts_of(block, x)
    assert torch.bfloat16 not in dtypes
    assert y.dtype == torch.float32
    torch.testing.assert_close(y, exact, rtol=1e-5, atol=1e-5)


def test_compiled_graphs_on_disk_are_of_one_build_and_plan():
    tag = torch.compiler.config.cache_key_tag
    assert f"upconv3d {upconv3d.__version__} " in tag and os.environ.get("UPCONV3D_PLAN", "") in tag


def test_compiled_graphs_on_disk_are_of_as_many_multiprocessors(monkeypatch):
    """Of a context that MPS grants a part of the GPU, plans are others, and what forwards keep."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda index: SimpleNamespace(multi_processor_count=132 - index)
    )
    whole = upconv3d.InductorPass().uuid()
    with torch.compiler.config.patch(cache_key_tag="build"):
        upconv3d._graphs.tag_multiprocessors.__wrapped__()
        assert torch.compiler.config.cache_key_tag == "build (132, 131)"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    assert upconv3d.InductorPass().uuid() != whole


def test_graphs_that_keep_something_are_tagged_before_they_are_looked_up(cuda, monkeypatch):
    """Dynamo asks what is kept, AOTAutograd looks the graph up behind that."""
    seen = []
    monkeypatch.setattr(upconv3d._facts, "tag_multiprocessors", lambda: seen.append(True))
    block = make_block(1, 16, 32, 4, 3, num_groups=8, dtype=torch.bfloat16, device=cuda).requires_grad()
    (_, *arguments), settings = block.arguments()

    def backend(graph, inputs):
        assert seen
        return graph.forward

    torch.compile(
        lambda x: upconv3d.conv_transpose3d_relu_group_norm(x, *arguments, **settings), backend=backend
    )(block.input)
    assert seen


@pytest.mark.parametrize("layout", ["NCDHW", "NDHWC"])
def test_nothing_is_told_of_what_depends_on_addresses(layout):
    """Compilers know no addresses: of input and weight that may begin amid 16 bytes, what is kept is known
    where that does not matter."""
    told = []
    for channels, outputs, extent in itertools.product((64, 256, 512), (128, 512), (2, 4, 8)):
        arguments = facts(
            1, channels, outputs, (extent,) * 3, layout=layout, weight_layout=layout, stride=[2] * 3
        )
        arguments |= {"device": HOPPER}

        def kept(unaligned, arguments=arguments):
            variant = {name: arguments[name] | {"data_ptr_mod16": 8} for name in unaligned}
            explained = upconv3d._C.explain(arguments | variant | {"training": True})
            plan = explained["plan"]
            return plan["keeps_conv"] or plan["keeps_sum"], explained["saved_bytes"]

        every = {kept(names) for names in ((), ("input",), ("weight",), ("input", "weight"))}
        known = kept_of(arguments)
        assert (known is None) == (len(every) > 1)
        assert known is None or tuple(known) in every
        told.append(known is not None)
    assert any(told) and (layout == "NCDHW" or not all(told))


def test_a_batch_that_turns_out_empty():
    """How many samples a mask leaves is known with the data alone; the CPU keeps their convolution."""
    block = make_block(3, 4, 6, (2, 3, 2), 2, num_groups=2).requires_grad()
    (_, *arguments), settings = block.arguments()

    def masked(x, mask):
        return upconv3d.conv_transpose3d_relu_group_norm(x[mask], *arguments, **settings)

    compiled = torch.compile(masked, fullgraph=True, backend="aot_eager")
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        for mask in ([True, False, True], [False] * 3):
            y = compiled(block.input, torch.tensor(mask))
            expected = masked(block.input, torch.tensor(mask))
            torch.testing.assert_close(y, expected)
            grads = [
                torch.autograd.grad(each.sin().sum(), [block.input, block.weight]) for each in (y, expected)
            ]
            torch.testing.assert_close(*grads)


def test_the_backward_operator_by_its_name_in_grad_mode(device):
    """As in a recorded training step that is run again with parameters that require gradients."""
    block = make_block(2, 4, 6, (2, 3, 2), 2, num_groups=2, device=device).requires_grad()
    y = block.ours()
    expected = torch.autograd.grad(y.sum(), [block.weight])
    op = torch.ops.upconv3d.conv_transpose3d_relu_group_norm_backward
    numbers = ([1] * 3, [0] * 3, [0] * 3, 1, [1] * 3, 2, block.norm_weight, block.eps, block.precision)
    given = (torch.ones_like(y), block.input, block.weight, block.bias, *numbers)
    torch.testing.assert_close(op(*given, [False, True, False, False, False], None)[1], *expected)


@pytest.mark.parametrize("name", ["block", "family"])
def test_compiled_autograd_of_an_eager_forward(name, device):
    """In one graph."""
    make = {
        "block": lambda: upconv3d.ConvTranspose3dReLUGroupNorm(4, 6, 2, 2),
        "family": lambda: upconv3d.ConvTranspose3dNormAct(4, 6, 2, num_groups=2, activation="silu"),
    }[name]
    module = make().to(device)
    x = torch.randn(2, 4, 3, 2, 4, device=device)
    expected = torch.autograd.grad(module(x).sin().sum(), list(module.parameters()))
    with torch._dynamo.compiled_autograd._enable(
        lambda graph: torch.compile(graph, backend="aot_eager", fullgraph=True)
    ):
        module(x).sin().sum().backward()
    torch.testing.assert_close([p.grad for p in module.parameters()], list(expected))


@pytest.mark.parametrize("fullgraph", [False, True])
def test_gradients_of_torch_func_of_accelerated_models(fullgraph, device):
    """Of an operator that the CPU has, too."""
    plain = torch.nn.Sequential(
        torch.nn.ConvTranspose3d(4, 6, 2, 2), torch.nn.ReLU(), torch.nn.GroupNorm(2, 6)
    ).to(device)
    model = copy.deepcopy(plain)
    assert upconv3d.accelerate(model).replaced
    x = torch.randn(2, 4, 3, 2, 4, device=device)
    found, expected = (
        torch.compile(
            torch.func.grad(lambda x, f=f: f(x).sin().sum()), backend="aot_eager", fullgraph=fullgraph
        )(x)
        for f in (model, plain)
    )
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)
