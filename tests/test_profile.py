# SPDX-License-Identifier: Apache-2.0
"""`python -m upconv3d.profile`: a run on the CPU, its arguments, and what it makes of traces and counters."""

import csv
import importlib.util
import json
import subprocess
import sys

import pytest
import torch
from upconv3d.profile import arguments, ncu
from upconv3d.profile.cases import (
    Case,
    Rates,
    Shape,
    floor_ms,
    h200_rates,
    load_shapes,
    shape_from_json,
)
from upconv3d.profile.kernels import (
    FORWARD,
    KernelRow,
    cpu_times,
    gpu_calls,
    gpu_times,
    rows_of,
    shorten,
)
from upconv3d.profile.measure import environment_line
from upconv3d.profile.memory import running_peak
from upconv3d.profile.results import write_whole

TINY = ["--input", "2", "8", "5", "4", "3", "--out-channels", "16", "--kernel", "3", "--stride", "2"]
TINY += ["--padding", "1", "--output-padding", "1", "--num-groups", "4", "--bias"]

needs_rich = pytest.mark.skipif(
    importlib.util.find_spec("rich") is None, reason="needs rich (the extra profile)"
)
needs_matplotlib = pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None, reason="needs matplotlib (the extra profile)"
)


def run_main(*given):
    from upconv3d.profile.__main__ import main

    return main(["--device", "cpu", *given])


@needs_rich
@needs_matplotlib
def test_a_run_on_the_cpu(tmp_path, capsys):
    files = {kind: tmp_path / "results" / f"profile.{kind}" for kind in ("json", "csv", "png")}
    options = [text for kind, path in files.items() for text in (f"--{kind}", str(path))]
    assert (
        run_main(*TINY, "--no-compile", "--seconds", "0.05", "--dtype", "float32", "bfloat16", *options) == 0
    )
    printed = capsys.readouterr().out
    assert files["png"].read_bytes().startswith(b"\x89PNG")
    result = json.loads(files["json"].read_text())
    rows = list(csv.DictReader(files["csv"].open()))
    assert [case["dtype"] for case in result["cases"]] == ["float32", "bfloat16"]
    assert result["environment"]["torch"] == torch.__version__
    for case, row in zip(result["cases"], rows, strict=True):
        by_name = {one["name"]: one for one in case["implementations"]}
        assert list(by_name) == ["upconv3d", "eager", "convolution alone"]
        block = by_name["upconv3d"]
        # The figures agree with one another, in all three places.
        assert case["useful_flop"] == shape_from_json(case["shape"]).useful_flops
        assert block["useful_tflop_per_s"] == pytest.approx(case["useful_flop"] / block["time_ms"] / 1e9)
        assert block["share_of_copy_ceiling"] == pytest.approx(
            case["minimal_bytes"] / block["time_ms"] / 1e6 / case["copy_ceiling_gb_per_s"]
        )
        assert case["ratio_to_eager"] == pytest.approx(block["time_ms"] / by_name["eager"]["time_ms"])
        assert case["ratio_to_floor"] == pytest.approx(block["time_ms"] / case["floor_ms"])
        assert float(row["time_ms"]) == block["time_ms"] and row["check"] == "ok" == case["check"]
        assert row["compile_ms"] == ""
        assert f"rms {block['error_rms']:.1e}" in printed
        # y is the peak but for what eager keeps beside it: relu(conv).
        assert by_name["eager"]["peak_memory_above_output_bytes"] >= 0
        operators = {kernel["name"] for kernel in case["kernels"]}
        assert "upconv3d::conv_transpose3d_relu_group_norm" in operators
        assert sum(kernel["share"] for kernel in case["kernels"]) == pytest.approx(1)
    assert "All cases" in printed and "convolution alone" in printed


@needs_rich
def test_a_wrong_result_fails_the_run(monkeypatch, capsys):
    import upconv3d

    def wrong(input, *_, **__):
        return torch.zeros(2, 16, 10, 8, 6)

    monkeypatch.setattr(upconv3d, "conv_transpose3d_relu_group_norm", wrong)
    assert run_main(*TINY, "--no-compile", "--seconds", "0.01") == 1
    assert "check FAILED" in capsys.readouterr().out


