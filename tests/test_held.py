# SPDX-License-Identifier: Apache-2.0
"""The SM90 kernel that holds a small block's convolution until it is normalized: its choice, and results.

UPCONV3D_PLAN is read once per process, so blocks that run by the plan's name run in another.
"""

import itertools
from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
import upconv3d
from oracles import ERROR_FACTOR, alike_blocks, check_alike, check_like_eager, make_block
from test_select_plan import facts, plan_of
from test_sm80 import _run_child

# Numbers of make_block: samples, C, K, extent, kernel; and what differs from a plain block.
SHAPES = {
    "kernel-is-stride": ((1, 64, 64, 8, 2), {"stride": 2}),
    "unequal-phases": ((2, 64, 32, (6, 7, 8), 3), {"stride": 2, "padding": 1, "output_padding": 1}),
    "channels-48-72": ((2, 48, 72, (5, 6, 7), 2), {"stride": 2}),
    "channels-20-packed": ((2, 20, 64, (5, 6, 7), 2), {"stride": 2, "bias": False}),
    "no-affine": ((3, 16, 24, (5, 4, 6), 2), {"padding": 1, "affine": False}),
    "kernel-1x2x2": ((2, 32, 16, (4, 6, 5), (1, 2, 2)), {"stride": (1, 2, 2)}),
    "channels-136-72": ((2, 136, 72, (9, 4, 17), 3), {}),
    "three-voxels": ((2, 256, 64, (1, 1, 3), 3), {}),
    "stride-3": ((2, 64, 72, (3, 4, 5), 4), {"stride": 3, "padding": 1}),
    "stride-1x4x4": ((2, 72, 64, (5, 4, 7), (2, 4, 5)), {"stride": (1, 4, 4), "padding": (1, 0, 2)}),
    "phases-without-taps": ((2, 40, 24, (5, 6, 7), 1), {"stride": 2, "output_padding": 1, "num_groups": 3}),
    "channels-8-8": ((2, 8, 8, (9, 4, 17), 3), {}),
    "dilated": ((1, 32, 64, (9, 8, 7), (2, 3, 2)), {"dilation": (3, 2, 1), "padding": (0, 2, 1)}),
    "kernel-7": ((2, 16, 24, 8, 7), {"padding": 3}),
    "instance-norm": ((3, 64, 136, (5, 9, 11), 3), {"num_groups": 136}),
    "one-group": ((2, 64, 136, (5, 9, 11), 3), {"num_groups": 1}),
    # Tiles that a block has no room for, which wait in y; and more partial moments than every block merges.
    "waiting-in-y": ((1, 16, 64, (47, 55, 64), 2), {"stride": 2, "num_groups": 8}),
    "of-one-group": ((1, 16, 32, (47, 55, 64), 2), {"stride": 2, "num_groups": 1}),
    "320-channels": ((2, 64, 320, (17, 18, 19), 3), {"stride": 2, "padding": 1, "num_groups": 320}),
}
TAILS = [
    {"order": order, "norm": norm, "activation": activation}
    for order, norm, activation in [
        ("norm_act", "group", "relu"),
        ("norm_act", "instance", "leaky_relu"),
        ("norm_act", "group", "prelu"),
        ("norm_act", "instance", None),
        ("act_norm", "instance", "relu"),
    ]
]


def check(block):
    plan = block.plan()
    assert plan.held and plan.kernel.startswith("conv_transpose_held_sm90"), plan
    check_like_eager(block)
    assert torch.equal(block.ours(), block.ours())


def shapes(device):
    """Run by the child: every shape and dtype, against float64 and PyTorch."""
    for sizes, numbers in SHAPES.values():
        for dtype in (torch.bfloat16, torch.float16):
            torch.manual_seed(1234)
            options = {"num_groups": 4, "device": device, "dtype": dtype, "precision": None}
            block = make_block(*sizes, **(options | numbers)).channels_last()
            check(block)
            # As PyTorch has it by default, so that it is packed.
            check(replace(block, weight=block.weight.contiguous()))


def other_values(device):
    """Run by the child: constant volumes, means far from 0, values that overflow, and infinite ones."""
    for dtype in (torch.bfloat16, torch.float16):
        torch.manual_seed(1234)
        for alike in alike_blocks(device, dtype, None):
            check_alike(alike.channels_last())
        block = make_block(2, 48, 72, 9, 3, num_groups=4, device=device, dtype=dtype, precision=None)
        block = block.channels_last()
        for mean in (3, 20):
            check(replace(block, bias=block.bias + mean))
        x = block.input.clone(memory_format=torch.preserve_format)
        x[1, 3, 4, 4, 4] = float("inf")
        infinite = replace(block, input=x)
        assert torch.equal(infinite.ours().isfinite(), infinite.eager().isfinite())
        assert torch.equal(infinite.ours()[0], block.ours()[0])  # nothing passes from sample to sample


