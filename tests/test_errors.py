# SPDX-License-Identifier: Apache-2.0
"""Bad input: the class of PyTorch's exception where it raises, and a message with rule, value and remedy."""

import math
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
import upconv3d
from oracles import Block, make_block


def good(device="cpu", **overrides) -> Block:
    return replace(make_block(2, 4, 8, 3, 3, num_groups=4, device=device), **overrides)


def _zeros(*sizes, **kwargs):
    return torch.zeros(sizes, **kwargs)


# name: (what is wrong, exception class, fragments of the message, does PyTorch raise for it)
CASES = {
    "rank-3": (
        lambda b: {"input": _zeros(4, 3, 3)},
        RuntimeError,
        ["input must be", "[4, 3, 3]", "unsqueeze"],
        True,
    ),
    "rank-6": (lambda b: {"input": _zeros(1, 2, 4, 3, 3, 3)}, RuntimeError, ["input must be"], True),
    "weight-rank": (lambda b: {"weight": _zeros(4, 8, 3, 3)}, RuntimeError, ["weight must be"], True),
    "channels": (
        lambda b: {"input": _zeros(2, 5, 3, 3, 3)},
        RuntimeError,
        ["weight.size(0)", "[2, 5, 3, 3, 3]"],
        True,
    ),
    "groups": (lambda b: {"groups": 3}, RuntimeError, ["groups=3, C=4", "Divisors: 1, 2, 4."], True),
    "groups-0": (lambda b: {"groups": 0}, RuntimeError, ["groups=0"], True),
    "groups-negative": (lambda b: {"groups": -1}, RuntimeError, ["groups=-1"], True),
    "num_groups-0": (lambda b: {"num_groups": 0}, RuntimeError, ["num_groups=0"], False),
    "num_groups-negative": (lambda b: {"num_groups": -4}, RuntimeError, ["num_groups=-4"], True),
    "num_groups-3": (
        lambda b: {"num_groups": 3},
        RuntimeError,
        ["num_groups=3", "Divisors", "1, 2, 4, 8"],
        True,
    ),
    "output_padding": (
        lambda b: {"output_padding": 1},
        RuntimeError,
        ["output_padding must be smaller than stride or dilation", "1"],
        True,
    ),
    "output_padding-negative": (
        lambda b: {"output_padding": -1},
        RuntimeError,
        ["output_padding", "-1"],
        True,
    ),
    "stride-0": (lambda b: {"stride": 0}, RuntimeError, ["stride", "0"], True),
    "stride-negative": (lambda b: {"stride": (1, -2, 1)}, RuntimeError, ["stride", "-2", "height"], True),
    "dilation-0": (lambda b: {"dilation": 0}, RuntimeError, ["dilation", "0"], True),
    "dilation-negative": (lambda b: {"dilation": -1}, RuntimeError, ["dilation", "-1"], True),
    "padding-negative": (lambda b: {"padding": -1}, RuntimeError, ["padding", "-1"], True),
    "kernel-0": (lambda b: {"weight": _zeros(4, 8, 3, 0, 3)}, RuntimeError, ["kernel size"], True),
    "empty-extent": (lambda b: {"input": _zeros(2, 4, 3, 0, 3)}, RuntimeError, ["input size"], True),
    "no-output-channels": (lambda b: {"weight": _zeros(4, 0, 3, 3, 3)}, RuntimeError, ["channel"], True),
    "no-output": (lambda b: {"padding": 4}, RuntimeError, ["output size must be positive"], True),
    "empty-output": (
        lambda b: {"input": _zeros(2, 4, 1, 1, 1), "weight": _zeros(4, 8, 2, 2, 2), "padding": 1},
        RuntimeError,
        ["output size must be positive", "0x0x0", "Lower the padding"],
        False,
    ),
    "stride-length": (lambda b: {"stride": (1, 1)}, RuntimeError, ["stride", "[1, 1]"], True),
    "padding-length": (lambda b: {"padding": (1, 1, 1, 1)}, RuntimeError, ["padding"], True),
    "stride-type": (lambda b: {"stride": 1.5}, TypeError, ["stride", "1.5"], True),
    "stride-none": (lambda b: {"stride": None}, TypeError, ["stride", "None"], True),
    "input-type": (lambda b: {"input": [1.0]}, TypeError, ["must be tensors", "list"], False),
    "bias-length": (lambda b: {"bias": _zeros(7)}, RuntimeError, ["bias", "[7]", "[8]"], True),
    "bias-rank": (lambda b: {"bias": _zeros(8, 1)}, RuntimeError, ["bias", "[8, 1]"], True),
    "norm_weight-length": (lambda b: {"norm_weight": _zeros(4)}, RuntimeError, ["norm_weight", "[4]"], True),
    "norm_bias-length": (lambda b: {"norm_bias": _zeros(9)}, RuntimeError, ["norm_bias", "[9]"], True),
    "weight-dtype": (lambda b: {"weight": b.weight.double()}, RuntimeError, ["dtype", "float64"], True),
    "input-dtype": (lambda b: {"input": b.input.half()}, RuntimeError, ["dtype", "float16"], True),
    "bias-dtype": (lambda b: {"bias": b.bias.bfloat16()}, RuntimeError, ["dtype", "bfloat16"], True),
    "norm-dtype": (
        lambda b: {"norm_weight": b.norm_weight.double()},
        RuntimeError,
        ["dtype", "float64"],
        True,
    ),
    "complex": (lambda b: b.to(torch.complex64).tensors(), NotImplementedError, ["complex64"], True),
    "integer": (lambda b: b.to(torch.int64).tensors(), NotImplementedError, ["int64"], True),
    "bool": (lambda b: b.to(torch.bool).tensors(), NotImplementedError, ["bool"], True),
    "stride-inner-type": (lambda b: {"stride": (1.5, 1, 1)}, TypeError, ["stride", "1.5"], True),
    "stride-bool": (lambda b: {"stride": True}, TypeError, ["stride", "True"], True),
    "stride-64-bit": (lambda b: {"stride": 2**63}, ValueError, ["stride", "64 bit"], True),
    "groups-type": (lambda b: {"groups": 1.0}, TypeError, ["groups", "1.0"], True),
    "groups-64-bit": (lambda b: {"groups": 2**64}, ValueError, ["groups", "64 bit"], True),
    "num_groups-type": (lambda b: {"num_groups": "2"}, TypeError, ["num_groups", "'2'"], False),
    "bias-type": (lambda b: {"bias": [1.0] * 8}, TypeError, ["bias", "list"], True),
    "precision": (lambda b: {"precision": "fp16"}, ValueError, ["precision", "fp16", "tf32"], False),
    "eps-nan": (lambda b: {"eps": math.nan}, ValueError, ["eps", "nan"], False),
    "eps-inf": (lambda b: {"eps": math.inf}, ValueError, ["eps", "inf"], False),
    "eps-type": (lambda b: {"eps": "small"}, TypeError, ["eps must be a number", "'small'"], True),
    "eps-none": (lambda b: {"eps": None}, TypeError, ["eps must be a number", "None"], True),
    "eps-vector": (lambda b: {"eps": _zeros(1)}, TypeError, ["eps must be a number", "Tensor"], False),
    "eps-fraction": (
        lambda b: {"eps": Fraction(1, 3)},
        TypeError,
        ["eps must be a number", "Fraction"],
        False,
    ),
    "eps-huge": (lambda b: {"eps": 10**400}, ValueError, ["eps must be a finite number"], False),
    "one-value-per-group": (
        lambda b: {"input": _zeros(1, 4, 1, 1, 1), "weight": _zeros(4, 8, 1, 1, 1), "num_groups": 8},
        ValueError,
        ["more than one value", "num_groups=8"],
        True,
    ),
    "meta-weight": (lambda b: {"weight": b.weight.to("meta")}, RuntimeError, ["device", "meta"], False),
    "meta-input": (lambda b: {"input": b.input.to("meta")}, RuntimeError, ["device", "meta"], False),
    "sparse-input": (
        lambda b: {"input": b.input.to_sparse()},
        RuntimeError,
        ["input.layout=sparse_coo"],
        True,
    ),
    "sparse-weight": (
        lambda b: {"weight": b.weight.to_sparse()},
        RuntimeError,
        ["weight.layout=sparse_coo"],
        True,
    ),
    "sparse-bias": (lambda b: {"bias": b.bias.to_sparse()}, RuntimeError, ["bias.layout=sparse_coo"], True),
}


