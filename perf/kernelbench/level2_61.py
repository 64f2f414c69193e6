# SPDX-License-Identifier: Apache-2.0
"""KernelBench level 2, problem 61 (ConvTranspose3d, ReLU, GroupNorm): PyTorch's block and ours."""

import torch
import upconv3d
from torch import nn

batch_size = 16
in_channels = 64
out_channels = 128
depth = height = width = 32
kernel_size = 3
groups = 8  # of the normalization
bias = False


class Model(nn.Module):
    """The three PyTorch calls. x: [N, in_channels, D, H, W] float32."""

    def __init__(self, in_channels, out_channels, kernel_size, groups, bias=False):
        super().__init__()
        self.conv_transpose = nn.ConvTranspose3d(in_channels, out_channels, kernel_size, bias=bias)
        self.relu = nn.ReLU()
        self.group_norm = nn.GroupNorm(num_groups=groups, num_channels=out_channels)

    def forward(self, x):
        return self.group_norm(self.relu(self.conv_transpose(x)))


class ModelNew(upconv3d.ConvTranspose3dReLUGroupNorm):
    """Model with the fused op: same constructor, same state dict, float32's own accuracy."""

    def __init__(self, in_channels, out_channels, kernel_size, groups, bias=False):
        super().__init__(
            in_channels, out_channels, kernel_size, num_groups=groups, bias=bias, precision="ieee"
        )


def get_inputs():
    return [torch.rand(batch_size, in_channels, depth, height, width)]


def get_init_inputs():
    return [in_channels, out_channels, kernel_size, groups, bias]
