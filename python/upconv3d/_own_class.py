# SPDX-License-Identifier: Apache-2.0
"""What a module is apart from what accelerate() made of its class."""

from typing import Any

from torch import nn


def own_class(module: nn.Module) -> type[nn.Module]:
    """The class that module has or, if it was accelerated, had."""
    cls: Any = type(module)
    return cls._upconv3d_base if "_upconv3d_base" in cls.__dict__ else cls  # type: ignore[no-any-return]


def own_forward(module: nn.Module) -> Any:
    """The forward of module's class or, where that is ours, the one that it stands for.

    Of a class that somebody put on top of an accelerated one, its forward if it has one.
    """
    cls: Any = type(module)
    made = getattr(cls, "_upconv3d_made", None)
    return cls._upconv3d_base.forward if made is not None and cls.forward is made.forward else cls.forward
