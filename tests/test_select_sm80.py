# SPDX-License-Identifier: Apache-2.0
"""The SM80 plan, where it is taken and where refused: selection without a GPU, as in test_select_plan.py."""

import pytest
from test_select_plan import facts, plan_of


@pytest.mark.parametrize("capability", [80, 86, 89, 100, 120])
def test_gpus_from_ampere_on_take_the_sm80_plan(capability):
    plan = plan_of(facts(), compute_capability=capability)
    assert plan.algorithm == "sm80_implicit_gemm"
    assert plan.kernel.startswith("conv_transpose_relu_moments_sm80_bf16x1_bf16_")
    assert f"{capability // 10}.{capability % 10}" in plan.reason
    assert plan.stages == ("pack_operands", plan.kernel, "group_norm_finalize", "group_norm_normalize")
    assert plan.activation_in_y and not plan.pack_x


@pytest.mark.parametrize(
    ("dtype", "precision", "family"),
    [
        ("bfloat16", "ieee", "bf16x1_bf16"),
        ("float16", "ieee", "f16x1_f16"),
        ("float32", "tf32", "f16x1_f32"),
        ("float32", "ieee", "f16x3_f32"),
    ],
)
@pytest.mark.parametrize("layout", ["NCDHW", "NDHWC"])
def test_sm80_family_per_dtype_and_precision(dtype, precision, family, layout):
    plan = plan_of(
        facts(dtype=dtype, layout=layout, precision=precision), compute_capability=80, sm_count=108
    )
    assert f"_sm80_{family}_" in plan.kernel and plan.activation == dtype
    assert plan.pack_x == (dtype == "float32" or layout == "NCDHW")
    assert plan.activation_in_y == (layout == "NDHWC")
    packing = "pack_scaled_operands" if dtype == "float32" else "pack_operands"
    assert plan.stages == (packing, plan.kernel, "group_norm_finalize", "group_norm_normalize")


SM80_REFUSED = {
    "float64": ({"dtype": "float64"}, "float64"),
    "groups": ({"groups": 2}, "groups 2"),
    "output-channels": ({"k": 124, "num_groups": 4}, "124"),
    "taps": ({"kernel": (11, 1, 1)}, "11 taps"),
    "phases": ({"stride": [4, 4, 4]}, "64 phases"),
}


@pytest.mark.parametrize("name", SM80_REFUSED)
def test_sm80_refuses_and_says_why(name):
    overrides, fragment = SM80_REFUSED[name]
    plan = plan_of(facts(**overrides), compute_capability=89)
    assert plan.algorithm == "cuda_library"
    assert "not the SM90 kernel" in plan.reason
    assert fragment in plan.reason.split("not the SM80 kernel: ")[1]
    with pytest.raises(RuntimeError, match=r"UPCONV3D_PLAN.*got sm80.*Unset UPCONV3D_PLAN") as refusal:
        plan_of(facts(**overrides), forced_plan="sm80")
    assert fragment in str(refusal.value)


def test_few_output_channels_take_the_narrow_tile():
    assert plan_of(facts(k=64), compute_capability=80).tile == (64, 128)
    assert plan_of(facts(k=128), compute_capability=80).tile == (128, 128)
