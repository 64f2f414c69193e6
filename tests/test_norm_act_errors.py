# SPDX-License-Identifier: Apache-2.0
"""What conv_transpose3d_norm_act says of bad arguments."""

import math
from dataclasses import replace
from fractions import Fraction

import pytest
import torch
import upconv3d
from tails import make_call


def _vector(*sizes):
    return torch.ones(sizes, dtype=torch.float64)


# name: (arguments that replace good ones, exception class, fragments of the message)
ERRORS = {
    "order": ({"order": "norm"}, ValueError, ["order must be one of", "'act_norm'", "order='norm'"]),
    "norm": ({"norm": "batch"}, ValueError, ["norm must be one of", "'instance'", "norm='batch'"]),
    "activation": ({"activation": "mish"}, ValueError, ["activation must be one of", "'silu'", "'mish'"]),
    "activation-object": ({"activation": ["relu"]}, ValueError, ["activation must be one of"]),
    "no-num_groups": ({"num_groups": None}, ValueError, ["norm='group' needs num_groups", "Remedy"]),
    "num_groups-0": ({"num_groups": 0}, RuntimeError, ["num_groups=0", "Remedy"]),
    "num_groups-4": ({"num_groups": 4}, RuntimeError, ["num_groups=4", "Divisors: 1, 2, 3, 6"]),
    "num_groups-type": ({"num_groups": 2.0}, TypeError, ["num_groups", "2.0"]),
    "num_groups-instance": ({"norm": "instance"}, ValueError, ["num_groups=2", "norm='instance'", "Remedy"]),
    "norm_weight-no-norm": (
        {"norm": None, "num_groups": None, "norm_weight": _vector(6)},
        ValueError,
        ["norm_weight", "norm=None", "Remedy"],
    ),
    "norm_weight-length": ({"norm_weight": _vector(5)}, RuntimeError, ["norm_weight", "[5]"]),
    "norm_bias-dtype": ({"norm_bias": _vector(6).float()}, RuntimeError, ["norm_bias", "float32"]),
    "parameter-of-none": ({"activation_param": 0.1}, ValueError, ["'relu' has no parameter", "0.1"]),
    "parameter-type": (
        {"activation": "elu", "activation_param": "a"},
        TypeError,
        ["must be a number", "str"],
    ),
    "parameter-tensor": (
        {"activation": "elu", "activation_param": _vector(1)},
        TypeError,
        ["must be a number", "Tensor"],
    ),
    "parameter-nan": ({"activation": "elu", "activation_param": math.nan}, ValueError, ["finite", "nan"]),
    "slopes-missing": ({"activation": "prelu"}, TypeError, ["slopes", "NoneType", "Remedy"]),
    "slopes-number": ({"activation": "prelu", "activation_param": 0.1}, TypeError, ["slopes", "float"]),
    "slopes-length": ({"activation": "prelu", "activation_param": _vector(4)}, RuntimeError, ["[4]", "[6]"]),
    "slopes-rank": ({"activation": "prelu", "activation_param": _vector(6, 1)}, RuntimeError, ["[6, 1]"]),
    "slopes-dtype": (
        {"activation": "prelu", "activation_param": _vector(6).float()},
        RuntimeError,
        ["activation_param", "float32"],
    ),
    "skip-type": ({"skip": 1.0}, TypeError, ["skip must be a tensor", "float"]),
    "skip-sizes": ({"skip": _vector(2, 6, 1, 1, 1)}, RuntimeError, ["skip must have the sizes", "expand"]),
    "skip-rank": ({"skip": _vector(6, 1)}, RuntimeError, ["skip must have the sizes", "[6, 1]"]),
    "skip-device": (
        {"skip": torch.empty(2, 6, 5, 2, 7, device="meta")},
        RuntimeError,
        ["one device", "meta"],
    ),
    "bias-device": ({"bias": _vector(6).to("meta")}, RuntimeError, ["device", "meta"]),
    "bias-length": ({"bias": _vector(7)}, RuntimeError, ["bias", "[7]"]),
    "bias-type": ({"bias": [1.0]}, TypeError, ["bias must be a tensor", "list"]),
    "weight-rank": ({"weight": _vector(4, 6, 3, 3)}, RuntimeError, ["weight must be"]),
    "weight-dtype": ({"weight": _vector(4, 6, 3, 3, 3).float()}, RuntimeError, ["dtype", "float32"]),
    "input-rank": ({"input": _vector(4, 3, 3)}, RuntimeError, ["input must be"]),
    "input-dtype": ({"input": _vector(2, 4, 3, 3, 3).long()}, NotImplementedError, ["int64"]),
    "input-sparse": ({"input": _vector(2, 4, 3, 3, 3).to_sparse()}, RuntimeError, []),
    "channels": ({"input": _vector(2, 5, 3, 3, 3)}, RuntimeError, ["weight.size(0)"]),
    "stride": ({"stride": 0}, RuntimeError, ["stride"]),
    "output_padding": ({"output_padding": 3}, RuntimeError, ["output_padding"]),
    "no-output": ({"padding": 9}, RuntimeError, ["output size must be positive"]),
    "groups-type": ({"groups": 1.0}, TypeError, ["groups", "1.0"]),
    "empty-output": (
        {"input": _vector(2, 4, 1, 1, 1), "weight": _vector(4, 6, 2, 2, 2), "padding": 1},
        RuntimeError,
        ["output size must be positive", "0x0x0", "Lower the padding"],
    ),
    "eps": ({"eps": math.nan}, ValueError, ["eps", "nan"]),
    "eps-none": ({"eps": None}, TypeError, ["eps must be a number", "None"]),
    "eps-vector": ({"eps": _vector(1)}, TypeError, ["eps must be a number", "Tensor"]),
    "eps-differentiated": ({"eps": torch.ones((), requires_grad=True)}, TypeError, ["eps must be a number"]),
    "eps-fraction": ({"eps": Fraction(1, 3)}, TypeError, ["eps must be a number", "Fraction"]),
    "eps-huge": ({"eps": 10**400}, ValueError, ["eps must be a finite number", "Remedy: "]),
    "parameter-huge": ({"activation": "elu", "activation_param": 10**400}, ValueError, ["must be finite"]),
    "precision": ({"precision": "fp16"}, ValueError, ["precision", "fp16"]),
    "one-value": (
        {"input": _vector(2, 4, 1, 1, 1), "padding": 1, "norm": "instance", "num_groups": None},
        ValueError,
        ["more than one value"],
    ),
}


