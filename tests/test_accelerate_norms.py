# SPDX-License-Identifier: Apache-2.0
"""upconv3d.accelerate(norms=True): norms that stand by themselves."""

import copy
import pickle

import pytest
import torch
import upconv3d
from accelerated_skips import SegResNetDS
from oracles import peak_memory_bytes, relative_error
from torch import nn
from torch.nn.utils import parametrize
from upconv3d._accelerated import norms

NORMS = {
    "group": lambda: nn.GroupNorm(3, 12),
    "one group": lambda: nn.GroupNorm(1, 12, eps=1e-3),
    "as many groups as channels": lambda: nn.GroupNorm(12, 12, affine=False),
    "instance": lambda: nn.InstanceNorm3d(12),
    "affine instance": lambda: nn.InstanceNorm3d(12, affine=True),
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Model(nn.Module):
    """One norm behind a convolution, and a block."""

    def __init__(self, norm):
        super().__init__()
        self.conv, self.norm, self.act = nn.Conv3d(4, 12, 3, padding=1), norm, nn.ReLU(inplace=True)
        self.up = nn.Sequential(nn.ConvTranspose3d(12, 8, 2, 2), nn.GroupNorm(2, 8), nn.ReLU())

    def forward(self, x):
        return self.up(self.act(self.norm(self.conv(x))))


@pytest.fixture
def calls(monkeypatch):
    """A list that grows by the name of the class of each norm that our kernels run, however small."""
    found, run_norm = [], norms.run_norm

    def counted(norm, x):
        y = run_norm(norm, x)
        if y is not None:
            found.append(type(norm).__name__)
        return y

    monkeypatch.setattr(norms, "run_norm", counted)
    monkeypatch.setattr(norms, "LEAST_VALUES_OF_GROUP", {False: 0, True: 0})
    return found


def _made(norm, device="cpu"):
    torch.manual_seed(3)
    made = norm()
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.randn_like(parameter))
    plain = copy.deepcopy(made)
    report = upconv3d.accelerate(made, norms=True)
    return made.to(device), plain.to(device), report


def _volume(dtype=torch.float32, device="cpu", extent=(5, 6, 7)):
    x = torch.randn(2, 12, *extent, generator=torch.Generator().manual_seed(5), dtype=torch.float64) * 2 + 1
    return x.to(device, dtype)


def _gradients(norm, x, low=None):
    x = x.detach().requires_grad_()
    with torch.autocast(x.device.type, low, enabled=low is not None):
        y = norm(x)
    seed = torch.randn(y.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    y.backward(seed.to(y.device, y.dtype))
    return [y, x.grad, *(p.grad for p in norm.parameters())]


def _check(norm, plain, x, low=None):
    """Results and gradients at most as far from float64's as twice those of PyTorch's norm."""
    wide = copy.deepcopy(plain).double()
    right = _gradients(wide, x.double())
    for value, ours, eager in zip(right, _gradients(norm, x, low), _gradients(plain, x, low), strict=True):
        assert ours.dtype is eager.dtype and ours.shape == eager.shape
        error, eager_error = (relative_error(g, value) for g in (ours, eager))
        floor = 1e-6 if x.dtype is torch.float32 and low is None else 2.0**-8
        assert error <= max(2 * eager_error, floor), f"{error:.2e}, eager {eager_error:.2e}"


@pytest.mark.parametrize("name", NORMS)
def test_by_stand_ins(name, keeping_kernels, calls):
    made, plain, report = _made(NORMS[name])
    assert report.norms == ("",) and report.findings == () and "1 norm by itself" in str(report)
    _check(made, plain, _volume())
    assert len(calls) == 1 and keeping_kernels.calls == ["norm_act", "backward"]
    assert list(made.state_dict()) == list(plain.state_dict()) and repr(made) == repr(plain)
    report.restore()
    assert type(made) is type(plain)


def test_many_channels_take_no_memory(cuda, calls):
    """What stands for a convolution's weight, of as many values as channels squared, is none of them."""
    channels = 4096
    made, _, _ = _made(lambda: nn.GroupNorm(8, channels), cuda)
    x = torch.randn(1, channels, 4, 4, 4, device=cuda, requires_grad=True)

    def step():
        made(x).sum().backward()

    step()
    # The result, its gradient and that of x are 1 MiB each, a weight would be 64.
    assert peak_memory_bytes(step) < 16 << 20
    assert len(calls) > 0


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last_3d])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", NORMS)
def test_like_pytorch(cuda, name, dtype, layout, calls):
    made, plain, _ = _made(NORMS[name], cuda)
    for extent in ((5, 6, 7), (40, 41, 42)):
        x = _volume(DTYPES[dtype], cuda, extent).contiguous(memory_format=layout)
        _check(made.to(x.dtype), plain.to(x.dtype), x)
        assert made(x).is_contiguous(memory_format=layout)
    assert len(calls) == 4


