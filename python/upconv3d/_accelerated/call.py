# SPDX-License-Identifier: Apache-2.0
"""The call of conv_transpose3d_norm_act that computes a block: its arguments."""

from typing import Any

import torch
from torch import Tensor, nn

from ..module import _parameter
from .block import Block, Options


def evaluated(conv: Any, weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor, Tensor | None]:
    """The convolution's weight and bias: entries of its _parameters or, for None, what is computed."""
    if weight is None:
        weight = conv.weight
    if bias is None and "bias" not in conv._parameters:
        bias = conv.bias
    return weight, bias


def fold(weight: Tensor, bias: Tensor | None, norm: Any) -> tuple[Tensor, Tensor]:
    """Weight and bias of a convolution that is followed by batch norm in eval mode, differentiable.

    Channels are axis 1 of a transposed convolution's weight, as they are of a volume, so that batch_norm
    itself scales it, in one kernel. Computed at every call: a tensor that was changed through .data keeps
    its version, and nothing else would tell.

    weight: [C, K, T, R, S]; bias: [K] or None. Returns: the same sizes.
    """
    mean = norm.running_mean
    zero = torch.zeros_like(mean)
    scaled = nn.functional.batch_norm(weight, zero, norm.running_var, norm.weight, None, False, 0.0, norm.eps)
    bias = zero.to(weight.dtype) if bias is None else bias
    rows = nn.functional.batch_norm(
        bias.unsqueeze(0), mean, norm.running_var, norm.weight, norm.bias, False, 0.0, norm.eps
    )
    return scaled, rows.squeeze(0)


def call_of(
    block: Block, x: Tensor, options: Options, weight: Tensor | None = None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of conv_transpose3d_norm_act, and those by name, for the block on x.

    weight: in the place of the convolution's; nothing is evaluated then.
    """
    conv, norm, normalizer = block.conv, block.norm, block.normalizer
    bias: Tensor | None = conv._parameters.get("bias")
    if weight is None:
        weight, bias = evaluated(conv, conv._parameters.get("weight"), bias)
    if norm == "batch":
        weight, bias = fold(weight, bias, normalizer)
        normalization: dict[str, Any] = {"norm": None}
    else:
        normalization = {"norm": norm}
        if norm is not None:
            normalization |= {
                "norm_weight": _parameter(normalizer, "weight"),
                "norm_bias": _parameter(normalizer, "bias"),
                "eps": normalizer.eps,
            }
            if norm == "group":
                normalization["num_groups"] = normalizer.num_groups
    geometry: Any = (conv.stride, conv.padding, conv.output_padding, conv.groups, conv.dilation)
    parameter = _parameter(block.parameter, "weight") if block.activation == "prelu" else block.parameter
    named = {
        "order": block.order,
        "activation": block.activation,
        "activation_param": parameter,
        "return_conv": block.returns_conv,
        "precision": options.precision,
    }
    return (x, weight, bias, *geometry), named | normalization
