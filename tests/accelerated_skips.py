# SPDX-License-Identifier: Apache-2.0
"""Small models for test_accelerate_skip.py: a skip is added to a transposed convolution before its norm."""

import torch
import torch.nn.functional as F
from torch import nn


def skip_like(x):
    """A skip of the sizes that Up makes of x: what a network's encoder has kept."""
    generator = torch.Generator().manual_seed(11)
    sizes = (x.shape[0], 8, *(2 * extent for extent in x.shape[2:]))
    return torch.randn(sizes, generator=generator, dtype=torch.float64).to(x.device, x.dtype)


class Up(nn.Module):
    """The sum is normalized, and read once more: SegResNet's, in one module."""

    def __init__(self, norm=None, act=None, **options):
        super().__init__()
        self.up = nn.ConvTranspose3d(6, 8, 2, 2, **options)
        self.norm, self.act = norm or nn.GroupNorm(2, 8), act or nn.ReLU()

    def forward(self, x, skip):
        x = self.up(x) + skip
        return self.act(self.norm(x)) + x * 2


class InPlace(Up):
    def forward(self, x, skip):
        x = self.up(x)
        x += skip
        return self.act(self.norm(x)) - x


class ByMethod(Up):
    def forward(self, x, skip):
        x = self.up(x).add_(skip)
        return self.act(self.norm(x)) - x


class SkipFirst(Up):
    def forward(self, x, skip):
        x = torch.add(skip, self.up(x))
        return torch.cat([F.gelu(self.norm(x)), x], 1)


class Alone(Up):
    """Nobody else reads the sum."""

    def forward(self, x, skip):
        return self.act(self.norm(self.up(x) + skip))


class Dropping(Up):
    """MONAI's ADN behind a skip, its dropout inactive."""

    def __init__(self):
        super().__init__()
        self.drop = nn.Dropout3d(0.0)

    def forward(self, x, skip):
        return self.act(self.drop(self.norm(self.up(x) + skip)))


class WithoutActivation(Up):
    def forward(self, x, skip):
        x = self.up(x).add(skip)
        return self.norm(x).sum(1, keepdim=True) * x


class Changing(Up):
    """What an addition does not read may change afterwards, and the sum where its norm's backward has
    no need of it: a norm has."""

    def forward(self, x, skip):
        skip = skip * 2
        y = self.act(self.norm(self.up(x) + skip))
        skip += 1
        return y + skip


class Residual(nn.Module):
    """MONAI's SegResBlock."""

    def __init__(self, channels=8):
        super().__init__()
        self.norm1, self.act1 = nn.InstanceNorm3d(channels), nn.ReLU(inplace=True)
        self.conv1 = nn.Conv3d(channels, channels, 3, padding=1, bias=False)
        self.norm2, self.act2 = nn.InstanceNorm3d(channels), nn.ReLU(inplace=True)
        self.conv2 = nn.Conv3d(channels, channels, 3, padding=1, bias=False)

    def forward(self, x):
        identity = x
        x = self.conv2(self.act2(self.norm2(self.conv1(self.act1(self.norm1(x))))))
        x += identity
        return x


class Upsample(nn.Sequential):
    """MONAI's: a Sequential of a class of its own."""

    def __init__(self, c, k):
        super().__init__()
        self.add_module("deconv", nn.ConvTranspose3d(c, k, 3, 2, 1, 1, bias=False))


class Encoder(nn.Module):
    """Returns a list, from the first level to the last."""

    def __init__(self, channels=(4, 8, 16)):
        super().__init__()
        self.first = nn.Conv3d(2, channels[0], 3, padding=1)
        self.layers = nn.ModuleList()
        for c, k in zip(channels, [*channels[1:], None], strict=True):
            down = nn.Identity() if k is None else nn.Conv3d(c, k, 3, 2, 1)
            self.layers.append(nn.ModuleDict({"blocks": nn.Sequential(Residual(c)), "down": down}))

    def forward(self, x):
        outputs = []
        x = self.first(x)
        for level in self.layers:
            x = level["blocks"](x)
            outputs.append(x)
            x = level["down"](x)
        return outputs


