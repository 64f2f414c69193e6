# SPDX-License-Identifier: Apache-2.0
"""Calls whose numbers PyTorch's dispatcher gets as one integer.

No settings may be taken for others, and whoever is not a CPU or CUDA kernel must get the public operator.
"""

import subprocess
import sys
import threading
from typing import ClassVar

import pytest
import torch
import upconv3d
from modes import OperatorNames
from oracles import make_block
from torch._subclasses.fake_tensor import FakeTensorMode
from upconv3d import _C
from upconv3d._numbered import known_number, numbered_block, numbered_block_for_training, settings_number

ONES, ZEROS = (1, 1, 1), (0, 0, 0)
BASE = (ONES, ZEROS, ZEROS, 1, ONES, 2, 1e-5, "ieee")
VARIANTS = [
    BASE,
    ((2, 1, 1), *BASE[1:]),
    ((1, 1, 2), *BASE[1:]),
    (ONES, ONES, *BASE[2:]),
    ((2, 2, 2), ZEROS, ONES, *BASE[3:]),
    (*BASE[:3], 2, *BASE[4:]),
    (*BASE[:4], (2, 2, 2), *BASE[5:]),
    (*BASE[:5], 4, *BASE[6:]),
    (*BASE[:6], 2.0, "ieee"),
    (*BASE[:7], "tf32"),
]
PUBLIC = "upconv3d::conv_transpose3d_relu_group_norm"


def tensors(device="cpu"):
    block = make_block(2, 8, 8, 3, 3, num_groups=2, device=device)
    return block.input, block.weight, block.bias, block.norm_weight, block.norm_bias


def public(settings, x, w, bias, gamma, beta):
    *numbers, eps, precision = settings
    return torch.ops.upconv3d.conv_transpose3d_relu_group_norm(
        x, w, bias, *numbers, gamma, beta, eps, precision
    )


def test_settings_have_a_number_each():
    numbers = [settings_number(settings) for settings in VARIANTS]
    assert len(set(numbers)) == len(VARIANTS)
    assert [settings_number(settings) for settings in VARIANTS] == numbers
    assert [_C.remembered_settings(number) for number in numbers] == VARIANTS


def test_known_numbers_are_asked_with_one_integer_or_three():
    number = settings_number(BASE)
    assert known_number(*BASE) == number
    assert known_number(1, 0, 0, 1, 1, 2, 1e-5, "ieee") == number
    assert known_number(1, ZEROS, 0, 1, ONES, 2, 1e-5, "ieee") == number
    assert known_number(1, 0, 0, 1, 1, 2, 1.25e-5, "ieee") is None
    with pytest.raises(TypeError, match="takes 8 arguments; got 2"):
        known_number(1, 0)


class _Integer(int):
    pass


@pytest.mark.parametrize(
    ("place", "value"),
    [
        (0, True),
        (0, 1.0),
        (0, _Integer(1)),
        (0, [1, 1, 1]),
        (0, (1, 1)),
        (0, (1, 1, True)),
        (0, (1, 1, 1.0)),
        (0, 2**64 + 1),
        (1, None),
        (2, "0"),
        (3, 1.0),
        (4, (1, 1, 2**63)),
        (5, torch.tensor(2)),
        (6, 1),
        (6, torch.tensor(1e-5)),
        (7, "half"),
        (7, None),
    ],
    ids=repr,
)
def test_what_equals_a_known_number_is_not_taken_for_it(place, value):
    """1.0 and True equal 1, and have its hash."""
    settings_number(BASE)
    given = list(BASE)
    given[place] = value
    assert known_number(*given) is None


class _NoTensor:
    dtype = torch.float32
    is_cuda = False


