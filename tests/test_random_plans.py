# SPDX-License-Identifier: Apache-2.0
"""The planner on random calls of any size, from a printed seed: without tensors, so sizes need no memory.

In a process of its own: a crash there names the call that ended it. A failure names UPCONV3D_SEED and the
call.
"""

import math
import random
import subprocess
import sys
from pathlib import Path

import torch
import upconv3d
from conftest import SEED
from test_random_problems import random_axis
from test_select_plan import _tensor

CALLS = 3000
DTYPES = ["bfloat16", "float16", "float32", "float32", "float64"]
CAPABILITIES = [75, 80, 86, 89, *[90] * 8, 100, 120]
FORCED = ["stored", "twice", "held", "direct", "col2im", "library", "sm80", "sm90"]
ACTIVATIONS = ["relu", "relu", "none", "leaky_relu", "silu", "gelu"]


def _log_uniform(rng, most):
    return int(2 ** rng.uniform(0, math.log2(most)))


def _strides(sizes, is_last):
    memory_format = torch.channels_last_3d if is_last else torch.contiguous_format
    return torch.empty(sizes, device="meta", memory_format=memory_format).stride()


def random_call(index):
    """What _C.explain takes of a call of the block or, as often, of the family."""
    rng = random.Random(f"{SEED}/plans/{index}")
    largest = rng.choice([1, 12, 100, 100, 600])
    axes = [random_axis(rng, largest) for _ in range(3)]
    groups = rng.choice([1, 1, 1, 1, 2, 4])
    n = rng.choice([0, 0, 1, 1, 2, 3, 16, 500])
    unit = groups * rng.choice([1, 8])
    c, k = (unit * _log_uniform(rng, rng.choice([4, 32, 256])) for _ in range(2))
    dtype = rng.choice(DTYPES)

    def tensor(sizes):
        is_last = len(sizes) == 5 and rng.random() < 0.5
        aligned = 0 if rng.random() < 0.9 else 4
        strides = _strides(sizes, is_last)
        return _tensor(sizes, strides, dtype) | {"data_ptr_mod16": aligned}

    def perhaps(sizes):
        return tensor(sizes) if rng.random() < 0.5 else None

    call = {
        "input": tensor([n, c, *(axis["extent"] for axis in axes)]),
        "weight": tensor([c, k // groups, *(axis["kernel"] for axis in axes)]),
        "bias": perhaps([k]),
        "norm_weight": perhaps([k]),
        "norm_bias": perhaps([k]),
        "groups": groups,
        "num_groups": rng.choice([1, k, *(g for g in range(1, min(k, 64) + 1) if k % g == 0)]),
        "eps": 1e-5,
        "precision": rng.choice(["ieee", "tf32"]),
        "training": rng.random() < 0.5,
        "spares_host": rng.random() < 0.3,
    }
    call |= {
        name: [axis[name] for axis in axes] for name in ("stride", "padding", "output_padding", "dilation")
    }
    if rng.random() < 0.5:
        call |= {
            "order": rng.choice(["norm_act", "act_norm"]),
            "activation": rng.choice(ACTIVATIONS),
            "activation_param": 0.1,
            "return_conv": rng.random() < 0.3,
            "slopes": None,
            "skip": None,
        }
        if rng.random() < 0.3:
            call |= {"num_groups": 0, "norm_weight": None, "norm_bias": None}
    capability = rng.choice(CAPABILITIES)
    return call | {
        "device": {
            "is_cuda": True,
            "compute_capability": capability,
            "sm_count": rng.choice([1, 14, 108, 132]),
            "max_threads": 16,
            "assume_compiled": rng.random() < 0.9,
            "forced_plan": rng.choice([*[""] * 8, *FORCED]),
        }
    }


def check(call):
    """Whether there is a plan; else one of our rules says why not."""
    try:
        found = upconv3d._C.explain(call)
    except (RuntimeError, ValueError) as error:
        assert str(error).startswith("upconv3d: "), error
        return False
    plan = found["plan"]
    assert found == upconv3d._C.explain(call)
    assert plan["stages"] and plan["reason"] and plan["workspace_bytes"] >= 0
    estimates = [plan[f"estimated_{name}_ms"] for name in ("stored", "twice", "held", "direct")] + [
        plan["saves_us"]
    ]
    assert all(math.isfinite(value) and value >= 0 for value in estimates), estimates
    return True


def check_all():
    found = 0
    for index in range(CALLS):
        call = random_call(index)
        print(f"UPCONV3D_SEED={SEED} index={index}: {call}", flush=True)
        found += check(call)
    print(f"plans={found}")


def test_every_call_has_a_plan_or_a_reason():
    code = "import test_random_plans; test_random_plans.check_all()"
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    *_, last = result.stdout.splitlines() or [""]
    assert result.returncode == 0, f"status {result.returncode}, of {last}\n{result.stderr}"
    assert int(last.removeprefix("plans=")) > CALLS / 3
