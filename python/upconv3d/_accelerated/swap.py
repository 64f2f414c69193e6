# SPDX-License-Identifier: Apache-2.0
"""Modules that are given another class: a subclass of their own, with a forward of ours.

Parameters, submodules, names, hooks and state stay where they are. The subclasses are made at run time, so
pickle and copy rebuild the module from its first class.
"""

import abc
import functools
import threading
import types
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import _has_any_global_hook

from ..functional import _dynamo_compiling, _tracing
from .block import Block, Options
from .chain import runs_forward_of, why_watched
from .in_graph import Path, Recipe, recipe_of, run_in_graph
from .remembered import Remembered, is_left, left_kind, remember
from .run import Decision, run_block, run_chain, takes

_OPTIONS = "_upconv3d_options"
_REMEMBERED = "_upconv3d_remembered"
_LEFT = "_upconv3d_left"
_made: dict[tuple[type, type], type] = {}
_making = threading.Lock()


class Accelerated(nn.Module):
    """The mixin before a module's own class."""

    _upconv3d_base: type[nn.Module]
    # Attributes of an instance that copies and pickles do not carry.
    _upconv3d_volatile: tuple[str, ...] = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        # Ours are no classes of the model's author, whose registries, say, are not to hear of them.
        if "_upconv3d_base" not in cls.__dict__:
            super().__init_subclass__(**kwargs)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        # object.__getstate__ exists from Python 3.11 on.
        getter = getattr(self, "__getstate__", None)
        state = self.__dict__ if getter is None else getter()
        if isinstance(state, dict):  # a __getstate__ of its class's may return anything
            state = {k: v for k, v in state.items() if k not in type(self)._upconv3d_volatile}
        mixin = next(cls for cls in type(self).__mro__ if cls in MIXINS)
        return rebuild, (mixin.__name__, self._upconv3d_base), state

    def __prepare_scriptable__(self) -> nn.Module:
        """The module as it was, for torch.jit.script, which compiles the forward of its class."""
        plain = self._upconv3d_base.__new__(self._upconv3d_base)
        plain.__dict__.update(self.__dict__)
        return plain


class AcceleratedSequential(Accelerated):
    """nn.Sequential's forward, with the blocks in it in one call each.

    Sequentials inside it that nobody watches are run as part of it.
    """

    _upconv3d_volatile = (_REMEMBERED, _LEFT)

    def forward(self, input: Any) -> Any:
        base: Any = self._upconv3d_base
        compiling = _dynamo_compiling()
        # Where all blocks are left to PyTorch, its own forward is right whatever the modules have become
        # since, and nothing is asked of them. (Dynamo would guard on what is kept here.)
        if not compiling:
            kind = self.__dict__.get(_LEFT)
            if kind is not None and is_left(input, kind):
                return base.forward(self, input)
        options = self.__dict__.get(_OPTIONS)
        # A slice has none, which nobody asked to accelerate. Hooks of all modules see each by itself.
        if options is None or _has_any_global_hook():  # type: ignore[no-untyped-call]
            return base.forward(self, input)
        if compiling:
            y = run_in_graph(self, input, options)
            return run_chain(leaves(self), input, options) if y is None else y
        if _tracing():
            return run_chain(leaves(self), input, options)
        return _run_and_remember(self, input, options)

    def _upconv3d_recipe(self, dtype: torch.dtype) -> Recipe | None:
        """recipe_of this module's chain."""
        children: list[tuple[Path, Path]] = []
        return recipe_of(_places(self, children), children, dtype)

    # As torch.compiler.assume_constant_result marks it, which would import Dynamo: called while Dynamo
    # traces, on the module itself, and not looked into.
    _upconv3d_recipe._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _run_and_remember(sequential: nn.Module, input: Any, options: Options) -> Any:
    """The chain of an accelerated Sequential on input, by what was found and decided at earlier calls."""
    attributes = sequential.__dict__
    remembered: Remembered | None = attributes.get(_REMEMBERED)
    if remembered is not None and remembered.holds(sequential):
        y, left = remembered.run(input, options)
    else:
        containers: list[nn.Module] = [sequential]
        chain = leaves(sequential, containers)
        remembered = attributes[_REMEMBERED] = remember(containers, chain)
        if remembered is not None:
            y, left = remembered.run(input, options)
        else:
            told: list[Decision] = []
            y = run_chain(chain, input, options, told)
            convs = sum(isinstance(module, nn.ConvTranspose3d) for module in chain)
            left = 0 < len(told) == convs and all(decision.settings is None for decision in told)
    kind = left_kind(input) if left else None
    if kind is not None:
        attributes[_LEFT] = kind
    else:  # what was decided before about other calls is decided anew
        attributes.pop(_LEFT, None)
    return y


class AcceleratedConvTranspose(Accelerated):
    """A convolution by itself, with nothing behind it that could be part of its call."""

    def forward(self, input: Any, output_size: Any = None) -> Any:
        base: Any = self._upconv3d_base
        options = self.__dict__.get(_OPTIONS)
        if options is None or output_size is not None or not takes(input):
            return base.forward(self, input, output_size)
        conv: Any = self
        block = Block(conv, 1, "norm_act", None, None, None, None)
        y = run_block(block, input, options)
        return base.forward(self, input) if y is None else y


def is_sequential(module: nn.Module) -> bool:
    """Whether calling module is calling its children, one after the other, each a module."""
    return _has_sequential_forward(module) and None not in module._modules.values()


def _has_sequential_forward(module: nn.Module) -> bool:
    if not isinstance(module, nn.Sequential):
        return False
    return isinstance(module, AcceleratedSequential) or (
        runs_forward_of(module, nn.Sequential) and type(module).__iter__ is nn.Sequential.__iter__
    )


