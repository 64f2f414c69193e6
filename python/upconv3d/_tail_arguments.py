# SPDX-License-Identifier: Apache-2.0
"""The arguments of torch.ops.upconv3d.conv_transpose3d_norm_act: in schemas, as tensors and settings, and as
facts."""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from . import _C
from ._facts import block_facts, tensor_facts
from ._tail import ACTIVATIONS, ORDERS, Settings, Tensors

TENSORS = "Tensor input, Tensor weight, Tensor? bias"
NUMBERS = (
    "SymInt[] stride, SymInt[] padding, SymInt[] output_padding, SymInt groups, SymInt[] dilation, "
    "str order, SymInt num_groups, Tensor? norm_weight, Tensor? norm_bias, float eps, str activation, "
    "float activation_param, Tensor? slopes, Tensor? skip"
)
_KERNEL_ACTIVATIONS = tuple("none" if name is None else name for name in ACTIVATIONS)


def split(arguments: Sequence[Any]) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Tensors and Settings, as plain tuples, of the public operator's arguments."""
    input, weight, bias, stride, padding, output_padding, groups, dilation = arguments[:8]
    order, num_groups, norm_weight, norm_bias, eps, activation, parameter, slopes, skip = arguments[8:17]
    return_conv, precision = arguments[17:]
    numbers = (stride, padding, output_padding, groups, dilation, num_groups, eps, precision)
    return (
        (input, weight, bias, norm_weight, norm_bias, slopes, skip),
        (*numbers, order, activation, parameter, return_conv),
    )


def join(tensors: Sequence[Any], settings: Sequence[Any]) -> tuple[Any, ...]:
    """The inverse of split."""
    input, weight, bias, norm_weight, norm_bias, slopes, skip = tensors
    *convolution, num_groups, eps, precision, order, activation, parameter, return_conv = settings
    norm = (order, num_groups, norm_weight, norm_bias, eps)
    return (
        input,
        weight,
        bias,
        *convolution,
        *norm,
        activation,
        parameter,
        slopes,
        skip,
        return_conv,
        precision,
    )


def require_known_settings(s: Settings) -> None:
    """What the operator's own callers see to, and PyTorch's calls, where they compute it, do not refuse."""
    if s.num_groups < 0:
        raise RuntimeError(
            f"upconv3d: num_groups must be at least 1, or 0 for no normalization; got "
            f"num_groups={s.num_groups}. Remedy: a divisor of the output channels."
        )
    for name, value, known in (
        ("order", s.order, ORDERS),
        ("activation", s.activation, _KERNEL_ACTIVATIONS),
    ):
        if value not in known:
            raise ValueError(f"upconv3d: {name} must be one of {', '.join(known)}; got {name}={value!r}.")


def facts_of(tensors: Sequence[Any], settings: Sequence[Any]) -> dict[str, Any]:
    """The whole call as plain data, which is what _C.validate and _C.explain take."""
    t, s = Tensors(*tensors), Settings(*settings)
    convolution = (s.stride, s.padding, s.output_padding, s.groups, s.dilation)
    norm = (s.num_groups, t.norm_weight, t.norm_bias, s.eps, s.precision)
    # A skip of another dtype promotes what it is added to: none of our rules, but for PyTorch to compute.
    skip = t.skip if t.skip is not None and t.skip.dtype == t.input.dtype else None
    return block_facts(t.input, t.weight, t.bias, *convolution, *norm) | {
        "order": s.order,
        "activation": s.activation,
        "activation_param": s.parameter,
        "return_conv": s.return_conv,
        "slopes": tensor_facts(t.slopes),
        "skip": tensor_facts(skip),
    }


def refuse_broken_rule(tensors: Sequence[Any], settings: Sequence[Any], is_cast: bool) -> None:
    """Raises RuntimeError where the call breaks one of our rules, with its value and remedy.

    is_cast: whether autocast casts the tensors: their dtypes are its affair then.
    """
    facts, t = facts_of(tensors, settings), Tensors(*tensors)
    promotes = t.skip is not None and t.skip.dtype != t.input.dtype
    # What is applied to a sum with such a skip has the sum's dtype.
    promoted = ("norm_weight", "norm_bias", "slopes") if promotes else ()
    for name, fact in facts.items():
        if isinstance(fact, dict) and (is_cast or name in promoted):
            fact["dtype"] = facts["input"]["dtype"]
    _C.validate(facts)


def runs_kernels(input: Tensor) -> bool:
    """Whether the call is for the internal operators rather than for PyTorch's."""
    return input.is_cuda
