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

    The stored activation, below, is what is normalized: the convolution, or an activation of it where one
    comes before the norm. Moments are partial (count, mean, sum of squared deviations).

    Attributes:
        algorithm: which of the plans: "sm90_implicit_gemm", "sm80_implicit_gemm", "cuda_direct",
            "cuda_col2im", "cuda_library" (PyTorch's convolution, or before a skip maybe the SM90 plan's, our
            kernels for the rest) or "cpu_library".
        reason: why this algorithm runs and not a quicker one.
        kernel: name of the compiled variant, None for the direct, col2im and library plans.
        tile: output channels and output positions of one tile of that kernel; None where kernel is.
        conv_layout: memory order in which the convolution runs and stores: "NCDHW" or "NDHWC".
        activation: dtype of the stored activation. Under "tf32" it may be stored in 16 bits with a step, as
            the plan's text says.
        pack_x: whether input is copied into operand form first.
        w_in_place: whether the kernel reads weight where it lies; else it packs a copy (SM90 plan).
        activation_in_y: whether the stored activation lies in the result's memory, to be normalized in place.
        keeps_activation: whether the stored activation and its moments are kept for the backward pass.
        keeps_conv: whether the convolution is kept for it (library and col2im plans), before the bias is
            added unless the call returns it.
        keeps_sum: whether the sum of convolution, bias and skip is kept for it (library plan).
        split_axes: number of axes, depth first, along which the kernel treats borders apart, to skip taps
            that would read only padding.
        share_taps: whether one load of input serves all taps along the height, or along the depth of small
            planes, where positions can be cut so; the rest is loaded tap by tap.
        pair_phases: whether two phases of a strided block of up to 64 output channels share tiles, and loads
            of input. (A phase is the outputs of one remainder by the stride.)
        window_tiles: of a strided block, tiles of positions for which all phases are computed before the next
            ones; 0 where phases follow each other whole.
        leaving_blocks: CUDA blocks of the convolution that end after the first sample, so that a
            normalization which is a kernel of its own runs beside the rest; 0 where it begins afterwards.
        channels: how channels are padded or kept apart by convolution group; "" where they lie as they are.
        twice: whether the convolution is computed for its moments and then once more instead of being stored;
            without a norm, by the same kernel, once (SM90 plan).
        held: whether the convolution stays in shared memory, as far as it has room, until it is normalized
            (SM90 plan). Of neither `twice` nor `held`, the SM90 plan stores the convolution.
        estimated_stored_ms, estimated_twice_ms: expected times, in ms without packing, of the SM90 plan where
            it stores the convolution and where it computes it twice; 0 where that cannot run, and on other
            plans. The former compares the SM90 plan with other plans where cpp/core/plan_times.cpp has no
            times, and may be of other tiles than run: which of the two runs is decided by an estimate of the
            tiles that would run, and by estimated_twice_ms.
        estimated_held_ms: expected time of the one launch of a held plan, in ms; 0 on other plans.
        estimated_direct_ms: expected time of all launches of the direct plan, in ms; 0 on other plans.
        saves_us: by how many us less the col2im plan is expected to take than the plan in whose place it
            runs; 0 on other plans.
        tile_positions, tiles: output positions that one partial moment covers, and how many partial moments
            there are per sample and channel.
        stages: names of kernels and PyTorch operators, in launch order.
        workspace_bytes: scratch memory beside the result; on library plans beside what the convolution takes,
            PyTorch's or ours, and the channels-last copies of input and weight.
        backward_stages: of a call whose gradients are wanted, in launch order; empty where the backward is
            PyTorch's operators.
        flops: multiplications and additions that touch an input value (two per product).
        problem: the block in the letters of the design: n, c, k, in, kernel, stride, padding, output_padding,
            dilation, out, groups, num_groups, eps, dtype, precision, and how tensors lie and what follows.
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
    estimated_held_ms: float
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
        estimated_held_ms=plan["estimated_held_ms"],
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

    Only sizes, strides, dtypes, devices and the alignment of input and weight are read.

    Args:
        input, ..., precision: as in conv_transpose3d_relu_group_norm.
        training: whether the plan is to be that of a call whose gradients are wanted; `requires_grad` of the
            tensors is not looked at.

    Returns: a Plan.

    Raises: as conv_transpose3d_relu_group_norm; NotImplementedError for tensors on another device than CPU
        and CUDA, the meta device among them.
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

    On the CPU PyTorch's operators run whatever follows the convolution, but for ReLU before a group norm.

    Args:
        input, ..., precision: as in conv_transpose3d_norm_act.
        training: as in explain. Of a small block without a norm, which PyTorch's own calls train, the plan
            is the one that our kernels would run.
        spares_host: whether a block that the SM90 plan is expected to run in at most 90 us is to take that
            plan, because it costs the host less than the library plan, as accelerate() has it in eager mode.

    Returns: a Plan.

    Raises: as conv_transpose3d_norm_act; NotImplementedError for tensors on another device than CPU and
        CUDA, the meta device among them.
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
    """What the compiled module was built from.

    Returns: a dict of
        version: of upconv3d. torch_build_version, torch_minimum_version: of the torch whose headers were
            used, and of the oldest that can load the module.
        cuda: whether it has CUDA kernels. cuda_runtime_version, cuda_archs, cutlass_version, cuda_compiler:
            of these, None or empty without.
        cxx_compiler: name and version.
        kernels: a dict per variant of the convolution's kernels: name, arch (compute capability times 10),
            operand, products, output, stored_bits, block_channels, block_positions, block_inputs, twice,
            held, and compiled: whether this build has it.
        grad_w_kernels: name and compiled of each kernel for the weight's gradient.
    """
    return dict(_C.build_config())
