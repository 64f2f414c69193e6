# SPDX-License-Identifier: Apache-2.0
"""Forwards of other modules than nn.Sequential, rewritten where their source admits it (proof.py).

torch.fx records the calls. A transposed convolution whose result goes to one norm or activation alone, and
on from there, becomes one call of run_chain; all else is called as before, in the same order. The module
runs what was written only where it is as it was when it was recorded, and its own forward otherwise.
"""

import inspect
import operator
import warnings
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, fx, nn
from torch.nn.modules.module import _has_any_global_hook

from .chain import Block, Options, find_block, run_chain, why_watched
from .functions import activation_of
from .proof import Guards, UnprovableError, holds, prove
from .swap import _OPTIONS, MIXINS, Accelerated, is_sequential, leaves

_TRACED = "_upconv3d_traced"
_PARTS = (nn.GroupNorm, nn.InstanceNorm3d, nn.BatchNorm3d, nn.Identity)
_PARTS += (nn.ReLU, nn.LeakyReLU, nn.ELU, nn.SiLU, nn.GELU, nn.PReLU)  # type: ignore[assignment]
_PARTS += (nn.Dropout, nn.Dropout2d, nn.Dropout3d)  # type: ignore[assignment]
# Activations that a forward calls as functions, by what they are: the module that computes the same.
_stateless: dict[tuple[str, Any], nn.Module] = {}


def run_traced(modules: tuple[nn.Module, ...], functions: tuple[Any, ...], options: Options, x: Any) -> Any:
    """run_chain of modules, and after them of activations that were functions."""
    return run_chain([*modules, *(_stateless[function] for function in functions)], x, options)


def is_open(sequential: nn.Module) -> bool:
    """Whether a Sequential ends with a transposed convolution, which what follows it may complete."""
    kept = [leaf for leaf in leaves(sequential) if not isinstance(leaf, (nn.Identity, nn.Dropout))]
    return bool(kept) and isinstance(kept[-1], nn.ConvTranspose3d)


def in_place(operation: str, left: Any, right: Any) -> Any:
    """The statement of that name, "iadd" for left += right, on whatever left is."""
    return getattr(operator, operation)(left, right)


def _recorded(operation: str) -> Callable[[fx.Proxy, Any], fx.Proxy]:
    def record(self: fx.Proxy, other: Any) -> fx.Proxy:
        return self.tracer.create_proxy("call_function", in_place, (operation, self, other), {})

    return record


class _Proxy(fx.Proxy):
    """A value while it is recorded. torch.fx's own records x += y as x = x + y, and other names keep x."""


