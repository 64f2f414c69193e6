# SPDX-License-Identifier: Apache-2.0
"""Forwards of other modules than nn.Sequential, rewritten where their source admits it (proof.py).

torch.fx records the calls. A transposed convolution whose result goes to a norm or activation, maybe after a
skip was added to it, and on from there, becomes one call (matched.py); all else is called as before, in the
same order. The rest of such a chain may stand in a module that is called with the convolution's result: that
one is entered (entered.py). The module runs what was written only where it is as it was when it was recorded,
and for arguments as they were then (arguments.py), and its own forward otherwise.
"""

import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from ..functional import _dynamo_compiling, _tracing
from .arguments import Arguments, arguments_of, require_constants
from .block import Block
from .entered import Entered, as_a, entered, may_be_entered
from .matched import PARTS, addition_of, chain_of, is_call_with, rewrite
from .proof import Guards, NeedsEntryError, Proof, UnprovableError, holds, prove
from .recorded import Recorded, RefusedError, compiled, record
from .swap import _OPTIONS, MIXINS, Accelerated

_TRACED = "_upconv3d_traced"
_UNTRACED = "_upconv3d_untraced"  # of a copy, whose first call is to trace it
_late = threading.Lock()  # of such calls: a trace gives its module another class meanwhile
_Path = tuple[str, ...]


def _at(module: nn.Module, path: _Path) -> nn.Module | None:
    """get_submodule, which splits a path at every call, or None."""
    part: nn.Module | None = module
    for name in path:
        part = part._modules.get(name) if part is not None else None
    return part


# A forward as it was rewritten, by module.training.
Functions = dict[bool, Callable[..., Any]]


@dataclass(frozen=True)
class Traced:
    """A forward as it was rewritten, for train() and eval() and the values of its flags.

    Attributes:
        functions: by the values of the flags; none where it has no block with these.
        usual: of functions those of calls that give nothing that has a default.
        needed: how many tensors such a call gives.
        arguments: of forward; calls that none of the functions is for run the module's own.
        guards: what the module's forward reads, and what it was.
        opened: modules that are not called by themselves, by path.
        aliases: pairs of paths to what is called and was one module: torch.fx records the first of each.
        unrecorded: where all blocks return their convolutions or add a skip, as no call on the CPU does that
            autograd records, the path of one of these; else None.
    """

    functions: dict[tuple[bool, ...], Functions]
    usual: Functions | None
    needed: int
    arguments: Arguments
    guards: Guards
    opened: tuple[tuple[_Path, Entered], ...]
    aliases: tuple[tuple[_Path, _Path], ...]
    unrecorded: _Path | None

    def __deepcopy__(self, memo: Any) -> "Traced":
        return self  # it knows modules by their paths alone

    def __reduce__(self) -> tuple[Any, ...]:
        # Functions that were made at run time cannot be pickled: None stands in the place of a Traced.
        return type(None), ()

    def called(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], Functions | None]:
        """What a call gives for the arguments without defaults, and the functions for its constants."""
        given = self.arguments.read(args, kwargs)
        return (args, None) if given is None else (given[0], self.functions.get(given[1]))

    def fits(self, module: nn.Module, tensors: tuple[Any, ...]) -> bool:
        """Whether module is as it was, and these are tensors."""
        if not all(isinstance(tensor, Tensor) for tensor in tensors):
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

    def is_idle(self, module: nn.Module, tensors: tuple[Any, ...]) -> bool:
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
        return tracing or any(isinstance(x, Tensor) and x.requires_grad for x in (weight, *tensors))


class AcceleratedForward(Accelerated):
    """A module whose forward was rewritten."""

    _upconv3d_volatile = (_TRACED, _UNTRACED)

    @staticmethod
    def _upconv3d_forward(base: Any) -> Callable[..., Any]:
        _upconv3d_base, _upconv3d_run = base, _run_traced

        def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
            return _upconv3d_run(_upconv3d_base, self, args, kwargs)

        return forward

    def __setstate__(self, state: Any) -> None:
        # Of copies and pickles: functions that were made at run time cannot be pickled.
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        if _OPTIONS not in self.__dict__:  # a slice, or a __setstate__ of its class's has emptied it
            return
        if _is_complete(self):
            _trace_copy(self)
        else:
            self.__dict__[_UNTRACED] = True


def _is_complete(module: nn.Module) -> bool:
    """Whether all in it have their states. Where one refers to module and was the first to be copied, it gets
    its own after module."""
    children = module.__dict__.get("_modules")
    return children is not None and all(child is None or _is_complete(child) for child in children.values())