class SegResNetDS(nn.Module):
    """MONAI's: it refuses sizes, takes its encoder's list apart, and returns a list in training."""

    def __init__(self, channels=(4, 8, 16)):
        super().__init__()
        self.encoder = Encoder(channels)
        self.levels = nn.ModuleList()
        for c, k in zip(channels[:0:-1], channels[-2::-1], strict=True):
            blocks = nn.Sequential(Residual(k), Residual(k))
            self.levels.append(
                nn.ModuleDict({"up": Upsample(c, k), "blocks": blocks, "head": nn.Conv3d(k, 2, 1)})
            )
        self.depth = len(channels) - 1

    def factor(self):
        return [2**self.depth for _ in range(3)]

    def is_valid(self, x):
        remainders = [i % j == 0 for i, j in zip(x.shape[2:], self.factor(), strict=True)]
        return all(remainders)

    def forward(self, x):
        if not self.is_valid(x):
            raise ValueError(f"sizes {tuple(x.shape)} must be divisible by {self.factor()}")
        kept = self.encoder(x)
        kept.reverse()
        x = kept.pop(0)
        if len(kept) == 0:
            kept = [torch.zeros(1, device=x.device, dtype=x.dtype)]
        outputs = []
        for level in self.levels:
            x = level["up"](x)
            x += kept.pop(0)
            x = level["blocks"](x)
            outputs.append(level["head"](x))
        outputs.reverse()
        if not self.training:
            return outputs[0]
        return outputs


# What keeps a block from being found, or a forward from being traced.


class Number(Up):
    """What is added is no tensor of its own."""

    def forward(self, x, skip):
        x = self.up(x) + 1
        return self.act(self.norm(x)) * x + skip


class OntoSkip(Up):
    def forward(self, x, skip):
        skip = skip * 1
        skip += self.up(x)
        return self.act(self.norm(skip)) + skip


class Between(Up):
    """What is called between convolution and sum might change the skip."""

    def forward(self, x, skip):
        y = self.up(x)
        skip = skip.mul(2)
        y = y + skip
        return self.act(self.norm(y)) * y


class ReadTwice(Up):
    """The convolution itself has other readers."""

    def forward(self, x, skip):
        c = self.up(x)
        x = c + skip
        return self.act(self.norm(x)) * x + c


class ActivationFirst(Up):
    def forward(self, x, skip):
        return self.norm(F.leaky_relu(self.up(x) + skip, 0.1))


class ChangedFirst(Up):
    """The sum is changed before the norm has read it."""

    def forward(self, x, skip):
        x = self.up(x) + skip
        x.mul_(2)
        return self.act(self.norm(x)) + x


class ValidTwice(SegResNetDS):
    """What says whether to raise decides about other things too."""

    def fine(self, x):
        return self.depth > 1

    def forward(self, x):
        if not self.fine(x):
            raise ValueError("sizes")
        return super().forward(x) if self.fine(x) else x


class ValidLate(SegResNetDS):
    def forward(self, x):
        x = x * 1
        return super().forward(x)


class Refusing(nn.Module):
    """A forward that a method may refuse, and a block."""

    def __init__(self):
        super().__init__()
        self.up, self.norm, self.act = nn.ConvTranspose3d(6, 8, 2, 2), nn.GroupNorm(2, 8), nn.ReLU()
        self.gain, self.calls = 1.0, []

    def is_valid(self, x):
        return x.shape[2] % 2 == 1 or all(size > 1 for size in x.shape)

    def forward(self, x):
        if not self.is_valid(x):
            raise ValueError("sizes")
        return self.act(self.norm(self.up(x))) * self.gain