@pytest.mark.parametrize("records", [False, True])
@pytest.mark.parametrize(
    ("changed", "error", "words"),
    [
        ({"input": _NoTensor()}, TypeError, "input and weight must be tensors"),
        ({"weight": [1.0]}, TypeError, "input and weight must be tensors"),
        ({"bias": 1.0}, TypeError, "bias must be a tensor or None"),
        ({"norm_weight": [1.0]}, TypeError, "norm_weight must be a tensor or None"),
        ({"norm_bias": "one"}, TypeError, "norm_bias must be a tensor or None"),
        (
            {"input": torch.zeros(2, 8, 3, 3, 3, dtype=torch.int32)},
            NotImplementedError,
            "input must be float32",
        ),
        ({"bias": torch.zeros(3)}, RuntimeError, "bias must have one value per output channel"),
        ({"stride": 1.0}, TypeError, "stride must be an integer"),
        ({"padding": True}, TypeError, "padding must be an integer"),
        ({"num_groups": 2.0}, TypeError, "num_groups must be an integer"),
        ({"eps": float("nan")}, ValueError, "eps must be a finite number"),
        ({"precision": "half"}, ValueError, "precision must be"),
    ],
    ids=str,
)
def test_refusals_of_numbers_that_are_known(changed, error, words, records):
    """They have the words that they have where nothing is known."""
    x, weight, *vectors = tensors()
    weight.requires_grad_(records)
    good = {"input": x, "weight": weight} | dict(
        zip(("bias", "norm_weight", "norm_bias"), vectors, strict=True)
    )
    good["num_groups"] = 2
    for _ in range(2):
        upconv3d.conv_transpose3d_relu_group_norm(**good)
        with pytest.raises(error, match=words):
            upconv3d.conv_transpose3d_relu_group_norm(**(good | changed))


def test_one_value_in_a_group_where_numbers_are_known():
    many, one = torch.ones(1, 4, 2, 2, 2), torch.ones(1, 4, 1, 1, 1)
    weight = torch.ones(4, 4, 1, 1, 1)
    for _ in range(2):
        upconv3d.conv_transpose3d_relu_group_norm(many, weight, num_groups=4)
        with pytest.raises(ValueError, match=r"more than one value.*for a single output position"):
            upconv3d.conv_transpose3d_relu_group_norm(one, weight, num_groups=4)


def _two(**changed):
    return {
        "input": torch.ones(2, 4, 1, 1, 1),
        "weight": torch.ones(4, 4, 1, 1, 1),
        "num_groups": 4,
    } | changed


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (_two(input=torch.ones(4)), r"input must be \[N, C, D, H, W\]"),
        (_two(input=torch.ones(1, 1, 1)), r"input must be \[N, C, D, H, W\]"),
        (_two(input=torch.ones(1, 1, 4, 1, 1, 1)), r"input must be \[N, C, D, H, W\]"),
        (_two(bias=torch.ones(3)), "bias must have one value per output channel"),
        (_two(input=torch.ones(2, 4, 1, 1, 1).to_sparse()), "strided"),
    ],
    ids=["1-D", "3-D", "6-D", "bias", "sparse"],
)
def test_other_rules_of_one_value_in_a_group(call, words):
    """Two samples of one value per group are legal; what is wrong is another rule's, known numbers or not."""
    with pytest.raises(RuntimeError) as first:
        upconv3d.conv_transpose3d_relu_group_norm(**call)
    assert torch.equal(upconv3d.conv_transpose3d_relu_group_norm(**_two()), torch.zeros(2, 4, 1, 1, 1))
    with pytest.raises(RuntimeError, match=words) as known:
        upconv3d.conv_transpose3d_relu_group_norm(**call)
    assert str(known.value) == str(first.value)


def test_a_tensor_as_eps_is_read_at_the_call():
    x, weight, *_ = tensors()
    gradients = []
    for eps in (1e-2, torch.tensor(1e-2)):
        leaf = weight.clone().requires_grad_()
        y = upconv3d.conv_transpose3d_relu_group_norm(x, leaf, num_groups=2, eps=eps)
        if isinstance(eps, torch.Tensor):
            eps.fill_(10.0)
        gradients += torch.autograd.grad(y.sin().sum(), leaf)
    torch.testing.assert_close(*gradients)


def test_a_tensor_as_eps_has_no_number():
    """Its value may change behind the number."""
    assert settings_number((*BASE[:6], torch.tensor(1e-5), "ieee")) is None


