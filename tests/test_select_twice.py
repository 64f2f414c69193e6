# SPDX-License-Identifier: Apache-2.0
"""What is stored and what is computed twice: selection without a GPU, as in test_select_plan.py."""

import pytest
from test_select_plan import ALONE, facts, plan_of


def test_computing_twice_reads_weights_where_they_lie():
    def plan(k, **changes):
        return plan_of(
            facts(1, 128, k, (48, 48, 48), (2, 2, 2), stride=[2, 2, 2], weight_layout="NDHWC", **changes)
        )

    lying = plan(128)
    assert lying.twice and lying.w_in_place and lying.stages == (lying.kernel,)
    # Rows of several phases in one warpgroup, and what is to be converted.
    for packed in (plan(32), plan(96), plan(128, dtype="float32", precision="tf32")):
        assert packed.twice and not packed.w_in_place and packed.stages[0].startswith("pack_")
        assert packed.stages[1:] == (packed.kernel,)


@pytest.mark.parametrize("stride", [(4, 4, 4), (1, 8, 8)])
def test_64_phases(stride):
    sizes = (1, 256, 256, (8, 32, 32), stride)
    numbers = {"stride": list(stride), "weight_layout": "NDHWC"}
    plan = plan_of(facts(*sizes, **numbers))
    assert plan.twice and plan.w_in_place and plan.stages == (plan.kernel,)
    refused = plan_of(facts(*sizes, **numbers, training=True))
    assert refused.algorithm == "cuda_library" and "more than 27 phases" in refused.reason
    channels_first = {"layout": "NCDHW", "weight_layout": "NCDHW"}
    for changes in (channels_first, {"dtype": "float32", "precision": "ieee"}):
        stored = plan_of(facts(*sizes, **numbers | changes))
        assert stored.algorithm == "sm90_implicit_gemm" and not stored.twice
        assert stored.stages.count(stored.kernel) == 3 and "launches: 3 of the convolution" in str(stored)
        assert stored.stages[-2:] == ("group_norm_finalize_slabs", "group_norm_normalize")


@pytest.mark.parametrize("precision", ["tf32", "ieee"])
@pytest.mark.parametrize(
    ("stride", "launches"),
    [((3, 3, 3), 1), ((1, 4, 4), 1), ((2, 3, 5), 2), ((2, 4, 4), 2), ((3, 3, 4), 2), ((4, 4, 4), 3)],
)
def test_launches_of_a_stored_convolution(stride, launches, precision):
    """NCDHW results, which computing twice cannot write with these strides along the width."""
    sizes = (1, 256, 256, (8, 32, 32), (4, 5, 6), "float32", "NCDHW")
    plan = plan_of(facts(*sizes, stride=list(stride), precision=precision))
    assert plan.algorithm == "sm90_implicit_gemm" and not plan.twice
    assert plan.stages.count(plan.kernel) == launches
    assert ("group_norm_finalize_slabs" in plan.stages) == ("launches: " in str(plan)) == (launches > 1)


def test_more_than_64_phases():
    refused = plan_of(facts(stride=[4, 4, 5]))
    assert refused.algorithm == "cuda_library" and "80 phases, more than the 64" in refused.reason


def test_phases_of_several_launches_are_compared_with_the_library():
    sizes, numbers = (64, 128, 256, (4, 4, 4), (8, 8, 8)), {"stride": [4, 4, 4], "padding": [2, 2, 2]}
    plan = plan_of(facts(*sizes, weight_layout="NDHWC", **numbers))
    assert plan.algorithm == "cuda_library" and "cuDNN's convolution" in plan.reason
    assert plan_of(facts(*sizes, weight_layout="NDHWC", **numbers), forced_plan="twice").twice


def test_64_phases_are_trained_where_that_is_asked_for():
    block = facts(1, 256, 256, (8, 32, 32), (4, 4, 4), stride=[4, 4, 4], training=True)
    for forced in ("sm90", "stored", "twice"):
        plan = plan_of(block, forced_plan=forced)
        assert not plan.twice and plan.stages.count(plan.kernel) == 3


# (n, c, k, extent, kernel), numbers, and whether computing twice was measured quicker (perf/NOTES.md)
STORED_OR_TWICE = [
    ((1, 128, 64, (40, 80, 80), 3), {"stride": 2, "padding": 1}, "NDHWC", "bfloat16", False),
    ((1, 128, 64, (40, 80, 80), 3), {"stride": 2, "padding": 1}, "NDHWC", "float32", False),
    (
        (1, 96, 96, (48, 48, 48), 3),
        {"stride": 2, "padding": 1, "output_padding": 1},
        "NDHWC",
        "bfloat16",
        False,
    ),
    (
        (1, 96, 96, (48, 48, 48), 3),
        {"stride": 2, "padding": 1, "output_padding": 1},
        "NCDHW",
        "float32",
        True,
    ),
    ((1, 128, 256, (64, 64, 5), 2), {"stride": 2}, "NDHWC", "bfloat16", True),
    ((1, 128, 256, (64, 64, 5), 2), {"stride": 2}, "NCDHW", "bfloat16", False),
    ((1, 128, 256, (64, 64, 5), 2), {"stride": 2}, "NCDHW", "float32", False),
    ((1, 256, 256, (24, 24, 24), 2), {"stride": 2}, "NDHWC", "bfloat16", True),
]


@pytest.mark.parametrize(("sizes", "numbers", "layout", "dtype", "twice"), STORED_OR_TWICE)
def test_stored_or_computed_twice(sizes, numbers, layout, dtype, twice):
    n, c, k, extent, kernel = sizes
    triples = {name: [value] * 3 for name, value in numbers.items()}
    block = facts(n, c, k, extent, (kernel,) * 3, dtype, layout, weight_layout=layout, **triples)
    plan = plan_of(block | {"precision": "tf32" if dtype == "float32" else "ieee"}, forced_plan="sm90")
    assert plan.algorithm == "sm90_implicit_gemm" and plan.twice == twice


def test_activations_before_a_norm_by_name():
    """A backward pass needs the convolution before what is no floor; so does computing twice."""
    tail = ALONE | {"order": "act_norm", "num_groups": 8, "activation": "silu"}
    assert plan_of(facts(**tail)).algorithm == "sm90_implicit_gemm" and not plan_of(facts(**tail)).twice
    assert plan_of(facts(**tail, training=True)).keeps_conv
    with pytest.raises(RuntimeError, match="got twice, but silu comes before the normalization"):
        plan_of(facts(**tail, kernel=(2, 2, 2), stride=[2, 2, 2]), forced_plan="twice")
    for forced in ("sm90", "stored", "twice"):
        with pytest.raises(RuntimeError, match=f"got {forced}, but a backward pass follows, which needs"):
            plan_of(facts(**tail, training=True), forced_plan=forced)


def test_once_without_a_norm():
    """Kernel = stride, in either layout; with few tiles for each set of weights it is stored."""
    block = ALONE | {"kernel": (2, 2, 2), "stride": [2, 2, 2], "activation": "none"}
    for layout in ("NCDHW", "NDHWC"):
        plan = plan_of(facts(**block, layout=layout, weight_layout=layout))
        assert plan.twice and plan.stages[-1] == plan.kernel and "computed once" in str(plan)
    few = block | {"kernel": (4, 4, 4), "stride": [4, 4, 4], "extent": (8, 8, 8), "n": 1, "c": 256, "k": 320}
    assert not plan_of(facts(**few, weight_layout="NDHWC")).twice