@pytest.mark.parametrize("dtype", DTYPES)
def test_inputs_that_lie_otherwise(cuda, dtype, calls):
    """Slices, expanded ones, and such as begin amid 16 bytes."""
    made, plain, _ = _made(NORMS["group"], cuda)
    whole = _volume(DTYPES[dtype], cuda, (9, 10, 11))
    flat = whole.new_empty(whole.numel() + 1)
    flat[1:] = whole.flatten()
    others = [whole[:, :, 1:, ::2], whole[:1].expand(2, -1, -1, -1, -1), flat[1:].view(whole.shape)]
    for x in (*others, whole.transpose(2, 4)):
        _check(made.to(x.dtype), plain.to(x.dtype), x)
    assert len(calls) == 4


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["group", "instance", "affine instance"])
def test_under_autocast(cuda, name, low, dtype, calls):
    made, plain, _ = _made(NORMS[name], cuda)
    _check(made, plain, _volume(DTYPES[dtype], cuda), low)
    assert len(calls) == 1


def test_whole_models(cuda, calls):
    """Activations that work in place behind the norms among them."""
    torch.backends.cudnn.conv.fp32_precision = "ieee"
    torch.manual_seed(7)
    model = SegResNetDS()
    plain, wide = copy.deepcopy(model).to(cuda), copy.deepcopy(model).to(cuda).double()
    upconv3d.accelerate(model, norms=True)
    x, found = torch.randn(2, 2, 8, 12, 16, device=cuda), []
    for each in (model.to(cuda), plain, wide):
        ys = each(x.to(next(each.parameters()).dtype))
        sum(y.square().mean() for y in ys).backward()
        found.append([*ys, *(p.grad for p in each.parameters())])
    assert len(calls) > 8
    scale = max(float(right.abs().max()) for right in found[2])
    for ours, eager, right in zip(*found, strict=True):
        error, eager_error = (float((value.double() - right).norm()) for value in (ours, eager))
        assert error <= max(2 * eager_error, 1e-5 * scale)


def test_same_bits(cuda, calls):
    made, _, _ = _made(NORMS["group"], cuda)
    x = _volume(torch.float32, cuda, (40, 41, 42))
    first = [tensor.clone() for tensor in _gradients(made, x)]
    for _ in range(20):
        for parameter in made.parameters():
            parameter.grad = None
        assert all(torch.equal(a, b) for a, b in zip(first, _gradients(made, x), strict=True))


