# SPDX-License-Identifier: Apache-2.0
"""torch.ops.upconv3d.conv_transpose3d_norm_act under autocast."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from ._autocast import gradients_lose_range, graph_without_casts
from ._tail import Settings, Tensors, autocast_result_dtype, composite, in_format_of_result, is_plain
from ._tail_arguments import split
from ._tail_op import public_tail

_library = torch.library.Library("upconv3d", "FRAGMENT")  # type: ignore[no-untyped-call]  # keeps registrations alive
_AUTOCAST_CUDA = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCUDA)


def _autocast_kernel(device_type: str) -> Callable[..., tuple[Tensor, Tensor]]:
    def kernel(*arguments: Any) -> tuple[Tensor, Tensor]:
        tensors, settings = split(arguments)
        t, s = Tensors(*tensors), Settings(*settings)
        low = torch.get_autocast_dtype(device_type)
        uncast = theirs = False
        if t.input.device.type != device_type or t.input.dtype == torch.float64:
            low = t.input.dtype
        else:
            uncast = is_plain(t, s) and graph_without_casts(tensors, low, settings)
            theirs = device_type == "cpu" or (t.skip is not None and t.skip.dtype != low)
            theirs = theirs or (not uncast and gradients_lose_range(tensors, low))
        if theirs:
            y, conv = composite(t, s, precise=False)
            if device_type == "cuda":
                y, conv = in_format_of_result(y, t), None if conv is None else in_format_of_result(conv, t)
            return y, t.input.new_empty((0,)) if conv is None else conv
        if uncast:
            cast, settings = [t.input.float(), *tensors[1:]], s._replace(precision="tf32")
        else:
            cast = [None if v is None else v if i == 6 else v.to(low) for i, v in enumerate(tensors)]
        with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST_CUDA):
            y, conv = public_tail(cast, settings)
        if low == t.input.dtype == torch.float64:
            return y, conv
        norm = "group" if s.num_groups > 0 else None
        return y.to(autocast_result_dtype(low, device_type, norm, settings)), conv

    return kernel


def register() -> None:
    """Ties autocast to the operator; the package calls it once."""
    for device_type, key in (("cpu", "AutocastCPU"), ("cuda", "AutocastCUDA")):
        _library.impl("conv_transpose3d_norm_act", _autocast_kernel(device_type), key)  # type: ignore[no-untyped-call]
