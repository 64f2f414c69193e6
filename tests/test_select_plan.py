# SPDX-License-Identifier: Apache-2.0
"""Selection without a GPU: select_plan through _C.explain, for devices given as numbers."""

from dataclasses import replace

import pytest
import torch
import upconv3d
from oracles import make_block
from test_values import SHAPES, shape_block
from upconv3d.explain import plan_from_dict

HOPPER = {
    "is_cuda": True,
    "compute_capability": 90,
    "sm_count": 132,
    "max_threads": 16,
    "assume_compiled": True,
}


def facts(
    n=16, c=64, k=128, extent=(32, 32, 32), kernel=(3, 3, 3), dtype="bfloat16", layout="NDHWC", **overrides
):
    """The headline shape, and departures from it. Only numbers: no memory is allocated."""

    def tensor(sizes, channels_last):
        memory_format = torch.channels_last_3d if channels_last else torch.contiguous_format
        strides = torch.empty(sizes, device="meta", memory_format=memory_format).stride()
        return _tensor(sizes, strides, dtype)

    groups = overrides.get("groups", 1)
    weight_layout = overrides.pop("weight_layout", "NCDHW")
    base = {
        "input": tensor([n, c, *extent], layout == "NDHWC"),
        "weight": tensor([c, k // groups, *kernel], weight_layout == "NDHWC"),
        "bias": None,
        "norm_weight": None,
        "norm_bias": None,
        "stride": [1, 1, 1],
        "padding": [0, 0, 0],
        "output_padding": [0, 0, 0],
        "dilation": [1, 1, 1],
        "groups": 1,
        "num_groups": 8,
        "eps": 1e-5,
        "precision": "ieee",
    }
    return base | overrides


def _tensor(sizes, strides, dtype):
    return {
        "sizes": list(sizes),
        "strides": list(strides),
        "dtype": dtype,
        "device": "cuda:0",
        "layout": "strided",
        "data_ptr_mod16": 0,
    }


def plan_of(arguments, **device):
    return plan_from_dict(upconv3d._C.explain(arguments | {"device": HOPPER | device}))


def test_borders_are_cut_off_only_where_it_pays():
    """Small blocks and kernel 1 keep one slab."""
    small = facts(input=_tensor([1, 64, 4, 4, 4], [4096, 64, 16, 4, 1], "bfloat16"))
    assert plan_of(small).split_axes == 0 and not plan_of(small).share_taps
    pointwise = facts(weight=_tensor([64, 128, 1, 1, 1], [128, 1, 1, 1, 1], "bfloat16"))
    assert plan_of(pointwise).split_axes == 0 and not plan_of(pointwise).share_taps


def test_borders_are_cut_off_along_all_axes_where_loads_are_not_shared():
    """Three products leave no room for the longer loads."""
    plan = plan_of(facts(dtype="float32"))
    # 4 depth slabs of 34*34, 4 height slabs of 30*34, 4 width slabs of 30*30 positions, and 30^3 inside
    slabs = 4 * [34 * 34] + 4 * [30 * 34] + 4 * [30 * 30] + [30**3]
    assert plan.split_axes == 3 and not plan.share_taps
    assert plan.tiles == sum(-(-positions // plan.tile_positions) for positions in slabs)


def test_headline_runs_on_the_sm90_kernel():
    plan = plan_of(facts())
    assert plan.algorithm == "sm90_implicit_gemm"
    assert plan.kernel.startswith("conv_transpose_relu_group_norm_sm90_bf16x1_bf16")
    assert plan.tile[1] == plan.tile_positions
    # A load of x serves three taps of the inside, 32 x 32 positions of each plane, which 1 to 3 taps reach
    # along the depth; of the borders around it, one row or column each, just one tap reaches along theirs.
    slabs = [32 * 32] * 4 + [30 * 32 * 32] + [34 * 34] * 2 + [34 * 32] * 2
    assert plan.split_axes == 0 and plan.share_taps
    assert plan.tiles == sum(-(-positions // plan.tile_positions) for positions in slabs)
    assert plan.conv_layout == "NDHWC" and plan.activation == "bfloat16"
    assert plan.activation_in_y and not plan.pack_x
    assert plan.stages == ("pack_operands", plan.kernel)
    assert plan.flops == 2 * 16 * 64 * 128 * 27 * 32**3
    assert plan.reason and plan.kernel in str(plan)


@pytest.mark.parametrize(
    ("dtype", "precision", "family"),
    [
        ("bfloat16", "ieee", "bf16x1_bf16"),
        ("float16", "ieee", "f16x1_f16"),
        ("float32", "tf32", "f16x1_u16"),
        ("float32", "ieee", "f16x3_f32"),
    ],
)
@pytest.mark.parametrize("layout", ["NCDHW", "NDHWC"])
def test_family_per_dtype_and_precision(dtype, precision, family, layout):
    plan = plan_of(facts(dtype=dtype, layout=layout, precision=precision))
    assert f"_sm90_{family}_" in plan.kernel
    assert plan.activation == dtype
    assert ("in 16 bits with a step" in str(plan)) == (precision == "tf32")
    assert plan.pack_x == (dtype == "float32" or layout == "NCDHW")
    assert plan.activation_in_y == (layout == "NDHWC")
    packing = "pack_scaled_operands" if dtype == "float32" else "pack_operands"
    normalizing = () if plan.activation_in_y else ("group_norm_normalize",)
    assert plan.stages == (packing, plan.kernel, *normalizing)


@pytest.mark.parametrize("training", [False, True])
def test_channels_last_weight_is_read_where_it_lies(training):
    def plan(**changes):
        return plan_of(facts(weight_layout="NDHWC", training=training, **changes))

    lying = plan()
    assert lying.w_in_place and lying.stages == (lying.kernel,)
    assert "from w as it lies" in str(lying) and lying.problem["w_channels_last"]
    # x in another order is packed by a launch of its own, which leaves w alone.
    transposed = plan(layout="NCDHW")
    assert transposed.w_in_place and transposed.pack_x and transposed.stages[0] == "pack_operands"
    # Rows that are no whole 16-byte chunks, groups, and what is to be converted.
    for changes in ({"k": 100, "num_groups": 10}, {"groups": 2}, {"dtype": "float32", "precision": "tf32"}):
        assert not plan(**changes).w_in_place and plan(**changes).stages[0].startswith("pack_")
    # Rows that begin amid a sector, if much is multiplied and nothing else is packed.
    amid = {"k": 40, "num_groups": 8}
    assert plan(**amid).stages == ("pack_operands", plan(**amid).kernel) and not plan(**amid).w_in_place
    short = facts(1, extent=(8, 8, 8), weight_layout="NDHWC", training=training, **amid)
    assert plan_of(short, forced_plan="stored").w_in_place
    # Many weights of few positions.
    many = facts(1, 1000, 1000, (8, 8, 8), weight_layout="NDHWC", training=training)
    assert plan_of(many, forced_plan="stored").w_in_place
    assert not plan(layout="NCDHW", **amid).w_in_place
    misaligned = facts(weight_layout="NDHWC")
    misaligned["weight"]["data_ptr_mod16"] = 8
    assert not plan_of(misaligned).w_in_place
    # One tap: both orders are the same memory.
    assert plan_of(facts(kernel=(1, 1, 1), training=True)).w_in_place


@pytest.mark.parametrize("layout", ["NCDHW", "NDHWC"])
def test_float32_operands_are_packed_by_one_launch(layout):
    for sizes in ({"n": 1}, {"n": 16, "c": 512, "k": 512, "extent": (8, 8, 8)}):
        plan = plan_of(facts(**sizes, dtype="float32", layout=layout))
        assert plan.stages[:2] == ("pack_scaled_operands", plan.kernel)


ACCEPTED = {
    "kernel-1": {"kernel": (1, 1, 1)},
    "kernel-7": {"kernel": (7, 7, 7), "padding": [3, 3, 3]},
    "anisotropic": {"kernel": (1, 3, 5), "padding": [0, 1, 2]},
    "channels-40-104": {"c": 40, "k": 104},
    "channels-3-100": {"c": 3, "k": 100, "num_groups": 4},
    "channels-64-2": {"n": 64, "c": 64, "k": 2, "num_groups": 1},
    "channels-60-124": {"c": 60, "k": 124, "num_groups": 31},
    "groups-of-32": {"groups": 2},
    "groups-of-16": {"groups": 4, "num_groups": 1, "dtype": "float32"},
    "groups-of-40-inputs": {"c": 160, "groups": 4, "dtype": "float32"},
    "instance-norm": {"num_groups": 128},
    "layer-norm": {"num_groups": 1},
    "one-sample": {"n": 1, "layout": "NCDHW", "dtype": "float32"},
    "kernel-16": {"kernel": (16, 1, 1)},
    "full-padding": {"kernel": (3, 3, 3), "padding": [2, 2, 2]},
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_sm90_accepts(name):
    plan = plan_of(facts(**ACCEPTED[name]))
    assert plan.algorithm == "sm90_implicit_gemm", plan.reason


def test_tf32_stores_16_bits_for_who_knows_the_steps():
    """Everywhere but for channels_last_3d results whose rows are no whole chunks."""
    for k, layout, family in ((100, "NCDHW", "u16"), (100, "NDHWC", "f32"), (104, "NDHWC", "u16")):
        plan = plan_of(facts(dtype="float32", layout=layout, precision="tf32", k=k, num_groups=4))
        assert f"_sm90_f16x1_{family}_" in plan.kernel
        assert plan.activation_in_y == (k == 104)
        assert ("in 16 bits with a step" in str(plan)) == (family == "u16")


def test_channels_are_padded_to_eights():
    """Input channels as x is packed, output channels in scratch memory that another kernel normalizes."""
    inputs = plan_of(facts(c=20))
    assert inputs.pack_x and inputs.activation_in_y
    assert inputs.channels == "input channels padded from 20 to 64" and inputs.channels in str(inputs)
    outputs = plan_of(facts(k=100, num_groups=25))
    assert not outputs.pack_x and not outputs.activation_in_y
    assert outputs.stages[-1] == "group_norm_normalize"
    assert "output channels stored beside y, padded from 100 to 104" in str(outputs)
    assert "padded" not in str(plan_of(facts()))


REFUSED = {
    "float64": ({"dtype": "float64"}, "float64"),
    "stride": ({"stride": [4, 4, 5]}, "stride"),
    "dilation": ({"dilation": [1, 16, 1]}, "dilation"),
    "channels-1": ({"n": 256, "c": 1, "k": 1, "num_groups": 1, "training": True}, "channels fill"),
    "groups-of-16": ({"groups": 4, "training": True}, "channels fill 12.5% of the tiles"),
    "depthwise": ({"k": 64, "groups": 64}, "groups 64 leave 1 output channels each"),
    "groups-of-12-outputs": (
        {"k": 24, "groups": 2, "training": True},
        "groups 2 leave 12 output channels each",
    ),
    "kernel-beyond-im2col": ({"kernel": (19, 1, 1)}, "im2col"),
    "padding-beyond-im2col": ({"kernel": (33, 1, 1), "padding": [17, 0, 0]}, "im2col"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_sm90_refuses_and_says_why(name):
    overrides, fragment = REFUSED[name]
    plan = plan_of(facts(**overrides))
    assert plan.algorithm == "cuda_library"
    assert fragment in plan.reason
    assert plan.kernel is None and plan.tile is None
    one_launch = ("activation_group_norm_held",)
    assert plan.stages[1:] in (
        one_launch,
        ("activation_moments", "group_norm_finalize", "group_norm_normalize"),
    )


def test_channels_that_fill_no_tile_leave_cudnn_too():
    """Of stride 1, cuDNN's convolution of few channels costs more than the direct plan is expected to."""
    plan = plan_of(facts(c=24, k=3, num_groups=3))
    assert plan.algorithm == "cuda_direct"
    assert "the direct kernel is expected to take" in plan.reason
    assert plan.kernel is None
    many_taps = {"kernel": (5, 5, 5), "padding": [2, 2, 2], "training": True}
    assert "channels fill" in plan_of(facts(c=24, k=3, num_groups=3, **many_taps)).reason


# Few inputs per output: up-blocks of MedNeXt, a group of two outputs per input, and KernelBench level 2, 60.
STRIDE_2 = {"stride": [2, 2, 2], "padding": [1, 1, 1]}
DIRECT = {
    "mednext-64": {"n": 1, "c": 64, "k": 64, "groups": 64, "extent": (64, 64, 64), **STRIDE_2},
    "mednext-512": {"n": 1, "c": 512, "k": 512, "groups": 512, "extent": (8, 8, 8), **STRIDE_2},
    "kernel-5": {
        "n": 1,
        "c": 64,
        "k": 64,
        "groups": 64,
        "kernel": (5, 5, 5),
        "stride": [2, 2, 2],
        "padding": [2, 2, 2],
    },
    "two-per-input": {"n": 1, "c": 32, "k": 64, "groups": 32, **STRIDE_2},
    "kernelbench-60": {"n": 128, "c": 3, "k": 16, "extent": (16, 32, 32), "num_groups": 4, **STRIDE_2},
}


# Without a norm.
ALONE = {"order": "norm_act", "num_groups": 0, "activation": "relu", "activation_param": 0.0}
ALONE |= {"return_conv": False, "slopes": None, "skip": None}


@pytest.mark.parametrize("layout", ["NCDHW", "NDHWC"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("name", DIRECT)
def test_few_inputs_take_the_direct_plan(name, dtype, layout):
    arguments = facts(**DIRECT[name], dtype=dtype, layout=layout)
    plan = plan_of(arguments)
    assert plan.algorithm == "cuda_direct" and plan.kernel is None, plan.reason
    assert plan.estimated_direct_ms > 0
    if arguments["groups"] != 1:
        assert "not the SM90 kernel" in plan.reason
    kernel = "conv_transpose_any_taps"
    if any(fragment in name for fragment in ("mednext", "kernel-5")):
        kernel = "conv_transpose_depthwise"
    elif name == "kernelbench-60":
        kernel = "conv_transpose_few_channels_sm80"
    assert plan.stages == (kernel, "group_norm_finalize", kernel)
    assert "computed for its moments, and once more" in str(plan)
    assert plan_of(arguments | {"training": True}).algorithm == "cuda_library"
    assert plan_of(arguments, forced_plan="library").algorithm == "cuda_library"
    forced = plan_of(facts(), forced_plan="direct")
    assert forced.reason == "UPCONV3D_PLAN=direct" and "estimate: " in str(forced)
    alone = plan_of(arguments | ALONE, forced_plan="direct")
    assert "computed once, and stored as y" in str(alone) and "moments" not in str(alone)


@pytest.mark.parametrize("capability", [70, 75])
def test_older_gpus_take_the_library_plan(capability):
    plan = plan_of(facts(), compute_capability=capability)
    assert plan.algorithm == "cuda_library"
    assert f"{capability // 10}.{capability % 10} is below 8.0" in plan.reason


def test_a_plan_can_be_forced():
    for capability in (80, 90, 120):
        sm80 = plan_of(facts(), compute_capability=capability, forced_plan="sm80")
        assert sm80.algorithm == "sm80_implicit_gemm"
        library = plan_of(facts(), compute_capability=capability, forced_plan="library")
        assert library.algorithm == "cuda_library" and "UPCONV3D_PLAN=library" in library.reason
    assert plan_of(facts(), forced_plan="sm90").algorithm == "sm90_implicit_gemm"
    with pytest.raises(RuntimeError, match=r"got sm90, but compute capability 8\.0 is not 9\.0"):
        plan_of(facts(), compute_capability=80, forced_plan="sm90")
    with pytest.raises(ValueError, match=r'UPCONV3D_PLAN must name a plan.*got "sm70".*Set it to'):
        plan_of(facts(), forced_plan="sm70")


def test_never_a_kernel_that_was_not_compiled():
    compiled = {kernel["name"] for kernel in upconv3d.build_config()["kernels"] if kernel["compiled"]}
    plan = plan_of(facts(), assume_compiled=False)
    if any("_sm90_" in name for name in compiled):
        assert plan.kernel in compiled
    else:
        assert plan.algorithm == "cuda_library" and "no kernel" in plan.reason
    ampere = plan_of(facts(), assume_compiled=False, compute_capability=80)
    if compiled:
        assert ampere.kernel in compiled
    else:
        assert ampere.algorithm == "cuda_library" and "no SM80 kernel" in ampere.reason


def test_cpu_plan():
    plan = plan_of(facts(), is_cuda=False)
    assert plan.algorithm == "cpu_library" and "CPU" in plan.reason


def test_library_moments_fill_the_card_at_one_sample():
    """eager's GroupNorm has one thread block per (sample, group); here tiles make up for few samples."""
    plan = plan_of(facts(n=1, c=128, k=128, extent=(48, 48, 48), kernel=(2, 2, 2), stride=[2, 2, 2]))
    if plan.tiles == 0:
        pytest.skip("a build without CUDA sizes no CUDA workspace")
    assert plan.tiles >= 132


def test_misaligned_input_is_packed():
    arguments = facts()
    arguments["input"] = arguments["input"] | {"data_ptr_mod16": 2}
    plan = plan_of(arguments)
    assert plan.algorithm == "sm90_implicit_gemm" and plan.pack_x


def test_small_problem_takes_a_smaller_tile_no_later_than_a_large_one():
    small, large = plan_of(facts(n=1, extent=(6, 6, 6)), forced_plan="sm90"), plan_of(facts())
    assert small.tile[0] * small.tile[1] <= large.tile[0] * large.tile[1]


def test_explain_is_pure():
    arguments = facts()
    assert plan_of(arguments) == plan_of(arguments)


@pytest.mark.parametrize("shape", SHAPES)
def test_explain_of_tensors_on_this_machine(device, shape):
    block = shape_block(shape, device=device)
    plan = block.plan()
    assert (plan.algorithm == "cpu_library") == (device.type == "cpu")
    assert plan.reason and str(plan)
    assert plan.workspace_bytes >= 0 and plan.flops > 0


def test_explain_reads_the_precision_setting(cuda):
    block = make_block(2, 16, 16, 4, 3, num_groups=2, device=cuda, precision=None)
    for setting in ("ieee", "tf32"):
        torch.backends.cudnn.conv.fp32_precision = setting
        assert block.plan().problem["precision"] == setting


def test_hopper_runs_the_sm90_plan(hopper):
    block = make_block(2, 32, 96, 16, 3, num_groups=4, stride=2, dilation=2, device=hopper)
    for precision in ("ieee", "tf32"):
        plan = replace(block, precision=precision).plan()
        assert plan.algorithm == "sm90_implicit_gemm", plan.reason


def test_windows_of_phases():
    """Where phases have tiles enough, and one convolution group reads them."""
    large = facts(c=256, k=128, extent=(32, 32, 32), kernel=(3, 3, 3), stride=[2, 2, 2], padding=[1, 1, 1])
    assert plan_of(large).window_tiles >= 16 and "order: all phases" in str(plan_of(large))
    assert plan_of(large | {"groups": 2}).window_tiles == 0
    assert plan_of(facts()).window_tiles == 0


@pytest.mark.parametrize(
    "changes",
    [
        {"layout": "NCDHW"},
        {"layout": "NCDHW", "dtype": "float32", "precision": "tf32"},
        {"layout": "NCDHW", "dtype": "float32"},
        {"layout": "NCDHW", "training": True},
    ],
    ids=["bfloat16", "tf32", "ieee", "training"],
)
def test_normalization_runs_beside_the_convolution_of_later_samples(changes):
    """Where it is a kernel of its own: a few blocks of the convolution leave it their multiprocessors."""
    plan = plan_of(facts(**changes))
    assert plan.stages[-1] == "group_norm_normalize"
    assert 0 < plan.leaving_blocks <= HOPPER["sm_count"] // 5
    assert f"beside the convolution, of which {plan.leaving_blocks} blocks end" in str(plan)
    # No later sample, or few tiles: nothing to gain.
    for small in ({"n": 1}, {"extent": (8, 8, 8)}):
        assert plan_of(facts(**changes | small)).leaving_blocks == 0


def test_no_block_leaves_for_less_than_a_launch_beside_it_takes():
    block = {
        "n": 2,
        "k": 320,
        "extent": (7, 15, 15),
        "kernel": (2, 2, 2),
        "stride": [2, 2, 2],
        "num_groups": 320,
    }
    plan = plan_of(facts(**block, layout="NCDHW", dtype="float32", precision="tf32"))
    assert plan.stages[-1] == "group_norm_normalize" and plan.leaving_blocks == 0


def test_the_convolutions_kernel_normalizes_without_blocks_that_leave():
    for plan in (plan_of(facts()), plan_of(facts(dtype="float32", precision="tf32"))):
        assert plan.stages[-1] == plan.kernel and plan.leaving_blocks == 0
        assert "beside the convolution" not in str(plan)
