# SPDX-License-Identifier: Apache-2.0
"""Which plan convolution groups take: selection without a GPU, as in test_select_plan.py."""

import pytest
from test_select_plan import facts, plan_of

INPUTS_OF_GROUPS = [
    {"layout": "NDHWC"},
    {"layout": "NCDHW"},
    {"layout": "NDHWC", "dtype": "float32", "precision": "tf32"},
    {"layout": "NCDHW", "dtype": "float32", "precision": "tf32"},
]


def plan_of_four_groups(group, **changes):
    """Two samples of 20^3 positions, kernel 3, of which perf/results/h200_grouped.txt has the times."""
    changes = {"padding": [1, 1, 1], "weight_layout": changes["layout"], **changes}
    return plan_of(facts(2, 4 * group[0], 4 * group[1], (20, 20, 20), groups=4, **changes))


@pytest.mark.parametrize(
    ("group", "inputs", "algorithm"),
    [
        ((64, 16), INPUTS_OF_GROUPS, "sm90_implicit_gemm"),  # 58 to 77 us, the library plan 79 to 136
        ((24, 24), INPUTS_OF_GROUPS[:1], "sm90_implicit_gemm"),  # 62 and 97
        ((16, 16), INPUTS_OF_GROUPS, "cuda_library"),  # that has kernels of its own for these
        ((32, 32), INPUTS_OF_GROUPS[:3], "cuda_library"),
    ],
)
def test_groups_at_stride_1(group, inputs, algorithm):
    for changes in inputs:
        assert plan_of_four_groups(group, **changes).algorithm == algorithm, changes
        pointwise = plan_of_four_groups(group, **changes | {"kernel": (1, 1, 1), "padding": [0, 0, 0]})
        assert pointwise.algorithm != "sm90_implicit_gemm"
    # Trained, as many outputs as inputs or not, in 16 bit and NDHWC: fewer are.
    assert plan_of_four_groups(group, training=True, layout="NDHWC").algorithm == "cuda_library"


@pytest.mark.parametrize(
    ("groups", "channels", "dtype", "layout", "quicker"),
    [
        (2, 64, "float16", "NDHWC", False),  # SM90 plan 38 us, library plan 20
        (2, 64, "float32", "NCDHW", False),  # 53 and 40
        (8, 64, "bfloat16", "NCDHW", True),  # 46 and 54
        (2, 256, "float32", "NDHWC", True),  # 88 and 151
    ],
)
def test_groups_of_many_channels_are_compared_by_their_times(groups, channels, dtype, layout, quicker):
    """Eight samples of 8^3 positions (perf/results/h200_grouped.txt, part 4)."""
    precision = {"precision": "tf32"} if dtype == "float32" else {}
    shape = {"groups": groups, "num_groups": groups, "dtype": dtype, "layout": layout, **precision}
    plan = plan_of(facts(8, groups * channels, groups * channels, (8, 8, 8), padding=[1, 1, 1], **shape))
    assert plan.algorithm == ("sm90_implicit_gemm" if quicker else "cuda_library")


@pytest.mark.parametrize(("weight_layout", "plan"), [("NDHWC", "library"), ("NCDHW", "sm90")])
def test_the_weight_of_groups_that_pytorch_copies_counts_as_a_whole(weight_layout, plan):
    """1.8 MB of it, at every call."""
    shape = {"groups": 8, "num_groups": 8, "dtype": "float16", "padding": [1, 1, 1]}
    chosen = plan_of(facts(8, 512, 512, (8, 8, 8), weight_layout=weight_layout, **shape))
    assert plan in chosen.algorithm


@pytest.mark.parametrize("layout", ["NCDHW", "NDHWC"])
@pytest.mark.parametrize(
    ("group", "algorithm"),
    [
        ((128, 32), "sm90_implicit_gemm"),  # which the kernel for few channels cannot hold
        ((80, 16), "cuda_direct"),  # the SM90 plan 175 and 202 us, the library plan 1096 and 1430
        ((64, 16), "cuda_direct"),  # 106 and 87 us, the SM90 plan 154 and 177
    ],
)
def test_groups_with_a_stride(layout, group, algorithm):
    strided = {"stride": [2, 2, 2], "output_padding": [1, 1, 1], "layout": layout}
    assert plan_of_four_groups(group, **strided).algorithm == algorithm


def test_groups_are_packed_apart_unless_they_are_whole_blocks():
    packed, lying = plan_of(facts(groups=2)), plan_of(facts(c=256, groups=4))
    assert packed.pack_x and not lying.pack_x
    assert "2 groups of 32 input and 64 output channels" in str(packed)
    assert packed.flops == plan_of(facts()).flops / 2
