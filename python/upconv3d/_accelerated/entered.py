# SPDX-License-Identifier: Apache-2.0
"""Modules that a trace looks into instead of recording calls of them: when it may, and what must stay so."""

from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import nn

from .._own_class import own_class
from .arguments import arguments_of
from .chain import is_called_plainly, why_watched
from .proof import Codes, Guards, UnprovableError, _is_simple, holds, prove
from .swap import is_sequential, set_class


class Entered(NamedTuple):
    """A module that is not called by itself any more.

    Attributes:
        cls: the class whose forward was recorded; None for a Sequential.
        guards: what that forward reads, and what it was; of a Sequential nothing.
        names: of a Sequential's children.
        reads_mode: whether that forward reads `training`. If so, there is a trace only of the mode that the
            outer module is in.
        codes, assumed: as in Proof; of a Sequential none.
    """

    cls: type[nn.Module] | None
    guards: Guards
    names: tuple[str, ...]
    reads_mode: bool
    codes: Codes
    assumed: dict[str, bool]

    def fits(self, module: Any, training: bool) -> bool:
        """Whether calling module is what was recorded, in an outer module of that mode."""
        if self.cls is None:
            same = is_sequential(module) and tuple(module._modules) == self.names
            return same and why_watched(module) is None
        return (
            isinstance(module, nn.Module)
            and own_class(module) is self.cls
            and "forward" not in module.__dict__
            and why_watched(module) is None
            and (not self.reads_mode or module.training == training)
            and holds(module, self.guards)
        )


@contextmanager
def as_a(cls: type[nn.Module], module: nn.Module) -> Any:
    """Gives module this class meanwhile."""
    kept = type(module)
    set_class(module, cls)
    try:
        yield
    finally:
        set_class(module, kept)


def entered(module: nn.Module, asks: bool) -> Entered:
    """What must stay so that a call of module with one tensor may be replaced by what its forward does.

    asks: as of prove. Raises: UnprovableError.
    """
    watched = why_watched(module)
    if watched is not None:
        raise UnprovableError(watched)
    if is_sequential(module):
        return Entered(None, (), tuple(module._modules), False, {}, {})
    if "forward" in module.__dict__:
        raise UnprovableError("its forward was replaced")
    if not is_called_plainly(type(module)):
        raise UnprovableError("it has a __call__ of its own")
    with as_a(own_class(module), module):
        proof = prove(module, asks)
        arguments = arguments_of(module)
    if arguments.needed != 1:
        raise UnprovableError(f"its forward takes {arguments.needed} arguments")
    # A list, say, may be what a call leaves for the next.
    if not all(map(_is_simple, arguments.defaults.values())):
        raise UnprovableError("its forward has defaults that are no plain numbers")
    guards, reads_mode, codes, assumed = proof
    return Entered(own_class(module), guards, (), reads_mode, codes, assumed)


def may_be_entered(module: nn.Module) -> bool:
    """Whether module is another's than torch.nn's, or a Sequential."""
    return is_sequential(module) or not (
        own_class(module).__module__.startswith(("torch.nn.", "torch.ao."))
        or isinstance(module, nn.Sequential)
    )