@pytest.mark.parametrize("number", [-1, 1 << 20])
def test_numbers_that_nobody_gave_out(number):
    with pytest.raises(IndexError, match="number that this process gave out"):
        numbered_block(*tensors(), number)


def test_same_tensors_under_every_number(device):
    """In turns, so that all calls find the addresses of the others."""
    given = tensors(device)
    weights = {
        settings[3]: given[1] if settings[3] == 1 else given[1][:, :4].contiguous() for settings in VARIANTS
    }
    for _ in range(2):
        for settings in VARIANTS:
            x, _, *vectors = given
            arguments = (x, weights[settings[3]], *vectors)
            expected = public(settings, *arguments)
            number = settings_number(settings)
            # Not the same bits: cuDNN's convolution by groups may differ in the last ones from call to call.
            for y in (
                numbered_block(*arguments, number),
                numbered_block_for_training(*arguments, number)[0],
            ):
                torch.testing.assert_close(y, expected, rtol=1e-3, atol=1e-3)


class _Wrapped(torch.Tensor):
    """A tensor that others than __torch_function__ look at."""

    names: ClassVar[list[str]] = []
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, plain):
        return torch.Tensor._make_wrapper_subclass(
            cls, plain.shape, strides=plain.stride(), dtype=plain.dtype
        )

    def __init__(self, plain):
        self.plain = plain

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        cls.names.append(func.name())
        return func(*(a.plain if isinstance(a, cls) else a for a in args), **(kwargs or {}))


def test_others_than_kernels_get_the_public_operator():
    given, number = tensors(), settings_number(BASE)
    expected = public(BASE, *given)
    with OperatorNames() as seen:
        assert torch.equal(numbered_block(*given, number), expected)
        numbered_block_for_training(*given, number)
    assert seen.names.count(PUBLIC) == 1 and seen.names.count(f"{PUBLIC}_for_training") == 1
    assert not [name for name in seen.names if "numbered" in name]
    _Wrapped.names.clear()
    y = numbered_block(_Wrapped(given[0]), *given[1:], number)
    assert torch.equal(y, expected) and _Wrapped.names == [PUBLIC]


def test_tensors_without_data():
    given, number = tensors(), settings_number(BASE)
    expected = public(BASE, *given)
    meta = numbered_block(*(tensor.to("meta") for tensor in given), number)
    assert meta.is_meta and meta.shape == expected.shape and meta.stride() == expected.stride()
    with FakeTensorMode() as mode:
        fake = numbered_block(*(mode.from_tensor(tensor) for tensor in given), number)
    assert fake.shape == expected.shape and fake.stride() == expected.stride()


def test_autocast():
    given, number = tensors(), settings_number(BASE)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert numbered_block(*given, number).dtype == torch.bfloat16


def test_threads_agree_on_what_a_number_means():
    settings = [(*BASE[:6], 1e-3 + 1e-6 * index, "ieee") for index in range(200)]
    differing = []

    def ask():
        for wanted in settings:
            if _C.remembered_settings(settings_number(wanted)) != wanted:
                differing.append(wanted)

    threads = [threading.Thread(target=ask) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not differing


FULL = """
import torch, upconv3d
from upconv3d import _C
from upconv3d._numbered import settings_number
ones, zeros = (1, 1, 1), (0, 0, 0)
count = 0
while _C.remember_settings((ones, zeros, zeros, 1, ones, 2, 1.0 + count, "ieee")) is not None:
    count += 1
assert count == 4096, count
assert settings_number((ones, zeros, zeros, 1, ones, 2, 1e-5, "ieee")) is None
x, w = torch.rand(1, 4, 3, 3, 3), torch.rand(4, 4, 3, 3, 3).requires_grad_()
y = upconv3d.conv_transpose3d_relu_group_norm(x, w, num_groups=2)
expected = torch.nn.functional.group_norm(torch.nn.functional.conv_transpose3d(x, w).relu(), 2)
torch.testing.assert_close(y, expected)
(grad,) = torch.autograd.grad(y.square().sum(), w)
assert grad.shape == w.shape
"""


def test_more_settings_than_are_remembered():
    subprocess.run([sys.executable, "-c", FULL], check=True, timeout=120)
