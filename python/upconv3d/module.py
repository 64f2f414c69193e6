# SPDX-License-Identifier: Apache-2.0
"""The block as a module, in the place of nn.ConvTranspose3d, nn.ReLU and nn.GroupNorm."""

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.nn.utils import prune
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from ._own_class import require_kind
from .functional import IntOrTriple, conv_transpose3d_relu_group_norm, integer

_PRECISIONS = (None, "ieee", "tf32")

# Hooks by which torch.nn.utils computes a parameter anew before each forward of its module.
_RENEWING = (prune.BasePruningMethod, SpectralNorm, WeightNorm)


def _check_precision(precision: str | None) -> None:
    if precision not in _PRECISIONS:
        raise ValueError(f"upconv3d: precision must be 'ieee', 'tf32' or None; got precision={precision!r}.")


def _parameter(module: nn.Module, name: str) -> Any:
    """module.weight or module.bias, without the 0.8 us that nn.Module.__getattr__ takes for each.

    Parametrizations and pruning keep what they compute outside of _parameters.
    """
    parameters = module._parameters
    if name in parameters:
        return parameters[name]
    for hook in module._forward_pre_hooks.values():
        if isinstance(hook, _RENEWING):
            renewed = hook._tensor_name if isinstance(hook, prune.BasePruningMethod) else hook.name
            if renewed == name:
                hook(module, ())
    return getattr(module, name)


def _require_kinds(conv_transpose: Any, group_norm: Any) -> None:
    """Raises TypeError for a module of another kind, or one with a forward of its own."""
    require_kind("conv_transpose", conv_transpose, (nn.ConvTranspose3d,))
    require_kind("group_norm", group_norm, (nn.GroupNorm,), "there is ConvTranspose3dNormAct")


