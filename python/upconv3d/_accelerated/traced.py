# SPDX-License-Identifier: Apache-2.0
"""Forwards of other modules than nn.Sequential, rewritten where their source admits it (proof.py).

torch.fx records the calls. A transposed convolution whose result goes to a norm or activation, and on from
there, becomes one call; all else is called as before, in the same order. The rest of such a chain may stand
in a module that is called with the convolution's result: that one is entered (entered.py). The module runs
what was written only where it is as it was when it was recorded, and its own forward otherwise.
"""

import operator
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.module import _has_any_global_hook

from ..functional import _dynamo_compiling, _tracing
from .block import Block, Options
from .chain import blocks_of
from .entered import Entered, as_its_base, entered, may_be_entered
from .functions import activation_of, works_in_place
from .proof import Codes, Guards, UnprovableError, defaults_of, holds, prove, require_constants
from .recorded import Recorded, compiled, record
from .run import run_chain, run_chain_and_conv
from .swap import _OPTIONS, MIXINS, Accelerated

_TRACED = "_upconv3d_traced"
_DROPOUTS = (nn.Dropout, nn.Dropout2d, nn.Dropout3d)
_PARTS = (nn.GroupNorm, nn.InstanceNorm3d, nn.BatchNorm3d, nn.Identity, *_DROPOUTS)
_PARTS += (nn.ReLU, nn.LeakyReLU, nn.ELU, nn.SiLU, nn.GELU, nn.PReLU)  # type: ignore[assignment]
# Activations that a forward calls as functions, by what they are: the module that computes the same.
Function = tuple[str, Any, bool]  # name and parameter of conv_transpose3d_norm_act, whether in place
_stateless: dict[Function, nn.Module] = {}


def run_traced(modules: tuple[nn.Module, ...], functions: tuple[Any, ...], options: Options, x: Any) -> Any:
    """run_chain of modules, and after them of activations that were functions."""
    return run_chain([*modules, *(_stateless[function] for function in functions)], x, options)


def run_traced_with_conv(
    modules: tuple[nn.Module, ...], functions: tuple[Any, ...], options: Options, x: Any
) -> tuple[Any, Any]:
    """run_traced, and the convolution modules[0] of x for those that read it beside."""
    return run_chain_and_conv([*modules, *(_stateless[function] for function in functions)], x, options)


_Path = tuple[str, ...]


def _at(module: nn.Module, path: _Path) -> nn.Module | None:
    """get_submodule, which splits a path at every call, or None."""
    part: nn.Module | None = module
    for name in path:
        part = part._modules.get(name) if part is not None else None
    return part


@dataclass(frozen=True)
class Traced:
    """A forward as it was rewritten, for train() and eval().

    Attributes:
        functions: by module.training.
        guards: what the module's forward reads, and what it was.
        opened: modules that are not called by themselves, by path.
        aliases: pairs of paths to what is called and was one module: torch.fx records the first of each.
        arguments: how many tensors forward takes; calls with others run the module's own.
        unrecorded: where all blocks return their convolutions, as no call on the CPU does that autograd
            records, the path of one of these; else None.
    """

    functions: dict[bool, Callable[..., Any]]
    guards: Guards
    opened: tuple[tuple[_Path, Entered], ...]
    aliases: tuple[tuple[_Path, _Path], ...]
    arguments: int
    unrecorded: _Path | None

    def fits(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        if kwargs or len(args) != self.arguments or not all(isinstance(a, Tensor) for a in args):
            return False
        # Those would see modules in the place of functions, and miss what was opened.
        if _has_any_global_hook():  # type: ignore[no-untyped-call]
            return False
        if not holds(module, self.guards):
            return False
        for path, entry in self.opened:
            part = _at(module, path)
            if part is None or not entry.fits(part, module.training):
                return False
        # A loop: all() of a generator costs twice as much.
        for path, other in self.aliases:  # noqa: SIM110
            if _at(module, path) is not _at(module, other):
                return False
        return True

    def is_idle(self, module: nn.Module, args: tuple[Any, ...]) -> bool:
        """Whether no block is going to run, so that the forward as it was written costs the host least."""
        if self.unrecorded is None:
            return False
        tracing = not _dynamo_compiling() and _tracing()
        if not tracing and not torch.is_grad_enabled():
            return False
        if module.__dict__[_OPTIONS].precision is not None:
            return False
        conv = _at(module, self.unrecorded)
        weight = None if conv is None else conv._parameters.get("weight")
        if weight is not None and weight.is_cuda and weight.dtype is not torch.float64:
            return False  # see run._has_backward
        return tracing or any(isinstance(x, Tensor) and x.requires_grad for x in (weight, *args))


class AcceleratedForward(Accelerated):
    """A module whose forward was rewritten."""

    _upconv3d_volatile = (_TRACED,)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        traced: Traced | None = self.__dict__.get(_TRACED)
        if traced is not None and not traced.is_idle(self, args) and traced.fits(self, args, kwargs):
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
                    f"upconv3d.restore(copy), then upconv3d.accelerate(copy).",
                    stacklevel=2,
                )
                return
        self.__dict__[_TRACED] = traced


