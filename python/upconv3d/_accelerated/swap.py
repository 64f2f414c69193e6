# SPDX-License-Identifier: Apache-2.0
"""Modules that are given another class: a subclass of their own, with a forward of ours.

Parameters, submodules, names, hooks and state stay where they are. The subclasses are made at run time, so
pickle and copy rebuild the module from its first class.
"""

import abc
import contextlib
import functools
import threading
import types
from collections.abc import Callable
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import nn
from torch.nn.modules.module import _has_any_global_hook

from .._own_class import own_forward
from ..functional import _dynamo_compiling, _tracing
from .block import Block, Options
from .chain import is_called_plainly, why_watched
from .in_graph import Path, Recipe, recipe_of, run_in_graph
from .remembered import Remembered, is_left, left_kind, remember
from .run import Decision, run_block, run_chain, takes
from .super_calls import names_its_class

_OPTIONS = "_upconv3d_options"
_REMEMBERED = "_upconv3d_remembered"
_LEFT = "_upconv3d_left"
# By mixin and the id of the base, which lives as long as the class made of it: that goes with the last module
# that has it.
_made: WeakValueDictionary[tuple[type, int], type[nn.Module]] = WeakValueDictionary()
_making = threading.Lock()
_OF_EACH_CLASS = ("__dict__", "__weakref__")  # which type() makes anew
# What we run in one: somebody may give the class others.
_OF_SEQUENTIAL = nn.Sequential.forward, nn.Sequential.__iter__


class Accelerated(nn.Module):
    """The mixin before a module's own class."""

    # The module's own class, and ours made of it; classes that others put on top inherit both.
    _upconv3d_base: type[nn.Module]
    _upconv3d_made: type[nn.Module]
    # Attributes of an instance that copies and pickles do not carry.
    _upconv3d_volatile: tuple[str, ...] = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        # Ours are no classes of the model's author, whose registries, say, are not to hear of them.
        if "_upconv3d_base" not in cls.__dict__:
            super().__init_subclass__(**kwargs)

    @staticmethod
    def _upconv3d_forward(base: Any) -> Callable[..., Any]:
        """A forward for a class made of base.

        It reads no global names, for it is given those of base's (_in_the_place_of), and holds what it calls,
        so that somebody who keeps it as a method may call it after restore(), too.
        """
        raise NotImplementedError

    def __reduce_ex__(self, protocol: Any) -> Any:
        cls = type(self)
        if cls is not cls._upconv3d_made:  # somebody's on top of ours, which a copy has too
            return super().__reduce_ex__(protocol)
        # object.__getstate__ exists from Python 3.11 on.
        getter = getattr(self, "__getstate__", None)
        state = self.__dict__ if getter is None else getter()
        if isinstance(state, dict):  # a __getstate__ of its class's may return anything
            state = {k: v for k, v in state.items() if k not in cls._upconv3d_volatile}
        mixin = next(cls for cls in cls.__mro__ if cls in MIXINS)
        return rebuild, (mixin.__name__, self._upconv3d_base, self.__dict__.get(_OPTIONS)), state


class AcceleratedSequential(Accelerated):
    """nn.Sequential's forward, with the blocks in it in one call each.

    Sequentials inside it that nobody watches are run as part of it.
    """

    _upconv3d_volatile = (_REMEMBERED, _LEFT)

    @staticmethod
    def _upconv3d_forward(base: Any) -> Callable[..., Any]:
        _upconv3d_base, _upconv3d_run = base, _run_sequential

        def forward(self: Any, input: Any) -> Any:
            return _upconv3d_run(_upconv3d_base, self, input)

        return forward

    def _upconv3d_recipe(self, dtype: torch.dtype) -> Recipe | None:
        """recipe_of this module's chain."""
        if not _goes_over_children(type(self), self._upconv3d_base.forward):
            return None
        children: list[tuple[Path, Path]] = []
        return recipe_of(_places(self, children), children, dtype)

    # As torch.compiler.assume_constant_result marks it, which would import Dynamo: called while Dynamo
    # traces, on the module itself, and not looked into.
    _upconv3d_recipe._dynamo_marked_constant = True  # type: ignore[attr-defined]


