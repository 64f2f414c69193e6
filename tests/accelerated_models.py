# SPDX-License-Identifier: Apache-2.0
"""Small models in the style of published decoders, for test_accelerate.py. Each takes [N, 6, D, H, W]."""

import copy

import torch
import torch.nn.functional as F
import upconv3d
from torch import nn
from upconv3d._accelerated import remembered, run, swap


def cna(activation=None):
    """vista3d, SurroundOcc: convolution, norm, activation."""
    return nn.Sequential(
        nn.ConvTranspose3d(6, 8, 3, 2, 1, 1), nn.GroupNorm(2, 8), activation or nn.ReLU(inplace=True)
    )


def cbn(activation=None):
    """MVSNet: batch norm, no bias."""
    return nn.Sequential(
        nn.ConvTranspose3d(6, 8, 3, 2, 1, 1, bias=False), nn.BatchNorm3d(8), activation or nn.ReLU()
    )


class Up(nn.Module):
    """Convolution and group norm in a forward of its own, for classes that differ from it."""

    def __init__(self):
        super().__init__()
        self.up, self.norm = nn.ConvTranspose3d(6, 8, 2, 2), nn.GroupNorm(2, 8)

    def forward(self, x):
        return self.norm(self.up(x))


class ADN(nn.Sequential):
    """MONAI's: what follows a convolution, by letters, with names."""

    def __init__(self, ordering, norm, activation, p=0.0):
        super().__init__()
        for letter in ordering:
            self.add_module(letter, {"A": activation, "N": norm, "D": nn.Dropout(p)}[letter])


class Convolution(nn.Sequential):
    """MONAI's, transposed."""

    def __init__(self, ordering="NDA", norm=None, activation=None, c=6, k=8):
        super().__init__()
        self.add_module("conv", nn.ConvTranspose3d(c, k, 3, 2, 1, 1))
        self.add_module("adn", ADN(ordering, norm or nn.InstanceNorm3d(k), activation or nn.PReLU()))


class SkipConnection(nn.Module):
    def __init__(self, submodule):
        super().__init__()
        self.submodule = submodule

    def forward(self, x):
        return torch.cat([x, self.submodule(x)], dim=1)


def unet():
    """MONAI's UNet: Sequentials in a module that concatenates, in Sequentials."""
    inner = nn.Sequential(nn.Conv3d(6, 6, 3, 2, 1), Convolution(k=6))
    middle = nn.Sequential(nn.Conv3d(6, 6, 3, 1, 1), nn.Identity())
    up = nn.Sequential(Convolution("AN", nn.GroupNorm(4, 8), nn.ReLU(), c=12), nn.Conv3d(8, 2, 1))
    return nn.Sequential(middle, SkipConnection(nn.Sequential(inner, nn.Upsample((4, 3, 4)))), up)


class UpTransition(nn.Module):
    """VNet's: the calls stand in forward, with batch norm and an activation in place."""

    def __init__(self, dropout=None):
        super().__init__()
        self.up_conv = nn.ConvTranspose3d(6, 8, 2, 2)
        self.bn1 = nn.BatchNorm3d(8)
        self.dropout = nn.Dropout3d(dropout) if dropout is not None else None
        self.act_function1 = nn.ELU(inplace=True)
        self.ops = nn.Conv3d(8, 8, 3, padding=1)
        self.act_function2 = nn.ELU(inplace=True)
        self.scale = 1.0

    def forward(self, x, skip=None):
        out = self.dropout(x) if self.dropout is not None else x
        out = self.act_function1(self.bn1(self.up_conv(out)))
        out = self.act_function2(torch.add(self.ops(out), out))
        if skip is not None:
            out = out + skip
        return out * self.scale


class FunctionalUp(nn.Module):
    """Activations as functions, a list of levels, and a method of its own."""

    def __init__(self):
        super().__init__()
        self.levels = nn.ModuleList([nn.ConvTranspose3d(6, 6, 2, 2), nn.ConvTranspose3d(6, 8, 2)])
        self.norms = nn.ModuleList([nn.InstanceNorm3d(6, affine=True), nn.GroupNorm(4, 8)])

    def up(self, level, norm, x):
        return F.leaky_relu(norm(level(x)), 0.2, inplace=True)

    def forward(self, x):
        for level, norm in zip(self.levels, self.norms, strict=True):
            x = self.up(level, norm, x)
        return x


