# SPDX-License-Identifier: Apache-2.0
"""What a forward's result can depend on, read from its source.

torch.fx records what one run of a forward did. That is all it ever does if the forward depends on nothing
but its arguments, its modules, its tensors and plain numbers that can be compared at each call. This
file admits such forwards and names what keeps it from admitting the others.
"""

import ast
import builtins
import contextlib
import inspect
import math
import textwrap
import threading
import time
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .refusals import refusal_of, why_not_asked


class UnprovableError(Exception):
    """What a forward does that a trace would not show."""


class NeedsEntryError(UnprovableError):
    """A forward asks of what a module returned what only that module's forward tells: how long a list is.

    path: of the module.
    """

    def __init__(self, path: str, asked: str) -> None:
        super().__init__(f"its forward {asked} what {path} returns")
        self.path = path


_FORBIDDEN: dict[type[ast.AST], str] = {
    ast.With: "with",
    ast.Try: "try",
    ast.Global: "global",
    ast.Nonlocal: "nonlocal",
    ast.Lambda: "lambda",
    ast.Yield: "yield",
    ast.YieldFrom: "yield from",
    ast.Import: "import",
    ast.ImportFrom: "import",
    ast.FunctionDef: "a function inside",
    ast.ClassDef: "a class inside",
    ast.Delete: "del",
    ast.While: "while",
    ast.NamedExpr: ":=",
    ast.JoinedStr: "an f-string",
}
_BUILTINS = {"len", "range", "enumerate", "zip", "reversed", "list", "tuple", "super", "sum", "min", "max"}
_BUILTINS |= {"True", "False", "None", "ValueError", "RuntimeError", "TypeError"}
_LIST_METHODS = {"append", "extend", "insert", "pop", "reverse"}
_CONTAINER_METHODS = {"values", "items", "keys"}
_SIMPLE = frozenset({bool, int, float, str, type(None)})
# What torch.fx writes into the code of a trace as it is, and compares.
_CONSTANTS = _SIMPLE | {complex, torch.dtype, torch.device, torch.memory_format}
# Functions of tensors that do nothing but return one, and that torch.fx records.
_TORCH = "cat concat stack chunk split flatten add sub mul div relu sigmoid tanh softmax transpose permute"
_TORCH += " squeeze unsqueeze reshape norm mean sum amax abs exp sqrt pow"
_FUNCTIONAL = (
    "relu leaky_relu elu silu gelu prelu sigmoid tanh softmax hardswish mish softplus interpolate pad"
)
_FUNCTIONAL += " dropout dropout3d group_norm instance_norm batch_norm layer_norm conv3d conv_transpose3d"
_FUNCTIONAL += " max_pool3d avg_pool3d adaptive_avg_pool3d linear"
_FUNCTIONS = [getattr(torch, name) for name in _TORCH.split()]
# In a branch that is not run; a trace in which one is made is none (recorded.py).
_FUNCTIONS += [torch.zeros, torch.ones]
_FUNCTIONS += [getattr(F, name) for name in _FUNCTIONAL.split()]
_MODULES = (torch, nn, F)

# CPython 3.11 counts the depth of the tree that it builds in one number for all threads, and a thread that is
# switched to meanwhile may parse too: SystemError for both (https://github.com/python/cpython/issues/106905).
_parsing = threading.RLock()  # a finalizer may parse meanwhile
# A thread that parses without the lock still disturbs one parse in fifty where it does nothing else. Without
# the pause the two may stay in step: ten in a row were seen.
_PARSES = 8
_PAUSE = 1e-3  # s


def _parse(source: str) -> ast.Module:
    """Raises: SyntaxError."""
    for _ in range(_PARSES - 1):
        with _parsing, contextlib.suppress(SystemError):
            return ast.parse(source)
        time.sleep(_PAUSE)
    with _parsing:
        return ast.parse(source)