def _run_sequential(base: Any, sequential: nn.Module, input: Any) -> Any:
    """What an accelerated Sequential, whose own class is base, returns of input."""
    compiling = _dynamo_compiling()
    # Where all blocks are left to PyTorch, its own forward is right whatever the modules have become
    # since, and nothing is asked of them. (Dynamo would guard on what is kept here.)
    if not compiling:
        kind = sequential.__dict__.get(_LEFT)
        if kind is not None and is_left(input, kind):
            return base.forward(sequential, input)
    options = sequential.__dict__.get(_OPTIONS)
    # A slice has none, which nobody asked to accelerate. Hooks of all modules see each by itself.
    if options is None or _has_any_global_hook():  # type: ignore[no-untyped-call]
        return base.forward(sequential, input)
    if compiling:
        y = run_in_graph(sequential, input, options)
        if y is not None:
            return y
    if not _goes_over_children(type(sequential), base.forward):
        return base.forward(sequential, input)
    if compiling or _tracing():
        return run_chain(leaves(sequential), input, options)
    return _run_and_remember(sequential, input, options)


def _run_and_remember(sequential: nn.Module, input: Any, options: Options) -> Any:
    """The chain of an accelerated Sequential on input, by what was found and decided at earlier calls."""
    attributes = sequential.__dict__
    remembered: Remembered | None = attributes.get(_REMEMBERED)
    if remembered is not None and remembered.holds(sequential):
        y, left = remembered.run(sequential, input, options)
    else:
        containers: list[nn.Module] = [sequential]
        chain = leaves(sequential, containers)
        remembered = attributes[_REMEMBERED] = remember(containers, chain)
        if remembered is not None:
            y, left = remembered.run(sequential, input, options)
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

    @staticmethod
    def _upconv3d_forward(base: Any) -> Callable[..., Any]:
        _upconv3d_base, _upconv3d_run = base, _run_conv

        def forward(self: Any, input: Any, output_size: Any = None) -> Any:
            return _upconv3d_run(_upconv3d_base, self, input, output_size)

        return forward


def _run_conv(base: Any, conv: Any, input: Any, output_size: Any) -> Any:
    """What an accelerated convolution, whose own class is base, returns."""
    options = conv.__dict__.get(_OPTIONS)
    if options is None or output_size is not None or not takes(input):
        return base.forward(conv, input, output_size)
    y = run_block(Block(conv, 1, "norm_act", None, None, None, None), input, options)
    return base.forward(conv, input) if y is None else y


def is_sequential(module: nn.Module) -> bool:
    """Whether calling module is calling its children, one after the other, each a module."""
    return _has_sequential_forward(module) and None not in module._modules.values()


def _goes_over_children(cls: Any, forward: Any) -> bool:
    """Whether forward, on a module of class cls, does what a Sequential's did when this was imported."""
    of_sequential, iterate = _OF_SEQUENTIAL
    return forward is of_sequential and cls.__iter__ is iterate


def _has_sequential_forward(module: nn.Module) -> bool:
    if not isinstance(module, nn.Sequential) or "forward" in module.__dict__:
        return False
    return _goes_over_children(type(module), own_forward(module)) and is_called_plainly(type(module))


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


def _in_the_place_of(own: Any, forward: Any) -> Any:
    """forward as a function that says of itself what own would.

    torch.jit.script compiles own's source, and looks names up among those of the function that it was given;
    inspect.signature and torch.fx read own too.
    """
    names = getattr(own, "__globals__", forward.__globals__)
    cells = getattr(own, "__closure__", None)
    if cells is not None:
        names = dict(names)
        for name, cell in zip(own.__code__.co_freevars, cells, strict=True):
            with contextlib.suppress(ValueError):  # one that is still empty
                names[name] = cell.cell_contents
    code, defaults, closure = forward.__code__, forward.__defaults__, forward.__closure__
    return functools.wraps(own)(types.FunctionType(code, names, forward.__name__, defaults, closure))


