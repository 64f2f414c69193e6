# SPDX-License-Identifier: Apache-2.0
"""torch.func: vmap's batching rules, grad, vjp, jacrev and their compositions, against PyTorch's calls."""

import copy
import warnings
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
import upconv3d
from oracles import make_block
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, stack_module_state, vjp, vmap

SLICES = 3


@pytest.fixture(autouse=True)
def _fallbacks_are_errors():
    """vmap's fallback for operators without a batching rule says so in a warning."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*batching rule.*")
        yield


def _case(device, n=2):
    """Ours and PyTorch's block as functions of the input, an input, and weights that make a scalar."""
    torch.backends.cudnn.conv.fp32_precision = "ieee"
    torch.backends.cudnn.deterministic = True
    block = make_block(n, 4, 6, (2, 3, 2), 3, num_groups=2, device=device, dtype=torch.float64)

    def ours(x):
        return upconv3d.conv_transpose3d_relu_group_norm(
            x,
            block.weight,
            block.bias,
            num_groups=2,
            norm_weight=block.norm_weight,
            norm_bias=block.norm_bias,
        )

    def eager(x):
        a = F.relu(F.conv_transpose3d(x, block.weight, block.bias))
        a = a.unsqueeze(0) if x.dim() == 4 else a
        return F.group_norm(a, 2, block.norm_weight, block.norm_bias).reshape(a.shape[5 - x.dim() :])

    # A sum of squares of normalized values hardly depends on the input.
    readout = torch.randn(6, 4, 5, 4, device=device, dtype=torch.float64)
    return ours, eager, block.input, readout


def _slices(x):
    return torch.stack([x * (index + 1) + index for index in range(SLICES)])


COMPOSITIONS = {
    "vmap": lambda f, x, r: vmap(f)(_slices(x)),
    "vmap-other-axes": lambda f, x, r: vmap(f, in_dims=2, out_dims=3)(_slices(x).movedim(0, 2)),
    "vmap-vmap": lambda f, x, r: vmap(vmap(f))(torch.stack([_slices(x), _slices(x + 1)])),
    "vmap-chunks": lambda f, x, r: vmap(f, chunk_size=2)(_slices(x)),
    "grad": lambda f, x, r: grad(lambda z: (r * f(z)).sum())(x),
    "grad-grad": lambda f, x, r: grad(lambda z: grad(lambda v: (r * f(v)).sum())(z).square().sum())(x),
    "vmap-grad": lambda f, x, r: vmap(grad(lambda z: (r * f(z)).sum()))(_slices(x)),
    "grad-vmap": lambda f, x, r: grad(lambda z: (r * vmap(f)(z)).sum())(_slices(x)),
    "vjp": lambda f, x, r: vjp(f, x)[1](r.expand_as(f(x)))[0],
    "vmap-vjp-without-grad": lambda f, x, r: torch.no_grad()(lambda: vmap(vjp(f, x)[1])(_slices(f(x))))()[0],
    "jacrev-without-grad": lambda f, x, r: torch.no_grad()(jacrev(lambda z: (r * f(z)).sum((-1, -2, -3))))(x),
    "jacrev": lambda f, x, r: jacrev(lambda z: (r * f(z)).sum((-1, -2, -3)))(x),
    "jacrev-jacrev": lambda f, x, r: jacrev(jacrev(lambda z: (r * f(z)).sum()))(x),
}


