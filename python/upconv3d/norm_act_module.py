# SPDX-License-Identifier: Apache-2.0
"""The family as a module, in the place of nn.ConvTranspose3d, a normalization and an activation."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ._own_class import require_kind
from .functional import IntOrTriple, integer, is_number
from .module import _check_precision, _parameter
from .norm_act import require_known, require_number, run_module

_MODULES: dict[type[nn.Module], str] = {
    nn.ReLU: "relu",
    nn.LeakyReLU: "leaky_relu",
    nn.ELU: "elu",
    nn.SiLU: "silu",
    nn.GELU: "gelu",
    nn.PReLU: "prelu",
}
_NORMS = (nn.GroupNorm, nn.InstanceNorm3d)


def _module_of(activation: str | None, parameter: float | None, kind: dict[str, Any]) -> nn.Module | None:
    """The torch.nn module of an activation; `parameter` None is that module's own default."""
    given = () if parameter is None else (parameter,)
    if parameter is not None and activation not in ("leaky_relu", "elu", "prelu"):
        raise ValueError(
            f"upconv3d: activation={activation!r} has no parameter; got activation_param={parameter!r}. "
            f"Remedy: leave it out (leaky_relu, elu and prelu have one)."
        )
    if parameter is not None and activation != "prelu":
        require_number(activation, parameter)
    elif parameter is not None and not is_number(parameter):
        raise TypeError(
            f"upconv3d: activation_param of 'prelu' must be a number, with which its one slope begins; got "
            f"{type(parameter).__name__}. Remedy: leave it out for 0.25; from_modules for one per channel."
        )
    makers: dict[str | None, Callable[[], nn.Module | None]] = {
        "relu": nn.ReLU,
        "leaky_relu": lambda: nn.LeakyReLU(*given),
        "elu": lambda: nn.ELU(*given),
        "silu": nn.SiLU,
        "gelu": nn.GELU,
        "gelu_tanh": lambda: nn.GELU("tanh"),
        "prelu": lambda: nn.PReLU(1, *given, **kind),
        None: lambda: None,
    }
    return makers[activation]()


def _names(module: nn.Module) -> tuple[str, Any]:
    """activation and activation_param of a torch.nn module, read at each call."""
    kind = _MODULES.get(type(module))
    if kind is None:
        kind = _MODULES[require_kind("activation", module, tuple(_MODULES))]
    if kind == "gelu" and module.approximate == "tanh":
        return "gelu_tanh", None
    if kind == "leaky_relu":
        return kind, module.negative_slope
    if kind == "elu":
        return kind, module.alpha
    return kind, _parameter(module, "weight") if kind == "prelu" else None


def _require_module(name: str, module: Any, expected: tuple[type[nn.Module], ...]) -> None:
    """Raises TypeError for a module whose forward, or whose hooks, the block would leave out."""
    require_kind(name, module, expected)
    if any(is_lazy(parameter) for parameter in module.parameters(recurse=False)):
        raise TypeError(f"upconv3d: {name} has uninitialized parameters; run it once before from_modules.")
    if module._forward_pre_hooks or module._forward_hooks:
        raise TypeError(
            f"upconv3d: {name} has forward hooks (spectral_norm, weight_norm and prune of torch.nn.utils add "
            f"them), and the block would not run them. Remedy: torch.nn.utils.parametrizations, or remove "
            f"the hooks."
        )


def _is_group(norm: Any) -> bool:
    """Whether a norm is a GroupNorm, and no InstanceNorm3d.

    Raises: TypeError where it is neither, or has a forward of its own; ValueError where its statistics are
        not those of its input.
    """
    if type(norm) is nn.GroupNorm or require_kind("norm", norm, _NORMS) is nn.GroupNorm:
        return True
    # Those that there are it updates, whatever the flag says.
    if norm.track_running_stats or norm._buffers.get("running_mean") is not None:
        told = "track_running_stats=True" if norm.track_running_stats else "running statistics in its buffers"
        raise ValueError(
            f"upconv3d: norm must take its statistics from the input; got an InstanceNorm3d with {told}. "
            f"Remedy: one made with track_running_stats=False, or PyTorch's own modules."
        )
    return False


