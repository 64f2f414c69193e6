# SPDX-License-Identifier: Apache-2.0
"""Import, refusal, `python -m upconv3d.info` and `python -m upconv3d.demo`."""

import importlib.metadata
import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import upconv3d


def _run(*arguments, timeout=300):
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=timeout)


def test_public_names():
    for name in upconv3d.__all__:
        assert getattr(upconv3d, name) is not None
    assert (Path(upconv3d.__file__).parent / "py.typed").exists()
    assert upconv3d.__version__ == upconv3d.build_config()["version"]


def test_licenses_of_compiled_headers_are_installed():
    try:
        files = importlib.metadata.files("upconv3d") or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("not installed, but on the path")
    texts = {f.name: f.locate().read_text() for f in files if f.parent.name == "licenses"}
    expected = {"pybind11.txt"} | ({"nvidia-cutlass.txt"} if upconv3d.build_config()["cuda"] else set())
    assert expected <= texts.keys()
    assert all("Redistributions in binary form" in texts[name] for name in expected)


def test_schema_of_the_operator():
    schema = str(torch.ops.upconv3d.conv_transpose3d_relu_group_norm.default._schema)
    assert "Tensor? bias" in schema and "Tensor? norm_weight" in schema and schema.endswith("-> Tensor")


@pytest.mark.parametrize("version", ["2.10.1", "1.13.0+cu117", "not-a-version"])
def test_too_old_a_torch_is_refused(version):
    code = f"import torch; torch.__version__ = {version!r}; import upconv3d"
    result = _run("-c", code)
    assert result.returncode != 0
    last = result.stderr.strip().splitlines()[-1]
    assert last.startswith("ImportError: upconv3d: PyTorch 2.11 or later")
    assert f"found torch {version}" in last and "pip install" in last


@pytest.mark.parametrize("version", ["2.11.0", "2.12.0a0+git123", "3.0"])
def test_new_enough_a_torch_is_accepted(monkeypatch, version):
    from upconv3d._extension import require_torch

    monkeypatch.setattr(torch, "__version__", version)
    require_torch()


def test_missing_torch_is_refused(monkeypatch):
    from upconv3d._extension import require_torch

    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ImportError, match=r"upconv3d: PyTorch 2\.11 or later.*pip install"):
        require_torch()


def test_missing_compiled_module_is_refused(monkeypatch):
    from upconv3d._extension import load_extension

    monkeypatch.setattr(importlib, "import_module", _raise(ModuleNotFoundError("no", name="upconv3d._C")))
    with pytest.raises(ImportError, match=r"upconv3d\._C is missing.*pip install"):
        load_extension()


def test_unloadable_compiled_module_is_refused(monkeypatch):
    from upconv3d._extension import load_extension

    monkeypatch.setattr(
        importlib, "import_module", _raise(ImportError("libtorch_cpu.so: undefined symbol: aoti"))
    )
    with pytest.raises(ImportError, match=r"undefined symbol: aoti.*reinstall"):
        load_extension()


def _raise(error):
    def function(*_):
        raise error

    return function


def test_info_as_text_and_json():
    text = _run("-m", "upconv3d.info")
    assert text.returncode == 0, text.stderr
    assert upconv3d.__version__ in text.stdout and torch.__version__ in text.stdout
    as_json = _run("-m", "upconv3d.info", "--json")
    found = json.loads(as_json.stdout)
    assert found["build"]["version"] == upconv3d.__version__
    assert found["machine"]["torch"] == torch.__version__
    assert {"name", "compiled", "block_channels", "block_positions"} <= set(found["build"]["kernels"][0])
    assert {"name", "compiled"} <= set(found["build"]["grad_w_kernels"][0])


def test_demo():
    if importlib.util.find_spec("rich") is None:
        pytest.skip("needs rich (the extra perf)")
    result = _run("-m", "upconv3d.demo", "--seconds", "0.05", "--device", "cpu")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "MONAI" in result.stdout and "relu_group_norm" in result.stdout and "FAILED" not in result.stdout


def test_demo_fails_when_a_check_fails(monkeypatch, capsys):
    pytest.importorskip("rich", reason="needs rich (the extra perf)")
    from upconv3d import demo

    def wrong(*_, **__):
        return torch.zeros(2, 32, 24, 24, 24)

    monkeypatch.setattr(demo.upconv3d, "conv_transpose3d_relu_group_norm", wrong)
    monkeypatch.setattr(
        demo,
        "cases",
        lambda device: [(demo.MONAI_INNER, demo.Mode(torch.float32, torch.contiguous_format, "ieee"))],
    )
    assert demo.main(["--device", "cpu", "--seconds", "0"]) == 1
    assert "check failed" in capsys.readouterr().out


def test_importing_prints_nothing_and_leaves_pytorchs_settings():
    code = (
        "import torch; a = torch.backends.cudnn.conv.fp32_precision, torch.get_num_threads()\n"
        "import upconv3d; assert a == (torch.backends.cudnn.conv.fp32_precision, torch.get_num_threads())"
    )
    result = _run("-W", "error", "-c", code)
    assert result.returncode == 0 and not result.stdout and not result.stderr, result.stderr


def test_type_checkers_know_what_the_family_returns(tmp_path, monkeypatch):
    pytest.importorskip("mypy")
    root = Path(upconv3d.__file__).parent.parent
    if root.name != "site-packages":  # where mypy looks by itself, and refuses to be told
        monkeypatch.setenv("MYPYPATH", str(root))
    calls = tmp_path / "calls.py"
    calls.write_text(
        "import torch, upconv3d\n"
        "x, w = torch.ones(1, 8, 4, 4, 4), torch.ones(8, 8, 2, 2, 2)\n"
        "y: torch.Tensor = upconv3d.conv_transpose3d_norm_act(x, w, norm='instance')\n"
        "z, c = upconv3d.conv_transpose3d_norm_act(x, w, norm='instance', return_conv=True)\n"
        "y = upconv3d.conv_transpose3d_norm_act(x, w, norm='instance', return_conv=True)\n"
    )
    result = _run("-m", "mypy", "--strict", "--cache-dir", str(tmp_path / "cache"), str(calls))
    errors = [line for line in result.stdout.splitlines() if ": error: " in line]
    assert len(errors) == 1 and "calls.py:5" in errors[0] and "tuple[Tensor, Tensor]" in errors[0], (
        result.stdout
    )