@pytest.mark.parametrize("name", ERRORS)
def test_bad_arguments(device, name):
    wrong, exception, fragments = ERRORS[name]
    call = make_call(device=device)
    keywords = call.keywords() | {"norm_weight": None, "norm_bias": None}
    keywords |= {name: call.tensors[name] for name in ("input", "weight", "bias")}
    wrong = {
        key: value.to(device) if isinstance(value, torch.Tensor) and not value.is_meta else value
        for key, value in wrong.items()
    }
    with pytest.raises(exception) as raised:
        upconv3d.conv_transpose3d_norm_act(**(keywords | wrong))
    for fragment in fragments:
        assert fragment in str(raised.value)
    if fragments:
        assert "upconv3d: " in str(raised.value)
    assert exception is not TypeError or "Remedy: " in str(raised.value)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_the_operator_by_its_name_refuses_a_negative_number_of_groups(device, dtype):
    """0 is no norm there. PyTorch's operators compute float64 on a GPU, and everything on a CPU."""
    x, weight = torch.randn(2, 4, 3, 3, 3, dtype=dtype), torch.randn(4, 6, 1, 1, 1, dtype=dtype)
    call = (None, [1] * 3, [0] * 3, [0] * 3, 1, [1] * 3, "norm_act", -1, None, None, 1e-5)
    for where in (device, "meta"):
        with pytest.raises(RuntimeError, match=r"num_groups must be at least 1.*got num_groups=-1"):
            torch.ops.upconv3d.conv_transpose3d_norm_act(
                x.to(where), weight.to(where), *call, "relu", 0.0, None, None, False, "tf32"
            )