@dataclass
class Call:
    """A call of the family: 72 > 40 channels, k3 s2."""

    tensors: dict[str, torch.Tensor]
    tail: dict[str, str | None]

    def parameter(self):
        slope = 0.2 if self.tail["activation"] == "leaky_relu" else None
        return self.tensors["slopes"] if self.tail["activation"] == "prelu" else slope

    def ask(self, function):
        t = self.tensors
        affine = {"norm_weight": t["gamma"], "norm_bias": t["beta"], "activation_param": self.parameter()}
        groups = 8 if self.tail["norm"] == "group" else None
        return function(t["x"], t["w"], t["bias"], 2, 1, 1, num_groups=groups, **affine, **self.tail)

    def activated(self, v, slopes):
        if self.tail["activation"] == "relu":
            return torch.relu(v)
        if self.tail["activation"] == "leaky_relu":
            return F.leaky_relu(v, 0.2)
        return F.prelu(v, slopes) if self.tail["activation"] == "prelu" else v

    def reference(self, dtype):
        t = {name: tensor.to(dtype) for name, tensor in self.tensors.items()}
        first = self.tail["order"] == "act_norm"
        v = F.conv_transpose3d(t["x"], t["w"], t["bias"], 2, 1, 1)
        v = self.activated(v, t["slopes"]) if first else v
        v = F.group_norm(v, 8 if self.tail["norm"] == "group" else 40, t["gamma"], t["beta"])
        return v if first else self.activated(v, t["slopes"])


def tails(device):
    """Run by the child: other orders, norms and activations."""
    for tail, dtype in itertools.product(TAILS, (torch.bfloat16, torch.float16)):
        torch.manual_seed(1234)
        shapes = {"x": (2, 72, 7, 8, 9), "w": (72, 40, 3, 3, 3)}
        shapes |= dict.fromkeys(("bias", "gamma", "beta", "slopes"), (40,))
        tensors = {name: torch.randn(shape, device=device, dtype=dtype) for name, shape in shapes.items()}
        for name, scale in (("x", 1), ("w", 1 / 16)):
            tensors[name] = (tensors[name] * scale).contiguous(memory_format=torch.channels_last_3d)
        call = Call(tensors, tail)
        assert call.ask(upconv3d.explain_norm_act).held, tail
        y, exact = call.ask(upconv3d.conv_transpose3d_norm_act), call.reference(torch.float64)
        error, eager = ((v.double() - exact).square().mean().sqrt() for v in (y, call.reference(dtype)))
        assert error <= ERROR_FACTOR * eager, tail
        assert torch.equal(y, call.ask(upconv3d.conv_transpose3d_norm_act))


@pytest.mark.parametrize("run", ["shapes", "other_values", "tails"])
def test_held_by_name(hopper, run):
    result = _run_child(f"import test_held; test_held.{run}('cuda')", plan="held")
    assert result.returncode == 0, result.stdout + result.stderr


def test_a_small_block_as_chosen(hopper):
    """In inference; on another stream, and in a captured graph, the same bits."""
    block = make_block(2, 256, 128, 6, 3, stride=2, padding=1, output_padding=1, num_groups=8, device=hopper)
    block = replace(block.to(torch.bfloat16).channels_last(), precision=None)
    assert block.plan().held and len(block.plan().stages) == 1, block.plan()
    y = block.ours()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        beside = block.ours()
    torch.cuda.current_stream().wait_stream(stream)
    assert torch.equal(beside, y)
    graph = torch.cuda.CUDAGraph()
    with torch.inference_mode(), torch.cuda.graph(graph):
        captured = block.ours()
    with torch.inference_mode():
        captured.fill_(float("nan"))
    graph.replay()
    assert torch.equal(captured, y)


SMALL = (2, 256, 128, (6, 6, 6), (3, 3, 3))
STRIDED = {"stride": [2, 2, 2], "padding": [1, 1, 1], "output_padding": [1, 1, 1]}


def test_small_blocks_are_held():
    """MONAI's AttentionUnet, 256 > 128: 17 us where cuDNN's convolution and the norm behind it take 23."""
    plan = plan_of(facts(*SMALL, weight_layout="NDHWC", **STRIDED))
    assert plan.held and not plan.twice and plan.w_in_place
    assert plan.stages == (plan.kernel,)
    assert plan.kernel.startswith("conv_transpose_held_sm90_bf16x1_bf16_64x")
    assert "held in shared memory" in str(plan) and plan.tile[0] == 64
    assert 0.01 < plan.estimated_held_ms < 0.03 and f"held {plan.estimated_held_ms:.4g}" in str(plan)
    assert plan.workspace_bytes < 1 << 20


@pytest.mark.parametrize(
    "changes",
    [
        {"weight_layout": "NCDHW"},  # which had to be packed first
        {"layout": "NCDHW"},
        {"dtype": "float32", "precision": "tf32"},
        {"training": True},
    ],
)
def test_what_is_not_held(changes):
    options = {"weight_layout": "NDHWC", **STRIDED} | changes
    assert not plan_of(facts(*SMALL, **options)).held


def test_large_blocks_are_not_held():
    assert not plan_of(facts(weight_layout="NDHWC")).held
    assert plan_of(facts(weight_layout="NDHWC"), forced_plan="held").held
    for forced in ("stored", "library"):
        assert not plan_of(facts(*SMALL, weight_layout="NDHWC", **STRIDED), forced_plan=forced).held


@pytest.mark.parametrize(
    ("arguments", "obstacle"),
    [
        (facts(layout="NCDHW"), "y is NCDHW"),
        (facts(k=100, num_groups=4), "output channels, 100, are no multiple of 8"),
        (facts(dtype="float32", precision="ieee"), "three products"),
        (facts(stride=[4, 4, 4]), "64 phases are more than a launch takes"),
    ],
)
def test_asked_for_where_it_cannot_run(arguments, obstacle):
    with pytest.raises(RuntimeError, match=rf"UPCONV3D_PLAN.*got held.*{obstacle}.*Unset UPCONV3D_PLAN"):
        plan_of(arguments, forced_plan="held")
