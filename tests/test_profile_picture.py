# SPDX-License-Identifier: Apache-2.0
"""The roofline that `python -m upconv3d.profile --png` draws: every case can be told, no two texts meet."""

import dataclasses
import itertools
import types

import pytest
import torch

pytest.importorskip("matplotlib", reason="needs matplotlib (the extra profile)")

from matplotlib.figure import Figure
from upconv3d.profile import roofline
from upconv3d.profile.cases import Case, Rates, floor_ms, load_shapes
from upconv3d.profile.run import CaseProfile, Measured

# As of a GPU: of one intensity, and with roofs that nearly meet.
ROOFS = {"bfloat16": (690e12, 1), "float16": (679e12, 1), "tf32": (679e12, 1), "ieee": (679e12, 3)}


def profiles_for_a_picture(shapes, kinds, layouts):
    """Profiles with invented times."""
    found = []
    for shape, kind, layout in itertools.product(shapes, kinds, layouts):
        precision = kind if kind in ("tf32", "ieee") else "native"
        dtype = torch.float32 if precision == kind else getattr(torch, kind)
        case = Case(shape, dtype, layout, precision)
        rate, count = ROOFS[kind]
        source = f"{kind} matmul, 8192^3{', divided by 3 products' if count > 1 else ''}; copy of 1024 MiB"
        rates = Rates(rate / count, 4.28e12, 40e6, source)
        floor = floor_ms(case, rates)
        ones = [
            Measured(name, floor * (1.2 + i), useful_tflop_per_s=shape.useful_flops / floor / (1.2 + i) / 1e9)
            for i, name in enumerate(roofline.STYLES)
        ]
        plan = types.SimpleNamespace(algorithm="sm90")
        found.append(CaseProfile(case, plan, rates, floor, "", "ok", ones, []))
    return found


@pytest.mark.parametrize(
    ("names", "kinds", "layouts"),
    [
        (["kernelbench_61"], ["bfloat16"], ["ndhwc"]),
        (["kernelbench_61"], ["tf32", "ieee"], ["ncdhw", "ndhwc"]),
        (["kernelbench_61", "unet_256"], ["tf32", "ieee", "bfloat16", "float16"], ["ncdhw", "ndhwc"]),
        (None, ["bfloat16"], ["ndhwc"]),
    ],
    ids=["1 case", "4 cases", "16 cases", "all shapes"],
)
def test_roofline_texts_neither_meet_nor_leave_the_picture(monkeypatch, names, kinds, layouts):
    figures = []
    save = Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda self, *given, **keys: (figures.append(self), save(self, *given, **keys))
    )
    shapes = [shape for shape in load_shapes() if names is None or shape.name in names]
    profiles = profiles_for_a_picture(shapes, kinds, layouts)
    env = {
        "date": "2026-01-01 00:00 UTC",
        "gpu": "NVIDIA H200",
        "driver": "580.159.04",
        "torch": "2.11.0+cu130",
    }
    env |= {"cuda": "13.0", "cudnn": 91900, "upconv3d": "0.1.0", "commit": "0" * 40 + " with local changes"}
    assert roofline.draw(env, profiles).startswith(b"\x89PNG")
    (figure,) = figures
    legends = [text for legend in figure.legends for text in legend.get_texts()]
    texts = [*figure.texts, *legends, *(text for axes in figure.axes for text in axes.texts)]
    boxes = [text.get_window_extent() for text in texts]
    for text, box in zip(texts, boxes, strict=True):
        assert box.x0 >= 0 and box.y0 >= 0, text
        assert box.x1 <= figure.bbox.x1 and box.y1 <= figure.bbox.y1, text
    for axes in figure.axes:
        bounds = axes.get_tightbbox()
        assert bounds.x0 >= 0 and bounds.y0 >= 0 and bounds.x1 <= figure.bbox.x1
    for (one, a), (other, b) in itertools.combinations(zip(texts, boxes, strict=True), 2):
        assert not a.overlaps(b), (one, other)
    if len(profiles) > 1:
        labels, _ = roofline.labels(profiles)
        assert len(set(labels)) == len(profiles)
        assert [text.get_text() for axes in figure.axes for text in axes.texts] == labels


def test_a_shape_by_its_numbers_is_named_by_them():
    shape = dataclasses.replace(load_shapes()[0], name="custom", source="command line")
    names, shared = roofline.labels(profiles_for_a_picture([shape], ["bfloat16"], ["ncdhw", "ndhwc"]))
    assert names == ["ncdhw", "ndhwc"]
    assert shared == "16x64x32x32x32 > 128, k3 s1 p0, 8 norm groups, bfloat16"


def test_places_are_moved_apart():
    wide = (-100.0, 100.0)
    assert roofline.moved_apart([3.0, 1.0], 1.0, *wide) == [3.0, 1.0]
    assert roofline.moved_apart([2.0, 2.0, 9.0], 1.0, *wide) == pytest.approx([1.5, 2.5, 9.0])
    assert roofline.moved_apart([2.0, 2.1, 3.0], 1.0, *wide) == pytest.approx(
        [1.3667, 2.3667, 3.3667], abs=1e-3
    )
    assert roofline.moved_apart([0.0, 0.0], 1.0, 0.0, 9.0) == [0.0, 1.0]
    assert roofline.moved_apart([9.0, 9.0], 1.0, 0.0, 9.0) == [8.0, 9.0]
