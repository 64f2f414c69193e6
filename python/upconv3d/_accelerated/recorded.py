# SPDX-License-Identifier: Apache-2.0
"""What torch.fx records of a forward, and the code of it."""

import functools
import operator
import sys
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode

from .chain import in_mode, why_watched
from .entered import Entered, entered
from .proof import NeedsEntryError, Proof, UnprovableError, may_read
from .swap import is_sequential, leaves


def is_open(sequential: nn.Module) -> bool:
    """Whether a Sequential ends with a transposed convolution, which what follows it may complete."""
    kept = [leaf for leaf in leaves(sequential) if not isinstance(leaf, (nn.Identity, nn.Dropout))]
    return bool(kept) and isinstance(kept[-1], nn.ConvTranspose3d)


def in_place(operation: str, left: Any, right: Any) -> Any:
    """The statement of that name, "iadd" for left += right, on whatever left is."""
    return getattr(operator, operation)(left, right)


class RefusedError(Exception):
    """A forward would raise of these arguments: its own is to say what."""


def require(method: Callable[..., Any], expected: bool, *arguments: Any) -> None:
    """Raises: RefusedError: the method, which a forward asks whether to raise, does not return this."""
    if bool(method(*arguments)) is not expected:
        raise RefusedError


# What may have been called of a forward's arguments before it asks whether to raise: torch.fx compares those
# with a default so, and sizes may be asked for.
_OF_ARGUMENTS: tuple[Any, ...] = (require, operator.eq, torch._assert, fx._symbolic_trace._assert_is_none)
_OF_ARGUMENTS += (getattr, operator.getitem, "size", "dim", "numel")


def _recorded(operation: str) -> Callable[[fx.Proxy, Any], fx.Proxy]:
    def record(self: fx.Proxy, other: Any) -> fx.Proxy:
        return self.tracer.create_proxy("call_function", in_place, (operation, self, other), {})

    return record


# Of a tensor, what is read and not called.
_READ = frozenset(
    name for name in dir(Tensor) if not name.startswith("_") and not callable(getattr(Tensor, name, None))
)


class _Proxy(fx.Proxy):
    """A value while it is recorded. torch.fx's own records x += y as x = x + y, and other names keep x."""

    def __getattr__(self, k: str) -> Any:
        # torch.fx's own reads an attribute where it is used first, behind what changes the tensor in between.
        if k in _READ:
            return self.tracer.create_proxy("call_function", getattr, (self, k), {})
        return super().__getattr__(k)

    def __len__(self) -> int:
        _needs_entry(self, "asks for the length of")
        return super().__len__()


def _needs_entry(proxy: fx.Proxy, asked: str) -> None:
    """Raises: NeedsEntryError: proxy is what a module returned, of which its forward knows more."""
    if proxy.node.op == "call_module":
        raise NeedsEntryError(str(proxy.node.target), asked)


