# SPDX-License-Identifier: Apache-2.0
"""upconv3d.accelerate: traced forwards call and read in the order of their source."""

import copy

import pytest
import torch
import upconv3d
from accelerated_models import Up as _Up
from accelerated_models import count_blocks_run
from torch import nn


def _volume():
    return torch.randn(2, 6, 3, 4, 3, generator=torch.Generator().manual_seed(3))


class _Noisy(nn.ReLU):
    def forward(self, x):
        return super().forward(x) * torch.rand(1)


class _Growing(nn.ELU):
    times = 0

    def forward(self, x):
        type(self).times += 1
        return super().forward(x) * type(self).times


class _Own(_Up):
    """An activation of its own behind a block, and another before it."""

    def __init__(self, act):
        super().__init__()
        self.relu, self.act, self.other = nn.ReLU(), act(), act()

    def forward(self, x):
        y = self.relu(self.norm(self.up(x)))
        return self.other(x).sum() * 2 + self.act(y)


class _Between(_Own):
    def forward(self, x):
        y = self.relu(self.norm(self.up(x)))
        z = self.other(x).sum()
        return z * 2 + self.act(y)


class _Adjacent(_Own):
    def forward(self, x):
        y = self.act(self.relu(self.norm(self.up(x))))
        return self.other(x).sum() * 2 + y


@pytest.mark.parametrize("act", [_Noisy, _Growing])
@pytest.mark.parametrize("make", [_Own, _Between, _Adjacent])
def test_activations_with_forwards_of_their_own(make, act, monkeypatch):
    plain = make(act).eval()
    model = copy.deepcopy(plain)
    assert upconv3d.accelerate(model, precision="ieee").replaced
    calls, results = count_blocks_run(monkeypatch.setattr), []
    for each in (plain, model):
        torch.manual_seed(5)
        _Growing.times = 0
        results.append(each(_volume()))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)
    assert len(calls) == 1


class _Reads(_Up):
    def forward(self, x):
        y = super().forward(x)
        sizes = y.shape
        y.unsqueeze_(0)
        return y.reshape(sizes)


class _ReadsOfWhatItReads(_Up):
    def forward(self, x):
        y = super().forward(x)
        sizes, of = y.data.shape, y.ndim
        y.unsqueeze_(0)
        return y.reshape(sizes) * of


class _ReadsOfArgument(_Up):
    def forward(self, x):
        dtype = x.dtype
        x = x.double()
        return super().forward(x.to(dtype)).to(dtype).transpose(1, 2).mT


@pytest.mark.parametrize("make", [_Reads, _ReadsOfWhatItReads, _ReadsOfArgument])
def test_attributes_of_tensors_are_read_where_they_stand(make):
    plain = make().eval()
    model = copy.deepcopy(plain)
    assert upconv3d.accelerate(model).replaced
    y, expected = model(_volume()), plain(_volume())
    assert y.shape == expected.shape
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5)
