# SPDX-License-Identifier: Apache-2.0
"""Where a small block runs cuDNN's convolution, or is held by ours: selection without a GPU, as in
test_select_plan.py.
"""

import pytest
from test_select_plan import ALONE, facts, plan_of

# Real decoder blocks: x [2,384,6^3], [2,256,8x8x4] and, with norm groups of one channel, [2,320,4^3]
SMALL_BLOCKS = {
    "unet-384": {"n": 2, "c": 384, "k": 64, "extent": (6, 6, 6), "num_groups": 2},
    "vnet-256": {"n": 2, "c": 256, "k": 128, "extent": (8, 8, 4), "kernel": (2, 2, 2)},
    "instance-norm": {"n": 2, "c": 320, "k": 320, "extent": (4, 4, 4), "num_groups": 320},
}


@pytest.mark.parametrize("name", SMALL_BLOCKS)
def test_small_blocks_take_the_library_and_one_launch(name):
    def plan(**changes):
        defaults = {"stride": [2, 2, 2], "weight_layout": "NDHWC"}
        device = {key: changes.pop(key) for key in ("forced_plan",) if key in changes}
        return plan_of(facts(**SMALL_BLOCKS[name] | defaults | changes), **device)

    tf32 = {"dtype": "float32", "precision": "tf32"}
    for changes in ({}, {"dtype": "float16"}, tf32):
        small = plan(**changes, forced_plan="library")
        assert small.algorithm == "cuda_library" and small.kernel is None
        assert small.stages == ("aten::convolution", "activation_group_norm_held")
        # cuDNN would copy x, w and the result; two launches of ours do.
        planes = plan(**changes, layout="NCDHW", weight_layout="NCDHW", forced_plan="library")
        assert planes.problem["y_layout"] == "NCDHW" and planes.conv_layout == "NDHWC"
        assert planes.stages == ("channels_last_copies", *small.stages)
        # Of 384 inputs under "tf32" the product took 31 us, cuDNN's convolution and what follows it 42.
        chosen = plan(**changes)
        if changes != tf32:
            assert chosen.held and chosen.stages == (chosen.kernel,)
        elif name == "unet-384":
            assert chosen.stages == ("conv_transpose_columns_sm80", "col2im", "activation_group_norm_held")
        else:
            assert chosen.stages == small.stages
            assert "cuDNN's convolution and what follows it are expected to take" in chosen.reason
    # cuDNN has no quick convolution for these.
    assert plan(dtype="float32").algorithm in ("sm90_implicit_gemm", "cuda_col2im")
    assert plan(dilation=[2, 2, 2]).algorithm == "cuda_col2im"
    assert plan(training=True).algorithm == "sm90_implicit_gemm" and plan(training=True).keeps_activation
    assert plan(forced_plan="sm90").algorithm == "sm90_implicit_gemm"


# Of which the schedule of the SM90 plan expects less than cuDNN takes.
SCHEDULED_BLOCKS = {
    "short-rows": {"n": 2, "c": 64, "k": 32, "extent": (48, 48, 48), "padding": [1, 1, 1]},
    "kernel-7": {"n": 1, "c": 32, "k": 32, "extent": (32, 32, 32), "kernel": (7, 7, 7), "padding": [3, 3, 3]},
}