for _operation in (
    *("iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "imatmul"),
    *("iand", "ior", "ixor", "ilshift", "irshift"),
):
    setattr(_Proxy, f"__{_operation}__", _recorded(_operation))


class _InThread:
    """True in the thread that made it."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()

    def __bool__(self) -> bool:
        return threading.get_ident() == self._thread


def _with_own_names(function: Any) -> Any:
    """function, which assigns to copies of its module's names."""
    names, code = dict(function.__globals__), function.__code__
    own = types.FunctionType(code, names, function.__name__, function.__defaults__, function.__closure__)
    own.__kwdefaults__ = function.__kwdefaults__
    return own


@contextmanager
def _tells_this_thread() -> Iterator[None]:
    """torch.fx says meanwhile that it traces, but to other threads. From torch 2.14 on it does so itself."""
    flags: Any = fx._symbolic_trace
    if not hasattr(flags, "_is_fx_tracing_flag"):
        yield
        return
    before = flags._is_fx_tracing_flag
    flags._is_fx_tracing_flag = _InThread()
    try:
        yield
    finally:
        flags._is_fx_tracing_flag = before


class _Tracer(fx.Tracer):
    """Records calls of submodules; looks into Sequentials that end with a transposed convolution.

    Attributes:
        to_enter: further modules, by path, that it looks into.
        opened: what it looked into.
        codes: of the module and of what it looked into, by id; and of all of these.
        assumed: of these, by id, as in Proof.
    """

    # A buffer is read at each call, as a parameter is; else one that a trace reads or changes would be the
    # module's own, once.
    proxy_buffer_attributes = True

    def __init__(self, module: nn.Module, proof: Proof, to_enter: dict[str, Entered]) -> None:
        super().__init__()
        self.to_enter = to_enter
        self.opened: dict[str, Entered] = {}
        self.codes, self.all_codes = {id(module): proof.codes}, dict(proof.codes)
        self.assumed = {id(module): proof.assumed}
        self._is_here = _InThread()

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)

    def iter(self, obj: fx.Proxy) -> Iterator[fx.Proxy]:
        _needs_entry(obj, "goes over")
        return super().iter(obj)

    def create_arg(self, a: Any) -> Any:
        # torch.fx would give the module an attribute for it, which would stay there.
        if isinstance(a, Tensor):
            raise UnprovableError("its forward makes a tensor that a trace would keep")
        return super().create_arg(a)

    # torch.fx says that it traces, and exchanges methods of nn.Module, in all threads. Others are to see
    # nothing of it: what they call runs, and what torch.compile made of it, which refuses to be traced, too.
    trace = _with_own_names(fx.Tracer.trace)  # it says so by a name of its own; see _tells_this_thread

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        if not self._is_here:
            return attr_val
        return super().getattr(attr, attr_val, parameter_proxy_cache)

    def call_module(self, m: nn.Module, *args: Any) -> Any:
        if not self._is_here:
            forward, arguments, options = args
            return forward(*arguments, **options)
        # What such a call does beside forward would be recorded, and then done by the recorded call again.
        owner = next(cls for cls in type(m).__mro__ if "__call__" in cls.__dict__)
        if owner is not nn.Module and not isinstance(m, fx.GraphModule):
            raise UnprovableError(f"its forward calls {type(m).__name__}, which has a __call__ of its own")
        return super().call_module(m, *args)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        entry = self.to_enter.get(module_qualified_name)
        if entry is None and is_sequential(m) and why_watched(m) is None and is_open(m):
            entry = entered(m, asks=False)  # which has no forward of its own
        if entry is not None:
            self.opened[module_qualified_name] = entry
            self.codes[id(m)], self.assumed[id(m)] = entry.codes, entry.assumed
            self.all_codes |= entry.codes
        return entry is None

    def _assume(self, module: nn.Module, name: str, expected: bool, *arguments: Any) -> bool:
        """A method that a forward asks whether to raise: recorded, and answered so that it does not.

        Raises: UnprovableError: others are called before, which would be called twice where it does raise, or
            an argument is none of the forward's.
        """
        if not all(isinstance(argument, fx.Proxy) for argument in arguments):
            raise UnprovableError(f"its forward asks {name}() whether to raise, of no argument of its own")
        for node in self.graph.nodes:
            if node.op not in ("placeholder", "get_attr") and node.target not in _OF_ARGUMENTS:
                raise UnprovableError(f"its forward asks {name}() whether to raise, after other calls")
        path = self.path_of_module(module)
        method = self.create_proxy("get_attr", f"{path}.{name}" if path else name, (), {})
        self.create_proxy("call_function", require, (method, expected, *arguments), {})
        return expected

    def look(self, module: nn.Module, name: str, frame: types.FrameType) -> Any:
        """What a forward gets in the place of an attribute that it reads; None where it gets that.

        Raises: UnprovableError: a forward, or an __iter__ that it calls, reads what no guard compares.
        """
        code, caller = frame.f_code, frame.f_back
        if code in self.codes.get(id(module), ()):  # its own, which the proof knows
            expected = self.assumed[id(module)].get(name)
            return None if expected is None else functools.partial(self._assume, module, name, expected)
        if code in self.all_codes:
            allowed = may_read(module, name, self.all_codes[code])
        else:
            of_forward = caller is not None and caller.f_code in self.all_codes
            allowed = not of_forward or frame.f_globals.get("__name__", "").startswith("torch.")
        if not allowed:
            raise UnprovableError(f"its forward reads {name} of a {type(module).__name__}")
        return None