class ConvTranspose3dReLUGroupNorm(nn.Module):
    """group_norm(relu(conv_transpose3d(x))) with the parameters of the two PyTorch modules.

    The submodules `conv_transpose` (nn.ConvTranspose3d) and `group_norm` (nn.GroupNorm) hold the
    parameters and the numbers, so state dict keys are conv_transpose.weight|bias and group_norm.weight|bias,
    and the same seed gives the initial values of the two modules made in that order. The submodules' own
    forwards do not run, so forward hooks on them are not called, except those by which prune, weight_norm and
    spectral_norm of torch.nn.utils renew a parameter. Hooks on this module are called.

    num_groups is the fourth positional argument, before stride, where nn.ConvTranspose3d has stride: pass
    what follows kernel_size by name.

    Args:
        in_channels, out_channels, kernel_size, stride, padding, output_padding, groups, bias, dilation: as in
            nn.ConvTranspose3d.
        num_groups, eps, affine: as in nn.GroupNorm; eps in activation units squared.
        precision, recompute: as in conv_transpose3d_relu_group_norm.
        device, dtype: of the parameters.

    Shape: [N, C, D, H, W] to [N, K, Z, P, Q], or [C, D, H, W] to [K, Z, P, Q].

    Raises:
        ValueError: in_channels or out_channels not divisible by groups, out_channels not by num_groups,
            num_groups below 1, or an unknown precision.
        TypeError: num_groups is no integer.

    Source: GroupNorm, Wu & He, arXiv:1803.08494.
    """

    # The submodules have no annotation here: torch.jit.script would take it for that of an interface.
    precision: str | None
    recompute: bool

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: IntOrTriple,
        num_groups: int,
        stride: IntOrTriple = 1,
        padding: IntOrTriple = 0,
        output_padding: IntOrTriple = 0,
        groups: int = 1,
        bias: bool = True,
        dilation: IntOrTriple = 1,
        eps: float = 1e-5,
        affine: bool = True,
        precision: str | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
        recompute: bool = False,
    ) -> None:
        super().__init__()
        _check_precision(precision)
        num_groups = integer(num_groups, "num_groups")
        if num_groups < 1:
            raise ValueError(
                f"upconv3d: num_groups must be at least 1; got num_groups={num_groups}. Remedy: num_groups=1 "
                f"normalizes all channels of a sample together."
            )
        self.conv_transpose = nn.ConvTranspose3d(
            in_channels,
            out_channels,
            kernel_size,  # type: ignore[arg-type]
            stride,  # type: ignore[arg-type]
            padding,  # type: ignore[arg-type]
            output_padding,  # type: ignore[arg-type]
            groups,
            bias,
            dilation,  # type: ignore[arg-type]
            device=device,
            dtype=dtype,
        )
        self.group_norm = nn.GroupNorm(num_groups, out_channels, eps, affine, device=device, dtype=dtype)
        self.precision = precision
        self.recompute = recompute

    @classmethod
    def from_modules(
        cls,
        conv_transpose: nn.ConvTranspose3d,
        group_norm: nn.GroupNorm,
        precision: str | None = None,
        recompute: bool = False,
    ) -> "ConvTranspose3dReLUGroupNorm":
        """The block of two existing modules. It holds these very modules, so their parameters are shared.

        Args:
            conv_transpose, group_norm: of equally many channels.
            precision, recompute: as in conv_transpose3d_relu_group_norm.

        Raises:
            TypeError: another type of module, one with a forward of its own or with forward hooks, or one not
                yet initialized.
            ValueError: channels of the two differ, padding_mode is not "zeros", or an unknown precision.
        """
        _require_kinds(conv_transpose, group_norm)
        for name, module in (("conv_transpose", conv_transpose), ("group_norm", group_norm)):
            if module._forward_pre_hooks or module._forward_hooks:
                if name == "conv_transpose" and is_lazy(conv_transpose.weight):
                    continue
                raise TypeError(
                    f"upconv3d: {name} has forward hooks (spectral_norm, weight_norm and prune of "
                    f"torch.nn.utils add them), and the block would not run them. Remedy: "
                    f"torch.nn.utils.parametrizations, or remove the hooks."
                )
        if is_lazy(conv_transpose.weight):
            raise TypeError(
                "upconv3d: conv_transpose has uninitialized parameters; run it once, or give in_channels, "
                "before from_modules."
            )
        if conv_transpose.padding_mode != "zeros":
            raise ValueError(
                f"upconv3d: only padding_mode='zeros' is defined for a transposed convolution; got "
                f"padding_mode={conv_transpose.padding_mode!r}. Remedy: padding_mode='zeros', as "
                f"torch.nn.ConvTranspose3d has it."
            )
        if conv_transpose.out_channels != group_norm.num_channels:
            raise ValueError(
                f"upconv3d: group_norm must normalize the channels that conv_transpose produces; got "
                f"out_channels={conv_transpose.out_channels} and num_channels={group_norm.num_channels}. "
                f"Remedy: a GroupNorm of {conv_transpose.out_channels} channels."
            )
        _check_precision(precision)
        block = cls.__new__(cls)
        nn.Module.__init__(block)
        block.conv_transpose = conv_transpose
        block.group_norm = group_norm
        block.precision = precision
        block.recompute = recompute
        block.training = conv_transpose.training
        return block

    def forward(self, input: Tensor, output_size: list[int] | None = None) -> Tensor:
        """The block on [N, C, D, H, W] or [C, D, H, W].

        Args:
            output_size: extents of the result, three or with samples and channels before them; chooses
                output_padding among what the stride allows, as in nn.ConvTranspose3d.

        Returns: [N, K, Z, P, Q] or [K, Z, P, Q].

        Raises: as conv_transpose3d_relu_group_norm; ValueError where output_size cannot be had; TypeError
            where a module inside was exchanged for one of another kind, or with a forward of its own.
        """
        if not torch.jit.is_scripting():  # type: ignore[attr-defined]
            modules: Any = self._modules
            conv: nn.ConvTranspose3d = modules["conv_transpose"]
            norm: nn.GroupNorm = modules["group_norm"]
            # Asked at each call, for modules may be exchanged.
            if type(conv) is not nn.ConvTranspose3d or type(norm) is not nn.GroupNorm:
                _require_kinds(conv, norm)
            output_padding: Any = conv.output_padding
            if output_size is not None:
                output_padding = conv._output_padding(
                    input,
                    list(output_size),
                    conv.stride,  # type: ignore[arg-type]
                    conv.padding,  # type: ignore[arg-type]
                    conv.kernel_size,  # type: ignore[arg-type]
                    3,
                    conv.dilation,  # type: ignore[arg-type]
                )
            return conv_transpose3d_relu_group_norm(
                input,
                _parameter(conv, "weight"),
                _parameter(conv, "bias"),
                conv.stride,
                conv.padding,  # type: ignore[arg-type]
                output_padding,
                conv.groups,
                conv.dilation,
                num_groups=norm.num_groups,
                norm_weight=_parameter(norm, "weight"),
                norm_bias=_parameter(norm, "bias"),
                eps=norm.eps,
                precision=self.precision,
                recompute=self.recompute,
            )
        return self._scripted_forward(input, output_size)

    def _scripted_forward(self, input: Tensor, output_size: list[int] | None) -> Tensor:
        """forward in the Python that TorchScript compiles.

        Raises: ValueError (from a script torch.jit.Error) where precision is None and input is float32 on
            CUDA: TorchScript cannot read torch.backends.
        """
        precision = self.precision
        if precision is None:
            if input.is_cuda and input.dtype == torch.float32:
                raise ValueError(
                    "upconv3d: under torch.jit.script, precision must be 'ieee' or 'tf32' for float32 input "
                    "on CUDA; got precision=None. Remedy: set it on the module before torch.jit.script."
                )
            precision = "ieee"
        conv = self.conv_transpose
        norm = self.group_norm
        output_padding = conv._output_padding(
            input,
            output_size,
            conv.stride,  # type: ignore[arg-type]
            conv.padding,  # type: ignore[arg-type]
            conv.kernel_size,  # type: ignore[arg-type]
            3,
            conv.dilation,  # type: ignore[arg-type]
        )
        y: Tensor = torch.ops.upconv3d.conv_transpose3d_relu_group_norm(
            input,
            conv.weight,
            conv.bias,
            conv.stride,
            conv.padding,
            output_padding,
            conv.groups,
            conv.dilation,
            norm.num_groups,
            norm.weight,
            norm.bias,
            norm.eps,
            precision,
        )
        return y

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Modules that were pickled before there was such a choice.
        super().__setstate__({"recompute": False} | state)  # type: ignore[no-untyped-call]

    def extra_repr(self) -> str:
        said = [] if self.precision is None else [f"precision={self.precision!r}"]
        return ", ".join([*said, "recompute=True"] if self.recompute else said)