class MedNeXtUp(FunctionalUp):
    """A forward that calls another, and an expansion behind the norm of a depthwise convolution."""

    def __init__(self):
        super().__init__()
        self.levels = nn.ModuleList([nn.ConvTranspose3d(6, 6, 3, 2, 1, groups=6)])
        self.norms = nn.ModuleList([nn.GroupNorm(6, 6)])
        self.conv2 = nn.Conv3d(6, 8, 1)

    def forward(self, x):
        return F.pad(self.conv2(super().forward(x)), (1, 0, 1, 0, 1, 0))


class SegResDecoder(nn.Module):
    """SegResNet's: the sum of convolution and skip is normalized, and kept."""

    def __init__(self):
        super().__init__()
        self.up = nn.ConvTranspose3d(6, 8, 3, 2, 1, 1, bias=False)
        self.norm = nn.GroupNorm(2, 8)

    def forward(self, x):
        x = self.up(x)
        x = x + 1
        return x + F.relu(self.norm(x))


class ValueSwitched(nn.Module):
    """What follows depends on the data."""

    def __init__(self):
        super().__init__()
        self.up, self.norm = nn.ConvTranspose3d(6, 8, 2), nn.GroupNorm(2, 8)

    def forward(self, x):
        y = self.up(x)
        return self.norm(y) if x.sum() > 0 else y


class Scaled(nn.Module):
    """What follows depends on a dictionary."""

    def __init__(self):
        super().__init__()
        self.up, self.norm = nn.ConvTranspose3d(6, 8, 2), nn.GroupNorm(2, 8)
        self.state = {"normalize": True}

    def forward(self, x):
        y = self.up(x)
        return self.norm(y) if self.state["normalize"] else y


MODELS = {
    "group norm, relu": cna,
    "group norm, silu": lambda: cna(nn.SiLU()),
    "group norm, tanh": lambda: cna(nn.Tanh()),
    "relu, group norm": lambda: Convolution("AN", nn.GroupNorm(2, 8), nn.ReLU()),
    "instance norm, dropout, prelu": Convolution,
    "gelu, instance norm, hardswish": lambda: nn.Sequential(
        nn.ConvTranspose3d(6, 8, 3, 2, 1), nn.GELU("tanh"), nn.InstanceNorm3d(8, affine=True), nn.Hardswish()
    ),
    "batch norm, relu": cbn,
    "batch norm without affine, elu": lambda: nn.Sequential(
        nn.ConvTranspose3d(6, 8, 2, 2), nn.BatchNorm3d(8, affine=False), nn.ELU(0.5)
    ),
    "relu, batch norm": lambda: nn.Sequential(
        nn.ConvTranspose3d(6, 8, 4, 2, 1), nn.ReLU(), nn.BatchNorm3d(8)
    ),
    "leaky relu": lambda: nn.Sequential(nn.ConvTranspose3d(6, 8, 4, 2, 1), nn.LeakyReLU(0.2)),
    "unet": unet,
    "vnet": UpTransition,
    "functional": FunctionalUp,
    "mednext": MedNeXtUp,
}


def count_blocks_run(replace):
    """A list that grows by one entry per block that an accelerated model runs as one call.

    replace: setattr, or a fixture's.
    """
    calls, run_block, run_decided = [], run.run_block, remembered._Decided.run

    def counted(block, x, options, told=None):
        y = run_block(block, x, options, told)
        if y is not None:
            calls.append(block)
        return y

    def counted_decided(self, x):
        calls.append(self)
        return run_decided(self, x)

    for module in (remembered, run, swap):
        replace(module, "run_block", counted)
    replace(remembered._Decided, "run", counted_decided)
    return calls


class Pair:
    """A model with one convolution, in eval mode, and a copy that is accelerated; `finding` says how."""

    def __init__(self, make, x, replace):
        """x: what check() calls them with. replace: as in count_blocks_run."""
        torch.manual_seed(7)
        self.plain, self.x = make().eval(), x
        self.model = copy.deepcopy(self.plain)
        (self.finding,) = upconv3d.accelerate(self.model).findings
        self.calls = count_blocks_run(replace)

    def change(self, change):
        for each in (self.plain, self.model):
            change(each)

    def check(self, blocks):
        """That both compute the same, the copy with so many of its blocks in one call."""
        self.calls.clear()
        torch.testing.assert_close(self.model(self.x), self.plain(self.x), rtol=1e-4, atol=1e-5)
        assert len(self.calls) == blocks


def accelerated_pair(make, **options):
    """An accelerated model, what it was, and the report.

    options: accelerate's.
    """
    torch.manual_seed(7)
    model = make()
    for parameter in model.parameters():
        parameter.data.add_(torch.rand_like(parameter) * 0.2)
    plain = copy.deepcopy(model)
    return model, plain, upconv3d.accelerate(model, **options)