class _NothingMade(TorchFunctionMode):
    """Refuses tensors that a forward makes while it is traced: what it decides by one, a trace would keep."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.zeros, torch.ones):
            raise UnprovableError(f"its forward makes a tensor, by {func.__name__}")
        return func(*args, **(kwargs or {}))


# One trace at a time: torch.fx puts back what it exchanged as if no other had exchanged it meanwhile.
_tracing = threading.Lock()


@contextmanager
def _reads_seen_by(look: Callable[[nn.Module, str, types.FrameType], Any]) -> Iterator[None]:
    """Shows look every attribute that this thread reads of a module meanwhile, and where; what look returns
    is read in its place, but for None.

    torch.fx sees only what nn.Module.__getattr__ finds. Other threads read as ever, but for torch.compile,
    which cannot trace what takes the place of __getattribute__: accelerate()'s docstring says so.
    """
    thread = threading.get_ident()

    before: Any = nn.Module.__dict__.get("__getattribute__")
    found = before or object.__getattribute__

    def read(module: nn.Module, name: str) -> Any:
        if threading.get_ident() == thread:
            other = look(module, name, sys._getframe(1))
            if other is not None:
                return other
        return found(module, name)

    try:
        nn.Module.__getattribute__ = read  # type: ignore[method-assign, assignment]
        yield
    finally:
        if before is not None:
            nn.Module.__getattribute__ = before  # type: ignore[method-assign]
        elif "__getattribute__" in nn.Module.__dict__:
            del nn.Module.__getattribute__


@dataclass
class Recorded:
    """A forward as torch.fx saw it in one mode; `opened` is what it did not record calls of."""

    graph: fx.Graph
    opened: dict[str, Entered]

    def convolutions(self, module: nn.Module) -> Iterator[fx.Node]:
        for node in list(self.graph.nodes):
            if (
                node.op == "call_module"
                and len(node.args) == 1
                and not node.kwargs
                and isinstance(module.get_submodule(str(node.target)), nn.ConvTranspose3d)
            ):
                yield node

    def otherwise_called(self, module: nn.Module) -> Iterator[tuple[str, str]]:
        """Names of convolutions that are called with more than a tensor or by keyword, and with what."""
        for node in self.graph.nodes:
            if node.op == "call_module" and (node.kwargs or len(node.args) != 1):
                if not isinstance(module.get_submodule(str(node.target)), nn.ConvTranspose3d):
                    continue
                if len(node.args) > 1 or "output_size" in node.kwargs:
                    yield str(node.target), "is called with output_size"
                else:
                    yield str(node.target), f"is called by keyword ({', '.join(node.kwargs)}=)"


def _said(error: Exception) -> str:
    return str(error).strip().partition("\n")[0][:120] or type(error).__name__


def _drop_constants(graph: fx.Graph, number: int) -> None:
    """Takes so many last arguments out of graph, with torch.fx's questions whether they are what they were:
    they are compared before."""
    arguments = [node for node in graph.nodes if node.op == "placeholder"]
    dropped = set(arguments[len(arguments) - number :])
    for node in graph.nodes:
        if not dropped.isdisjoint(node.all_input_nodes):
            dropped.add(node)
    for node in reversed(list(graph.nodes)):
        if node in dropped:
            graph.erase_node(node)


def record(
    module: nn.Module, proof: Proof, constants: dict[str, Any], training: bool, to_enter: dict[str, Entered]
) -> Recorded:
    """proof: module's; constants: values of the arguments that have defaults. Raises: UnprovableError."""
    tracer = _Tracer(module, proof, to_enter)
    inner = [module, *(module.get_submodule(path) for path in to_enter)]
    try:
        with (
            _tracing,
            in_mode(inner, training),
            _reads_seen_by(tracer.look),
            _tells_this_thread(),
            _NothingMade(),
        ):
            graph = tracer.trace(module, concrete_args=constants or None)
    except UnprovableError:
        raise
    except Exception as error:  # whatever a forward does that torch.fx cannot record
        raise UnprovableError(f"torch.fx cannot trace its forward: {_said(error)}") from error
    _drop_constants(graph, len(constants))
    return Recorded(graph, tracer.opened)


def compiled(graph: fx.Graph) -> Callable[..., Any]:
    """The function that graph is. Raises: UnprovableError."""
    try:
        code = graph.python_code("self")
        names = dict(code.globals)
        exec(compile(code.src, "<upconv3d.accelerate>", "exec"), names)
    except Exception as error:  # whatever torch.fx writes that is no code, of a value that it does not know
        raise UnprovableError(f"the code of its trace is none: {_said(error)}") from error
    function: Callable[..., Any] = names["forward"]
    return function