@needs_rich
def test_ncu_that_cannot_run_is_a_note_and_a_status(capsys):
    assert run_main(*TINY, "--no-compile", "--seconds", "0.01", "--ncu") == 3
    assert "note: Nsight Compute: ncu measures CUDA kernels; got --device cpu" in capsys.readouterr().out


@needs_rich
@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--shape", "kernelbench61"], "got 'kernelbench61' (near it: kernelbench_61"),
        (["--kernel", "3"], "add --input"),
        (["--input", "1", "8", "4", "4", "4", "--kernel", "3"], "add --out-channels"),
        ([*TINY, "--shape", "kernelbench_61"], "exclude one another"),
        ([*TINY, "--kernel", "3", "3"], "--kernel takes one value, or three"),
        ([*TINY, "--padding", "9"], "the output would be empty"),
        ([*TINY, "--num-groups", "3"], "num_groups must divide the output channels; got num_groups=3"),
        ([*TINY, "--groups", "3"], "--groups must divide input and output channels; got 3"),
        ([*TINY, "--precision", "tf32"], "a CPU computes float32 as it is"),
        ([*TINY, "--seconds", "0"], "must be a positive number; got 0"),
        ([*TINY, "--stride", "0"], "must be a positive integer; got 0"),
        (["--shapes-file", "missing.json"], "must be a JSON file in the form of shapes.json"),
        (["--device", "tpu"], "--device must be cpu, cuda or cuda:INDEX; got 'tpu'"),
        (["--shape", "all", "kernelbench_61"], "takes names, or all alone; got all kernelbench_61"),
        ([*TINY, "--stride", "1.5"], "must be a positive integer; got 1.5"),
        ([*TINY, "--seconds", "soon"], "must be a positive number; got soon"),
        ([*TINY, "--eps", "-1"], "must be a number and not negative; got -1"),
    ],
)
def test_wrong_arguments_are_refused(given, message, capsys):
    with pytest.raises(SystemExit) as refusal:
        run_main(*given)
    assert refusal.value.code == 2
    assert message in capsys.readouterr().err


@needs_rich
@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], "it has no shape"),
        ([1], "must be a JSON file in the form of shapes.json"),
        (
            [{"num_groups": 3}],
            "shape s: upconv3d: num_groups must divide the output channels; got num_groups=3",
        ),
        ([{"n": "two"}], "shape s: "),
    ],
)
def test_wrong_shapes_of_a_file_are_refused(tmp_path, capsys, rows, message):
    path = tmp_path / "shapes.json"
    shapes = [vars(SMALL) | row if isinstance(row, dict) else row for row in rows]
    path.write_text(json.dumps({"shapes": shapes}))
    with pytest.raises(SystemExit) as refusal:
        run_main("--shapes-file", str(path), "--shape", "all")
    assert refusal.value.code == 2 and message in capsys.readouterr().err


def test_a_file_that_is_no_text_is_refused(tmp_path):
    (tmp_path / "shapes.json").write_bytes(b"\xff\xfe")
    with pytest.raises(arguments.ArgumentError, match="must be a JSON file"):
        arguments.shapes_of_file(tmp_path / "shapes.json")


def never(*_, **__):
    raise AssertionError("measured before the files were tried")


