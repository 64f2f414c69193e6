# SPDX-License-Identifier: Apache-2.0
"""What would run, and what was built."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from . import _C
from ._facts import block_facts
from ._tail_arguments import facts_of
from .functional import IntOrTriple, check_kinds, integer, resolve_precision, triple
from .norm_act import checked_arguments, require_known


@dataclass(frozen=True)
class Plan:
    """The plan that a call would run, as data; str() of it is for people.

    Attributes:
        algorithm: which of the plans: "sm90_implicit_gemm", "sm80_implicit_gemm", "cuda_direct",
            "cuda_col2im", "cuda_library" (PyTorch's convolution, or before a skip maybe the SM90 plan's, our
            kernels for the rest) or "cpu_library"; `reason` says why this one and not a quicker one.
        kernel: name of the compiled variant, None for the direct, col2im and library plans.
        tile: output channels and output positions of one tile of that kernel.
        conv_layout: memory order in which the convolution runs and stores.
        activation: dtype of what is normalized, the convolution or an activation of it, between the two.
            Under "tf32" it is stored in 16 bits with a step, as the plan's text says.
        pack_x: whether input is copied into operand form first.
        w_in_place: whether the kernel reads weight where it lies; else it packs a copy.
        activation_in_y: whether that is stored in the result's memory and normalized in place.
        keeps_activation: whether that and its moments are kept for the backward pass.
        keeps_conv: whether the convolution is (library and col2im plans), before the bias is added.
        keeps_sum: whether the sum of convolution, bias and skip is.
        split_axes: axes, depth first, along which the kernel treats borders apart, to skip taps that would
            read only padding.
        share_taps: whether one load of input serves all taps along the height, or along the depth of small
            planes, where positions can be cut so; the rest is loaded tap by tap.
        pair_phases: whether two phases of a strided block of up to 64 output channels share tiles, and loads
            of input.
        window_tiles: of a strided block, tiles of positions for which all phases are computed before the next
            ones; 0 where phases follow each other whole.
        leaving_blocks: of the convolution, as many of its blocks as end after the first sample, so that a
            normalization which is a kernel of its own runs beside it; 0 where that begins behind it.
        channels: how channels are padded or kept apart by convolution group; "" where they lie as they are.
        held: whether the result is kept in shared memory until it is normalized.
        twice: whether the convolution is computed for its moments and then once more instead of being stored;
            without a norm, by the same kernel, once.
        estimated_stored_ms, estimated_twice_ms: what the two take without packing, by arithmetic and bytes; 0
            where one cannot run. The choice rests on the latter, and on an estimate of the tiles that run in
            the place of the former, which is of others.
        estimated_direct_ms: of the direct plan, what it is expected to take; else 0.
        saves_us: of the col2im plan where it is chosen, by how much less time it is expected to take than the
            plan that it runs in place of; else 0.
        tile_positions, tiles: positions that one partial moment covers, and how many there are per sample and
            channel.
        stages: in launch order.
        workspace_bytes: scratch memory beside the result; on library plans beside what the convolution takes,
            PyTorch's or ours, and the channels-last copies of input and weight.
        backward_stages: of a call whose gradients are wanted, in launch order; empty where the backward is
            PyTorch's operators.
        flops: multiplications and additions that touch an input value.
        problem: the block in the letters of the design: n, c, k, in, kernel, ...
        description: the plan in a few lines of text.
    """

    algorithm: str
    reason: str
    kernel: str | None
    tile: tuple[int, int] | None
    conv_layout: str
    activation: str
    pack_x: bool
    w_in_place: bool
    activation_in_y: bool
    keeps_activation: bool
    keeps_conv: bool
    keeps_sum: bool
    tile_positions: int
    split_axes: int
    share_taps: bool
    pair_phases: bool
    window_tiles: int
    leaving_blocks: int
    channels: str
    twice: bool
    held: bool
    estimated_stored_ms: float
    estimated_twice_ms: float
    estimated_direct_ms: float
    saves_us: float
    tiles: int
    stages: tuple[str, ...]
    workspace_bytes: int
    backward_stages: tuple[str, ...]
    flops: float
    problem: Mapping[str, Any]
    description: str

    def __str__(self) -> str:
        return self.description.rstrip()


def plan_from_dict(result: Mapping[str, Any]) -> Plan:
    """Plan from what _C.explain returns."""
    plan = result["plan"]
    return Plan(
        algorithm=plan["algorithm"],
        reason=plan["reason"],
        kernel=plan["kernel"],
        tile=None if plan["tile"] is None else (plan["tile"][0], plan["tile"][1]),
        conv_layout=plan["conv_layout"],
        activation=plan["activation"],
        pack_x=plan["pack_x"],
        w_in_place=plan["w_in_place"],
        activation_in_y=plan["activation_in_y"],
        keeps_activation=plan["keeps_activation"],
        keeps_conv=plan["keeps_conv"],
        keeps_sum=plan["keeps_sum"],
        tile_positions=plan["tile_positions"],
        split_axes=plan["split_axes"],
        share_taps=plan["share_taps"],
        pair_phases=plan["pair_phases"],
        window_tiles=plan["window_tiles"],
        leaving_blocks=plan["leaving_blocks"],
        channels=plan["channels"],
        twice=plan["twice"],
        held=plan["held"],
        estimated_stored_ms=plan["estimated_stored_ms"],
        estimated_twice_ms=plan["estimated_twice_ms"],
        estimated_direct_ms=plan["estimated_direct_ms"],
        saves_us=plan["saves_us"],
        tiles=plan["tiles"],
        stages=tuple(plan["stages"]),
        workspace_bytes=plan["workspace_bytes"],
        backward_stages=tuple(result["backward_stages"]),
        flops=result["flops"],
        problem=dict(result["problem"]),
        description=result["description"],
    )


def explain(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: IntOrTriple = 1,
    padding: IntOrTriple = 0,
    output_padding: IntOrTriple = 0,
    groups: int = 1,
    dilation: IntOrTriple = 1,
    *,
    num_groups: int,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    eps: float = 1e-5,
    precision: str | None = None,
    training: bool = False,
) -> Plan:
    """The plan that conv_transpose3d_relu_group_norm would run for the same arguments; computes nothing.

    Args and Raises: those of conv_transpose3d_relu_group_norm; only sizes, strides, dtypes, devices and the
    alignment of input and weight are read. training: whether the plan is to be that of a call whose
    gradients are wanted.
    """
    check_kinds(input, weight, bias, norm_weight, norm_bias, eps)
    facts = block_facts(
        input,
        weight,
        bias,
        triple(stride, "stride"),
        triple(padding, "padding"),
        triple(output_padding, "output_padding"),
        integer(groups, "groups"),
        triple(dilation, "dilation"),
        integer(num_groups, "num_groups"),
        norm_weight,
        norm_bias,
        eps,
        resolve_precision(input, precision),
    )
    return plan_from_dict(_C.explain(facts | {"training": training}))


def explain_norm_act(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: IntOrTriple = 1,
    padding: IntOrTriple = 0,
    output_padding: IntOrTriple = 0,
    groups: int = 1,
    dilation: IntOrTriple = 1,
    *,
    order: str = "norm_act",
    norm: str | None = "group",
    num_groups: int | None = None,
    norm_weight: Tensor | None = None,
    norm_bias: Tensor | None = None,
    eps: float = 1e-5,
    activation: str | None = "relu",
    activation_param: float | Tensor | None = None,
    skip: Tensor | None = None,
    return_conv: bool = False,
    precision: str | None = None,
    training: bool = False,
    spares_host: bool = False,
) -> Plan:
    """The plan that conv_transpose3d_norm_act would run for the same arguments; computes nothing.

    Args and Raises: those of conv_transpose3d_norm_act; `training` as in explain. On the CPU PyTorch's
    operators run whatever follows, but for ReLU before a group norm. spares_host: whether a small block is
    to take the host least, as accelerate() has it in eager mode.
    """
    require_known(order, norm, activation)
    tensors, settings = checked_arguments(
        *(input, weight, bias, stride, padding, output_padding, groups, dilation),
        *(order, norm, num_groups, norm_weight, norm_bias, eps),
        *(activation, activation_param, skip, return_conv, precision),
    )
    asked = {"training": training, "spares_host": spares_host}
    return plan_from_dict(_C.explain(facts_of(tensors, settings) | asked))


def build_config() -> dict[str, Any]:
    """What the compiled module was built from: versions, CUDA architectures, and every kernel variant."""
    return dict(_C.build_config())
