# SPDX-License-Identifier: Apache-2.0
"""upconv3d.InductorPass: which blocks of a compiled graph become one call, and that nothing else changes."""

import pytest
import torch
import torch.nn.functional as F
import upconv3d
from torch import fx, nn
from torch._dynamo.backends.debugging import aot_eager
from torch._inductor import config
from torch._inductor.utils import fresh_inductor_cache
from torch.utils.checkpoint import checkpoint
from upconv3d import _tail
from upconv3d._accelerated.graph import rewrite

HERE = frozenset({"cpu", "cuda"})
OPERATOR = "upconv3d.conv_transpose3d_norm_act_in_graph."


@pytest.fixture(scope="module", autouse=True)
def empty_cache():
    """A graph that an earlier run left in a cache would not be rewritten again."""
    with fresh_inductor_cache():
        yield


@pytest.fixture(autouse=True)
def afresh():
    torch._dynamo.reset()
    torch.backends.cudnn.conv.fp32_precision = "ieee"
    yield
    torch._dynamo.reset()


def _recorded(function, *args, devices=HERE):
    """How many blocks of function's graph are rewritten, and what it computes then, uncompiled."""
    counts = []

    def backend(gm, inputs):
        counts.append(rewrite(gm.graph, devices))
        gm.graph.lint()
        gm.recompile()
        return aot_eager(gm, inputs)

    torch._dynamo.reset()
    result = torch.compile(function, backend=backend, fullgraph=True)(*args)
    return sum(counts), result


def _x(channels=4, device="cpu", dtype=torch.float32, n=2, extent=3):
    generator = torch.Generator().manual_seed(3)
    return torch.randn(n, channels, extent, 4, 3, generator=generator, dtype=torch.float64).to(device, dtype)


def _w(device="cpu", dtype=torch.float32):
    return _x(4, device, dtype, n=4)[:, :, :2, :2, :2].repeat(1, 2, 1, 1, 1) * 0.3


def _decoder(p=0.0):
    """As MONAI nests them: Sequentials of a convolution and of norm, dropout, activation."""

    def layer(conv, **adn):
        return nn.Sequential(conv, nn.Sequential(*adn.values()))

    return nn.Sequential(
        layer(nn.ConvTranspose3d(4, 8, 3, 2), N=nn.GroupNorm(2, 8), D=nn.Dropout(p), A=nn.PReLU()),
        layer(nn.ConvTranspose3d(8, 6, 2), A=nn.ReLU(inplace=True), N=nn.GroupNorm(3, 6, affine=False)),
        nn.Conv3d(6, 4, 1),
        layer(nn.ConvTranspose3d(4, 6, 1, bias=False), N=nn.InstanceNorm3d(6, affine=True), A=nn.SiLU()),
        nn.ConvTranspose3d(6, 2, 1),
    )


def _gradients(model, parameters, x):
    x = x.clone().requires_grad_()
    y = model(x)
    weights = torch.linspace(-1, 1, y.numel(), dtype=y.dtype, device=y.device).view(y.shape)
    return y, torch.autograd.grad((y * weights).sum(), [x, *parameters])


def _compare(ours, theirs, tolerance=1e-4):
    (y, gradients), (expected, others) = ours, theirs
    assert y.dtype is expected.dtype and y.stride() == expected.stride()
    torch.testing.assert_close(y, expected, rtol=tolerance, atol=tolerance)
    scale = float(others[0].abs().max())  # a bias before a norm has a gradient of rounding alone
    for ours_of, theirs_of in zip(gradients, others, strict=True):
        torch.testing.assert_close(ours_of, theirs_of, rtol=tolerance, atol=10 * tolerance * max(1, scale))


def test_inductor_with_gradients(device):
    model = nn.Sequential(*_decoder()[:2]).to(device)
    parameters, x = list(model.parameters()), _x(device=device)
    expected = _gradients(model, parameters, x)
    with upconv3d.inductor_pass(devices=HERE) as own:
        compiled = torch.compile(model, fullgraph=True)
        _compare(_gradients(compiled, parameters, x), expected)
        assert own.rewritten == 2
    assert config.pre_grad_custom_pass is None


def test_as_an_option_of_compile_for_any_size():
    own = upconv3d.InductorPass(devices=HERE)
    model = nn.Sequential(nn.ConvTranspose3d(4, 8, 2, 2), nn.GroupNorm(2, 8), nn.LeakyReLU(0.2))
    options = {"pre_grad_custom_pass": own}
    compiled = torch.compile(model, fullgraph=True, dynamic=True, options=options)
    graphs = []
    for extent in (5, 6, 7):
        x = _x(extent=extent)
        expected = _gradients(model, list(model.parameters()), x)
        _compare(_gradients(compiled, list(model.parameters()), x), expected)
        graphs.append(own.rewritten)
    assert graphs[0] > 0 and graphs[0] == graphs[-1]  # one graph for all sizes


