# SPDX-License-Identifier: Apache-2.0
"""Small models for test_accelerate_flags.py: forwards whose arguments have defaults, and calls of them."""

import copy

import torch
import torch.nn.functional as F
from accelerated_models import Up
from accelerated_skips import SegResNetDS
from torch import nn

# What is given for the constants of Numbers, and whether it is what they are.
CONSTANTS = [
    *(({"scale": 2.0}, True), ({"scale": float("2"), "count": 1}, True), ({"dtype": torch.float32}, True)),
    *(({"zero": float("0"), "mode": "".join("a"), "last": None}, True), ({"dtype": torch.float64}, False)),
    *(({"scale": 2}, False), ({"scale": 3.0}, False), ({"scale": torch.tensor(2.0)}, False)),
    *(({"zero": -0.0}, False), ({"zero": False}, False), ({"count": True}, False), ({"count": 1.0}, False)),
    *(({"mode": "b"}, False), ({"last": 0}, False), ({"turn": complex("1j")}, True)),
    ({"turn": complex(-0.0, 1)}, False),
]


class TwoBranches(SegResNetDS):
    """MONAI's SegResNetDS2: flags say which of its decoders run, of two blocks each."""

    def __init__(self):
        super().__init__()
        self.auto_levels = copy.deepcopy(self.levels)

    def forward(self, x: torch.Tensor, with_point: bool = True, with_label: bool = True):
        if not self.is_valid(x):
            raise ValueError(f"sizes {tuple(x.shape)} must be divisible by {self.factor()}")
        kept = self.encoder(x)
        kept.reverse()
        x = kept.pop(0)
        if len(kept) == 0:
            kept = [torch.zeros(1, device=x.device, dtype=x.dtype)]
        outputs: list[torch.Tensor] = []
        outputs_auto: list[torch.Tensor] = []
        level: nn.ModuleDict
        before = x
        if with_point:
            if with_label:
                before = x.clone()
            i = 0
            for level in self.levels:
                x = level["up"](x)
                x = x + kept[i]
                x = level["blocks"](x)
                if self.training or len(self.levels) - i == 1:
                    outputs.append(level["head"](x))
                i = i + 1
            outputs.reverse()
        x = before
        if with_label:
            i = 0
            for level in self.auto_levels:
                x = level["up"](x)
                x = x + kept[i]
                x = level["blocks"](x)
                if self.training or len(self.auto_levels) - i == 1:
                    outputs_auto.append(level["head"](x))
                i = i + 1
            outputs_auto.reverse()
        return outputs[0] if len(outputs) == 1 else outputs, outputs_auto


class Calling(nn.Module):
    """MONAI's VISTA3D: calls its encoder with flags by keyword."""

    def __init__(self):
        super().__init__()
        self.image_encoder = TwoBranches()

    def forward(self, x, labels=None, points=None):
        out, out_auto = self.image_encoder(
            x, with_point=points is not None, with_label=labels is not None or points is None
        )
        return out, out_auto


# A call's arguments behind the input or, where they give it, all of them; and the blocks that run in it.
CALLS = {
    "nothing": ((), {}, 4),
    "positional": ((False,), {}, 2),
    "both positional": ((True, False), {}, 2),
    "keyword": ((), {"with_label": False}, 2),
    "both by keyword": ((), {"with_label": True, "with_point": False}, 2),
    "mixed": ((False,), {"with_label": True}, 2),
    "the defaults": ((True,), {"with_label": True}, 4),
    "neither": ((False,), {"with_label": False}, 0),
    "1": ((), {"with_point": 1}, 0),
    "0.0": ((0.0,), {}, 0),
    "None": ((), {"with_label": None}, 0),
    "a tensor": ((torch.tensor(True),), {}, 0),
    "another tensor": ((True, torch.tensor(False)), {}, 0),
}
REFUSED = {
    "unknown": lambda model, x: model(x, with_labels=True),
    "twice": lambda model, x: model(x, True, with_point=True),
    "input twice": lambda model, x: model(x, x=x),
    "too many": lambda model, x: model(x, True, True, True),
    "no input": lambda model, x: model(with_point=True),
    "nothing": lambda model, x: model(),
}


class Two(Up):
    """Two tensors that are needed, one flag."""

    def forward(self, x, other, negate: bool = False):
        y = F.relu(self.norm(self.up(x))) - other
        return -y if negate else y


class Numbers(Up):
    """Constants that are no flags."""

    def forward(self, x, scale=2.0, zero=0.0, count=1, mode="a", last=None, dtype=torch.float32, turn=1j):
        y = F.relu(self.norm(self.up(x))) * scale * count / (zero + 1)
        y = y + 1 if mode == "a" else y
        y = torch.div(y, zero) if count == 1 else y
        return (y if last is None else y - last).to(dtype) * turn


class OneTraced(Up):
    """With one of its flags it depends on the data, with the other it raises."""

    def forward(self, x, checked=False, strict=False):
        y = F.relu(self.norm(self.up(x)))
        if strict:
            raise ValueError("strict")
        if checked and x.mean() > 0:
            y = y + 1
        return y * 2


class OnlyDefaultUntraced(Up):
    def forward(self, x, checked=True):
        y = F.relu(self.norm(self.up(x)))
        if checked and x.mean() > 0:
            y = y + 1
        return y * 2


class Elsewhere(Up):
    """Its block, and what it enters for that, are there with a flag only."""

    def __init__(self):
        super().__init__()
        self.after = Normed()

    def forward(self, x, refined=False):
        y = self.up(x)
        return self.after(y) if refined else torch.cat([y, y], 1)


class Normed(nn.Module):
    """What follows a convolution, in a module of its own."""

    def __init__(self):
        super().__init__()
        self.norm, self.gain = nn.GroupNorm(2, 8), 2.0

    def forward(self, x):
        return F.relu(self.norm(x)) * self.gain


class Turned(Elsewhere):
    """What it enters, and what it calls by a second name, differ by its flag."""

    def __init__(self):
        super().__init__()
        self.before = Normed()
        self.head = self.again = nn.Conv3d(8, 4, 1)

    def forward(self, x, turned=False):
        y = self.up(x)
        return self.again(self.after(y)) if turned else self.before(y)


class Either(Up):
    """Which norm its block has is a flag's."""

    def __init__(self):
        super().__init__()
        self.other, self.third = nn.GroupNorm(4, 8), nn.GroupNorm(8, 8)

    def forward(self, x, swapped=False):
        y = self.up(x)
        y = self.other(y) if swapped else self.norm(y)
        return self.third(F.relu(y) + 1)


class Many(Up):
    def forward(self, x, a=False, b=False, c=True, d=False):
        y = F.relu(self.norm(self.up(x)))
        return y * (1 + a + 2 * b + 4 * c + 8 * d)