@pytest.mark.parametrize("n", [2, None], ids=["batch", "unbatched"])
@pytest.mark.parametrize("name", COMPOSITIONS)
def test_like_eager(device, name, n):
    ours, eager, x, readout = _case(device, n)
    results = [COMPOSITIONS[name](function, x, readout) for function in (ours, eager)]
    torch.testing.assert_close(*results, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("name", ["vmap", "vmap-vmap", "vmap-other-axes"])
def test_plain_autograd_through_vmap(device, name):
    ours, eager, x, _ = _case(device)
    gradients = []
    for function in (ours, eager):
        leaf = x.clone().requires_grad_()
        y = COMPOSITIONS[name](function, leaf, None)
        y.sin().sum().backward()
        gradients.append(leaf.grad)
    torch.testing.assert_close(*gradients, rtol=1e-8, atol=1e-10)


def test_slices_become_samples_of_one_call(device):
    """The profiler shows the call with batched tensors, and the one that the rule makes of it."""
    ours, _, x, _ = _case(device)
    name = "upconv3d::conv_transpose3d_relu_group_norm"

    def calls(function):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
            function()
        names = [event.name for event in profiler.events()]
        return names.count(name), names.count(f"{name}_backward")

    xs = _slices(x).requires_grad_()
    assert calls(lambda: vmap(ours)(xs).sin().sum().backward()) == (2, 1)
    with torch.no_grad():  # gradients of gradients excluded, the backward operator serves vjp too
        y, pullback = vjp(ours, x)
        grads_y = torch.randn(SLICES, *y.shape, device=device, dtype=y.dtype)
        assert calls(lambda: vmap(pullback)(grads_y)) == (0, 2)


def test_vmap_keeps_channels_last(device):
    ours, _, x, _ = _case(device)
    xs = _slices(x).permute(0, 1, 3, 4, 5, 2).contiguous().permute(0, 1, 5, 2, 3, 4)
    y = vmap(ours)(xs)
    assert all(sample.is_contiguous(memory_format=torch.channels_last_3d) for sample in y)
    torch.testing.assert_close(y, torch.stack([ours(sample) for sample in xs]))


def test_ensemble(device):
    """Batched weights: one call per model, gradients included."""
    make = upconv3d.ConvTranspose3dReLUGroupNorm
    models = [make(4, 6, 3, 2, device=device, dtype=torch.float64) for _ in range(SLICES)]
    parameters, _ = stack_module_state(models)
    base = copy.deepcopy(models[0]).to("meta")
    x = torch.randn(2, 4, 3, 2, 3, device=device, dtype=torch.float64)
    y = vmap(lambda p: functional_call(base, p, (x,)))(parameters)
    y.sin().sum().backward()
    for index, model in enumerate(models):
        alone = model(x)
        torch.testing.assert_close(y[index], alone)
        alone.sin().sum().backward()
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameters[name].grad[index], parameter.grad)


def test_gradients_per_sample(device):
    """vmap of grad over one set of parameters, the sum of which is the gradient of the batch."""
    torch.backends.cudnn.deterministic = True
    model = upconv3d.ConvTranspose3dReLUGroupNorm(4, 6, 3, 2, device=device, dtype=torch.float64)
    x = torch.randn(SLICES, 4, 3, 2, 3, device=device, dtype=torch.float64)
    parameters = {name: parameter.detach() for name, parameter in model.named_parameters()}

    def loss(p, sample):
        return functional_call(model, p, (sample,)).sin().sum()

    apart = vmap(grad(loss), in_dims=(None, 0))(parameters, x)
    model(x).sin().sum().backward()
    for name, parameter in model.named_parameters():
        assert apart[name].shape == (SLICES, *parameter.shape)
        torch.testing.assert_close(apart[name].sum(0), parameter.grad)


def test_batched_grad_outputs(device):
    """autograd.grad(is_grads_batched=True), which vectorized Jacobians are made of."""
    ours, eager, x, _ = _case(device)
    results = []
    for function in (ours, eager):
        leaf = x.clone().requires_grad_()
        y = function(leaf)
        grads_y = torch.stack(
            [torch.ones_like(y), torch.cos(torch.arange(y.numel(), device=device)).view_as(y)]
        )
        results.append(torch.autograd.grad(y, leaf, grads_y.to(y.dtype), is_grads_batched=True)[0])
    torch.testing.assert_close(*results, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last_3d], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_batched_grad_outputs_are_those_of_a_loop(device, dtype, layout):
    block = make_block(2, 16, 16, 4, 3, num_groups=4, device=device, dtype=dtype).requires_grad()
    leaf = block.input.detach().contiguous(memory_format=layout).requires_grad_()
    y = replace(block, input=leaf).ours()
    grads_y = torch.stack([torch.ones_like(y), torch.randn_like(y)])
    batched = torch.autograd.grad(y, leaf, grads_y, is_grads_batched=True, retain_graph=True)[0]
    loop = [torch.autograd.grad(y, leaf, grad_y, retain_graph=True)[0] for grad_y in grads_y]
    torch.testing.assert_close(batched, torch.stack(loop), rtol=1e-2, atol=1e-2)