class Setting(Refusing):
    def is_valid(self, x):
        self.gain = float(x.shape[2])
        return all(size > 1 for size in x.shape)


class Listing(Refusing):
    def is_valid(self, x):
        self.calls.append(1)
        return all(size > 1 for size in x.shape)


class Drawing(Refusing):
    def is_valid(self, x):
        return all(size > 1 for size in x.shape) and torch.rand(()).item() < 2


class Overwriting(Refusing):
    def is_valid(self, x):
        return all(size > 1 for size in x.mul_(2).shape)


class Counting(Refusing):
    def is_valid(self, x):
        x += 1
        return all(size > 1 for size in x.shape)


LEAST, VOLUMES = 1, iter([1, 2, 3])


class Iterating(Refusing):
    def is_valid(self, x):
        return all(size > 1 for size in x.shape) and next(iter([*VOLUMES, 1])) > 0


class Keyed(Refusing):
    def is_valid(self, x, key=lambda size: -size):
        return min(sorted(x.shape, key=key)) > 1


class OfProperty(Refusing):
    @property
    def least(self):
        self.calls.append(1)
        return 1

    def is_valid(self, x):
        return all(size > self.least for size in x.shape)


class Joined(Refusing):
    """Reads a global number at each call, as PyTorch's call does."""

    def is_valid(self, x):
        return x.shape[2] % 2 == 1 or all(size > LEAST for size in x.shape)


class OfGlobal(Refusing):
    def is_valid(self, x, least):
        return all(size > least for size in x.shape)

    def forward(self, x):
        if not self.is_valid(x, LEAST):
            raise ValueError("sizes")
        return self.act(self.norm(self.up(x)))


class OfSelf(OfGlobal):
    @staticmethod
    def is_valid(module, x):
        return all(size > module.gain for size in x.shape)

    def forward(self, x):
        if not self.is_valid(self, x):
            raise ValueError("sizes")
        return self.act(self.norm(self.up(x)))


class OfList(Refusing):
    def is_valid(self, x, sizes):
        return all(size > 1 for size in list(x.shape) + list(sizes))

    def forward(self, x):
        sizes = []
        if not self.is_valid(x, sizes):
            raise ValueError("sizes")
        return self.act(self.norm(self.up(x)))


class Sized(Refusing):
    """It asks of a size, which is no call of anything."""

    def is_valid(self, size):
        return size % 2 == 1 and any(size > least for least in (0, 1))

    def forward(self, x):
        n = x.shape[2]
        if not self.is_valid(n):
            raise ValueError("sizes")
        return self.act(self.norm(self.up(x)))


class Traceable(Refusing):
    """What it asks can be traced, after other calls and more than once."""

    def is_valid(self):
        return self.gain > 0

    def forward(self, x):
        x = x * 2
        if not self.is_valid():
            raise ValueError("gain")
        return self.act(self.norm(self.up(x))) if self.is_valid() else x


class ByZeros(Refusing):
    """A branch that a tensor of its own decides."""

    def forward(self, x):
        y = self.act(self.norm(self.up(x)))
        if F.dropout(torch.ones(1), 0.5, self.training).sum() == 0:
            return y
        return y * 2


class Unpacking(Refusing):
    def forward(self, x):
        a, b = torch.chunk(x, 2, 1)
        return self.act(self.norm(self.up(torch.cat([b, a], 1))))


class SharedBatchNorm(Refusing):
    """Its batch norm's statistics depend on the order of its calls."""

    def __init__(self):
        super().__init__()
        self.bn = nn.BatchNorm3d(8)

    def forward(self, x):
        y = self.norm(self.up(x))
        z = self.bn(torch.cat([x, x[:, :2]], 1))
        return self.act(self.bn(y)).mean() + z


class CountedEncoder(Encoder):
    """What it returns is as long as it likes."""

    def forward(self, x):
        outputs = super().forward(x)
        return outputs if x.mean() < 1e9 else outputs[:1]
