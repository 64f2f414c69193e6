# SPDX-License-Identifier: Apache-2.0
"""Calls of conv_transpose3d_norm_act, and what PyTorch's own calls make of the same arguments."""

import itertools
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
import upconv3d
from torch import Tensor

ORDERS = ("norm_act", "act_norm")
NORMS = ("group", "instance", None)
ACTIVATIONS = ("relu", "leaky_relu", "elu", "silu", "gelu", "gelu_tanh", "prelu", None)
PARAMETERS = {"leaky_relu": 0.2, "elu": 0.7}
KINKED = ("relu", "leaky_relu", "prelu", "elu")  # their derivative jumps at 0 (elu's where alpha is not 1)
COMBINATIONS = [
    combination
    for combination in itertools.product(ORDERS, NORMS, ACTIVATIONS)
    if combination[0] == "norm_act" or (combination[1] and combination[2])
]


@dataclass
class Call:
    """Tensors by name, numbers of the convolution, and what follows it."""

    tensors: dict[str, Tensor]
    numbers: dict[str, Any]
    order: str = "norm_act"
    norm: str | None = "group"
    activation: str | None = "relu"
    return_conv: bool = False
    num_groups: int = 2
    precision: str | None = "ieee"

    def map(self, function) -> "Call":
        return replace(self, tensors={name: function(tensor) for name, tensor in self.tensors.items()})

    def to(self, dtype) -> "Call":
        return self.map(lambda tensor: tensor.detach().to(dtype))

    def leaves(self) -> "Call":
        return self.map(
            lambda tensor: tensor.detach().clone(memory_format=torch.preserve_format).requires_grad_()
        )

    def channels_last(self, *names: str) -> "Call":
        def convert(tensor):
            whole = tensor if tensor.dim() == 5 else tensor.unsqueeze(0)
            whole = whole.contiguous(memory_format=torch.channels_last_3d)
            return whole if tensor.dim() == 5 else whole.squeeze(0)

        converted = {name: convert(self.tensors[name]) for name in names if name in self.tensors}
        return replace(self, tensors=self.tensors | converted)

    def keywords(self) -> dict[str, Any]:
        slopes = self.tensors.get("slopes")
        return self.numbers | {
            "order": self.order,
            "norm": self.norm,
            "num_groups": self.num_groups if self.norm == "group" else None,
            "norm_weight": self.tensors.get("norm_weight"),
            "norm_bias": self.tensors.get("norm_bias"),
            "activation": self.activation,
            "activation_param": PARAMETERS.get(self.activation) if slopes is None else slopes,
            "skip": self.tensors.get("skip"),
            "return_conv": self.return_conv,
            "precision": self.precision,
        }

    def ours(self) -> Any:
        t = self.tensors
        return upconv3d.conv_transpose3d_norm_act(t["input"], t["weight"], t.get("bias"), **self.keywords())

    def operator_arguments(self) -> tuple[Any, ...]:
        """Of torch.ops.upconv3d.conv_transpose3d_norm_act."""
        t, k = self.tensors, self.keywords()

        def triple(name, default):
            value = k.get(name, default)
            return [value] * 3 if isinstance(value, int) else list(value)

        groups = k.get("groups", 1)
        channels = t["weight"].shape[1] * groups
        norm_groups = {"group": self.num_groups, "instance": channels, None: 0}[self.norm]
        convolution = (
            triple("stride", 1),
            triple("padding", 0),
            triple("output_padding", 0),
            groups,
            triple("dilation", 1),
        )
        norm = (self.order, norm_groups, t.get("norm_weight"), t.get("norm_bias"), 1e-5)
        activation = (self.activation or "none", PARAMETERS.get(self.activation, 0.0), t.get("slopes"))
        tail = (*activation, t.get("skip"), self.return_conv, self.precision or "ieee")
        return (t["input"], t["weight"], t.get("bias"), *convolution, *norm, *tail)

    def _activate(self, value: Tensor) -> Tensor:
        slope = PARAMETERS.get(self.activation)
        return {
            None: lambda: value,
            "relu": lambda: F.relu(value),
            "leaky_relu": lambda: F.leaky_relu(value, slope),
            "elu": lambda: F.elu(value, slope),
            "silu": lambda: F.silu(value),
            "gelu": lambda: F.gelu(value),
            "gelu_tanh": lambda: F.gelu(value, approximate="tanh"),
            "prelu": lambda: F.prelu(value, self.tensors["slopes"]),
        }[self.activation]()

    def _normalize(self, value: Tensor) -> Tensor:
        gamma, beta = self.tensors.get("norm_weight"), self.tensors.get("norm_bias")
        if self.norm == "group":
            return F.group_norm(value, self.num_groups, gamma, beta)
        return value if self.norm is None else F.instance_norm(value, weight=gamma, bias=beta)

    def eager(self) -> Any:
        """PyTorch's own calls, in the precision that the settings say."""
        t = self.tensors
        unbatched = t["input"].dim() == 4
        x = t["input"].unsqueeze(0) if unbatched else t["input"]
        c = F.conv_transpose3d(x, t["weight"], t.get("bias"), **self.numbers)
        skip = t.get("skip")
        value = c if skip is None else c + (skip.unsqueeze(0) if unbatched else skip)
        steps = [self._normalize, self._activate]
        for step in steps if self.order == "norm_act" else steps[::-1]:
            value = step(value)
        y, c = (value.squeeze(0), c.squeeze(0)) if unbatched else (value, c)
        return (y, c) if self.return_conv else y


def make_call(
    n=2, c=4, k=6, extent=(3, 2, 4), kernel=3, *, norm="group", activation="relu", skip=False, bias=True,
    affine=True, one_slope=False, device="cpu", dtype=torch.float64, groups=1, stride=(2, 1, 2), padding=1,
    **options,
) -> Call:  # fmt: skip
    """A random call; `n` None is one sample without a batch."""

    def random(*sizes, scale=1.0, shift=0.0):
        return (torch.randn(*sizes, device=device, dtype=torch.float64) * scale + shift).to(dtype)

    batch = () if n is None else (n,)
    numbers = {"stride": stride, "padding": padding}
    if groups != 1:
        numbers["groups"] = groups
    tensors = {
        "input": random(*batch, c, *extent),
        "weight": random(c, k // groups, *(kernel,) * 3, scale=(c // groups * kernel**3) ** -0.5),
    }
    if bias:
        tensors["bias"] = random(k, scale=0.3)
    if norm is not None and affine:
        tensors["norm_weight"] = random(k, scale=0.3, shift=1)
        tensors["norm_bias"] = random(k, scale=0.3)
    if activation == "prelu":
        tensors["slopes"] = random(1 if one_slope else k, scale=0.3)
    call = Call(tensors, numbers, norm=norm, activation=activation, **options)
    if skip:
        with torch.no_grad():
            sizes = F.conv_transpose3d(tensors["input"], tensors["weight"], **numbers).shape
        tensors["skip"] = random(*sizes)
    return call


def outputs(result: Any) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def gradients(call: Call, run, seeds=None) -> tuple[tuple[Tensor, ...], dict[str, Tensor]]:
    """Results, and gradients of all tensors for random (or given) gradients of the results."""
    leaves = call.leaves()
    results = outputs(run(leaves))
    if seeds is None:
        generator = torch.Generator().manual_seed(7)
        seeds = [torch.randn(y.shape, generator=generator, dtype=torch.float64) for y in results]
    torch.autograd.backward(results, [s.to(y.device, y.dtype) for s, y in zip(seeds, results, strict=True)])
    return results, {name: tensor.grad for name, tensor in leaves.tensors.items()}