def test_autocast_under_vmap(device):
    block = make_block(2, 4, 6, 3, 3, num_groups=2, device=device)
    results = []
    for function in (vmap, lambda f: lambda xs: torch.stack([f(x) for x in xs])):
        leaf = _slices(block.input).requires_grad_()
        with torch.autocast(device.type, dtype=torch.bfloat16):
            y = function(lambda x: upconv3d.conv_transpose3d_relu_group_norm(x, block.weight, num_groups=2))(
                leaf
            )
        y.float().sin().sum().backward()
        assert leaf.grad.dtype == torch.float32
        results.append((y.float(), leaf.grad))
    # On CUDA, one of the two may be computed without the casts, and is then more exact.
    for together, apart in zip(*results, strict=True):
        error = (together - apart).detach().norm() / apart.detach().norm()
        assert float(error) < 4 * torch.finfo(torch.bfloat16).eps


def test_functionalize(device):
    ours, _, x, _ = _case(device)
    torch.testing.assert_close(torch.func.functionalize(ours)(x), ours(x))


def test_no_slices(device):
    ours, _, x, _ = _case(device)
    xs = x.new_empty(0, *x.shape).requires_grad_()
    y = vmap(ours)(xs)
    assert y.shape == (0, *ours(x).shape)


def test_autocast_under_grad(device):
    """The casts are differentiated: gradients of float32 tensors are float32, within bfloat16's error."""
    block = make_block(2, 4, 6, 3, 3, num_groups=2, device=device)
    readout = torch.randn(2, 6, 5, 5, 5, device=device)

    def loss(x, w, cast):
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=cast):
            y = upconv3d.conv_transpose3d_relu_group_norm(x, w, num_groups=2)
        assert y.dtype == (torch.bfloat16 if cast and device.type == "cpu" else torch.float32)
        return (y.float() * readout).sum()

    low, full = (grad(loss, argnums=(0, 1))(block.input, block.weight, cast) for cast in (True, False))
    for ours, expected in zip(low, full, strict=True):
        assert ours.dtype == torch.float32
        assert float((ours - expected).norm() / expected.norm()) < 0.05


def test_compiled_vmap(device):
    torch._dynamo.reset()
    ours, _, x, _ = _case(device)
    compiled = torch.compile(lambda z: vmap(ours)(z), fullgraph=True, backend="aot_eager")
    xs = _slices(x)
    torch.testing.assert_close(compiled(xs), vmap(ours)(xs))


FORWARD_MODES = {
    "jvp": lambda f, x, t: jvp(f, (x,), (t,)),
    "vmap-jvp": lambda f, x, t: vmap(lambda z: jvp(f, (z,), (t[0],)))(torch.stack([*x])),
    "jvp-vmap": lambda f, x, t: jvp(vmap(f), (_slices(x),), (_slices(t),)),
    "jacfwd": lambda f, x, t: jacfwd(lambda z: f(z).square().mean(-1))(x),
    "hessian": lambda f, x, t: hessian(lambda z: f(x + z.sum() * t).pow(3).sum())(x[0, :, 0, 0, 0]),
    "grad-of-jvp": lambda f, x, t: grad(lambda z: jvp(f, (z,), (t,))[1].pow(3).sum())(x),
}


@pytest.mark.parametrize("mode", FORWARD_MODES)
def test_forward_mode(device, mode):
    """PyTorch's calls."""
    ours, eager, x, _ = _case(device)
    run, tangent = FORWARD_MODES[mode], torch.randn_like(x)
    torch.testing.assert_close(run(ours, x, tangent), run(eager, x, tangent))


def test_forward_mode_of_weights(device):
    """Of every tensor, under torch.func and in a dual level without it."""
    block = make_block(2, 4, 6, (2, 3, 2), 3, num_groups=2, device=device, dtype=torch.float64)
    names = [*block.tensors()]
    tangents = tuple(torch.randn_like(tensor) for tensor in block.tensors().values())

    def of(run):
        return lambda *tensors: run(replace(block, **dict(zip(names, tensors, strict=True))))

    expected = jvp(of(type(block).eager), tuple(block.tensors().values()), tangents)
    torch.testing.assert_close(jvp(of(type(block).ours), tuple(block.tensors().values()), tangents), expected)
    with forward_ad.dual_level():
        duals = (forward_ad.make_dual(*pair) for pair in zip(block.tensors().values(), tangents, strict=True))
        torch.testing.assert_close(forward_ad.unpack_dual(of(type(block).ours)(*duals)), expected)