@needs_rich
@needs_matplotlib
@pytest.mark.parametrize(
    ("files", "message"),
    [
        (["--png", "x.xyz"], "--png must name a file that ends in .png; got x.xyz. Remedy: --png x.xyz.png"),
        (["--png", "x"], "Remedy: --png x.png"),
        (["--json", "."], "--json must name a file; got ., a directory"),
        (["--csv", "/dev/null"], "--csv must name a file; got /dev/null, a device or pipe"),
        (["--json", "/proc/x.json"], "--json must name a file that can be written; got /proc/x.json"),
        (["--json", "shapes.json/x.json"], "that can be written; got shapes.json/x.json: File exists"),
        (["--csv", "n" * 300], "File name too long"),
        (["--json", "x", "--csv", "./x"], "--csv must name a file of its own; got x, which is --json's"),
        (
            ["--json", "shapes.json"],
            "--json must name a file of its own; got shapes.json, which this command",
        ),
    ],
)
def test_files_that_cannot_be_written_are_refused_at_first(files, message, tmp_path, monkeypatch, capsys):
    from upconv3d.profile import __main__ as command

    monkeypatch.chdir(tmp_path)
    text = json.dumps({"shapes": [vars(SMALL)]})
    (tmp_path / "shapes.json").write_text(text)
    monkeypatch.setattr(command, "profile_case", never)
    with pytest.raises(SystemExit) as refusal:
        run_main("--shapes-file", "shapes.json", "--shape", "s", *files)
    assert refusal.value.code == 2 and message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["shapes.json"]
    assert (tmp_path / "shapes.json").read_text() == text


@needs_rich
def test_tables_come_where_a_file_cannot_be_written_at_last(tmp_path, monkeypatch, capsys):
    from upconv3d.profile import __main__ as command

    folder = tmp_path / "results"
    measured = command.profile_case

    def measured_while_the_file_became_a_folder(*given, **keywords):
        (folder / "x.json").mkdir()
        return measured(*given, **keywords)

    monkeypatch.setattr(command, "profile_case", measured_while_the_file_became_a_folder)
    given = [*TINY, "--no-compile", "--seconds", "0.01", "--csv", str(folder / "x.csv")]
    assert run_main(*given, "--json", str(folder / "x.json")) == 4
    printed = capsys.readouterr()
    assert "check ok" in printed.out
    assert "x.json was not written: IsADirectoryError" in printed.err
    assert sorted(path.name for path in folder.iterdir()) == ["x.csv", "x.json"]


@needs_rich
def test_an_interrupted_run_prints_what_it_has(monkeypatch, capsys):
    from upconv3d.profile import __main__ as command

    measured = command.profile_case

    def interrupted_at_bfloat16(case, *given, **keywords):
        if case.dtype is torch.bfloat16:
            raise KeyboardInterrupt
        return measured(case, *given, **keywords)

    monkeypatch.setattr(command, "profile_case", interrupted_at_bfloat16)
    with pytest.raises(KeyboardInterrupt):
        run_main(*TINY, "--no-compile", "--seconds", "0.01", "--dtype", "float32", "bfloat16")
    assert "check ok" in capsys.readouterr().out


def test_a_result_replaces_what_a_link_points_to(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "file")
    write_whole(tmp_path / "link", "text")
    assert (tmp_path / "link").is_symlink() and (tmp_path / "file").read_text() == "text"


def test_a_missing_extra_is_named(monkeypatch, capsys):
    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "rich" else found(name))
    with pytest.raises(SystemExit):
        run_main(*TINY)
    assert (
        "needs rich, which is not installed. Remedy: pip install 'upconv3d[profile]'"
        in capsys.readouterr().err
    )