def _source(function: Callable[..., Any]) -> ast.FunctionDef:
    if not isinstance(function, types.FunctionType) or hasattr(function, "__wrapped__"):
        raise UnprovableError(
            f"{getattr(function, '__qualname__', function)!s} is wrapped in another function"
        )
    try:
        tree = _parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError) as error:
        raise UnprovableError(f"the source of {function.__qualname__} is not at hand") from error
    definition = tree.body[0]
    if not isinstance(definition, ast.FunctionDef):
        raise UnprovableError(f"{function.__qualname__} is not a plain function")
    if any(not (isinstance(d, ast.Name) and d.id == "staticmethod") for d in definition.decorator_list):
        raise UnprovableError(f"{function.__qualname__} is decorated")
    _mangle(definition, function)
    return definition


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """code, and that of the comprehensions in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _mangle(definition: ast.FunctionDef, function: types.FunctionType) -> None:
    """Gives private names, __x, the names that the compiler gave them, _Class__x.

    Raises: UnprovableError: function's name does not say in which class it was written.
    """
    written_in = function.__qualname__.rpartition(".")[0].rpartition(".")[2].lstrip("_")
    compiled: set[str] = set()
    for code in _codes(function.__code__):
        compiled.update(code.co_names, code.co_varnames, code.co_cellvars, code.co_freevars)
    for node in _inside(definition):
        for field in ("id", "attr", "arg"):
            name = getattr(node, field, None)
            if isinstance(node, ast.keyword) or not isinstance(name, str):
                continue
            if name.startswith("__") and not name.endswith("__"):
                mangled = f"_{written_in}{name}" if written_in else name
                if mangled not in compiled:
                    raise UnprovableError(f"{function.__qualname__} uses {name}, another class's")
                setattr(node, field, mangled)


def _inside(node: ast.AST) -> Iterator[ast.AST]:
    """Every node below, annotations left out."""
    for name, value in ast.iter_fields(node):
        if name in ("annotation", "returns", "decorator_list"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST):
                yield child
                yield from _inside(child)


def _known_of_values(attribute: str) -> bool:
    """Whether an attribute of some value, a tensor, a list or a module, is no state of a module."""
    return hasattr(Tensor, attribute) or attribute in _LIST_METHODS | _CONTAINER_METHODS


def _read_of_values(body: list[ast.AST], parents: dict[int, ast.AST], this: str) -> Iterator[str]:
    """The attributes of others than `this` that are not just called."""
    for node in body:
        if isinstance(node, ast.Attribute):
            call = parents.get(id(node))
            called = isinstance(call, ast.Call) and call.func is node
            if not called and not (isinstance(node.value, ast.Name) and node.value.id == this):
                yield node.attr


# The code of each function that was read, and the attributes of others than its module that it does not just
# call.
Codes = dict[types.CodeType, frozenset[str]]


class _Reader:
    """One pass over a forward and the methods that it calls."""

    def __init__(self, module: nn.Module, asks: bool) -> None:
        self.module, self.asks = module, asks
        self.reads: set[str] = set()
        self.seen: set[types.FunctionType] = set()
        self.codes: Codes = {}
        self.assumed: dict[str, bool] = {}
        self.methods: set[str] = set()  # an attribute of the instance would be called in their place
        self.named: set[str] = set()  # what it reads of self otherwise

    def read(self, function: Callable[..., Any], owner: type) -> None:
        """Raises: UnprovableError."""
        definition = _source(function)
        assert isinstance(function, types.FunctionType)
        if function in self.seen:
            return
        self.seen.add(function)
        arguments = definition.args
        if arguments.vararg is not None or arguments.kwarg is not None:
            raise UnprovableError(f"{function.__qualname__} takes *args or **kwargs")
        names = {a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
        bound = not isinstance(inspect.getattr_static(owner, function.__name__, None), staticmethod)
        this = arguments.args[0].arg if bound and arguments.args else ""
        body = [node for statement in definition.body for node in (statement, *_inside(statement))]
        for node in list(body) if self.asks else ():
            refusal = refusal_of(node, this)
            if refusal is not None:
                self._assume(*refusal)
                asked = {id(node), *map(id, _inside(node))}
                body = [node for node in body if id(node) not in asked]
        names |= {n.id for n in body if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        parents = {id(child): node for node in body for child in ast.iter_child_nodes(node)}
        values = frozenset(_read_of_values(body, parents, this))
        self.codes |= dict.fromkeys(_codes(function.__code__), values)
        for node in body:
            self._statement(node)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
                self._name(node, parents, function, owner, this, names)

    def _assume(self, name: str, expected: bool) -> None:
        """Lets a trace go on as if the method of that name returned this, which each call asks.

        Raises: UnprovableError.
        """
        why = why_not_asked(self.module, name, _source)
        if why is None and self.assumed.setdefault(name, expected) is not expected:
            why = f"{name}() is asked whether to raise, and whether not to"
        if why is not None:
            raise UnprovableError(f"its forward raises by what a method says: {why}")

    def _statement(self, node: ast.AST) -> None:
        for kind, word in _FORBIDDEN.items():
            if isinstance(node, kind):
                raise UnprovableError(f"its forward uses {word}")
        if isinstance(node, (ast.Attribute, ast.Subscript)) and not isinstance(node.ctx, ast.Load):
            raise UnprovableError(f"its forward assigns to {ast.unparse(node)}")
        if isinstance(node, ast.Compare):
            # A trace holds other objects than a call.
            sides = [node.left, *node.comparators]
            for operator, left, right in zip(node.ops, sides, sides[1:], strict=False):
                constant = isinstance(left, ast.Constant) or isinstance(right, ast.Constant)
                if isinstance(operator, (ast.Is, ast.IsNot)) and not constant:
                    raise UnprovableError(f"its forward asks whether {ast.unparse(node)}")
        if isinstance(node, ast.Attribute) and not isinstance(node.value, (ast.Name, ast.Attribute)):
            after_super = isinstance(node.value, ast.Call) and ast.unparse(node.value) == "super()"
            if not after_super and not _known_of_values(node.attr):
                raise UnprovableError(f"its forward reads {ast.unparse(node)}")

    def _name(
        self,
        node: ast.Name,
        parents: dict[int, ast.AST],
        function: types.FunctionType,
        owner: type,
        this: str,
        names: set[str],
    ) -> None:
        """Judges what is reached from one name: a chain of attributes, as in torch.nn.functional.relu."""
        chain: list[str] = []
        top: ast.AST = node
        while isinstance(parent := parents.get(id(top)), ast.Attribute):
            chain.append(parent.attr)
            top = parent
        if this and node.id == this:
            self._own(chain, owner)
        elif node.id in function.__code__.co_freevars:
            raise UnprovableError(f"its forward uses {node.id}, of a function around it")
        elif node.id in names:
            if chain and not _known_of_values(chain[0]):
                raise UnprovableError(f"its forward reads {node.id}.{chain[0]}")
        elif node.id == "super":
            self._super(parents.get(id(node)), parents, owner)
        elif node.id in function.__globals__ or not hasattr(builtins, node.id):
            self._global(node.id, chain, function)
        elif node.id not in _BUILTINS:
            raise UnprovableError(f"its forward uses {node.id}()")

    def _global(self, name: str, chain: list[str], function: types.FunctionType) -> None:
        dotted = ".".join([name, *chain])
        found = function.__globals__.get(name)
        for attribute in chain:
            if not isinstance(found, types.ModuleType):
                break
            found = getattr(found, attribute, None)
        if isinstance(found, types.ModuleType) or not any(found is known for known in _FUNCTIONS):
            raise UnprovableError(f"its forward uses {dotted}")

    def _own(self, chain: list[str], owner: type) -> None:
        if not chain:
            raise UnprovableError("its forward hands self to something")
        name = chain[0]
        self.named.add(name)
        static = inspect.getattr_static(type(self.module), name, None)
        if name in self.module.__dict__.get("_modules", {}):
            container = isinstance(self.module._modules[name], (nn.ModuleList, nn.ModuleDict))
            if len(chain) > 1 and not (container and chain[1] in _CONTAINER_METHODS):
                raise UnprovableError(f"its forward reads self.{'.'.join(chain)}")
            _require_parameters(self.module._modules[name], name)
            self.reads.add(name)
        elif name in self.module._parameters or name in self.module._buffers:
            self.reads.add(name)
        elif name in self.module.__dict__:
            if not _is_simple(self.module.__dict__[name]):
                kind = type(self.module.__dict__[name]).__name__
                raise UnprovableError(f"its forward reads self.{name}, a {kind}")
            self.reads.add(name)
        elif isinstance(static, (types.FunctionType, staticmethod)):
            self._method(name, type(self.module))
            self.methods.add(name)
        elif static is None and not hasattr(self.module, name):
            self.reads.add(name)  # in a branch that is not taken as long as this is so
        else:
            raise UnprovableError(f"its forward reads self.{name}")

    def _super(self, call: ast.AST | None, parents: dict[int, ast.AST], owner: type) -> None:
        attribute = parents.get(id(call))
        if not isinstance(call, ast.Call) or call.args or not isinstance(attribute, ast.Attribute):
            raise UnprovableError("its forward uses super in an unusual way")
        mro = type(self.module).__mro__
        self._method(attribute.attr, *mro[mro.index(owner) + 1 :])

    def _method(self, name: str, *classes: type) -> None:
        for cls in classes[0].__mro__ if len(classes) == 1 else classes:
            if name in cls.__dict__:
                if cls is nn.Module:
                    break
                method = cls.__dict__[name]
                method = method.__func__ if isinstance(method, staticmethod) else method
                self.read(method, cls)
                _require_defaults(method, name)
                return
        raise UnprovableError(f"its forward calls self.{name}()")


def _require_defaults(method: Any, name: str) -> None:
    """Raises: UnprovableError: what a call of method leaves out is more than a constant.

    A list may be what a call leaves for the next, and a function is called without its name.
    """
    named = method.__kwdefaults__ or {}
    for value in (*(method.__defaults__ or ()), *named.values()):
        if not _is_simple(value) and type(value) not in _CONSTANTS:
            raise UnprovableError(f"{name}() has a default that is no plain number: a {type(value).__name__}")


_ABSENT = object()  # of an attribute that is not there
# Of one that is no plain number; equal to none, as True would be to 1. (Dynamo compares no plain objects.)
_PRESENT = b"present"
_METHOD = b"method"  # of the class, which no attribute of the instance is in the place of


def _is_simple(value: Any) -> bool:
    """Whether comparing value says whether it is still the same; tuples of such values too.

    Not of subclasses: they may compute and be written, in a trace's code, in ways of their own.
    """
    return type(value) in _SIMPLE or (type(value) in (tuple, torch.Size) and all(map(_is_simple, value)))


_OF_PARAMETERS = (nn.ParameterList, nn.ParameterDict)
_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential, *_OF_PARAMETERS)


def _parameters_of(container: nn.Module) -> dict[str, bool]:
    """The keys of a ParameterList or ParameterDict in order, and whether each has a parameter."""
    of: Any = container
    keys = of.keys() if isinstance(of, nn.ParameterDict) else range(len(of))
    return {str(key): container._parameters.get(str(key)) is not None for key in keys}


def _require_parameters(container: nn.Module | None, name: str) -> None:
    """Raises: UnprovableError: container, or one in it, is one of parameters and holds something else."""
    if isinstance(container, _OF_PARAMETERS) and not all(_parameters_of(container).values()):
        raise UnprovableError(f"its forward reads self.{name}, which holds more than parameters")
    if isinstance(container, _CONTAINERS):
        for child in container._modules.values():
            _require_parameters(child, name)


def _keys(container: nn.Module) -> tuple[Any, ...]:
    """What a loop over container, and over containers in it, depends on."""
    if isinstance(container, _OF_PARAMETERS):
        return tuple(_parameters_of(container).items())
    return tuple(
        (name, _keys(child) if isinstance(child, _CONTAINERS) else None)
        for name, child in container._modules.items()
    )


def _has_keys(container: nn.Module, keys: Any) -> bool:
    """Whether _keys of container are these."""
    if container._parameters:
        same: bool = _keys(container) == keys
        return same
    children = container._modules
    if not isinstance(keys, tuple) or len(children) != len(keys):
        return False
    for (name, inner), here in zip(keys, children, strict=True):
        child = children[here]
        if name != here:
            return False
        if isinstance(child, _CONTAINERS):
            if not _has_keys(child, inner):
                return False
        elif inner is not None:
            return False
    return True


def _is_same(now: Any, state: Any) -> bool:
    """Whether a value is the one that was compared, by type too, in tuples as well; 0.0 is not -0.0."""
    if type(now) is not type(state) or now != state:
        return False
    if type(state) is float:
        return state != 0.0 or math.copysign(1.0, now) == math.copysign(1.0, state)
    return type(state) is not tuple or all(map(_is_same, now, state))


def _state(module: nn.Module, name: str) -> Any:
    """What is compared of an attribute: a number itself, a container's keys, else whether there is one.

    One that a parametrization computes counts as none: reading it would be an evaluation.
    """
    if name in module._modules.get("parametrizations", ()):  # type: ignore[operator]
        return ...
    value = getattr(module, name, _ABSENT)
    if value is _ABSENT:
        return ...
    if isinstance(value, _CONTAINERS):
        return _keys(value)
    return value if _is_simple(value) else _PRESENT


Guards = tuple[tuple[str, Any], ...]


class Proof(NamedTuple):
    """What the trace of a forward depends on.

    Attributes:
        guards: the attributes that it reads, with what they were; not `training`: there is a trace for each
            mode.
        reads_mode: whether it reads `training`.
        codes: of the forward and the methods that it calls.
        assumed: names of methods that it asks whether to raise, and what they return where it does not; none
            where these are traced themselves.
    """

    guards: Guards
    reads_mode: bool
    codes: Codes
    assumed: dict[str, bool]


def prove(module: nn.Module, asks: bool) -> Proof:
    """asks: whether methods by which it decides to raise are to be asked at each call (refusals.py), of which
    no trace shows anything then; else they are traced. Raises: UnprovableError.
    """
    forward = type(module).forward
    owner = next(cls for cls in type(module).__mro__ if "forward" in cls.__dict__)
    reader = _Reader(module, asks)
    reader.read(forward, owner)
    for name in reader.assumed.keys() & reader.named:
        raise UnprovableError(f"its forward uses self.{name}() for more than to raise")
    guards = tuple((name, _state(module, name)) for name in sorted(reader.reads - {"training"}))
    guards += tuple((name, _METHOD) for name in sorted(reader.methods))
    return Proof(guards, "training" in reader.reads, reader.codes, reader.assumed)


def may_read(module: nn.Module, name: str, values: frozenset[str]) -> bool:
    """Whether a forward may read this of a module that it holds: a child or a container's method, to call it.

    A trace calls the child by its name. values: as in Codes.
    """
    children = object.__getattribute__(module, "__dict__").get("_modules", ())
    contained = name in _CONTAINER_METHODS and issubclass(type(module), _CONTAINERS)
    return name not in values and (name in children or contained)


def holds(module: nn.Module, guards: Guards) -> bool:
    """Whether module is as it was when guards were taken."""
    modules = module._modules
    for name, state in guards:
        # Most are modules that are there: getattr finds these last. A loop costs less than all() of it.
        child = modules.get(name)
        if state == _METHOD:
            if name in module.__dict__:
                return False
        elif child is None:
            if not _is_same(_state(module, name), state):
                return False
        elif isinstance(child, _CONTAINERS):
            if not _has_keys(child, state):
                return False
        elif type(state) is not bytes:  # _PRESENT's
            return False
    return True