@pytest.mark.parametrize("name", CASES)
def test_bad_input(device, name):
    wrong, exception, fragments, pytorch_raises = CASES[name]
    block = good()
    block = replace(block, **wrong(block))
    if device.type == "cuda":
        if "meta" in name:
            pytest.skip("the same on every device")
        moved = {
            key: value.to(device) for key, value in block.tensors().items() if isinstance(value, torch.Tensor)
        }
        block = replace(block, **moved)
    before = {key: value.clone() for key, value in block.tensors().items() if _has_values(value)}
    with pytest.raises(exception) as ours:
        block.ours()
    for fragment in fragments:
        assert fragment in str(ours.value)
    if fragments:
        assert "upconv3d: " in str(ours.value)
    assert exception is not TypeError or "Remedy: " in str(ours.value)
    if pytorch_raises and device.type == "cpu":
        with pytest.raises(Exception) as theirs:
            block.eager()
        assert isinstance(ours.value, type(theirs.value))
    for key, value in before.items():
        assert torch.equal(getattr(block, key), value)


def _has_values(tensor) -> bool:
    return isinstance(tensor, torch.Tensor) and tensor.layout == torch.strided and not tensor.is_meta


def test_process_is_usable_afterwards(device):
    torch.backends.cudnn.deterministic = True  # the library plan's convolution is PyTorch's
    block = good(device)
    expected = block.ours()
    with pytest.raises(RuntimeError):
        replace(block, num_groups=3).ours()
    assert torch.equal(block.ours(), expected)