def test_the_command_lists_shapes():
    result = subprocess.run(
        [sys.executable, "-m", "upconv3d.profile", "--list-shapes"],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert result.returncode == 0, result.stderr
    assert len(result.stdout.splitlines()) == len(load_shapes())
    assert "kernelbench_61: 16x64x32x32x32 > 128, k3 s1 p0, 8 norm groups" in result.stdout


def options(*given):
    return arguments.parser().parse_args(list(given))


def test_a_cuda_device_has_an_index(monkeypatch):
    """torch.cuda.set_device takes no other."""
    for name, value in {"is_available": True, "device_count": 2, "current_device": 1}.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    for given, index in ((None, 1), ("cuda", 1), ("cuda:0", 0)):
        asked = options(*(("--device", given) if given else ()))
        assert arguments.device_of(asked) == torch.device("cuda", index)
    with pytest.raises(arguments.ArgumentError, match="2 CUDA devices"):
        arguments.device_of(options("--device", "cuda:2"))


@pytest.mark.parametrize("commit", ["0123456", "0123456 with local changes"])
def test_a_commit_is_named_as_it_was_found(commit):
    env = {"date": "today", "cpu": "some", "threads": 2, "torch": "2.13", "upconv3d": "0.1", "commit": commit}
    assert environment_line(env).endswith(f"; commit {commit}")


def test_a_shape_by_its_numbers():
    (case,) = arguments.cases(options(*TINY, "--dtype", "bfloat16", "--layout", "ndhwc"), torch.device("cpu"))
    assert (case.dtype, case.layout, case.precision) == (torch.bfloat16, "ndhwc", "native")
    assert case.shape.output == (10, 8, 6)
    y = torch.nn.functional.conv_transpose3d(
        torch.zeros(2, 8, 5, 4, 3), torch.zeros(8, 16, 3, 3, 3), None, 2, 1, 1
    )
    assert y.shape == (2, 16, 10, 8, 6)


def test_useful_arithmetic_of_a_dilated_shape():
    # An axis of extent 2 with stride 1, padding 1, kernel 2, dilation 2 has outputs 0 and 1; input 0 lands on
    # -1 and 1, input 1 on 0 and 2. So 2 of 4 taps on an axis, 8 of 64 in all.
    shape = Shape("s", "s", 3, 4, 6, (2,) * 3, (2,) * 3, (1,) * 3, (1,) * 3, (0,) * 3, 2, 2, False, 1e-5)
    dilated = shape_from_json({**vars(shape), "dilation": [2, 2, 2]})
    assert dilated.output == (2, 2, 2)
    assert dilated.useful_flops == 2 * 3 * (4 // 2) * 6 * 8
    assert "d2" in dilated.describe() and "d2" not in shape.describe()


def test_a_value_given_twice_counts_once():
    given = options("--dtype", "float32", "float32", "--layout", "ncdhw", "ncdhw")
    assert len(arguments.cases(given, torch.device("cpu"))) == 1


def test_float32_on_a_gpu_has_both_precisions():
    cases = arguments.cases(options("--dtype", "float32", "float16"), torch.device("cuda"))
    assert [(case.dtype, case.precision, case.layout) for case in cases] == [
        (torch.float32, "tf32", "ndhwc"),
        (torch.float32, "ieee", "ndhwc"),
        (torch.float16, "native", "ndhwc"),
    ]


# 1x1x1 kernels on 10^3 positions: x and y of 8 channels are 8000 values, 16 kB of bfloat16 each; 128 kFLOP.
SMALL = Shape("s", "s", 1, 8, 8, (10,) * 3, (1,) * 3, (1,) * 3, (0,) * 3, (0,) * 3, 1, 2, False, 1e-5)


@pytest.mark.parametrize(
    ("flops", "bandwidth", "cache", "ms"),
    [
        (128e6, 1e12, 0, 1.0),  # arithmetic bounds: 128e3 / 128e6 s
        (1e15, 64e6, 0, 0.75),  # stored: 64 kB take 1 ms; computed twice: 2x + y, 48 kB, 0.75 ms
        (1e15, 64e6, 16e3, 0.5),  # in cache: x + y, 32 kB
        (256e6, 64e6, 0, 1.0),  # twice the arithmetic takes 1 ms, as long as storing
        (160e6, 64e6, 0, 1.0),  # twice the arithmetic would take 1.6 ms; stored: 1 ms
    ],
)
def test_floor(flops, bandwidth, cache, ms):
    case = Case(SMALL, torch.bfloat16, "ndhwc", "native")
    assert SMALL.useful_flops == 128_000
    assert floor_ms(case, Rates(flops, bandwidth, cache, "")) == pytest.approx(ms)


def test_floors_of_the_headline_on_an_h200():
    shape = {shape.name: shape for shape in load_shapes()}["kernelbench_61"]
    for dtype, precision, ms in (("bfloat16", "native", 0.34157), ("float32", "ieee", 1.02472)):
        case = Case(shape, getattr(torch, dtype), "ndhwc", precision)
        assert floor_ms(case, h200_rates(case)) == pytest.approx(ms, rel=1e-4)
    assert h200_rates(Case(shape, torch.float64, "ndhwc", "native")) is None


CONV = "void upconv3d::conv_sm90<upconv3d::Traits<__nv_bfloat16, 128, 256>>(Args)"
NORMALIZE = "void upconv3d::normalize<float>(Args)"


def ncu_row(launch, kernel, metric, unit, value):
    cells = [launch, "4711", "python3.12", "127.0.0.1", kernel, "1", "7", "(384, 1, 1)", "(132, 1, 1)", "0"]
    cells += ["9.0", "Command line profiler metrics", metric, unit, value]
    return ",".join(f'"{cell}"' for cell in cells)


# As `ncu --csv --print-units base --log-file` writes it: messages, a thousands separator, a missing metric.
NCU_LOG = "\n".join(
    [
        "==PROF== Connected to process 4711 (/usr/bin/python3.12)",
        '==PROF== Profiling "conv_sm90" - 0: 0%....50%....100% - 4 passes',
        '"ID","Process ID","Process Name","Host Name","Kernel Name","Context","Stream","Block Size",'
        '"Grid Size","Device","CC","Section Name","Metric Name","Metric Unit","Metric Value"',
        ncu_row("0", CONV, "gpu__time_duration.sum", "ns", "335,104"),
        ncu_row("0", CONV, "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_elapsed", "%", "83.25"),
        ncu_row("1", NORMALIZE, ncu.METRICS["wgmma_issue_percent"], "", "(!) n/a"),
        ncu_row("1", NORMALIZE, "dram__throughput.avg.pct_of_peak_sustained_elapsed", "%", "91.5"),
        "==PROF== Disconnected from process 4711",
    ]
)


def test_ncu_csv():
    launches = ncu.parse_csv(NCU_LOG)
    assert [counters for _, counters in launches] == [
        {"duration_ns": 335104.0, "tensor_pipe_percent": 83.25},
        {"wgmma_issue_percent": None, "dram_percent": 91.5},
    ]
    rows = [
        KernelRow("conv_sm90", "void upconv3d::conv_sm90<Traits<bf16, (int)128>>(Args)", 1, 335.0, 0.8),
        KernelRow("normalize", "void upconv3d::normalize<float>(Args)", 1, 79.0, 0.2),
        KernelRow("(gaps between kernels)", "(gaps between kernels)", 0, 1.0, 0.0),
    ]
    ncu.add_counters(rows, launches)
    assert rows[0].counters["tensor_pipe_percent"] == 83.25 and rows[0].counters["dram_percent"] is None
    assert rows[1].counters["dram_percent"] == 91.5
    assert rows[2].counters == {}
    assert ncu.parse_csv("==ERROR== nothing was profiled\n") == []


def test_ncu_says_why_it_failed(monkeypatch, tmp_path):
    refused = "==ERROR== ERR_NVGPUCTRPERM - no permission\n==WARNING== No kernels were profiled.\n"
    assert "--cap-add=SYS_ADMIN" in ncu.why_it_failed(refused, 1)
    assert "status 9" in ncu.why_it_failed("==ERROR== the application returned an error\n", 9)
    assert "it printed nothing" in ncu.why_it_failed("", 1)
    case = Case(SMALL, torch.bfloat16, "ndhwc", "native")
    for name in ("CUDA_HOME", "CUDA_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(ncu, "STANDARD_FOLDERS", ())
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ncu.NcuError, match="ncu was not found on PATH"):
        ncu.run_ncu(case, torch.device("cuda"))
    # A program in ncu's place that refuses as ncu does.
    program = tmp_path / "ncu"
    program.write_text(f"#!/bin/sh\necho '{refused.splitlines()[0]}'\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    assert not any("gmma" in metric for metric in ncu.metrics_for(torch.device("cuda")))
    with pytest.raises(ncu.NcuError, match="may not read the GPU's performance counters"):
        ncu.run_ncu(case, torch.device("cuda"))


@pytest.mark.parametrize(
    ("full", "short"),
    [
        ("void upconv3d::(anonymous namespace)::pack_weight<float, 2>(upconv3d::Args<float>)", "pack_weight"),
        (
            "void cutlass::device_kernel<cutlass::gemm::GemmUniversal<int, 3>>(Params)",
            "device_kernel<GemmUniversal>",
        ),
        (
            "void at::native::elementwise_kernel<4, at::native::AddFunctor<float>>(int)",
            "elementwise_kernel<AddFunctor>",
        ),
        ("Memset (Device)", "Memset (Device)"),
        ("sm90_" + "x" * 200 + "_cudnn", "sm90_xxxxxxxxxxxxxxxxxxxxxxxxx...xxxxxxxxxxxxxx_cudnn"),
    ],
)
def test_kernel_names_are_shortened(full, short):
    assert shorten(full) == short


def event(cat, name, ts, dur, **args):
    return {"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur, "args": args}


def test_kernels_of_a_trace():
    # Two calls, a flush before each, whose kernel runs while the call is launched.
    events = []
    for base in (0.0, 1000.0):
        correlation = int(base)
        events += [
            event("cuda_runtime", "cudaLaunchKernel", base + 1, 5, correlation=correlation),
            event("user_annotation", FORWARD, base + 10, 50),
            event("cuda_runtime", "cudaLaunchKernelExC", base + 20, 5, correlation=correlation + 1),
            event("cuda_driver", "cuLaunchKernelEx", base + 30, 5, correlation=correlation + 2),
            event("cuda_runtime", "cudaLaunchKernel", base + 40, 5, correlation=correlation + 3),
            event("kernel", "flush", base + 5, 200, correlation=correlation),
            event("kernel", "void conv<int>()", base + 206, 100, correlation=correlation + 1),
            event("kernel", "void norm<int>()", base + 308, 30, correlation=correlation + 2),
            event("kernel", "void norm<int>()", base + 344, 30, correlation=correlation + 3),
        ]
    calls = gpu_calls(events)
    assert [[kernel["name"] for kernel in call] for call in calls] == [
        ["void conv<int>()"] + ["void norm<int>()"] * 2
    ] * 2
    assert gpu_times(calls[0]) == ({"void conv<int>()": [100.0], "void norm<int>()": [30.0, 30.0]}, 8.0)
    rows = rows_of([gpu_times(call) for call in calls], "cuda")
    assert [(row.name, row.launches, row.time_us) for row in rows] == [
        ("conv", 1, 100.0),
        ("norm", 2, 60.0),
        ("(gaps between kernels)", 0, 8.0),
    ]
    assert sum(row.share for row in rows) == pytest.approx(1)


def test_a_kernel_beside_another_counts_from_its_end():
    call = [event("kernel", "conv", 0.0, 100.0), event("kernel", "norm", 20.0, 90.0)]
    assert gpu_times(call) == ({"conv": [100.0], "norm": [10.0]}, 0.0)


def test_operators_of_a_trace():
    events = [
        event("user_annotation", FORWARD, 0.0, 100.0),
        event("cpu_op", "outer", 10.0, 80.0),
        event("cpu_op", "inner", 20.0, 30.0),
        event("cpu_op", "inner", 50.0, 10.0),  # begins where the other ends
        event("cpu_op", "elsewhere", 200.0, 10.0),
    ]
    assert cpu_times(events) == ({"outer": [40.0], "inner": [30.0, 10.0]}, 20.0)


def test_peak_of_a_trace():
    changes = [(3, -100), (1, 100), (2, 50), (4, 20)]
    events = [
        {"ph": "i", "name": "[memory]", "ts": ts, "args": {"Bytes": size, "Device Type": 0}}
        for ts, size in changes
    ]
    assert running_peak(events) == 150
    assert running_peak([]) is None
