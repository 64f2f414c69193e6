# SPDX-License-Identifier: Apache-2.0
"""The training example: both kinds of blocks train alike, and a run that goes wrong says so."""

import argparse

import pytest
import torch

for _module in ("rich", "matplotlib"):
    pytest.importorskip(_module, reason=f"needs {_module} (the extra profile)")

from upconv3d.examples import train_voxel_autoencoder as example  # noqa: E402  (it needs rich)

SMALL = ["--steps", "6", "--batch", "2", "--size", "8", "--width", "8"]


@pytest.fixture(autouse=True)
def _few_volumes(monkeypatch):
    monkeypatch.setattr(example, "VOLUMES", 8)
    monkeypatch.setattr(example, "HELD_OUT", 4)


def _options(device, *more):
    return example.parse([*SMALL, "--device", device.type, *more])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_both_kinds_of_blocks_train_alike(device, dtype):
    torch.backends.cudnn.conv.fp32_precision = "ieee"
    steps = []
    eager, ours = (
        example.train(blocks, _options(device, "--dtype", dtype), lambda: steps.append(1))
        for blocks in ("eager", "upconv3d")
    )
    assert len(steps) == 12 and len(ours.losses) == len(ours.step_ms) == 6
    assert ours.losses == pytest.approx(eager.losses, rel=1e-3 if dtype == "float32" else 3e-2)
    assert ours.last_loss() < ours.losses[0] and min(ours.step_ms) > 0
    assert (ours.peak_bytes is None) == (device.type == "cpu")


@pytest.mark.parametrize("blocks", ["both", "upconv3d"])
def test_command(tmp_path, capsys, blocks):
    assert example.main([*SMALL, "--device", "cpu", "--blocks", blocks, "--out", str(tmp_path / "new")]) == 0
    printed = capsys.readouterr().out
    assert "upconv3d" in printed and ("eager" in printed) == (blocks == "both")
    assert (tmp_path / "new" / example.PNG_NAME).read_bytes().startswith(b"\x89PNG")


def test_runs_that_do_not_begin_alike_fail(tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(example.BLOCKS, "upconv3d", lambda c, k: torch.nn.ConvTranspose3d(c, k, 2, stride=2))
    assert example.main([*SMALL, "--device", "cpu", "--out", str(tmp_path)]) == 1
    assert "first losses must agree" in capsys.readouterr().out


def test_a_loss_that_is_not_finite_fails():
    history = example.History("eager", [1.0, float("nan")], [1.0, 1.0], 0.5, None)
    assert example.failures([history], "float32") == ["eager: a loss is not finite"]


def test_volumes_are_those_of_the_seed():
    cpu = torch.device("cpu")
    one, two = (example.random_volume(16, torch.Generator().manual_seed(3), cpu) for _ in range(2))
    assert torch.equal(one, two) and one.shape == (1, 16, 16, 16)
    assert set(one.unique().tolist()) == {0.0, 1.0}


@pytest.mark.parametrize(
    "wrong",
    [
        ["--size", "12"],
        ["--width", "4"],
        ["--steps", "0"],
        ["--lr", "nan"],
        ["--lr", "-1"],
        ["--seed", "1" * 30],
    ],
)
def test_wrong_options_are_refused(wrong, capsys):
    with pytest.raises(SystemExit) as refusal:
        example.parse([f"{wrong[0]}={wrong[1]}"])
    assert refusal.value.code == 2 and "must" in capsys.readouterr().err


def test_a_folder_in_the_picture_s_place_is_refused_before_training(tmp_path, capsys):
    (tmp_path / example.PNG_NAME).mkdir()
    with pytest.raises(SystemExit) as refusal:
        example.parse(["--device", "cpu", "--out", str(tmp_path)])
    assert refusal.value.code == 2
    assert f"--out must not hold a folder {example.PNG_NAME}" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_is_refused_before_training(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    with pytest.raises(SystemExit) as refusal:
        example.parse(["--device", "cpu", "--out", str(tmp_path / "file")])
    assert refusal.value.code == 2
    assert "--out must be a folder that can be written; got" in capsys.readouterr().err


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_cuda_is_refused_where_there_is_none(capsys):
    with pytest.raises(SystemExit):
        example.parse(["--device", "cuda"])
    assert "--device cuda needs a GPU that PyTorch sees" in capsys.readouterr().err


def test_help_has_whole_sentences(capsys):
    with pytest.raises(SystemExit):
        example.parse(["--help"])
    words = " ".join(capsys.readouterr().out.split())
    assert "Both runs have the same initial values, batches and optimizer." in words
    assert "or where a loss is not finite; with 2 for wrong options" in words


def test_defaults_are_those_of_the_device():
    options = example.parse(["--device", "cpu", "--steps", "7"])
    assert isinstance(options, argparse.Namespace)
    assert (options.steps, options.size, options.dtype) == (7, 16, "float32")