def accelerated_class(mixin: type[Accelerated], base: type[nn.Module]) -> type[nn.Module]:
    """The subclass of base with mixin's forward; the same one as long as anything has it."""
    with _making:
        made = _made.get((mixin, id(base)))
        if made is None:
            # Its name is base's: code that asks for a class by name goes on working.
            names: dict[str, Any] = {
                "__module__": base.__module__,
                "__qualname__": base.__qualname__,
                "__doc__": base.__doc__,
            }
            # torch.jit.script reads the nearest, which are not to be the mixin's.
            annotated = (cls.__dict__.get("__annotations__") for cls in base.__mro__)  # noqa: RUF063
            names["__annotations__"] = next((found for found in annotated if found is not None), {})
            made_now: Any = type(base.__name__, (mixin, base), names | {"_upconv3d_base": base})
            made_now._upconv3d_made = made_now
            made_now.forward = _in_the_place_of(base.forward, mixin._upconv3d_forward(base))
            made = _made[mixin, id(base)] = made_now
        return made


def rebuild(mixin: str, base: type[nn.Module], options: Options | None = None) -> nn.Module:
    """A module for pickle and copy, empty but for options, which a __getstate__ of base's may leave out."""
    cls = accelerated_class(next(found for found in MIXINS if found.__name__ == mixin), base)
    module = cls.__new__(cls)
    if options is not None:
        module.__dict__[_OPTIONS] = options
    return module


def set_class(module: nn.Module, cls: type[nn.Module]) -> None:
    """Gives module another class; a __setattr__ of its own has no part in that."""
    object.__setattr__(module, "__class__", cls)


# By these a class says how its modules are copied, which rebuild() does in its own way.
_COPYING = ("__reduce__", "__reduce_ex__", "__deepcopy__", "__copy__", "__getnewargs__", "__getnewargs_ex__")


def why_not_swapped(module: nn.Module, mixin: type[Accelerated]) -> str | None:
    """What would be lost if module were given another class, or why it cannot be."""
    cls = type(module)
    if isinstance(module, Accelerated):
        return f"{cls.__name__} was made from an accelerated class"
    for name in _COPYING:
        if getattr(cls, name, None) is not getattr(nn.Module, name, None):
            return f"{cls.__name__} has a {name} of its own"
    if "forward" in module.__dict__:
        return f"{cls.__name__} had its forward replaced"
    if not is_called_plainly(cls):
        return f"{cls.__name__} has a __call__ of its own"
    for name, method in vars(cls).items():
        if name != "__init__" and names_its_class(method):
            return f"{cls.__name__}.{name} calls super() of whatever class self has"
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


def _is_parametrized(module: nn.Module, made: type[nn.Module]) -> bool:
    """Whether module has the class that torch.nn.utils.parametrize puts on top of made."""
    cls = type(module)
    return (
        cls.__bases__ == (made,)
        and cls.__name__ == f"Parametrized{made.__name__}"
        and isinstance(module._modules.get("parametrizations"), nn.ModuleDict)
    )


def unswap(module: nn.Module) -> None:
    """The module as it was before swap(); nothing where it was not swapped.

    One that was parametrized since stays that. One that has yet another class keeps it, and runs its own
    forward.
    """
    if isinstance(module, Accelerated):
        cls: Any = type(module)
        for name in (_OPTIONS, *cls._upconv3d_volatile):
            module.__dict__.pop(name, None)
        if "_upconv3d_base" in cls.__dict__:
            set_class(module, cls._upconv3d_base)
        elif _is_parametrized(module, cls._upconv3d_made):
            # A class of its own, for copies that are still accelerated have this one.
            own = {name: value for name, value in vars(cls).items() if name not in _OF_EACH_CLASS}
            set_class(module, type(cls.__name__, (cls._upconv3d_base,), own))


MIXINS: list[type[Accelerated]] = [AcceleratedSequential, AcceleratedConvTranspose]
