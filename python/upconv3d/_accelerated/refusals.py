# SPDX-License-Identifier: Apache-2.0
"""`if not self.method(x): raise` in a forward: which methods a trace may leave to be asked at each call.

A method that computes with sizes, say, cannot be traced, but it can be called: what it says decides whether
the forward that was written raises. It may then be called twice, so it must do nothing but compute, as far as
its source shows: with sizes, plain numbers, builtins that do nothing else, and functions of math and NumPy.
"""

import ast
import builtins
import inspect
import math
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

_BUILTINS = {
    "len",
    "range",
    "enumerate",
    "zip",
    "reversed",
    "list",
    "tuple",
    "sum",
    "min",
    "max",
    "all",
    "any",
}
_BUILTINS |= {"int", "float", "bool", "abs", "round", "divmod", "isinstance", "sorted", "set"}
_OF_NUMPY = "prod array asarray all any min max sum mod remainder"
_OF_TENSORS = {"size", "dim", "numel", "ndimension"}  # called
_READ_OF_TENSORS = {"shape", "ndim", "dtype", "device"}
_KEYWORDS = {"strict", "start", "default", "reverse", "axis"}
_STATEMENTS = (ast.Return, ast.Assign, ast.AnnAssign, ast.If, ast.For, ast.Expr, ast.Pass, ast.Raise)
_STATEMENTS += (ast.Break, ast.Continue, ast.Assert)  # type: ignore[assignment]
_SIMPLE = (bool, int, float, str, type(None))


def refusal_of(node: ast.AST, this: str) -> tuple[str, bool] | None:
    """Of `if self.method(...): raise` or `if not self.method(...): raise` the method's name, and what it
    returns where nothing is raised; None of other nodes. Its arguments are names.

    this: the name of self.
    """
    if not isinstance(node, ast.If) or node.orelse or len(node.body) != 1:
        return None
    test, expected = node.test, False
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        test, expected = test.operand, True
    if not isinstance(node.body[0], ast.Raise) or not isinstance(test, ast.Call) or test.keywords:
        return None
    method, named = test.func, all(isinstance(argument, ast.Name) for argument in test.args)
    if not named or not isinstance(method, ast.Attribute) or not isinstance(method.value, ast.Name):
        return None
    return (method.attr, expected) if this and method.value.id == this else None


def why_not_asked(module: nn.Module, name: str, source: Callable[[Any], ast.FunctionDef]) -> str | None:
    """What a method of module's class does beside computing what it returns, or None.

    source: the definition of a function, or an exception.
    """
    if name in module.__dict__:
        return f"self.{name} is no method of its class"
    return _Pure(module, source).why(name)


