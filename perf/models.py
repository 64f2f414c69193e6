# SPDX-License-Identifier: Apache-2.0
"""Published decoders, as their projects build them, for bench_models.py.

They need monai (1.6.1), pytorch3dunet (1.9.6) and what those import: numpy, h5py, scikit-image with
imageio, lazy_loader, tifffile, pillow, networkx, packaging and scipy, tqdm, pyyaml, tensorboard.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import nn


@dataclass(frozen=True)
class Model:
    """One model.

    Attributes:
        source: where it is from, with its settings.
        size: of its input on a GPU, [N, C, D, H, W].
        small: of its input on a CPU.
        make: the module, with fewer channels where it is told so.
        needs: the package that it comes from.
    """

    name: str
    source: str
    size: tuple[int, ...]
    small: tuple[int, ...]
    make: Callable[[bool], nn.Module]
    needs: str | None = "monai"


def _unet(small: bool, **settings: Any) -> nn.Module:
    from monai.networks.nets import UNet

    channels = (4, 8, 16) if small else (16, 32, 64, 128, 256)
    return UNet(3, 1, 2, channels, (2,) * (len(channels) - 1), num_res_units=2, **settings)


def _unet_an(small: bool) -> nn.Module:
    return _unet(small, adn_ordering="AN", act="RELU", norm=("GROUP", {"num_groups": 2}))


def _vnet(small: bool) -> nn.Module:
    from monai.networks.nets import VNet

    return VNet(3, 1, 2)


def _segresnet_ds(small: bool) -> nn.Module:
    from monai.networks.nets import SegResNetDS

    return SegResNetDS(3, 8 if small else 32, 1, 2, norm="INSTANCE", blocks_down=(1, 2, 2, 4, 4), dsdepth=1)


def _autoencoder_kl(small: bool) -> nn.Module:
    from monai.networks.nets.autoencoderkl import Decoder

    channels = (16, 32) if small else (64, 128, 256)
    levels = len(channels)
    return Decoder(
        spatial_dims=3,
        channels=channels,
        in_channels=4,
        out_channels=1,
        num_res_blocks=(2,) * levels,
        norm_num_groups=16 if small else 32,
        norm_eps=1e-6,
        attention_levels=(False,) * levels,
        with_nonlocal_attn=False,
        use_convtranspose=True,
    )


def _dynunet(small: bool) -> nn.Module:
    from monai.networks.nets import DynUNet

    channels = [8, 16, 32] if small else [32, 64, 128, 256, 320, 320]
    twos = [2] * (len(channels) - 1)
    return DynUNet(3, 1, 2, [3] * len(channels), [1, *twos], twos, filters=channels)


def _residual_unet(small: bool) -> nn.Module:
    from pytorch3dunet.unet3d.model import ResidualUNet3D

    return ResidualUNet3D(1, 1, f_maps=8 if small else 64, num_levels=3 if small else 5)


class OccupancyHead(nn.Module):
    """Three levels of ConvTranspose3d, GroupNorm(16), ReLU, with a convolution to the next one's channels."""

    def __init__(self, channels: tuple[int, ...]) -> None:
        super().__init__()
        levels = []
        for c, k in zip(channels, (*channels[1:], channels[-1]), strict=True):
            up = [nn.ConvTranspose3d(c, c, 2, 2, bias=False), nn.GroupNorm(16, c), nn.ReLU(inplace=True)]
            out = [nn.Conv3d(c, k, 3, padding=1, bias=False), nn.GroupNorm(16, k), nn.ReLU(inplace=True)]
            levels.append(nn.Sequential(*up, *out))
        self.levels = nn.ModuleList(levels)
        self.occupancy = nn.Conv3d(channels[-1], 17, 1)

    def forward(self, x: Any) -> Any:
        for level in self.levels:
            x = level(x)
        return self.occupancy(x)


MODELS = [
    Model(
        "monai_unet_an",
        "MONAI UNet, 16..256 channels, 2 residual units, adn 'AN', ReLU, GroupNorm(2)",
        (2, 1, 96, 96, 96),
        (1, 1, 16, 16, 16),
        _unet_an,
    ),
    Model(
        "monai_unet",
        "MONAI UNet, 16..256 channels, 2 residual units, InstanceNorm, PReLU",
        (2, 1, 96, 96, 96),
        (1, 1, 16, 16, 16),
        _unet,
    ),
    Model("monai_vnet", "MONAI VNet, BatchNorm, ELU", (1, 1, 128, 128, 64), (1, 1, 32, 32, 32), _vnet),
    Model(
        "monai_segresnet_ds",
        "MONAI SegResNetDS, 32..512 channels, InstanceNorm",
        (1, 1, 128, 128, 128),
        (1, 1, 32, 32, 32),
        _segresnet_ds,
    ),
    Model(
        "monai_autoencoderkl",
        "decoder of MONAI AutoencoderKL, 256, 128, 64 channels, use_convtranspose, GroupNorm(32)",
        (1, 4, 24, 24, 24),
        (1, 4, 6, 6, 6),
        _autoencoder_kl,
    ),
    Model(
        "occupancy_head",
        "in the style of SurroundOcc's head, 256, 128, 64 channels, GroupNorm(16)",
        (1, 256, 25, 25, 2),
        (1, 64, 5, 5, 2),
        lambda small: OccupancyHead((64, 32, 16) if small else (256, 128, 64)),
        None,
    ),
    Model(
        "monai_dynunet",
        "MONAI DynUNet, nnU-Net's, 32..320 channels, InstanceNorm, LeakyReLU; bare transposed convolutions",
        (2, 1, 128, 128, 128),
        (1, 1, 16, 16, 16),
        _dynunet,
    ),
    Model(
        "residual_unet3d",
        "pytorch-3dunet ResidualUNet3D, 64..1024 channels, GroupNorm(8)",
        (1, 1, 80, 160, 160),
        (1, 1, 16, 16, 16),
        _residual_unet,
        "pytorch3dunet",
    ),
]