MIXINS.append(AcceleratedForward)


def _activation_function(node: fx.Node) -> Function | None:
    """The activation that node applies, if it is one of ours with a plain number if any."""
    found = activation_of(node)
    if found is None or not isinstance(found[1], (int, float, type(None))):
        return None
    return *found, works_in_place(node)


def _module_of(function: Function) -> nn.Module:
    name, value, in_place = function
    if name in ("gelu", "gelu_tanh"):
        return nn.GELU("none" if name == "gelu" else "tanh")
    if name == "leaky_relu":
        return nn.LeakyReLU(value, in_place)
    return nn.ELU(value, in_place) if name == "elu" else {"relu": nn.ReLU, "silu": nn.SiLU}[name](in_place)


def _is_call_with(node: fx.Node, argument: fx.Node) -> bool:
    return node.op == "call_module" and node.args == (argument,) and not node.kwargs


def _adjacent(nodes: list[fx.Node], user: fx.Node) -> bool:
    """Whether nothing is called between the chain's nodes, up to user: what else draws random numbers would
    get others where one of the chain does."""
    node = nodes[0].next
    while node is not user:
        if node not in nodes and node.op not in ("placeholder", "get_attr"):
            return False
        node = node.next
    return True


def _follow(conv: fx.Node, module: nn.Module, user: fx.Node) -> tuple[list[fx.Node], list[Any], str]:
    """The nodes behind a convolution's from this user of it on, each the only user of the one before.

    Returns: nodes, the convolution first; what each is, a module or a Function; why it ends there.
    """
    nodes, parts = [conv], [module.get_submodule(str(conv.target))]
    while True:
        name = getattr(user.target, "__name__", str(user.target))
        why = f"{name} follows" if user.op != "output" else "forward returns it"
        if user.args[:1] != (nodes[-1],):
            return nodes, parts, why
        if _is_call_with(user, nodes[-1]):
            part = module.get_submodule(str(user.target))
            if not isinstance(part, _PARTS) or any(not isinstance(p, nn.Module) for p in parts):
                return nodes, parts, f"{type(part).__name__} follows"
            if isinstance(part, _DROPOUTS) and not _adjacent(nodes, user):
                return nodes, parts, f"{type(part).__name__} follows, after other calls"
            parts.append(part)
        elif (function := _activation_function(user)) is not None:
            parts.append(function)  # type: ignore[arg-type]
        else:
            return nodes, parts, why
        nodes.append(user)
        users = list(user.users)
        if len(users) != 1:
            return nodes, parts, f"its result is used {len(users)} times"
        user = users[0]


class _Chain(NamedTuple):
    """A convolution in a graph, and what follows it as far as one call may compute it.

    Attributes:
        nodes, parts: as _follow returns them.
        modules: parts, with modules in the place of Functions.
        returns_conv: whether the convolution is read by others, too; all of them come after the last node,
            so that what they might do to it in place is done after the chain has read it.
    """

    nodes: list[fx.Node]
    parts: list[Any]
    modules: list[nn.Module]
    returns_conv: bool


def _chain_of(graph: fx.Graph, conv: fx.Node, module: nn.Module) -> _Chain | str:
    """The chain behind a convolution that is a block in one mode at least, or why there is none."""
    users = list(conv.users)
    place = {node: index for index, node in enumerate(graph.nodes)}
    reason = f"its result is used {len(users)} times"
    for user in users:
        nodes, parts, why = _follow(conv, module, user)
        modules = [part if isinstance(part, nn.Module) else _module_of(part) for part in parts]
        chain = _Chain(nodes, parts, modules, len(users) > 1)
        blocks = blocks_of(modules, returns_conv=chain.returns_conv)
        if not any(isinstance(block, Block) for block in blocks.values()):
            if len(users) == 1:
                reason = why if len(nodes) == 1 else str(blocks[False])
            continue
        if all(place[other] > place[nodes[-1]] for other in users if other is not user):
            return chain
        reason = f"its result is used {len(users)} times, not only after the norm or activation of it"
    return reason


def _rewrite(graph: fx.Graph, chain: _Chain) -> None:
    """One call_function in the place of all nodes."""
    nodes = chain.nodes
    first, last = nodes[0], nodes[-1]
    with graph.inserting_before(first):
        modules = [
            graph.create_node("get_attr", str(node.target))
            for node, part in zip(nodes, chain.parts, strict=True)
            if isinstance(part, nn.Module)
        ]
        options = graph.create_node("get_attr", _OPTIONS)
        functions = tuple(part for part in chain.parts if not isinstance(part, nn.Module))
        for function in functions:
            _stateless.setdefault(function, _module_of(function))
        arguments = (tuple(modules), functions, options, first.args[0])
        result = graph.call_function(run_traced_with_conv if chain.returns_conv else run_traced, arguments)
        if chain.returns_conv:
            pair, result = result, graph.call_function(operator.getitem, (result, 0))
            conv = graph.call_function(operator.getitem, (pair, 1))
            first.replace_all_uses_with(conv, delete_user_cb=lambda user: user is not nodes[1])
    last.replace_all_uses_with(result)
    for node in reversed(nodes):
        graph.erase_node(node)