@pytest.mark.parametrize("name", SCHEDULED_BLOCKS)
def test_small_blocks_of_stride_1_are_compared_by_their_schedule(name):
    def plan(**changes):
        return plan_of(facts(**SCHEDULED_BLOCKS[name] | {"weight_layout": "NDHWC"} | changes))

    for dtype in ("bfloat16", "float16"):
        assert plan(dtype=dtype).algorithm == "sm90_implicit_gemm"
    # Of half the extent the library's two launches are the shorter ones, or one that holds the result.
    half = plan(extent=tuple(e // 2 for e in SCHEDULED_BLOCKS[name]["extent"]))
    assert half.held if name == "short-rows" else half.algorithm == "cuda_library"


def test_pointwise_blocks_are_not_compared_by_their_schedule():
    block = {"n": 4, "c": 256, "k": 48, "extent": (16, 32, 32), "kernel": (1, 1, 1), "num_groups": 48}
    assert plan_of(facts(**block, layout="NCDHW")).algorithm == "cuda_library"


def test_pointwise_blocks_in_ncdhw_need_no_copies():
    block = {"n": 1, "c": 256, "k": 256, "extent": (64, 64, 5), "kernel": (1, 1, 1), "num_groups": 32}
    for changes in ({"dtype": "bfloat16"}, {"dtype": "float32", "precision": "tf32"}):
        plan = plan_of(facts(**block, layout="NCDHW", **changes))
        assert plan.stages == ("aten::convolution", "activation_group_norm_held")
        assert plan.conv_layout == "NCDHW" and "cuDNN's convolution" in plan.reason


def test_a_pointwise_result_that_one_launch_cannot_hold_takes_three():
    """Of float32 in channels_last_3d and 20 MB; packing alone takes the SM90 plan longer."""
    block = {"n": 1, "c": 256, "k": 256, "extent": (64, 64, 5), "kernel": (1, 1, 1), "num_groups": 32}
    block |= {"dtype": "float32", "precision": "tf32"}
    plan = plan_of(facts(**block))
    assert plan.algorithm == "cuda_library"
    assert plan.stages[1:] == ("activation_moments", "group_norm_finalize", "group_norm_normalize")
    smaller = plan_of(facts(**block | {"extent": (64, 64, 3)}))  # 13 MB, which one launch holds
    assert smaller.stages == ("aten::convolution", "activation_group_norm_held")
    alone = plan_of(facts(**block) | ALONE)
    assert "activation_moments" not in alone.stages


def test_matmuls_as_they_lie():
    """By the bytes that either plan moves: packing x, or transposing y, costs more than passes over y."""
    block = {"n": 1, "c": 320, "k": 96, "extent": (48, 48, 48), "kernel": (1, 1, 1), "num_groups": 8}
    tf32 = {"dtype": "float32", "precision": "tf32"}
    for changes in ({"layout": "NCDHW", **tf32}, tf32, {"layout": "NCDHW", "dtype": "bfloat16"}):
        plan = plan_of(facts(**block | changes))
        assert plan.algorithm == "cuda_library", changes
    ieee = {"c": 32, "layout": "NCDHW", "dtype": "float32", "precision": "ieee"}
    assert "a matmul as it lies" in plan_of(facts(**block | ieee)).reason
    wide = {"c": 64, "k": 320, "extent": (64, 64, 64)}
    for changes in ({"layout": "NCDHW", **tf32}, tf32, {"dtype": "bfloat16"}, {"dtype": "float32"}):
        assert plan_of(facts(**block | wide | changes)).algorithm == "sm90_implicit_gemm", changes
    for changes in ({"padding": [1, 1, 1]}, {"stride": [2, 2, 2]}):
        assert "a matmul as it lies" not in plan_of(facts(**block | ieee | changes)).reason


def test_large_blocks_keep_their_kernel():
    """Where the SM90 plan's fixed time is a small part of it, and where no launch can hold the result."""
    for n in (4, 16):
        assert plan_of(facts(n=n, weight_layout="NDHWC")).algorithm == "sm90_implicit_gemm"
    forced = plan_of(facts(weight_layout="NDHWC"), forced_plan="library")
    assert forced.stages[1:] == ("activation_moments", "group_norm_finalize", "group_norm_normalize")


def test_weights_in_another_order_are_copied_by_pytorch():
    """The copy of a large weight at every call takes longer than the SM90 plan's packing."""
    block = {"n": 1, "c": 1024, "k": 512, "extent": (5, 10, 10), "stride": [2, 2, 2], "padding": [1, 1, 1]}
    assert plan_of(facts(**block, weight_layout="NDHWC")).held  # 51 us, by cuDNN 63
    packed = plan_of(facts(**block, weight_layout="NCDHW"))
    assert packed.algorithm == "sm90_implicit_gemm" and not packed.held


def test_col2im_where_products_are_few():
    """In inference; the kernels by their names, and what is expected of them."""
    block = {"n": 1, "c": 96, "k": 64, "extent": (9, 12, 10), "padding": [1, 0, 1], "num_groups": 64}
    for layout in ("NCDHW", "NDHWC"):
        arguments = block | {"dtype": "float32", "precision": "ieee", "layout": layout}
        plan = plan_of(facts(**arguments, weight_layout=layout))
        assert plan.algorithm == "cuda_col2im" and "a matrix product and a gather" in plan.reason
        assert plan.stages == ("conv_transpose_columns_sm80", "col2im", "activation_group_norm_held")
        training = plan_of(facts(**arguments, weight_layout=layout, training=True))
        assert training.algorithm != "cuda_col2im" and training.saves_us == 0 < plan.saves_us
    few = {"n": 1, "c": 128, "k": 1, "extent": (42, 38, 37), "padding": [1, 1, 1], "num_groups": 1}
    assert plan_of(facts(**few, dtype="float32", precision="tf32")).algorithm == "cuda_col2im"
    more = block | {"c": 256, "k": 128, "dtype": "bfloat16"}
    assert plan_of(facts(**more, weight_layout="NDHWC")).algorithm == "cuda_library"
    large = block | {"n": 16, "extent": (32, 32, 32), "dtype": "float32", "num_groups": 8}
    assert plan_of(facts(**large)).algorithm == "sm90_implicit_gemm"


COL2IM_REFUSED = {
    "dtype": ({"dtype": "float64"}, "it computes no float64"),
    "groups": ({"k": 8, "groups": 2}, "the convolution has groups"),
    "look back": ({"extent": (1, 1, 1), "stride": [1, 1, 100003], "dilation": [1, 1, 100019]},
                  "offsets need more than 31 bits"),
    "channels": ({"n": 1, "c": 2**31 - 8, "k": 1, "extent": (1, 1, 1), "kernel": (1, 1, 1),
                  "stride": [2, 2, 2], "output_padding": [1, 1, 1]}, "offsets need more than 31 bits"),
    "positions": ({"n": 1, "c": 1, "k": 1, "extent": (8, 8, 2**25 - 10), "kernel": (1, 1, 1)},
                  "offsets need more than 31 bits"),
}  # fmt: skip


@pytest.mark.parametrize("name", COL2IM_REFUSED)
def test_col2im_refuses_and_says_why(name):
    """Asked for by name it is an error; else another plan runs."""
    changes, fragment = COL2IM_REFUSED[name]
    block = {"n": 2, "c": 16, "k": 4, "extent": (4, 4, 4), "kernel": (1, 1, 2), "num_groups": 1}
    block |= {"dtype": "float32", "precision": "ieee", "layout": "NCDHW", "weight_layout": "NCDHW"} | changes
    assert plan_of(facts(**block)).algorithm != "cuda_col2im"
    with pytest.raises(RuntimeError, match=r"UPCONV3D_PLAN.*got col2im.*Unset UPCONV3D_PLAN") as refusal:
        plan_of(facts(**block), forced_plan="col2im")
    assert fragment in str(refusal.value)


def test_col2im_leaves_short_sums():
    """At float32's accuracy: two words of TF32 lack last bits of a float, which few products do not hide."""
    block = {"n": 2, "k": 4, "extent": (12, 12, 12), "stride": [3, 3, 3]}
    block |= {"num_groups": 1, "dtype": "float32", "layout": "NCDHW", "weight_layout": "NCDHW"}
    for c, kernel, expected in ((4, 3, False), (7, 3, False), (8, 3, True)):
        plan = plan_of(facts(**block | {"c": c, "kernel": (kernel,) * 3}, precision="ieee"))
        assert (plan.algorithm == "cuda_col2im") == expected, (c, kernel, plan.reason)


def test_col2im_in_place_of_long_sums_of_cudnn():
    """Under "tf32", of stride 1: cuDNN sums up so many products one after the other."""
    block = {"n": 1, "c": 384, "k": 160, "extent": (5, 7, 5), "padding": [1, 1, 1], "num_groups": 2}
    for layout in ("NCDHW", "NDHWC"):
        arguments = block | {"dtype": "float32", "precision": "tf32", "layout": layout}
        assert plan_of(facts(**arguments, weight_layout=layout)).algorithm == "cuda_col2im"
        short = arguments | {"c": 64, "k": 128, "extent": (14, 14, 14)}
        assert plan_of(facts(**short, weight_layout=layout)).algorithm == "cuda_library"


def test_col2im_of_few_outputs_and_large_inputs():
    """Further than of many outputs, at float32's accuracy, for products of 360 MB at most."""
    block = {"n": 4, "c": 100, "k": 3, "extent": (66, 67, 61), "stride": [2, 2, 2], "padding": [1, 1, 1]}
    block |= {"num_groups": 1, "dtype": "float32", "layout": "NCDHW", "weight_layout": "NCDHW"}
    assert plan_of(facts(**block, precision="ieee")).algorithm == "cuda_col2im"
    for other in ({"n": 5}, {"k": 5}, {"c": 113}):
        assert plan_of(facts(**block | other, precision="ieee")).algorithm != "cuda_col2im"
    # Without that limit; product and gather, with what follows, took 1280 us, the SM90 plan 1760.
    assert plan_of(facts(**block, precision="tf32")).algorithm == "cuda_col2im"


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_col2im_of_few_outputs_in_16_bit(dtype):
    """Products of up to 450 MB, as were timed, if those of more than 128 MB gain much."""
    block = {"n": 1, "c": 256, "k": 1, "extent": (48, 48, 48), "stride": [2, 2, 2], "padding": [1, 1, 1]}
    block |= {"num_groups": 1}
    for layout in ("NCDHW", "NDHWC"):
        arguments = block | {"dtype": dtype, "layout": layout, "weight_layout": layout}
        plan = plan_of(facts(**arguments))
        assert plan.algorithm == "cuda_col2im" and plan.saves_us > 90
        for other in ({"n": 3}, {"c": 520}):
            assert plan_of(facts(**arguments | other)).saves_us > plan.saves_us
        for other in ({"n": 40}, {"k": 40, "stride": [1, 1, 1]}):
            assert plan_of(facts(**arguments | other)).algorithm != "cuda_col2im"


def test_flat_blocks_of_long_kernels_leave_deterministic_cudnn():
    """Under "tf32" its kernels take 63 to 297 us for these, where 35 were expected."""

    def algorithm(kernel, padding, layout, extent=(1, 32, 32), stride=(2, 2, 2), n=2):
        tf32 = {"c": 64, "k": 64, "dtype": "float32", "precision": "tf32"}
        numbers = {"n": n, "extent": extent, "kernel": kernel, "padding": padding, "stride": list(stride)}
        return plan_of(facts(**tf32 | numbers, layout=layout, weight_layout=layout)).algorithm

    for layout in ("NCDHW", "NDHWC"):
        assert algorithm((5, 5, 5), [2, 2, 2], layout) != "cuda_library"
        assert algorithm((1, 5, 5), [0, 2, 2], layout) != "cuda_library"
    assert algorithm((5, 5, 5), [2, 2, 2], "NDHWC", extent=(8, 8, 8), n=4) == "cuda_library"


# Of 96 and 160 outputs tiles of 64 and 128 channels are partly empty, cuDNN's less so.
HALF_TILES = {
    "96": {"n": 1, "c": 160, "k": 96, "extent": (62, 62, 62), "padding": [1, 1, 1], "num_groups": 96},
    "96-held": {"n": 1, "c": 512, "k": 96, "extent": (30, 30, 30), "padding": [1, 1, 1]},
    "160": {"n": 2, "c": 96, "k": 160, "extent": (44, 44, 44), "padding": [1, 1, 1]},
}


@pytest.mark.parametrize("name", HALF_TILES)
def test_half_tiles_are_compared_at_any_length(name):
    def plan(**changes):
        return plan_of(facts(**HALF_TILES[name] | {"weight_layout": "NDHWC"} | changes))

    for dtype in ("bfloat16", "float16"):
        half = plan(dtype=dtype)
        assert half.algorithm == "cuda_library" and "cuDNN's convolution" in half.reason
        assert ("activation_group_norm_held" in half.stages) == (name == "96-held")
    # Of whole tiles, and the normalization of all samples but the last beside the multiplication.
    assert plan(c=64, k=128, n=16, num_groups=8).algorithm == "sm90_implicit_gemm"
    assert plan(training=True).algorithm == "sm90_implicit_gemm"
    assert plan(dtype="float32", precision="tf32").algorithm == "sm90_implicit_gemm"


def test_phases_of_few_positions_train_by_the_library():
    def plan(**changes):
        defaults = {"n": 64, "c": 512, "k": 256, "extent": (4, 4, 4), "kernel": (4, 4, 4), "training": True}
        numbers = {"stride": [2, 2, 2], "padding": [1, 1, 1], "weight_layout": "NDHWC"}
        return plan_of(facts(**defaults | numbers | changes))

    few = plan()
    assert few.algorithm == "cuda_library" and few.keeps_conv
    assert plan(n=16).algorithm == "cuda_library"
    # A step of so few waits for its host, which the library plan takes longer.
    assert plan(n=2).algorithm == "sm90_implicit_gemm"
    assert plan(extent=(8, 8, 8)).algorithm == "sm90_implicit_gemm"
    assert plan(dtype="float32", precision="tf32").algorithm == "sm90_implicit_gemm"
    assert plan(layout="NCDHW", weight_layout="NCDHW").algorithm == "sm90_implicit_gemm"


# Every output has one tap: of a kernel of 4 with a padding of 1, the inner 2 of each axis.
ONE_VOXEL = {
    "latent": {"n": 64, "c": 200, "k": 512, "kernel": (4, 4, 4)},
    "padded": {"n": 4, "c": 512, "k": 256, "kernel": (4, 4, 4), "stride": [2, 2, 2], "padding": [1, 1, 1]},
    "anisotropic": {"n": 1, "c": 64, "k": 32, "kernel": (2, 3, 5), "stride": [2, 1, 3]},
}


@pytest.mark.parametrize("training", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("layout", ["NCDHW", "NDHWC"])
@pytest.mark.parametrize("name", ONE_VOXEL)
def test_one_voxel_is_a_matrix_product(name, layout, dtype, training):
    def plan(**changes):
        options = {"dtype": dtype, "weight_layout": layout, "training": training, "layout": "NCDHW"}
        return plan_of(facts(**ONE_VOXEL[name] | {"extent": (1, 1, 1)} | options | changes))

    product = plan()
    assert product.algorithm == "cuda_library" and "one voxel per sample" in product.reason
    # A result that lies as the weight does, and so an x in the same order.
    assert product.problem["x_layout"] == product.problem["y_layout"] == layout
    assert product.stages == ("aten::convolution", "activation_group_norm_held")
    for other in ({"extent": (1, 1, 2)}, {"groups": 2}, {"dilation": [2, 2, 2]}):
        assert "one voxel per sample" not in plan(**other).reason
    if name == "latent":
        assert "one voxel per sample" not in plan(output_padding=[1, 1, 1], stride=[2, 2, 2]).reason


def test_small_operands_are_copied_at_no_better_rate():
    """Of an x of 3.5 MB, or a w of 1.6, the library plan took 51 and 24 us, what is chosen 47 and 22
    (perf/NOTES.md, "Around cuDNN's convolution in NCDHW")."""
    numbers = {"n": 2, "stride": [2, 2, 2], "layout": "NCDHW"}
    edges = {"padding": [1, 1, 1], "output_padding": [1, 1, 1]}
    large_x = facts(c=64, k=16, extent=(24, 24, 24), num_groups=2, **numbers, **edges)
    assert plan_of(large_x).algorithm == "sm90_implicit_gemm"
    large_w = facts(c=320, k=320, extent=(4, 4, 4), kernel=(2, 2, 2), num_groups=320, **numbers)
    assert plan_of(large_w).algorithm == "cuda_col2im"
