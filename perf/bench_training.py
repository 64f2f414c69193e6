# SPDX-License-Identifier: Apache-2.0
"""Times forward and backward of the block, all five gradients, beside its peers.

One line per case:

    TRAIN name=... dtype=... layout=... precision=... ms=... forward_ms=... x_eager=... x_compile=...
          memory_mb=... x_memory=... err_ratio=... check=...

ms is a median of forward and backward together, forward_ms of the forward that keeps what the backward reads.
x_eager and x_compile are ms divided by that of PyTorch's three calls, and of torch.compile of them at its
best. memory_mb is the peak beside parameters, input and grad_y, and x_memory its ratio to eager's, on a GPU.
err_ratio is the largest, over the five gradients, of the rms error against float64 divided by eager's; in
float32 with precision "ieee", of a grad_y that is 0 where rounding decides ReLU's gate. check is "ok" where
every gradient is finite and err_ratio is at most 2, rounding of the result aside.

Exit status 1 if any check fails; 2 for wrong arguments, a result file that cannot be written among them; 4
where it could be written at first and not after measuring. perf/README.md says how to
read and record results.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from bench import bench_line, cases, exit_status, nothing_selected, parse_arguments, result_text
from torch import Tensor
from upconv3d.profile.arguments import make_current
from upconv3d.profile.cases import Case, Tensors, conv_arguments, make_tensors
from upconv3d.profile.measure import environment, medians_ms
from upconv3d.profile.peers import COMPILE_MODES, ERROR_FACTOR, block_call, eager, set_precision

GRADIENTS = ("x", "w", "bias", "gamma", "beta")
# Relative rounding of a gradient in its own dtype, where eager's error happens to be smaller still.
ROUNDING = {torch.float32: 2.0**-22, torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12, torch.float64: 1e-15}
# A loss averages: its gradients are small.
GRAD_SCALE = 1e-3
# Of the convolution's rms: a hundred times what float32's rounding moves it by. One value of 80,000 is below.
GATE_BAND = 2.0**-16


def leaves(t: Tensors) -> list[Tensor]:
    """The tensors whose gradients are wanted, marked so."""
    found = [getattr(t, name) for name in GRADIENTS if getattr(t, name) is not None]
    return [tensor.requires_grad_() for tensor in found]


def reference(t: Tensors, case: Case, grad_y: Tensor) -> list[Tensor]:
    """float64 gradients, sample by sample: memory for one sample at a time."""
    wide = t.samples([0], torch.float64)
    grads_x, sums = [], None
    for n in range(case.shape.n):
        wide.x = t.x[n : n + 1].detach().double()
        tensors = leaves(wide)
        y = eager(wide, case.shape.with_samples(1))
        grads = torch.autograd.grad(y, tensors, grad_y[n : n + 1].double())
        grads_x.append(grads[0])
        sums = grads[1:] if sums is None else [a + b for a, b in zip(sums, grads[1:], strict=True)]
    assert sums is not None
    return [torch.cat(grads_x), *sums]


@torch.no_grad()
def close_doubtful_gates(t: Tensors, case: Case, grad_y: Tensor) -> None:
    """Sets grad_y to 0 where float32's rounding may open or close ReLU's gate.

    Of a hundred million gates it decides two to ten, in eager as in ours, which together cost a thousand
    times what all other roundings do. Whose are more is chance.
    """
    wide = t.samples([0], torch.float64)
    for n in range(case.shape.n):
        c = F.conv_transpose3d(t.x[n : n + 1].double(), wide.w, wide.bias, **conv_arguments(case.shape))
        grad_y[n : n + 1].masked_fill_(c.abs() <= GATE_BAND * c.square().mean().sqrt(), 0)


def relative_rms(gradient: Tensor, right: Tensor) -> float:
    return float((gradient.double() - right).norm() / right.norm().clamp(min=1e-300))


def peak_bytes(step: Callable[[], Any], device: torch.device) -> int | None:
    """Peak memory of a step beside what was allocated before it; None on a CPU, where nobody counts."""
    if device.type != "cuda":
        return None
    torch.cuda.synchronize(device)
    before = torch.cuda.memory_allocated(device)
    torch.cuda.reset_peak_memory_stats(device)
    step()
    torch.cuda.synchronize(device)
    return torch.cuda.max_memory_allocated(device) - before


def compiled_steps(t: Tensors, case: Case, modes: list[str], step_of: Any) -> dict[str, Callable[[], Any]]:
    torch._dynamo.reset()
    calls = {}
    for mode in modes:
        compiled = torch.compile(lambda: eager(t, case.shape), mode=mode, dynamic=False, fullgraph=True)
        calls[f"compile:{mode}"] = step_of(compiled)
        calls[f"compile:{mode}"]()
    return calls


def measure(case: Case, device: torch.device, modes: list[str], budget_s: float) -> dict[str, Any]:
    """One row: times, memory, errors."""
    set_precision(case)
    t = make_tensors(case, device)
    with torch.no_grad():
        y = eager(t, case.shape)
    generator = torch.Generator(device=device).manual_seed(case.shape.n)
    grad_y = torch.randn(y.shape, generator=generator, device=device) * GRAD_SCALE
    grad_y = grad_y.to(case.dtype).contiguous(memory_format=case.memory_format)
    del y
    if case.dtype == torch.float32 and case.precision == "ieee":
        close_doubtful_gates(t, case, grad_y)
    tensors = leaves(t)

    def step_of(forward: Callable[[], Tensor]) -> Callable[[], Any]:
        return lambda: torch.autograd.grad(forward(), tensors, grad_y)

    block = block_call(t, case)
    ours, theirs = step_of(block), step_of(lambda: eager(t, case.shape))
    right = reference(t, case, grad_y)
    floor = ROUNDING[case.dtype]
    ratios, finite = [], True
    for gradient, other, exact in zip(ours(), theirs(), right, strict=True):
        finite = finite and bool(torch.isfinite(gradient).all())
        ratios.append(relative_rms(gradient, exact) / max(relative_rms(other, exact), floor))
    del right, exact, gradient, other
    memory, eager_memory = peak_bytes(ours, device), peak_bytes(theirs, device)
    calls = {"ours": ours, "forward": block, "eager": theirs}
    times = medians_ms(calls | compiled_steps(t, case, modes, step_of), device, budget_s)
    compiled = min((ms for name, ms in times.items() if name.startswith("compile")), default=None)
    ms = times["ours"]
    return {
        "name": case.shape.name,
        "dtype": str(case.dtype).removeprefix("torch."),
        "layout": case.layout,
        "precision": case.precision,
        "pass": "training",
        "ms": ms,
        "forward_ms": times["forward"],
        "peers_ms": {name: value for name, value in times.items() if name != "ours"},
        "x_eager": ms / times["eager"],
        "x_compile": None if compiled is None else ms / compiled,
        "memory_mb": None if memory is None else memory / 1e6,
        "x_memory": None if memory is None or not eager_memory else memory / eager_memory,
        "err_ratios": dict(zip([n for n in GRADIENTS if getattr(t, n) is not None], ratios, strict=True)),
        "err_ratio": max(ratios),
        "check": "ok" if finite and max(ratios) <= ERROR_FACTOR else "FAILED",
    }


LINE = "name dtype layout precision ms forward_ms x_eager x_compile memory_mb x_memory err_ratio check"


def main() -> int:
    args = parse_arguments(__doc__)
    device = args.device
    make_current(device)
    torch.backends.cudnn.benchmark = True
    selected = list(cases(args, device))
    if not selected:
        return nothing_selected("bench_training", args)
    env = environment(device, ["python", "perf/bench_training.py", *sys.argv[1:]], Path(__file__))
    rows = []
    for case in selected:
        row = measure(case, device, COMPILE_MODES[args.compile], args.seconds)
        rows.append(row)
        print(bench_line(row, "TRAIN", LINE), flush=True)
        args.files.write("--json", lambda: result_text(env, rows))
    failed = sum(row["check"] != "ok" for row in rows)
    print(f"TRAIN_SUMMARY cases={len(rows)} failed={failed}")
    return exit_status("bench_training", rows, args.files)


if __name__ == "__main__":
    sys.exit(main())