class _Pure:
    """One pass over a method, and those of the same module that it calls."""

    def __init__(self, module: nn.Module, source: Callable[[Any], ast.FunctionDef]) -> None:
        self.module, self.source, self.seen = module, source, set[str]()

    def why(self, name: str) -> str | None:
        if name in self.seen:
            return None
        self.seen.add(name)
        static = inspect.getattr_static(type(self.module), name, None)
        function = static.__func__ if isinstance(static, staticmethod) else static
        if not isinstance(function, types.FunctionType):
            return f"self.{name} is no method"
        if function.__closure__ is not None:
            return f"{name}() has names of the function around it"
        definition = self.source(function)
        arguments = definition.args
        if not all(
            map(_is_plain, (function.__defaults__ or ()) + tuple((function.__kwdefaults__ or {}).values()))
        ):
            return f"{name}() has defaults that are no plain numbers"
        names = {a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)}
        this = "" if isinstance(static, staticmethod) or not arguments.args else arguments.args[0].arg
        nodes = [node for statement in definition.body for node in ast.walk(statement)]
        names |= {n.id for n in nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        parents = {id(child): node for node in nodes for child in ast.iter_child_nodes(node)}
        for node in nodes:
            why = self._statement(node) or self._read(node, parents, function, names, this)
            if why is not None:
                return f"{name}() {why}"
        return None

    def _statement(self, node: ast.AST) -> str | None:
        if isinstance(node, ast.stmt) and not isinstance(node, _STATEMENTS):
            return f"has a statement that may do more than compute, {ast.unparse(node).partition(chr(10))[0]}"
        if isinstance(node, (ast.Attribute, ast.Subscript)) and not isinstance(node.ctx, ast.Load):
            return f"assigns to {ast.unparse(node)}"
        if isinstance(node, (ast.NamedExpr, ast.Lambda, ast.Await, ast.Yield, ast.YieldFrom)):
            return f"uses {ast.unparse(node)}"
        return None

    def _read(
        self,
        node: ast.AST,
        parents: dict[int, ast.AST],
        function: types.FunctionType,
        names: set[str],
        this: str,
    ) -> str | None:
        parent = parents.get(id(node))
        called = isinstance(parent, ast.Call) and parent.func is node
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load):
            if node.id == this:
                return None if isinstance(parent, ast.Attribute) else "hands self to something"
            return self._named(node.id, parent, called, function, names)
        elif isinstance(node, ast.Attribute):
            if isinstance(node.value, ast.Name) and node.value.id == this:
                return self._own(node.attr, called)
            if called:
                one = isinstance(parent, ast.Call) and len(parent.args) <= 1  # others may be written to
                known = one and self._is_known_function(node, function, names)
                return None if known else f"calls {ast.unparse(node)}()"
            if isinstance(node.value, ast.Name):
                known = node.value.id in names and node.attr in _READ_OF_TENSORS
                return None if known else f"reads {ast.unparse(node)}"
        elif isinstance(node, ast.Call):
            if not isinstance(node.func, (ast.Name, ast.Attribute)):
                return f"calls {ast.unparse(node.func)}()"
            if any(keyword.arg not in _KEYWORDS for keyword in node.keywords):
                return f"calls {ast.unparse(node.func)}() with {node.keywords[0].arg}"
        return None

    @staticmethod
    def _named(
        name: str, parent: ast.AST | None, called: bool, function: types.FunctionType, names: set[str]
    ) -> str | None:
        if called:
            return None if name not in names and _is_builtin(name, function) else f"calls {name}()"
        if name in names or isinstance(parent, ast.Attribute) or _is_builtin(name, function):
            return None
        return None if _is_plain(function.__globals__.get(name, function)) else f"reads {name}"

    def _own(self, name: str, called: bool) -> str | None:
        if called:
            return self.why(name)
        described = inspect.getattr_static(type(self.module), name, None) is not None
        if name != "training" and (described or not _is_plain(self.module.__dict__.get(name, self))):
            return f"reads self.{name}, which is no plain number, nor a list of such"
        return None

    @staticmethod
    def _is_known_function(node: ast.Attribute, function: types.FunctionType, names: set[str]) -> bool:
        """Whether node is a question about sizes, or a function of a module that computes numbers."""
        if not isinstance(node.value, ast.Name):
            return node.attr in _OF_TENSORS
        if node.value.id in names:
            return node.attr in _OF_TENSORS
        found = getattr(function.__globals__.get(node.value.id), node.attr, None)
        return found is not None and any(found is known for known in _functions())


def _functions() -> Iterator[Any]:
    yield from (getattr(math, name) for name in dir(math) if not name.startswith("_"))
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        yield from (getattr(numpy, name) for name in _OF_NUMPY.split())


def _is_builtin(name: str, function: types.FunctionType) -> bool:
    return name in _BUILTINS and name not in function.__globals__ and hasattr(builtins, name)


def _is_plain(value: Any) -> bool:
    """Whether value is a number, a string or None, of NumPy too, or a list or tuple of such."""
    if type(value) in (list, tuple):
        return all(map(_is_plain, value))
    numpy = sys.modules.get("numpy")
    return type(value) in _SIMPLE or (numpy is not None and isinstance(value, numpy.generic))
