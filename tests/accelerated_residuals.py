# SPDX-License-Identifier: Apache-2.0
"""Small models for test_accelerate_residual.py: a transposed convolution's result is read twice."""

import torch
import torch.nn.functional as F
from torch import nn


class Residual(nn.Module):
    """MONAI's AEKLResBlock."""

    def __init__(self, c=8, k=8):
        super().__init__()
        self.norm1, self.conv1 = nn.GroupNorm(2, c), nn.Sequential(nn.Conv3d(c, k, 3, padding=1))
        self.norm2, self.conv2 = nn.GroupNorm(2, k), nn.Sequential(nn.Conv3d(k, k, 3, padding=1))
        self.nin_shortcut = nn.Identity() if c == k else nn.Conv3d(c, k, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x
        h = self.norm1(h)
        h = F.silu(h)
        h = self.conv1(h)
        h = self.conv2(F.silu(self.norm2(h)))
        x = self.nin_shortcut(x)
        return x + h


class Decoder(nn.Module):
    """MONAI's AutoencoderKL's: a list of blocks, one after the other."""

    def __init__(self, block=Residual, up=None):
        super().__init__()
        ups = [nn.Sequential(nn.ConvTranspose3d(6, 8, 2, 2)), nn.Sequential(nn.ConvTranspose3d(8, 8, 2, 2))]
        blocks = [nn.Conv3d(6, 6, 1), Residual(6, 6), ups[0], block(8), up or ups[1], Residual(8, 4)]
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class Up(nn.Module):
    def __init__(self, norm=None, act=None):
        super().__init__()
        self.up, self.norm, self.act = nn.ConvTranspose3d(6, 8, 2, 2), norm or nn.GroupNorm(2, 8), act

    def forward(self, x):
        x = self.up(x)
        h = F.gelu(self.norm(x))
        return torch.cat([x, h], 1)


class Returned(Up):
    """The convolution leaves the module, and is changed there."""

    def forward(self, x):
        x = self.up(x)
        h = F.elu(self.norm(x), inplace=True)
        return h, x


class Thrice(Up):
    def forward(self, x):
        x = self.up(x)
        h = self.act(self.norm(x))
        return torch.cat([x, h], 1).mean((2, 3, 4)).sum() + x * h + torch.sigmoid(x)


class ActivationFirst(Up):
    def forward(self, x):
        x = self.up(x)
        return self.norm(F.leaky_relu(x, 0.1)) + x


class Afterwards(Up):
    """Seen through every name of the convolution, after the norm has read it."""

    def forward(self, x):
        x = self.up(x)
        kept = x
        h = self.norm(x).relu()
        x += 1
        return kept * 2 + h


class Listed(nn.Module):
    """What follows stands in a Sequential."""

    def __init__(self):
        super().__init__()
        self.up = nn.Sequential(nn.ConvTranspose3d(6, 8, 3, 2, 1, 1))
        self.after = nn.Sequential(nn.InstanceNorm3d(8, affine=True), nn.PReLU(8), nn.Conv3d(8, 2, 1))

    def forward(self, x):
        return self.after(self.up(x))


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Residual()
        self.scale = 1.0

    def forward(self, x, shift=0.5):
        return self.inner(x) * self.scale + shift


# Model, and how many of its blocks return the convolution.
MODELS = {
    "autoencoder": (Decoder, 2),
    "two in a module": (lambda: Decoder(lambda c: Nested()), 2),
    "cat": (Up, 1),
    "returned": (Returned, 1),
    "thrice": (lambda: Thrice(nn.InstanceNorm3d(8), nn.LeakyReLU(0.2, inplace=True)), 1),
    "activation first": (ActivationFirst, 1),
    "changed afterwards": (Afterwards, 1),
    "sequential": (Listed, 0),
}


# Inner modules that are not what Residual is.


class Shifted(Residual):
    def forward(self, x):
        return super().forward(x) + 1


class Called(Residual):
    def __call__(self, x):
        return super().__call__(x) + 1


class Modal(Residual):
    """A forward that reads its own mode."""

    def forward(self, x):
        return super().forward(x) if self.training else super().forward(x) * 3


class Dropping(Residual):
    def __init__(self, c=8):
        super().__init__(c)
        self.dropout = nn.Dropout3d(0.5)

    def forward(self, x):
        return self.conv1(F.silu(self.norm1(self.dropout(x)))) + x


class OwnUp(Residual):
    """A module behind a convolution that has one itself, and is called by others too."""

    def __init__(self, c=8):
        super().__init__(c)
        self.up, self.norm3 = nn.ConvTranspose3d(c, c, 2, 2), nn.GroupNorm(2, c)

    def forward(self, x):
        x = super().forward(x)
        return F.relu(self.norm3(self.up(x)))


class Reused(nn.Module):
    """One module behind both convolutions, under two names, and once more behind itself."""

    def __init__(self):
        super().__init__()
        self.up1, self.up2 = nn.ConvTranspose3d(6, 8, 2, 2), nn.ConvTranspose3d(8, 8, 2, 2)
        self.first = self.second = Residual()

    def forward(self, x):
        x = self.first(self.first(self.up1(x)))
        return self.second(self.up2(x))


# What keeps a block from being found.


class Before(Up):
    """The norm reads what was changed in place."""

    def forward(self, x):
        x = self.up(x)
        x.add_(1)
        return F.silu(self.norm(x))


class Between(Up):
    def forward(self, x):
        x = self.up(x)
        h = self.norm(x)
        y = x.mul_(2)
        return F.silu(h) + y


class InPlaceFirst(Up):
    def forward(self, x):
        x = self.up(x)
        return F.relu(x, inplace=True) + x


class InPlaceMethod(Up):
    def forward(self, x):
        x = self.up(x)
        return self.norm(x.relu_()) + x


class InPlaceModule(Up):
    def forward(self, x):
        x = self.up(x)
        return self.act(x) + x


class Remembers(Residual):
    def forward(self, x, seen=[]):  # noqa: B006
        seen.append(len(seen))
        return super().forward(x) * len(seen)


class Branches(Residual):
    def forward(self, x):
        return super().forward(x) if x.mean() > 0 else x


class Hidden(Residual):
    def forward(self, x):
        return super().forward(x) * self.state["scale"]

    def __init__(self, c=8):
        super().__init__(c)
        self.state = {"scale": 2}