def _require_norm(conv_transpose: nn.ConvTranspose3d, norm: Any) -> None:
    _require_module("norm", norm, _NORMS)
    group = _is_group(norm)
    channels = norm.num_channels if group else norm.num_features
    if channels != conv_transpose.out_channels:
        raise ValueError(
            f"upconv3d: norm must normalize the channels that conv_transpose produces; got "
            f"out_channels={conv_transpose.out_channels} and {channels} of {type(norm).__name__}. Remedy: a "
            f"norm of {conv_transpose.out_channels} channels."
        )


class ConvTranspose3dNormAct(nn.Module):
    """conv_transpose3d_norm_act with the parameters of PyTorch's modules.

    The submodules `conv_transpose` (nn.ConvTranspose3d), `norm` (nn.GroupNorm, nn.InstanceNorm3d or None) and
    `activation` (a torch.nn module or None) hold the parameters and the numbers, so state dict keys are
    conv_transpose.*, norm.* and activation.*. The submodules' own forwards do not run, so forward hooks on
    them are not called, except those by which prune, weight_norm and spectral_norm of torch.nn.utils renew a
    parameter. Hooks on this module are called.

    Args:
        in_channels, out_channels, kernel_size, stride, padding, output_padding, groups, bias, dilation: as in
            nn.ConvTranspose3d.
        order, norm, num_groups, activation, return_conv, precision: as in conv_transpose3d_norm_act.
        eps, affine: as in nn.GroupNorm (eps in activation units squared); affine has GroupNorm's default,
            True, for an instance norm too.
        activation_param: leaky_relu's negative_slope, elu's alpha, or the value with which prelu's one slope
            begins; None is torch.nn's own. For a slope per channel use from_modules.
        device, dtype: of the parameters.

    Shape: [N, C, D, H, W] to [N, K, Z, P, Q], or [C, D, H, W] to [K, Z, P, Q]; two of them with return_conv.

    Raises:
        ValueError: an unknown order, norm, activation or precision; channels that groups or num_groups do not
            divide; num_groups missing, below 1 or with another norm than "group"; an activation_param that
            is not finite, or of an activation that has none.
        TypeError: num_groups is no integer, or activation_param no number.

    Sources: as of conv_transpose3d_norm_act.
    """

    order: str
    return_conv: bool
    precision: str | None

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: IntOrTriple,
        stride: IntOrTriple = 1,
        padding: IntOrTriple = 0,
        output_padding: IntOrTriple = 0,
        groups: int = 1,
        bias: bool = True,
        dilation: IntOrTriple = 1,
        *,
        order: str = "norm_act",
        norm: str | None = "group",
        num_groups: int | None = None,
        eps: float = 1e-5,
        affine: bool = True,
        activation: str | None = "relu",
        activation_param: float | None = None,
        return_conv: bool = False,
        precision: str | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        require_known(order, norm, activation)
        _check_precision(precision)
        num_groups = None if num_groups is None else integer(num_groups, "num_groups")
        if (norm == "group") != (num_groups is not None) or (num_groups is not None and num_groups < 1):
            raise ValueError(
                f"upconv3d: num_groups, at least 1, belongs to norm='group'; got num_groups={num_groups} "
                f"with norm={norm!r}. Remedy: num_groups=1 normalizes all channels of a sample together; "
                f"leave it out for other norms."
            )
        kind: dict[str, Any] = {"device": device, "dtype": dtype}
        numbers: tuple[Any, ...] = (stride, padding, output_padding, groups, bias, dilation)
        self.conv_transpose = nn.ConvTranspose3d(
            in_channels,
            out_channels,
            kernel_size,  # type: ignore[arg-type]
            *numbers,
            **kind,
        )
        made: nn.Module | None = None
        if norm == "group" and num_groups is not None:
            made = nn.GroupNorm(num_groups, out_channels, eps, affine, **kind)
        elif norm == "instance":
            made = nn.InstanceNorm3d(out_channels, eps, affine=affine, **kind)
        self.register_module("norm", made)
        self.register_module("activation", _module_of(activation, activation_param, kind))
        self.order, self.return_conv, self.precision = order, return_conv, precision

    @classmethod
    def from_modules(
        cls,
        conv_transpose: nn.ConvTranspose3d,
        norm: nn.Module | None = None,
        activation: nn.Module | None = None,
        *,
        order: str = "norm_act",
        return_conv: bool = False,
        precision: str | None = None,
    ) -> "ConvTranspose3dNormAct":
        """The block of existing modules. It holds these very modules, so their parameters are shared.

        Args:
            norm: nn.GroupNorm or nn.InstanceNorm3d of as many channels as conv_transpose makes, or None.
            activation: nn.ReLU, LeakyReLU, ELU, SiLU, GELU or PReLU, or None.
            order, return_conv, precision: as in conv_transpose3d_norm_act.

        Raises:
            TypeError: another type of module, one with a forward of its own or with forward hooks, or one not
                yet initialized.
            ValueError: channels differ, padding_mode is not "zeros", statistics are tracked, or an unknown
                order or precision.
        """
        require_known(order, None, None)
        _check_precision(precision)
        _require_module("conv_transpose", conv_transpose, (nn.ConvTranspose3d,))
        if conv_transpose.padding_mode != "zeros":
            raise ValueError(
                f"upconv3d: only padding_mode='zeros' is defined for a transposed convolution; got "
                f"padding_mode={conv_transpose.padding_mode!r}. Remedy: padding_mode='zeros', as "
                f"torch.nn.ConvTranspose3d has it."
            )
        if norm is not None:
            _require_norm(conv_transpose, norm)
        if activation is not None:
            _require_module("activation", activation, tuple(_MODULES))
        block = cls.__new__(cls)
        nn.Module.__init__(block)
        block.conv_transpose = conv_transpose
        block.register_module("norm", norm)
        block.register_module("activation", activation)
        block.order, block.return_conv, block.precision = order, return_conv, precision
        block.training = conv_transpose.training
        return block

    def forward(self, input: Tensor, output_size: list[int] | None = None, skip: Tensor | None = None) -> Any:
        """The block on [N, C, D, H, W] or [C, D, H, W].

        Args:
            output_size: extents of the result, three or with samples and channels before them; chooses
                output_padding among what the stride allows, as in nn.ConvTranspose3d.
            skip: as in conv_transpose3d_norm_act.

        Returns: [N, K, Z, P, Q] or [K, Z, P, Q]; with return_conv the pair of it and the convolution.

        Raises: as conv_transpose3d_norm_act; ValueError where output_size cannot be had; TypeError where a
            module inside was exchanged for one of another kind, or with a forward of its own.
        """
        modules: Any = self._modules
        conv, norm, activation = modules["conv_transpose"], modules["norm"], modules["activation"]
        # Asked at each call, for modules may be exchanged; so are the other two below.
        if type(conv) is not nn.ConvTranspose3d:
            require_kind("conv_transpose", conv, (nn.ConvTranspose3d,))
        output_padding = conv.output_padding
        if output_size is not None:
            output_padding = conv._output_padding(
                input, list(output_size), conv.stride, conv.padding, conv.kernel_size, 3, conv.dilation
            )
        vectors, num_groups, eps = (None, None), None, 1e-5
        kind = None
        if norm is not None:
            kind, num_groups = ("group", norm.num_groups) if _is_group(norm) else ("instance", None)
            vectors, eps = (_parameter(norm, "weight"), _parameter(norm, "bias")), norm.eps
        return run_module(
            (input, _parameter(conv, "weight"), _parameter(conv, "bias"), *vectors, skip),
            (conv.stride, conv.padding, output_padding, conv.groups, conv.dilation),
            (self.order, kind, num_groups, eps),
            (None, None) if activation is None else _names(activation),
            self.return_conv,
            self.precision,
        )

    def extra_repr(self) -> str:
        said = [f"order={self.order!r}"]
        said += ["return_conv=True"] if self.return_conv else []
        return ", ".join([*said, *([] if self.precision is None else [f"precision={self.precision!r}"])])