def why_not_called(module: nn.Module) -> str | None:
    """Why a call of a Sequential raises, or None; such a one may stand in a model and be never called."""
    missing = next((name for name, child in module._modules.items() if child is None), None)
    if missing is None or not _has_sequential_forward(module):
        return None
    return f"its child {missing!r} is None, which its forward would call"


def _is_part(child: Any) -> bool:
    """Whether a Sequential's child is one whose own children are called instead."""
    return isinstance(child, nn.Sequential) and is_sequential(child) and why_watched(child) is None


def _called(name: str, child: nn.Module | None) -> nn.Module:
    """Raises: TypeError, as calling None does: a child was taken away since."""
    if child is None:
        raise TypeError(
            f"upconv3d: a Sequential's children are modules, which it calls; got None for {name!r}. Remedy: "
            f"torch.nn.Identity()."
        )
    return child


def leaves(sequential: nn.Module, nested: list[nn.Module] | None = None) -> list[nn.Module]:
    """The modules that a Sequential calls, in order, those of Sequentials in it for these.

    nested: gets those Sequentials.
    """
    found: list[nn.Module] = []
    for name, child in sequential._modules.items():
        child = _called(name, child)
        if _is_part(child):
            found.extend(leaves(child, nested))
            if nested is not None:
                nested.append(child)
        else:
            found.append(child)
    return found


def _places(
    sequential: nn.Module, children: list[tuple[Path, Path]], path: Path = ()
) -> list[tuple[Path, nn.Module]]:
    """leaves() with the way to each; children gets the names of those of each Sequential."""
    children.append((path, tuple(sequential._modules)))
    found: list[tuple[Path, nn.Module]] = []
    for name, child in sequential._modules.items():
        child = _called(name, child)
        if _is_part(child):
            found.extend(_places(child, children, (*path, name)))
        else:
            found.append(((*path, name), child))
    return found


def _copy_of(forward: Any) -> Any:
    """The same function with attributes of its own. (One that passes its arguments on costs a frame.)"""
    code, names = forward.__code__, forward.__globals__
    return types.FunctionType(code, names, forward.__name__, forward.__defaults__, forward.__closure__)


def accelerated_class(mixin: type[Accelerated], base: type[nn.Module]) -> type[nn.Module]:
    """The subclass of base with mixin's forward; the same one for every call."""
    with _making:
        made = _made.get((mixin, base))
        if made is None:
            # Its name is base's: code that asks for a class by name goes on working.
            names = {
                "__module__": base.__module__,
                "__qualname__": base.__qualname__,
                "__doc__": base.__doc__,
            }
            made_now: Any = type(base.__name__, (mixin, base), names | {"_upconv3d_base": base})
            # What inspect.signature says of it, and what torch.fx traces of it, are base's.
            made_now.forward = functools.wraps(base.forward)(_copy_of(mixin.forward))
            made = _made[mixin, base] = made_now
        return made


def rebuild(mixin: str, base: type[nn.Module]) -> nn.Module:
    """An empty module for pickle and copy."""
    cls = accelerated_class(next(found for found in MIXINS if found.__name__ == mixin), base)
    return cls.__new__(cls)


def set_class(module: nn.Module, cls: type[nn.Module]) -> None:
    """Gives module another class; a __setattr__ of its own has no part in that."""
    object.__setattr__(module, "__class__", cls)


def why_not_swapped(module: nn.Module, mixin: type[Accelerated]) -> str | None:
    """What would be lost if module were given another class, or why it cannot be."""
    cls = type(module)
    if isinstance(module, Accelerated):
        return f"{cls.__name__} was made from an accelerated class"
    for name in ("__reduce__", "__reduce_ex__", "__deepcopy__", "__copy__", "__prepare_scriptable__"):
        if getattr(cls, name, None) is not getattr(nn.Module, name, None):
            return f"{cls.__name__} has a {name} of its own"
    if "forward" in module.__dict__:
        return f"{cls.__name__} had its forward replaced"
    if cls.__call__ is not nn.Module.__call__:
        return f"{cls.__name__} has a __call__ of its own"
    made_by: Any = type(cls)
    if made_by.__new__ not in (type.__new__, abc.ABCMeta.__new__) or made_by.__init__ is not type.__init__:
        return f"{cls.__name__} has a metaclass, {made_by.__name__}, that takes part in making subclasses"
    try:
        set_class(module, accelerated_class(mixin, cls))
        set_class(module, cls)
    except Exception as error:  # whatever a class may have against subclasses, or an object against another
        said = str(error).strip().partition("\n")[0][:120] or type(error).__name__
        return f"{cls.__name__} cannot be given a subclass: {said}"
    return None


def swap(module: nn.Module, mixin: type[Accelerated], options: Options) -> None:
    set_class(module, accelerated_class(mixin, type(module)))
    module.__dict__[_OPTIONS] = options


def is_swapped(module: nn.Module) -> bool:
    """Whether module is accelerated; a slice of an accelerated Sequential has its class, but is not."""
    return isinstance(module, Accelerated) and _OPTIONS in module.__dict__


def unswap(module: nn.Module) -> None:
    """The module as it was before swap(); nothing where it was not swapped.

    One that has yet another class since, as of a parametrization, keeps that, and runs its own forward.
    """
    if isinstance(module, Accelerated):
        cls: Any = type(module)
        for name in (_OPTIONS, *cls._upconv3d_volatile):
            module.__dict__.pop(name, None)
        if "_upconv3d_base" in cls.__dict__:
            set_class(module, cls._upconv3d_base)


MIXINS: list[type[Accelerated]] = [AcceleratedSequential, AcceleratedConvTranspose]