def _trace_copy(module: Any) -> None:
    """Traces a copy of an accelerated module, or warns."""
    with as_a(module._upconv3d_base, module):
        try:
            traced = trace(module).traced
        except UnprovableError as error:
            warnings.warn(
                f"upconv3d: a copy of an accelerated {type(module).__name__} needs the source of its "
                f"forward as it was; got {error}. It runs its own forward. Remedy: "
                f"upconv3d.restore(copy), then upconv3d.accelerate(copy).",
                stacklevel=3,
            )
            return
    module.__dict__[_TRACED] = traced


MIXINS.append(AcceleratedForward)


def _run_traced(base: Any, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What a module whose forward was rewritten, and whose own class is base, returns."""
    traced: Traced | None = module.__dict__.get(_TRACED)
    if traced is None and _UNTRACED in module.__dict__ and not _dynamo_compiling() and not _tracing():
        with _late:
            if module.__dict__.pop(_UNTRACED, False):
                _trace_copy(module)
        traced = module.__dict__.get(_TRACED)
    if traced is not None:
        tensors, functions = args, traced.usual
        if kwargs or len(args) != traced.needed:
            tensors, functions = traced.called(args, kwargs)
        if functions is not None and not traced.is_idle(module, tensors) and traced.fits(module, tensors):
            try:  # contextlib.suppress would cost every call
                return functions[module.training](module, *tensors)
            except RefusedError:
                pass  # as it was written, it says what is wrong with the arguments
    return base.forward(module, *args, **kwargs)


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

    def __init__(self, module: nn.Module, constants: dict[str, Any], proof: Proof, asks: bool) -> None:
        self.module, self.constants, self.proof, self.asks = module, constants, proof, asks
        self.refused: dict[str, str] = {}  # why a module is not entered, by its path
        self.entered: dict[str, Entered] = {}
        self.asked: dict[str, list[str]] = {}  # paths by the convolution that they are called with
        records = self._first_records()
        needed = set(self.entered)
        while (found := self._next(records)) is not None:
            conv, path = found
            self.asked.setdefault(conv, []).append(path)
            try:
                attempt = self.entered | {path: entered(module.get_submodule(path), asks)}
                records = self._records(attempt)
            except UnprovableError as error:
                self.refused[path] = str(error)
                continue
            self.entered = attempt
        kept = needed | {path for conv in self._blocks(records) for path in self.asked.get(conv, ())}
        self.entered = {path: entry for path, entry in self.entered.items() if path in kept}

    def _records(self, to_enter: dict[str, Entered]) -> list[Recorded]:
        return [record(self.module, self.proof, self.constants, mode, to_enter) for mode in (True, False)]

    def _first_records(self) -> list[Recorded]:
        """With those modules entered without which there is no trace. Raises: UnprovableError."""
        while True:
            try:
                return self._records(self.entered)
            except NeedsEntryError as needs:
                called = self.module.get_submodule(needs.path)
                if needs.path in self.entered or not may_be_entered(called):
                    raise
                try:
                    self.entered[needs.path] = entered(called, self.asks)
                except UnprovableError as error:
                    raise UnprovableError(f"{needs}: {error}") from error

    def _next(self, records: list[Recorded]) -> tuple[str, str] | None:
        """A convolution without a block, and a module called with its result that may hold the rest."""
        found = set(self._blocks(records))
        for recorded in records:
            for conv in recorded.convolutions(self.module):
                if str(conv.target) in found:
                    continue
                addition = addition_of(conv)
                value = conv if addition is None else addition.node
                for user in value.users:
                    path = str(user.target)
                    if not is_call_with(user, value) or path in self.entered or path in self.refused:
                        continue
                    called = self.module.get_submodule(path)
                    if not isinstance(called, PARTS) and may_be_entered(called):
                        return str(conv.target), path
        return None

    def _blocks(self, records: list[Recorded]) -> Iterator[str]:
        for recorded in records:
            for conv in recorded.convolutions(self.module):
                if not isinstance(chain_of(recorded.graph, conv, self.module), str):
                    yield str(conv.target)

    def why(self, conv: str, reason: str) -> str:
        """reason, and why what follows was not entered."""
        refused = [self.refused[path] for path in self.asked.get(conv, ()) if path in self.refused]
        return ": ".join([reason, *refused])


class Tracing(NamedTuple):
    """A traced forward, and what of it concerns the report.

    Attributes:
        found: names of the convolutions that were given a block, with what it is in each mode in calls that
            give no flags or, if it is none there, those in `flags`.
        flags: what such a call gives, by name of the convolution.
        reasons: why the others were not.
        normalizers: of all blocks, by id.
    """

    traced: Traced
    found: dict[str, dict[bool, Block | str]]
    flags: dict[str, dict[str, bool]]
    reasons: dict[str, str]
    normalizers: set[int]


class _Rewritten(NamedTuple):
    """A forward as it was rewritten for some values of its flags.

    Attributes:
        functions: as of Traced.
        found, reasons: as of Tracing, with these flags.
        opened: what its traces looked into.
        called: names of the modules that it calls.
        idle: of each convolution in found, whether autograd records no call of it on the CPU.
    """

    functions: Functions
    found: dict[str, dict[bool, Block | str]]
    reasons: dict[str, str]
    opened: dict[str, Entered]
    called: set[str]
    idle: dict[str, bool]


def trace(module: nn.Module) -> Tracing:
    """module's forward with its blocks in one call each.

    Raises: UnprovableError, where its forward might do what a trace does not show. Flags with which no trace
        can be made, though one can with the defaults, are left to the module's own forward.
    """
    try:
        return _trace(module, asks=False)
    except UnprovableError:
        # What a forward says of its arguments may not be traceable; it can be asked at each call.
        return _trace(module, asks=True)


def _trace(module: nn.Module, asks: bool) -> Tracing:
    proof = prove(module, asks)
    arguments = arguments_of(module)
    require_constants(arguments.defaults)
    rewritten: dict[tuple[bool, ...], _Rewritten] = {}
    for constants in arguments.combinations():
        try:
            rewritten[arguments.flags_of(constants)] = _rewritten_for(module, constants, proof, asks)
        except UnprovableError:
            if not rewritten:  # the defaults are first
                raise
    return _joined(module, arguments, proof.guards, rewritten)


def _rewritten_for(module: nn.Module, constants: dict[str, Any], proof: Proof, asks: bool) -> _Rewritten:
    search = _Search(module, constants, proof, asks)
    made = _Rewritten({}, {}, {}, {}, set(), {})
    for training in (True, False):
        recorded = record(module, proof, constants, training, search.entered)
        nodes = recorded.graph.nodes
        made.called.update(str(node.target) for node in nodes if node.op == "call_module")
        made.reasons.update(recorded.otherwise_called(module))
        for conv in recorded.convolutions(module):
            name, chain = str(conv.target), chain_of(recorded.graph, conv, module)
            if isinstance(chain, str):
                made.reasons[name] = search.why(name, chain)
                continue
            rewrite(recorded.graph, chain)
            made.found[name] = chain.blocks()
            unrecorded = chain.returns_conv or chain.addition is not None
            made.idle[name] = made.idle.get(name, True) and unrecorded
        made.functions[training] = compiled(recorded.graph)
        made.opened.update(recorded.opened)
    return made


def _joined(
    module: nn.Module, arguments: Arguments, guards: Guards, rewritten: dict[tuple[bool, ...], _Rewritten]
) -> Tracing:
    """One Traced of all that have a block; it runs only where all that they rest on is as it was."""
    found: dict[str, dict[bool, Block | str]] = {}
    flags: dict[str, dict[str, bool]] = {}
    normalizers: set[int] = set()
    opened: dict[str, Entered] = {}
    called: set[str] = set()
    for values, made in rewritten.items():
        if not made.found:
            continue
        given = dict(zip(arguments.flags, values, strict=True))
        given = {name: value for name, value in given.items() if value is not arguments.defaults[name]}
        flags = dict.fromkeys(made.found, given) | flags
        found = made.found | found
        blocks = (block for modes in made.found.values() for block in modes.values())
        normalizers |= {id(block.normalizer) for block in blocks if isinstance(block, Block)}
        opened |= made.opened
        called |= made.called
    known = {name: why for made in reversed(rewritten.values()) for name, why in made.reasons.items()}
    reasons = {name: why for name, why in known.items() if name not in found}
    functions = {values: made.functions for values, made in rewritten.items() if made.found}
    idle = all(each for made in rewritten.values() for each in made.idle.values())
    traced = Traced(
        functions=functions,
        usual=functions.get(arguments.flags_of(arguments.defaults)),
        needed=arguments.needed,
        arguments=arguments,
        guards=guards,
        opened=tuple((_path(name), entry) for name, entry in opened.items()),
        aliases=_aliases(module, called | set(opened)),
        unrecorded=_path(next(iter(found))) if found and idle else None,
    )
    return Tracing(traced, found, flags, reasons, normalizers)