def test_only_cuda_unless_told():
    devices = upconv3d.InductorPass().devices
    assert devices == {"cuda"}
    assert _recorded(_block, _x(), _w(), devices=devices)[0] == 0


NORMS = {
    "group": (
        lambda c, v: F.group_norm(c, 4, v, v),
        lambda c, v: F.group_norm(input=c, num_groups=2, eps=0.1),
    ),
    "instance": (
        lambda c, v: F.instance_norm(c, None, None, v, v, True, 0.1, 1e-3),
        lambda c, v: F.instance_norm(c, weight=v),
    ),
}
ACTIVATIONS = {
    "relu": (lambda c, v: F.relu(c), lambda c, v: torch.relu(c), lambda c, v: c.relu()),
    "relu_": (lambda c, v: F.relu_(c), lambda c, v: c.relu_(), lambda c, v: F.relu(c, inplace=True)),
    "leaky_relu": (lambda c, v: F.leaky_relu(c, 0.3, True), lambda c, v: F.leaky_relu_(c)),
    "elu": (lambda c, v: F.elu(c, alpha=0.5), lambda c, v: F.elu_(c, 2.0)),
    "silu": (lambda c, v: F.silu(c), lambda c, v: F.silu(c, inplace=True)),
    "gelu": (lambda c, v: F.gelu(c), lambda c, v: F.gelu(c, approximate="tanh")),
    "prelu": (lambda c, v: F.prelu(c, v), lambda c, v: torch.prelu(c, v[:1]), lambda c, v: c.prelu(v)),
}