def _path(name: str) -> _Path:
    return tuple(name.split("."))


def _aliases(module: nn.Module, called: set[str]) -> tuple[tuple[_Path, _Path], ...]:
    """Pairs of a path that was called and of another to the same module."""
    first = {id(part): name for name, part in module.named_modules()}
    every = module.named_modules(remove_duplicate=False)
    others = [(first[id(part)], name) for name, part in every if first[id(part)] != name]
    return tuple((_path(known), _path(name)) for known, name in others if known in called)


class _Search:
    """Finds the modules behind convolutions that hold the rest of a block, and why others are not entered."""

    def __init__(self, module: nn.Module, defaults: dict[str, Any], codes: Codes) -> None:
        self.module, self.defaults, self.codes = module, defaults, codes
        self.refused: dict[str, str] = {}  # why a module is not entered, by its path
        self.entered: dict[str, Entered] = {}
        self.asked: dict[str, list[str]] = {}  # paths by the convolution that they are called with
        records = self._records(self.entered)
        while (found := self._next(records)) is not None:
            conv, path = found
            self.asked.setdefault(conv, []).append(path)
            try:
                attempt = self.entered | {path: entered(module.get_submodule(path))}
                records = self._records(attempt)
            except UnprovableError as error:
                self.refused[path] = str(error)
                continue
            self.entered = attempt
        kept = {path for conv in self._blocks(records) for path in self.asked.get(conv, ())}
        self.entered = {path: entry for path, entry in self.entered.items() if path in kept}

    def _records(self, to_enter: dict[str, Entered]) -> list[Recorded]:
        return [record(self.module, self.codes, self.defaults, mode, to_enter) for mode in (True, False)]

    def _next(self, records: list[Recorded]) -> tuple[str, str] | None:
        """A convolution without a block, and a module called with its result that may hold the rest."""
        found = set(self._blocks(records))
        for recorded in records:
            for conv in recorded.convolutions(self.module):
                if str(conv.target) in found:
                    continue
                for user in conv.users:
                    path = str(user.target)
                    if not _is_call_with(user, conv) or path in self.entered or path in self.refused:
                        continue
                    called = self.module.get_submodule(path)
                    if not isinstance(called, _PARTS) and may_be_entered(called):
                        return str(conv.target), path
        return None

    def _blocks(self, records: list[Recorded]) -> Iterator[str]:
        for recorded in records:
            for conv in recorded.convolutions(self.module):
                if not isinstance(_chain_of(recorded.graph, conv, self.module), str):
                    yield str(conv.target)

    def why(self, conv: str, reason: str) -> str:
        """reason, and why what follows was not entered."""
        refused = [self.refused[path] for path in self.asked.get(conv, ()) if path in self.refused]
        return ": ".join([reason, *refused])


class Tracing(NamedTuple):
    """A traced forward, and what of it concerns the report.

    Attributes:
        found: names of the convolutions that were given a block, with what it is in each mode.
        reasons: why the others were not.
    """

    traced: Traced
    found: dict[str, dict[bool, Block | str]]
    reasons: dict[str, str]


def trace(module: nn.Module) -> Tracing:
    """module's forward with its blocks in one call each.

    Raises: UnprovableError, where its forward might do what a trace does not show.
    """
    proof = prove(module)
    needed, defaults = defaults_of(module)
    require_constants(defaults)
    search = _Search(module, defaults, proof.codes)
    functions: dict[bool, Callable[..., Any]] = {}
    found: dict[str, dict[bool, Block | str]] = {}
    reasons: dict[str, str] = {}
    opened: dict[str, Entered] = {}
    called: set[str] = set()
    returning: dict[str, bool] = {}
    for training in (True, False):
        recorded = record(module, proof.codes, defaults, training, search.entered)
        called |= {str(node.target) for node in recorded.graph.nodes if node.op == "call_module"}
        reasons |= recorded.otherwise_called(module)
        for conv in recorded.convolutions(module):
            name, chain = str(conv.target), _chain_of(recorded.graph, conv, module)
            if isinstance(chain, str):
                reasons[name] = search.why(name, chain)
                continue
            _rewrite(recorded.graph, chain)
            found[name] = blocks_of(chain.modules, returns_conv=chain.returns_conv)
            returning[name] = returning.get(name, True) and chain.returns_conv
        functions[training] = compiled(recorded.graph)
        opened |= recorded.opened
    reasons = {name: why for name, why in reasons.items() if name not in found}
    entries = tuple((_path(name), entry) for name, entry in opened.items())
    aliases = _aliases(module, called | set(opened))
    unrecorded = _path(next(iter(found))) if found and all(returning.values()) else None
    traced = Traced(functions, proof.guards, entries, aliases, needed, unrecorded)
    return Tracing(traced, found, reasons)