for _operation in (
    *("iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "imatmul"),
    *("iand", "ior", "ixor", "ilshift", "irshift"),
):
    setattr(_Proxy, f"__{_operation}__", _recorded(_operation))


class _Tracer(fx.Tracer):
    """Records calls of submodules; looks into Sequentials that end with a transposed convolution."""

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return not (is_sequential(m) and why_watched(m) is None and is_open(m))


@dataclass(frozen=True)
class Traced:
    """A forward as it was rewritten, for train() and eval().

    Attributes:
        functions: by module.training.
        guards: what the module's forward reads, and what it was.
        opened: Sequentials that are not called by themselves: path, and the names in them.
        arguments: how many tensors forward takes; calls with others run the module's own.
    """

    functions: dict[bool, Callable[..., Any]]
    guards: Guards
    opened: tuple[tuple[str, tuple[str, ...]], ...]
    arguments: int

    def fits(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if kwargs or len(args) != self.arguments or not all(isinstance(a, Tensor) for a in args):
            return False
        if not holds(module, self.guards):  # which says too that what is opened is still there
            return False
        for path, names in self.opened:
            sequential = module.get_submodule(path)
            if not is_sequential(sequential) or tuple(sequential._modules) != names:
                return False
            if why_watched(sequential) is not None:
                return False
        return not self.opened or not _has_any_global_hook()  # type: ignore[no-untyped-call]


class AcceleratedForward(Accelerated):
    """A module whose forward was rewritten."""

    _upconv3d_volatile = (_TRACED,)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        traced: Traced | None = self.__dict__.get(_TRACED)
        if traced is not None and traced.fits(self, args, kwargs):
            return traced.functions[self.training](self, *args)
        base: Any = self._upconv3d_base
        return base.forward(self, *args, **kwargs)

    def __setstate__(self, state: Any) -> None:
        # Of copies and pickles: functions that were made at run time cannot be pickled.
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        with as_its_base(self):
            try:
                traced = trace(self).traced
            except UnprovableError as error:
                warnings.warn(
                    f"upconv3d: a copy of an accelerated {type(self).__name__} needs the source of its "
                    f"forward as it was; got {error}. It runs its own forward. Remedy: "
                    f"upconv3d.accelerate(model) again.",
                    stacklevel=2,
                )
                return
        self.__dict__[_TRACED] = traced


MIXINS.append(AcceleratedForward)


@contextmanager
def as_its_base(module: Accelerated) -> Any:
    """Gives module its own class back meanwhile."""
    cls: type[Any] = type(module)
    module.__class__ = cls._upconv3d_base
    try:
        yield
    finally:
        module.__class__ = cls


@contextmanager
def in_mode(modules: list[nn.Module], training: bool) -> Any:
    """Lets `training` of each read as told meanwhile; nothing that a module's own train() does happens."""
    kept = [module.training for module in modules]
    for module in modules:
        module.training = training
    try:
        yield
    finally:
        for module, mode in zip(modules, kept, strict=True):
            module.training = mode


def _defaults(module: nn.Module) -> tuple[int, dict[str, Any]]:
    """How many arguments forward needs, and the values of the others."""
    needed, defaults = 0, {}
    for parameter in inspect.signature(type(module).forward).parameters.values():
        if parameter.name == "self":
            continue
        if parameter.kind is not inspect.Parameter.POSITIONAL_OR_KEYWORD:
            raise UnprovableError("its forward takes arguments of an unusual kind")
        if parameter.default is inspect.Parameter.empty:
            needed += 1
        else:
            defaults[parameter.name] = parameter.default
    return needed, defaults


def _activation_function(node: fx.Node) -> tuple[str, Any] | None:
    """Name and parameter where node applies one of our activations, with a plain number if any."""
    found = activation_of(node)
    return found if found is not None and isinstance(found[1], (int, float, type(None))) else None


def _module_of(function: tuple[str, Any]) -> nn.Module:
    name, value = function
    if name in ("gelu", "gelu_tanh"):
        return nn.GELU("none" if name == "gelu" else "tanh")
    if name == "leaky_relu":
        return nn.LeakyReLU(value)
    return nn.ELU(value) if name == "elu" else {"relu": nn.ReLU, "silu": nn.SiLU}[name]()


def _follow(node: fx.Node, module: nn.Module) -> tuple[list[fx.Node], list[Any], str]:
    """The nodes behind a convolution's, each the only user of the one before, and why it ends."""
    nodes, parts = [node], [module.get_submodule(str(node.target))]
    while True:
        users = list(nodes[-1].users)
        if len(users) != 1:
            return nodes, parts, f"its result is used {len(users)} times"
        user = users[0]
        name = getattr(user.target, "__name__", str(user.target))
        why = f"{name} follows" if user.op != "output" else "forward returns it"
        if user.args[:1] != (nodes[-1],):
            return nodes, parts, why
        if user.op == "call_module" and len(user.args) == 1 and not user.kwargs:
            part = module.get_submodule(str(user.target))
            if not isinstance(part, _PARTS) or any(not isinstance(p, nn.Module) for p in parts):
                return nodes, parts, f"{type(part).__name__} follows"
            parts.append(part)
        elif (function := _activation_function(user)) is not None:
            parts.append(function)  # type: ignore[arg-type]
        else:
            return nodes, parts, why
        nodes.append(user)


def _rewrite(graph: fx.Graph, nodes: list[fx.Node], parts: list[Any]) -> None:
    """One call_function in the place of all nodes."""
    first, last = nodes[0], nodes[-1]
    with graph.inserting_before(first):
        modules = [
            graph.create_node("get_attr", str(node.target))
            for node, part in zip(nodes, parts, strict=True)
            if isinstance(part, nn.Module)
        ]
        options = graph.create_node("get_attr", _OPTIONS)
        functions = tuple(part for part in parts if not isinstance(part, nn.Module))
        for function in functions:
            _stateless.setdefault(function, _module_of(function))
        x = first.args[0]
        call = graph.call_function(run_traced, (tuple(modules), functions, options, x))
    last.replace_all_uses_with(call)
    for node in reversed(nodes):
        graph.erase_node(node)


def blocks_of(chain: list[nn.Module], at: int = 0) -> dict[bool, Block | str]:
    """find_block for train() and for eval()."""
    found = {}
    for mode in (True, False):
        with in_mode(chain, mode):
            found[mode] = find_block(chain, at)
    return found


def _one_mode(module: nn.Module, defaults: dict[str, Any], training: bool) -> tuple[Any, ...]:
    tracer = _Tracer()
    opened: list[tuple[str, tuple[str, ...]]] = [
        (name, tuple(child._modules))
        for name, child in module.named_modules()
        if child is not module and not tracer.is_leaf_module(child, name)
    ]
    inner = [module, *(module.get_submodule(name) for name, _ in opened)]
    try:
        with in_mode(inner, training):
            graph = tracer.trace(module, concrete_args=defaults or None)
    except Exception as error:  # whatever a forward does that torch.fx cannot record
        said = str(error).strip().partition("\n")[0][:120] or type(error).__name__
        raise UnprovableError(f"torch.fx cannot trace its forward: {said}") from error
    found: dict[str, list[nn.Module]] = {}
    reasons: dict[str, str] = {}
    for node in list(graph.nodes):
        if node.op == "get_attr" and "_tensor_constant" in str(node.target):
            raise UnprovableError("its forward makes a tensor that a trace would keep")
        if node.op != "call_module" or len(node.args) != 1 or node.kwargs:
            continue
        if not isinstance(module.get_submodule(str(node.target)), nn.ConvTranspose3d):
            continue
        nodes, parts, why = _follow(node, module)
        chain = [part if isinstance(part, nn.Module) else _module_of(part) for part in parts]
        blocks = blocks_of(chain)
        if any(isinstance(block, Block) for block in blocks.values()):
            _rewrite(graph, nodes, parts)
            found[str(node.target)] = chain
        else:
            reasons[str(node.target)] = why if len(nodes) == 1 else str(blocks[False])
    return graph, found, reasons, opened


def _compiled(graph: fx.Graph) -> Callable[..., Any]:
    code = graph.python_code("self")
    names = dict(code.globals)
    exec(compile(code.src, "<upconv3d.accelerate>", "exec"), names)
    function: Callable[..., Any] = names["forward"]
    return function


class Tracing(NamedTuple):
    """A traced forward, and what of it concerns the report.

    Attributes:
        found: names of the convolutions that were given a block, with the chain that it is in.
        reasons: why the others were not.
    """

    traced: Traced
    found: dict[str, list[nn.Module]]
    reasons: dict[str, str]


def trace(module: nn.Module) -> Tracing:
    """module's forward with its blocks in one call each.

    Raises: UnprovableError, where its forward might do what a trace does not show.
    """
    guards = prove(module)
    needed, defaults = _defaults(module)
    functions: dict[bool, Callable[..., Any]] = {}
    found: dict[str, list[nn.Module]] = {}
    reasons: dict[str, str] = {}
    opened: list[tuple[str, tuple[str, ...]]] = []
    for training in (True, False):
        graph, found_here, reasons_here, opened = _one_mode(module, defaults, training)
        functions[training] = _compiled(graph)
        found |= found_here
        reasons |= reasons_here
    reasons = {name: why for name, why in reasons.items() if name not in found}
    return Tracing(Traced(functions, guards, tuple(opened), needed), found, reasons)