@pytest.mark.parametrize("name", CASES)
def test_explain_raises_as_the_call_does(name):
    wrong, exception, fragments, _ = CASES[name]
    block = good()
    with pytest.raises(exception) as raised:
        replace(block, **wrong(block)).plan()
    for fragment in fragments:
        assert fragment in str(raised.value)


@pytest.mark.parametrize("suffix", ["", "_recomputed"])
def test_forward_mode_of_the_operator_is_refused(suffix):
    """It would drop a tangent, as in graphs. The function has PyTorch's calls (test_transforms.py)."""
    block = good()
    expected = block.ours()
    t = block.tensors()
    numbers = ([1] * 3, [0] * 3, [0] * 3, 1, [1] * 3, block.num_groups)

    def named(x):
        op = getattr(torch.ops.upconv3d, f"conv_transpose3d_relu_group_norm{suffix}")
        return op(
            x, t["weight"], t.get("bias"), *numbers, t.get("norm_weight"), t.get("norm_bias"), 1e-5, "ieee"
        )

    with torch.autograd.forward_ad.dual_level(), torch.no_grad():
        assert torch.equal(block.ours(), expected)
        dual = torch.autograd.forward_ad.make_dual(block.input, torch.ones_like(block.input))
        with pytest.raises(NotImplementedError, match=r"forward-mode AD.* call the function"):
            named(dual)
    with pytest.raises(NotImplementedError, match="got an argument with a tangent"):
        torch.func.jvp(named, (block.input,), (block.input,))


def test_integers_of_any_kind():
    """What F.conv_transpose3d takes: NumPy's integers and tensors of one element."""
    import numpy

    block = good()
    expected = block.ours()
    for one in (numpy.int64(1), torch.tensor(1), [numpy.int64(1)] * 3, (numpy.int32(1),) * 3):
        assert torch.equal(replace(block, stride=one, groups=numpy.int64(1)).ours(), expected)


def _facts(block: Block, **overrides):
    from upconv3d._facts import block_facts

    def triple(value):
        return [value] * 3 if isinstance(value, int) else list(value)

    facts = block_facts(
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
    return facts | overrides


def test_more_elements_than_can_be_indexed():
    facts = _facts(good())
    facts["input"] = facts["input"] | {"sizes": [2**20, 4, 2**20, 2**20, 2**20], "strides": [0, 0, 0, 0, 0]}
    with pytest.raises(RuntimeError, match=r"2\^59 elements"):
        upconv3d._C.validate(facts)


def test_huge_stride_does_not_overflow():
    facts = _facts(good(), stride=[2**62, 1, 1])
    with pytest.raises(RuntimeError, match="stride"):
        upconv3d._C.validate(facts)


def test_validate_raises_value_errors():
    for overrides in ({"eps": math.nan}, {"precision": "fp16"}):
        with pytest.raises(ValueError):
            upconv3d._C.validate(_facts(good(), **overrides))
    assert upconv3d._C.validate(_facts(good())) is None


@pytest.mark.parametrize("value", [1, (1,), [1], (1, 1, 1), [1, 1, 1], torch.Size([1, 1, 1])])
@pytest.mark.parametrize("name", ["stride", "padding", "dilation"])
def test_ints_and_lists_that_pytorch_takes(name, value):
    block = good(**{name: value})
    torch.testing.assert_close(block.ours(), block.eager(), rtol=1e-4, atol=1e-4)


def test_mixed_devices(cuda):
    block = good(cuda)
    for name, tensor in block.tensors().items():
        with pytest.raises(RuntimeError, match="device"):
            replace(block, **{name: tensor.cpu()}).ours()