@pytest.mark.parametrize("order", ["norm_act", "act_norm"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("norm", NORMS)
def test_every_spelling(norm, activation, order, device):
    x, w, v = _x(device=device), _w(device), torch.linspace(0.1, 0.8, 8, device=device)
    for normalize in NORMS[norm]:
        for activate in ACTIVATIONS[activation]:

            def function(x, w, v, slopes, normalize=normalize, activate=activate):
                c = F.conv_transpose3d(x, w, v, stride=(2, 1, 1), padding=1, output_padding=(1, 0, 0))
                return (
                    activate(normalize(c, v), slopes)
                    if order == "norm_act"
                    else normalize(activate(c, slopes), v)
                )

            # The slopes of one channel are a view that the graph makes between the calls.
            found, y = _recorded(function, x, w, v, v)
            assert found == (0 if ACTIVATIONS["prelu"][1] is activate else 1)
            torch.testing.assert_close(y, function(x, w, v, v), rtol=1e-4, atol=1e-4)


def _block(x, w):
    return F.relu(F.group_norm(F.conv_transpose3d(x, w), 2))


def _reads_convolution(x, w):
    c = F.conv_transpose3d(x, w)
    return F.relu(F.group_norm(c, 2)) + c


def _reads_norm(x, w):
    y = F.group_norm(F.conv_transpose3d(x, w), 2)
    return F.relu(y), y


def _returns_what_is_changed_in_place(x, w):
    c = F.conv_transpose3d(x, w)
    F.relu_(c)
    return F.group_norm(c, 2)


def _changes_weight_between(x, w):
    w = w + 0
    c = F.conv_transpose3d(x, w)
    w.mul_(2)
    return F.relu(F.group_norm(c, 2)) + w.sum()


def _convolution_is_its_own_slope(x, w):
    v = F.conv_transpose3d(x, w).mean((0, 2, 3, 4))
    return F.prelu(F.group_norm(F.conv_transpose3d(x, w), 2), v)


def _region(enabled):
    def function(x, w):
        with torch.autocast(x.device.type, torch.bfloat16, enabled=enabled):
            return _block(x, w)

    return function


def _region_around_checkpoint(x, w):
    with torch.autocast(x.device.type, torch.bfloat16):
        return checkpoint(_block, x, w, use_reentrant=False)


def _ends_inside_a_region(x, w):
    c = F.conv_transpose3d(x, w)
    with torch.autocast(x.device.type, torch.bfloat16):
        return F.relu(F.group_norm(c, 2))


def _mean_and_variance(x, w):
    v = w.new_ones(8)
    return F.relu(F.batch_norm(F.conv_transpose3d(x, w), v * 0, v))


def _running_statistics(x, w):
    v = w.new_ones(8)
    return F.relu(F.instance_norm(F.conv_transpose3d(x, w), v * 0, v, use_input_stats=False))


def _tracked(x, w):
    v = w.new_ones(8)
    return F.relu(F.instance_norm(F.conv_transpose3d(x, w), v * 0, v)), v


def _gradient_of_func(x, w):
    return torch.func.grad(lambda x: _block(x, w).square().sum())(x)


def _over_slices(x, w):
    return torch.vmap(lambda s: _block(s[None], w))(x)


def _drops(x, w):
    return F.relu(F.dropout3d(F.group_norm(F.conv_transpose3d(x, w), 2), 1.0))


def _sum_between(x, w):
    return F.relu(F.group_norm(F.conv_transpose3d(x, w) + 1, 2))


def _unbatched(x, w):
    return F.relu(F.group_norm(F.conv_transpose3d(x[0], w), 4))


LEFT_ALONE = [
    _reads_convolution,
    _reads_norm,
    _returns_what_is_changed_in_place,
    _changes_weight_between,
    _region(True),
    _region(False),
    _ends_inside_a_region,
    _region_around_checkpoint,
    _mean_and_variance,
    _running_statistics,
    _tracked,
    _gradient_of_func,
    _over_slices,
    _drops,
    _sum_between,
    _unbatched,
    lambda x, w: torch.tanh(F.group_norm(F.conv_transpose3d(x, w), 2)),
    lambda x, w: F.rrelu(F.group_norm(F.conv_transpose3d(x, w), 2)),
    lambda x, w: F.relu(F.conv_transpose3d(x, w)),
    lambda x, w: F.group_norm(F.conv_transpose3d(x, w), 2),
    lambda x, w: F.relu(F.group_norm(F.conv3d(x, w.transpose(0, 1)), 2)),
]


@pytest.mark.parametrize("function", LEFT_ALONE, ids=lambda f: f.__name__.strip("_"))
def test_left_alone(function):
    x, w = _x(), _w()
    found, y = _recorded(function, x, w)
    assert found == 0
    torch.testing.assert_close(y, function(x, w), rtol=1e-4, atol=1e-4)


def test_what_is_left_alone_is_taken_without_its_reason():
    x, w = _x(), _w()
    assert _recorded(_block, x, w)[0] == 1
    assert _recorded(lambda x, w: (_block(x, w), _block(x, w), _reads_norm(x, w)), x, w)[0] == 2
    assert _recorded(lambda x, w: checkpoint(_block, x, w, use_reentrant=False), x, w)[0] == 0
    assert _recorded(_convolution_is_its_own_slope, x, w)[0] == 1


def test_bodies_of_checkpoints_by_inductor():
    x, w = _x().requires_grad_(), _w()

    def function(x, w):
        return checkpoint(_block, x, w, use_reentrant=False)

    expected = _gradients(lambda x: function(x, w), [], x.detach())
    with upconv3d.inductor_pass(devices=HERE) as own:
        compiled = torch.compile(function, dynamic=False)
        _compare(_gradients(lambda x: compiled(x, w), [], x.detach()), expected)
    assert own.rewritten == 1


def test_mixed_dtypes_are_left_alone():
    x, w = _x(dtype=torch.bfloat16), _w(dtype=torch.bfloat16)

    def function(x, w, v):
        return F.relu(F.group_norm(F.conv_transpose3d(x, w), 2, v))

    assert _recorded(function, x, w, torch.ones(8))[0] == 0
    assert _recorded(function, x, w, torch.ones(8, dtype=torch.bfloat16))[0] == 1


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_under_autocast(norm, dtype, device):
    x, w = _x(device=device, dtype=dtype), _w(device, dtype)
    v = torch.linspace(0.5, 1, 8, device=device)

    def function(x, w, v):
        return F.leaky_relu(NORMS[norm][0](F.conv_transpose3d(x, w), v))

    with torch.autocast(device.type, torch.bfloat16):
        expected = function(x, w, v)
        found, y = _recorded(function, x, w, v)
    assert found == 1 and y.dtype is expected.dtype
    torch.testing.assert_close(y, expected, rtol=2e-2, atol=2e-2)


def test_strides_are_those_that_were_recorded(device):
    """On CUDA group_norm returns contiguous volumes, the operator channels_last_3d where input is; on the CPU
    it returns channels_last_3d, and torch 2.14 records that it does not.
    """
    x, w = _x(device=device).contiguous(memory_format=torch.channels_last_3d), _w(device)
    recorded = []

    def function(x, w):
        y = _block(x, w)
        return y, y.permute(0, 2, 3, 4, 1).reshape(-1)

    def backend(gm, inputs):
        output = next(node for node in gm.graph.nodes if node.op == "output")
        recorded.extend(node.meta["example_value"].stride() for node in output.args[0])
        assert rewrite(gm.graph, HERE) == 1
        gm.recompile()
        return aot_eager(gm, inputs)

    torch._dynamo.reset()
    results = torch.compile(function, backend=backend, fullgraph=True)(x, w)
    assert [y.stride() for y in results] == recorded
    for ours, theirs in zip(results, function(x, w), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_strides_that_differ_are_restored():
    """The graph says contiguous, as it would on CUDA, of what the operator makes channels_last_3d."""
    graphs = []

    def backend(gm, inputs):
        last = next(node for node in gm.graph.nodes if node.target is F.relu)
        value = last.meta["example_value"]
        last.meta["example_value"] = value.contiguous()
        assert rewrite(gm.graph, HERE) == 1
        gm.recompile()
        graphs.append(gm.graph)
        return gm

    x = _x().contiguous(memory_format=torch.channels_last_3d)
    y = torch.compile(_block, backend=backend, dynamic=False)(x, _w())
    assert y.is_contiguous() and any(node.target == "contiguous" for node in graphs[0].nodes)


def test_a_decoder_with_inactive_dropouts(device):
    """In training with p=0, as MONAI's networks have them unless told otherwise, and in eval with any p."""
    for training, p, count in ((True, 0.0, 3), (False, 0.5, 3), (True, 0.5, 2)):
        model = _decoder(p).to(device).train(training)
        parameters, x = list(model.parameters()), _x(device=device)
        counts = []

        def compiled(x, model=model, counts=counts):
            found, y = _recorded(model, x)
            counts.append(found)
            return y

        ours = _gradients(compiled, parameters, x)
        assert counts == [count]
        if count == 3:
            _compare(ours, _gradients(model, parameters, x))


def test_one_operator_takes_the_place_of_three_calls():
    graphs = []

    def backend(gm, inputs):
        rewrite(gm.graph, HERE)
        graphs.append(gm.graph)
        return gm

    model = _decoder()
    torch.compile(model, backend=backend)(_x())
    targets = [str(node.target) for node in graphs[0].nodes if node.op == "call_function"]
    assert sum(target.startswith(OPERATOR) for target in targets) == 3
    assert not any("norm" in target and "upconv3d" not in target for target in targets)
    assert isinstance(graphs[0], fx.Graph)


def test_the_key_of_caches_tells_what_changes_the_graph():
    own = upconv3d.InductorPass()
    key = own.uuid()
    assert key == upconv3d.InductorPass().uuid() and hash(key) is not None
    assert key != upconv3d.InductorPass(devices=HERE).uuid()
    torch.backends.cudnn.conv.fp32_precision = "tf32"
    assert own.uuid() != key


def test_caches_keep_both_graphs_apart(monkeypatch):
    """A graph that was compiled with the pass does not come back without it, nor the other way round."""
    x, w = _x(), _w()
    calls = []

    def counted(*args, **kwargs):
        calls.append(args)
        return _tail.composite(*args, **kwargs)

    monkeypatch.setattr("upconv3d._tail_op.composite", counted)  # what the operator runs on a CPU

    def runs_operator():
        torch._dynamo.reset()
        compiled = torch.compile(_block, dynamic=False)
        compiled(x, w)
        calls.clear()
        compiled(x, w)
        return len(calls) == 1

    assert not runs_operator()
    for _ in range(2):
        with upconv3d.inductor_pass(devices=HERE):
            assert runs_operator()
        with upconv3d.inductor_pass():
            assert not runs_operator()
    assert not runs_operator()


def test_errors(monkeypatch):
    with pytest.raises(TypeError, match=r"devices=\('cuda',\)"):
        upconv3d.InductorPass(devices="cuda")
    with upconv3d.inductor_pass(), pytest.raises(RuntimeError, match="to be free"), upconv3d.inductor_pass():
        pass
    monkeypatch.setattr("upconv3d.inductor._SLOT", "no_such_slot")
    with pytest.raises(RuntimeError, match=r"Remedy: upconv3d\.accelerate"):
        upconv3d.InductorPass()


def test_numbers_that_only_data_says_are_left_alone():
    def decoder(x, w, slope):
        return F.leaky_relu(F.group_norm(F.conv_transpose3d(x, w), 2), slope.item())

    arguments = (_x(), _w(), torch.tensor(0.3))
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        found, result = _recorded(decoder, *arguments)
    assert found == 0
    torch.testing.assert_close(result, decoder(*arguments))


@pytest.mark.parametrize("eps", [float("inf"), float("nan")])
def test_an_eps_that_the_family_refuses_is_left_alone(eps):
    def decoder(x, w):
        return F.relu(F.group_norm(F.conv_transpose3d(x, w), 2, eps=eps))

    found, result = _recorded(decoder, _x(), _w())
    assert found == 0
    torch.testing.assert_close(result, decoder(_x(), _w()), equal_nan=True)
