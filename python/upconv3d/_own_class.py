# SPDX-License-Identifier: Apache-2.0
"""What a module is apart from what accelerate() made of its class, and whether it is what a block takes."""

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


def require_kind(
    name: str,
    module: Any,
    expected: tuple[type[nn.Module], ...],
    otherwise: str = "call the modules one after the other",
) -> type[nn.Module]:
    """Which of `expected` the module is an instance of.

    name, otherwise: what the caller calls the module, and what to do with modules of other kinds.

    Raises: TypeError where it is none, or has a forward of its own, which the block would leave out.
    """
    for base in expected:
        if isinstance(module, base):
            if own_forward(module) is base.forward:
                return base
            raise TypeError(
                f"upconv3d: {name} is a {type(module).__name__} whose forward is not that of "
                f"torch.nn.{base.__name__}, and the block would not run it. Remedy: call the modules one "
                f"after the other, instead of the block."
            )
    known = ", ".join(f"torch.nn.{cls.__name__}" for cls in expected)
    rule = f"one of {known}" if len(expected) > 1 else f"a {known}"
    raise TypeError(
        f"upconv3d: {name} must be {rule}; got {type(module).__name__}. Remedy: pass such a module; "
        f"for others {otherwise}."
    )