def test_norms_of_blocks_stay_theirs(keeping_kernels, calls):
    model = Model(nn.GroupNorm(3, 12))
    report = upconv3d.accelerate(model, norms=True)
    assert report.norms == ("norm",) and len(report.replaced) == 1
    assert type(model.up[1]) is nn.GroupNorm and type(model.norm) is not nn.GroupNorm
    ds = SegResNetDS()
    plain = copy.deepcopy(ds)
    report = upconv3d.accelerate(ds, norms=True, precision="ieee")
    instances = [name for name, m in plain.named_modules() if isinstance(m, nn.InstanceNorm3d)]
    assert len(report.replaced) == 2 and len(report.norms) == len(instances) - 2
    x = torch.randn(2, 2, 8, 8, 8)
    for copied in (ds, copy.deepcopy(ds), pickle.loads(pickle.dumps(ds))):
        del calls[:]
        for ours, theirs in zip(copied(x), plain(x), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
        assert len(calls) == len(report.norms)
    assert upconv3d.accelerate(copy.deepcopy(plain)).norms == ()


LEFT = {
    "running statistics": lambda: nn.InstanceNorm3d(12, track_running_stats=True),
    "batch norm": lambda: nn.BatchNorm3d(12),
    "two axes": lambda: nn.InstanceNorm2d(12),
}


@pytest.mark.parametrize("case", LEFT)
def test_left_alone(case):
    assert upconv3d.accelerate(LEFT[case](), norms=True).norms == ()


def test_decided_at_the_call(keeping_kernels, calls):
    made, plain, _ = _made(NORMS["affine instance"])
    x = _volume()
    with pytest.raises(ValueError):
        made(x[0, :, 0, 0])  # two axes: PyTorch says what is wrong
    assert torch.equal(made(x[0]), plain(x[0])) and calls == []  # no batch
    assert torch.equal(made.double()(x.double()), plain.double()(x.double())) and calls == []
    made, plain = made.float(), plain.float()
    torch.testing.assert_close(made(x), plain(x))
    assert len(calls) == 1
    _, ours = torch.func.jvp(made, (x,), (x,))
    torch.testing.assert_close(ours, torch.func.jvp(plain, (x,), (x,))[1])
    made.register_forward_hook(lambda module, args, y: y * 2)
    torch.testing.assert_close(made(x), plain(x) * 2)
    assert len(calls) == 2
    made.track_running_stats = True
    made.running_mean, made.running_var = torch.zeros(12), torch.ones(12)
    made(x)
    assert len(calls) == 2


def test_small_groups_are_left(keeping_kernels, calls, monkeypatch):
    """And larger ones where autograd records, which takes the host longer."""
    made, plain, _ = _made(NORMS["group"])
    x, values = _volume(), 12 // 3 * 5 * 6 * 7
    monkeypatch.setattr(norms, "LEAST_VALUES_OF_GROUP", {False: values, True: values + 1})
    assert torch.equal(made(x), plain(x)) and calls == []
    with torch.no_grad():
        made(x)
        assert calls == ["GroupNorm"]
        made(x[:, :, :4])
    assert len(calls) == 1


def test_small_volumes_are_left(keeping_kernels, calls, monkeypatch):
    """Their models wait for the host."""
    made, plain, _ = _made(NORMS["one group"])
    x, values = _volume(), 12 * 5 * 6 * 7
    monkeypatch.setattr(norms, "SMALL_BLOCK_VALUES", x.numel())
    monkeypatch.setattr(norms, "LEAST_OF_SMALL", {False: values, True: values + 1})
    assert torch.equal(made(x), plain(x)) and calls == []
    with torch.no_grad():
        made(x)
    assert len(calls) == 1
    monkeypatch.setattr(norms, "SMALL_BLOCK_VALUES", x.numel() - 1)
    made(x)
    assert len(calls) == 2


def test_parametrized_weights_are_evaluated_once(keeping_kernels, calls):
    class Counted(nn.Module):
        count = 0

        def forward(self, weight):
            type(self).count += 1
            return weight * 2

    made, _, _ = _made(NORMS["group"])
    parametrize.register_parametrization(made, "weight", Counted())
    before = Counted.count
    made(_volume())
    assert Counted.count == before + 1 and calls == []


def test_twice_differentiable(keeping_kernels, calls):
    made, plain, _ = _made(NORMS["group"])
    found = []
    for norm in (made, plain):
        x = _volume().requires_grad_()
        (first,) = torch.autograd.grad(norm(x).pow(3).sum(), x, create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), [x, *norm.parameters()]))
    assert len(calls) == 1
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("name", ["group", "affine instance"])
def test_a_bias_may_change_before_the_backward(keeping_kernels, calls, name):
    made, plain, _ = _made(NORMS[name])
    for norm in (made, plain):
        y = norm(_volume())
        with torch.no_grad():
            norm.bias.zero_()
        y.square().sum().backward()
    assert len(calls) == 1
    torch.testing.assert_close(made.weight.grad, plain.weight.grad, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(made.bias.grad, plain.bias.grad, rtol=1e-4, atol=1e-3)


def test_gradients_beyond_float16(keeping_kernels, calls):
    """An instance norm's vectors have theirs in float32 under autocast."""
    made, plain, _ = _made(NORMS["affine instance"])
    x = _volume(torch.float16)
    for norm in (made, plain):
        with torch.autocast("cpu", torch.float16):
            y = norm(x)
        y.backward(torch.full_like(y, 6e4))
    assert torch.isfinite(made.bias.grad).all() and torch.equal(made.bias.grad, plain.bias.grad)
    assert calls == []
    with torch.no_grad(), torch.autocast("cpu", torch.float16):
        made(x)
    assert len(calls) == 1


class _Doubled(nn.InstanceNorm3d):
    def _apply_instance_norm(self, input):
        return super()._apply_instance_norm(input) * 2


class _OffsetWeight(nn.GroupNorm):
    @property
    def weight(self):
        return self._parameters["weight"] + 1


def _offset():
    norm = nn.GroupNorm(2, 12)
    norm.__class__ = _OffsetWeight  # its constructor would find the name taken
    return norm


@pytest.mark.parametrize("make", [lambda: _Doubled(12), _offset], ids=["helper", "property"])
def test_subclasses_with_ways_of_their_own(make, keeping_kernels, calls):
    """By themselves, and in a block."""
    made, plain, report = _made(make)
    assert report.norms == ()
    torch.testing.assert_close(made(_volume()), plain(_volume()))
    torch.manual_seed(3)
    block = nn.Sequential(nn.ConvTranspose3d(12, 12, 2), make(), nn.ReLU())
    plain = copy.deepcopy(block)
    assert not upconv3d.accelerate(block, precision="ieee").replaced
    torch.testing.assert_close(block(_volume()), plain(_volume()))


def test_others_forwards(keeping_kernels, calls, monkeypatch):
    made, _, _ = _made(NORMS["group"])
    monkeypatch.setattr(nn.GroupNorm, "forward", lambda self, x: x * 3)
    assert torch.equal(made(_volume()), _volume() * 3) and calls == []


def test_sizes_that_are_not_known(keeping_kernels, calls):
    """A program is for small and large volumes: nothing compares their sizes."""
    model = nn.Sequential(nn.Conv3d(12, 12, 1), nn.GroupNorm(3, 12)).eval()
    plain = copy.deepcopy(model)
    upconv3d.accelerate(model, norms=True)
    sizes = dict.fromkeys((2, 3, 4), torch.export.Dim.DYNAMIC)
    program = torch.export.export(
        model, (_volume(extent=(40, 30, 20)),), dynamic_shapes=(sizes,), strict=False
    )
    torch.testing.assert_close(program.module()(_volume()), plain(_volume()))
    assert calls == []


def test_compiled(device, calls):
    made, plain, _ = _made(NORMS["group"], device)
    x = _volume(device=device)
    compiled = torch.compile(made, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), plain(x))
    assert calls == []
