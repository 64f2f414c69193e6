# SPDX-License-Identifier: Apache-2.0
"""The arguments of a forward: which a trace takes, which are constants in it, and which of these vary."""

import inspect
import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from .proof import _CONSTANTS, UnprovableError

# Each doubles the traces, which accelerate() and every copy of a module make.
_MOST_FLAGS = 3


@dataclass(frozen=True)
class Arguments:
    """What a forward takes besides self.

    Attributes:
        names: of all, in order.
        needed: how many have no default: what a trace takes, tensors.
        defaults: of the others, which are constants in a trace.
        flags: names of those whose default is a bool, each of which there are traces of both values of; none
            where these are more than _MOST_FLAGS.
    """

    names: tuple[str, ...]
    needed: int
    defaults: dict[str, Any]
    flags: tuple[str, ...]

    def combinations(self) -> Iterator[dict[str, Any]]:
        """The constants that there are traces of, by name: the defaults, then with other flags."""
        for changed in itertools.product((False, True), repeat=len(self.flags)):
            yield self.defaults | {
                name: self.defaults[name] is not change
                for name, change in zip(self.flags, changed, strict=True)
            }

    def flags_of(self, constants: dict[str, Any]) -> tuple[bool, ...]:
        return tuple(constants[name] for name in self.flags)

    def read(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], tuple[bool, ...]] | None:
        """What a call gives for the arguments without defaults, and for the flags; None where it gives other
        constants than there is a trace of, or what is no call of forward."""
        if len(args) > len(self.names):
            return None
        given = dict(zip(self.names, args, strict=False))
        for name, value in kwargs.items():
            if name in given or name not in self.names:
                return None
            given[name] = value
        flags = []
        for name, default in self.defaults.items():
            value = given.get(name, default)
            if name in self.flags and type(value) is bool:
                flags.append(value)
            elif not _is_same(value, default):
                return None
        tensors = tuple(given[name] for name in self.names[: self.needed] if name in given)
        return (tensors, tuple(flags)) if len(tensors) == self.needed else None


def _is_same(value: Any, constant: Any) -> bool:
    """Whether value, given in the place of a constant, leaves a trace what it is."""
    if value is constant:
        return True
    if type(value) is not type(constant) or value != constant:
        return False
    if type(value) is complex:
        return _is_same(value.real, constant.real) and _is_same(value.imag, constant.imag)
    # 0.0 == -0.0, by which other quotients come out.
    return type(value) is not float or math.copysign(1.0, value) == math.copysign(1.0, constant)


def arguments_of(module: nn.Module) -> Arguments:
    """Raises: UnprovableError."""
    needed, defaults = 0, {}
    static = isinstance(inspect.getattr_static(type(module), "forward"), staticmethod)
    parameters = list(inspect.signature(type(module).forward).parameters.values())[0 if static else 1 :]
    for parameter in parameters:
        if parameter.kind is not inspect.Parameter.POSITIONAL_OR_KEYWORD:
            raise UnprovableError("its forward takes arguments of an unusual kind")
        if parameter.default is inspect.Parameter.empty:
            needed += 1
        else:
            defaults[parameter.name] = parameter.default
    flags = tuple(name for name, default in defaults.items() if type(default) is bool)
    names = tuple(parameter.name for parameter in parameters)
    return Arguments(names, needed, defaults, flags if len(flags) <= _MOST_FLAGS else ())


def require_constants(defaults: dict[str, Any]) -> None:
    """Raises: UnprovableError: the code of a trace would not say of one what it is, or compare it with it."""
    for name, value in defaults.items():
        if type(value) not in _CONSTANTS or value != value:
            kind = "nan" if type(value) is float else f"a {type(value).__name__}"
            raise UnprovableError(f"its forward has a default that is no plain number, {name}: {kind}")