def test_a_vector_of_another_dtype_is_refused_where_pytorch_takes_it():
    """Its group_norm takes float32 vectors beside 16 bit on the CPU, and not on CUDA."""
    x, weight, gamma = torch.randn(2, 4, 3, 3, 3), torch.randn(4, 6, 1, 1, 1), torch.randn(6)
    x, weight = x.bfloat16(), weight.bfloat16()
    torch.group_norm(torch.nn.functional.conv_transpose3d(x, weight), 2, gamma, gamma)
    for vectors in ({"norm_weight": gamma}, {"norm_bias": gamma}, {"norm_weight": gamma, "norm_bias": gamma}):
        with pytest.raises(RuntimeError, match=r"must have the dtype of input; .*float32\. Pass "):
            upconv3d.conv_transpose3d_norm_act(x, weight, num_groups=2, **vectors)


@pytest.mark.parametrize(
    "wrong",
    [{"order": "act"}, {"norm": "layer"}, {"activation": "swish"}],
    ids=lambda names: next(iter(names)),
)
def test_unknown_names_are_not_explained(wrong):
    call = make_call()
    (name,) = wrong
    with pytest.raises(ValueError, match=f"{name} must be one of"):
        upconv3d.explain_norm_act(call.tensors["input"], call.tensors["weight"], **(call.keywords() | wrong))


@pytest.mark.parametrize("kind", ["autocast", "promoting skip"])
def test_what_is_wrong_beside_dtypes_that_are_right(kind, monkeypatch):
    """A rule of ours is named where it is broken, and an allocation that fails is said to have."""
    x, weight = torch.randn(2, 4, 3, 3, 3), torch.randn(4, 6, 1, 1, 1)
    keywords = {"num_groups": 2}
    if kind == "autocast":
        x = x.bfloat16()
    else:
        keywords |= {"skip": torch.randn(2, 6, 3, 3, 3, dtype=torch.float64), "norm_weight": _vector(6)}

    def call(**changed):
        with torch.autocast("cpu", torch.bfloat16, enabled=kind == "autocast"):
            return upconv3d.conv_transpose3d_norm_act(x, weight, **(keywords | changed))

    call()
    with pytest.raises(RuntimeError, match="num_groups=4"):
        call(num_groups=4)

    def fails(*_, **__):
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(torch, "group_norm", fails)
    monkeypatch.setattr(torch.nn.functional, "group_norm", fails)
    with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
        call()


def test_instance_norm_of_one_position_has_words_of_its_own():
    with pytest.raises(ValueError, match=r"as of instance norm.*or a larger input"):
        upconv3d.conv_transpose3d_norm_act(
            torch.ones(2, 4, 1, 1, 1), torch.ones(4, 6, 1, 1, 1), norm="instance"
        )


def test_mixed_devices(cuda):
    call = make_call(skip=True, activation="prelu", device=cuda)
    for name in call.tensors:
        with pytest.raises(RuntimeError, match="device"):
            replace(call, tensors=call.tensors | {name: call.tensors[name].cpu()}).ours()


def test_numbers_of_numpy():
    import numpy

    call = make_call(activation="elu")
    arguments = [call.tensors[name] for name in ("input", "weight", "bias")]
    ours, expected = (
        upconv3d.conv_transpose3d_norm_act(*arguments, **(call.keywords() | numbers))
        for numbers in (
            {"activation_param": numpy.float32(0.5), "eps": numpy.float64(1e-4)},
            {"activation_param": 0.5, "eps": 1e-4},
        )
    )
    assert torch.equal(ours, expected)