@pytest.mark.parametrize("slices", [0, SLICES])
def test_recomputed_blocks_have_a_batching_rule(device, slices):
    block = make_block(2, 4, 6, 3, 3, num_groups=2, device=device, dtype=torch.float64)
    x = torch.randn(slices, *block.input.shape, device=device, dtype=torch.float64, requires_grad=True)

    def ours(x, recompute=True):
        return upconv3d.conv_transpose3d_relu_group_norm(x, block.weight, num_groups=2, recompute=recompute)

    y = vmap(ours)(x)
    assert y.shape[0] == slices
    if slices:
        expected = torch.stack([ours(each, recompute=False) for each in x])
        torch.testing.assert_close(y, expected)
        grads = [torch.autograd.grad(each.sin().sum(), x)[0] for each in (y, expected)]
        torch.testing.assert_close(*grads)


@pytest.mark.parametrize("transform", [vmap, grad])
def test_the_family_names_the_rule_that_a_slice_breaks(transform):
    """Wrapped tensors are plain to Python, and have no storage to begin anywhere."""
    w = torch.randn(4, 6, 3, 3, 3)

    def family(x):
        return upconv3d.conv_transpose3d_norm_act(x, w, num_groups=4).sum()

    with pytest.raises(RuntimeError, match=r"num_groups=4.*Divisors: 1, 2, 3, 6"):
        transform(family)(torch.randn(2, 2, 4, 3, 3, 3) if transform is vmap else torch.randn(2, 4, 3, 3, 3))


def test_empty_slices_of_the_family():
    w = torch.randn(4, 6, 3, 3, 3)
    y = vmap(lambda x: upconv3d.conv_transpose3d_norm_act(x, w, num_groups=2))(torch.randn(3, 0, 4, 3, 3, 3))
    assert y.shape == (3, 0, 6, 5, 5, 5)


def test_plans_are_explained_under_transforms():
    w, x = torch.randn(4, 6, 3, 3, 3), torch.randn(2, 4, 3, 3, 3)
    plans = []

    def explained(x):
        plans.append(upconv3d.explain(x, w, num_groups=2).algorithm)
        return x.sum()

    grad(explained)(x)
    assert plans == [upconv3d.explain(x, w, num_groups=2).algorithm]


BATCHED = {  # along which dimension grad_y, input and weight are
    "both": (0, 0, None),
    "gradients": (1, None, None),
    "inputs": (None, 2, None),
    "weights": (0, None, 0),
}
MASKS = {"input": [True] + 4 * [False], "weight": [False, True] + 3 * [False], "all": 5 * [True]}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("kept", [False, True], ids=["", "kept"])
@pytest.mark.parametrize("dims", BATCHED)
@pytest.mark.parametrize("n", [2, None], ids=["batch", "unbatched"])
def test_vmap_of_the_backward_operator(device, n, dims, kept, mask):
    """By its name; what a forward kept was of one input and weight."""
    ops = torch.ops.upconv3d
    block = make_block(n, 4, 6, (2, 3, 2), 3, num_groups=2, device=device, dtype=torch.float64)
    numbers = ([1, 1, 1], [0, 0, 0], [0, 0, 0], 1, [1, 1, 1], 2)
    forward = (block.input, block.weight, block.bias, *numbers, block.norm_weight, block.norm_bias)
    y, saved = ops.conv_transpose3d_relu_group_norm_for_training(*forward, block.eps, "ieee")
    kept = kept and dims == "gradients"

    def backward(grad_y, x, w):
        vectors = (*numbers, block.norm_weight, block.eps, "ieee", MASKS[mask], saved if kept else None)
        return ops.conv_transpose3d_relu_group_norm_backward(grad_y, x, w, block.bias, *vectors)

    tensors, in_dims = [torch.randn_like(y), block.input, block.weight], BATCHED[dims]
    for index, dim in enumerate(in_dims):
        if dim is not None:
            tensors[index] = _slices(tensors[index]).movedim(0, dim)
    found = vmap(backward, in_dims=in_dims)(*tensors)
    slices = [
        backward(*(t if dim is None else t.select(dim, i) for t, dim in zip(tensors, in_dims, strict=True)))
        for i in range(SLICES)
    ]
    for ours, *each in zip(found, *slices, strict=True):
        torch.testing.assert_close(ours, torch.stack(each), rtol=1e-8, atol=1e-10)
