# SPDX-License-Identifier: Apache-2.0
"""Blocks in a recorded forward: a transposed convolution and the calls behind it, in one call each."""

import operator
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from .block import Block, Options
from .chain import blocks_of, kind_of
from .functions import activation_of, works_in_place
from .recorded import in_place
from .run import run_chain, run_chain_and_conv, run_chain_with_skip
from .swap import _OPTIONS

_DROPOUTS = (nn.Dropout, nn.Dropout2d, nn.Dropout3d)
PARTS = (nn.GroupNorm, nn.InstanceNorm3d, nn.BatchNorm3d, nn.Identity, *_DROPOUTS)
PARTS += (nn.ReLU, nn.LeakyReLU, nn.ELU, nn.SiLU, nn.GELU, nn.PReLU)  # type: ignore[assignment]
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


def run_traced_with_skip(
    modules: tuple[nn.Module, ...],
    functions: tuple[Any, ...],
    options: Options,
    x: Any,
    skip: Any,
    operation: str,
    returns_sum: bool,
) -> tuple[Any, Any]:
    """run_traced where a skip is added to the convolution modules[0] of x, and the sum for its other readers.

    operation: as of run.add; returns_sum: whether there are others.
    """
    chain = [*modules, *(_stateless[function] for function in functions)]
    return run_chain_with_skip(chain, x, skip, operation, options, returns_sum)


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


def is_call_with(node: fx.Node, argument: fx.Node) -> bool:
    return node.op == "call_module" and node.args == (argument,) and not node.kwargs


class Addition(NamedTuple):
    """The sum of a convolution and a skip: its node, the skip's, and how they are added, as of run.add."""

    node: fx.Node
    skip: fx.Node
    operation: str


def addition_of(conv: fx.Node) -> Addition | None:
    """The addition that alone reads conv, right behind it: what is called between might change the skip."""
    users = list(conv.users)
    if len(users) != 1 or users[0].kwargs or not _adjacent([conv], users[0]):
        return None
    user, args = users[0], users[0].args
    operation, summands = "add", args
    if user.op == "call_function" and user.target is in_place and args[0] == "iadd":
        operation, summands = "iadd", args[1:]
    elif user.op == "call_method" and user.target == "add_":
        operation = "iadd"
    elif not (user.op == "call_function" and user.target in (operator.add, torch.add)) and not (
        user.op == "call_method" and user.target == "add"
    ):
        return None
    if len(summands) != 2 or not all(isinstance(summand, fx.Node) for summand in summands):
        return None
    left, right = summands
    if left is right:
        return None
    if left is conv:
        return Addition(user, right, operation)  # type: ignore[arg-type]
    return Addition(user, left, "radd") if operation == "add" else None  # type: ignore[arg-type]


def _adjacent(nodes: list[fx.Node], user: fx.Node) -> bool:
    """Whether nothing is called between the chain's nodes, up to user: what else draws random numbers would
    get others where one of the chain does."""
    node = nodes[0].next
    while node is not user:
        if node not in nodes and node.op not in ("placeholder", "get_attr"):
            return False
        node = node.next
    return True


def _follow(
    conv: fx.Node, module: nn.Module, value: fx.Node, user: fx.Node
) -> tuple[list[fx.Node], list[Any], str]:
    """The nodes behind a convolution's from this user on, each the only user of the one before.

    value: what user reads, conv or its sum with a skip.
    Returns: nodes, the convolution first; what each is, a module or a Function; why it ends there.
    """
    nodes, parts = [conv], [module.get_submodule(str(conv.target))]
    passed = [conv, value]
    while True:
        called = user.args[0] if user.target is in_place else user.target
        name = getattr(called, "__name__", str(called))
        why = f"{name} follows" if user.op != "output" else "forward returns it"
        if user.args[:1] != (value,):
            return nodes, parts, why
        if is_call_with(user, value):
            part = module.get_submodule(str(user.target))
            if not isinstance(part, PARTS) or any(not isinstance(p, nn.Module) for p in parts):
                return nodes, parts, f"{type(part).__name__} follows"
            # Of two that count their calls, or draw numbers, the order matters; so may one with a forward of
            # its own.
            counts = isinstance(part, (*_DROPOUTS, nn.BatchNorm3d)) or kind_of(part) is None
            if counts and not _adjacent(passed, user):
                return nodes, parts, f"{type(part).__name__} follows, after other calls"
            parts.append(part)
        elif (function := _activation_function(user)) is not None:
            parts.append(function)  # type: ignore[arg-type]
        else:
            return nodes, parts, why
        nodes.append(user)
        passed.append(user)
        value = user
        users = list(user.users)
        if len(users) != 1:
            return nodes, parts, f"its result is used {len(users)} times"
        user = users[0]


class MatchedChain(NamedTuple):
    """A convolution in a graph, and what follows it as far as one call may compute it.

    Attributes:
        nodes, parts: as _follow returns them.
        modules: parts, with modules in the place of Functions.
        returns_conv: whether the convolution, or its sum with a skip, is read by others, too; all of them
            come after the last node, so that what they might do to it in place is done after the chain has
            read it.
        addition: of a skip, between the first two nodes.
    """

    nodes: list[fx.Node]
    parts: list[Any]
    modules: list[nn.Module]
    returns_conv: bool
    addition: Addition | None

    def blocks(self) -> dict[bool, Block | str]:
        return blocks_of(self.modules, 0, self.returns_conv, self.addition is not None)


def chain_of(graph: fx.Graph, conv: fx.Node, module: nn.Module) -> MatchedChain | str:
    """The chain behind a convolution that is a block in one mode at least, or why there is none."""
    addition = addition_of(conv)
    value = conv if addition is None else addition.node
    users = list(value.users)
    place = {node: index for index, node in enumerate(graph.nodes)}
    reason = f"its {'result' if addition is None else 'sum with a skip'} is used {len(users)} times"
    several = reason
    for user in users:
        nodes, parts, why = _follow(conv, module, value, user)
        modules = [part if isinstance(part, nn.Module) else _module_of(part) for part in parts]
        chain = MatchedChain(nodes, parts, modules, len(users) > 1, addition)
        blocks = chain.blocks()
        if not any(isinstance(block, Block) for block in blocks.values()):
            if len(users) == 1:
                reason = why if len(nodes) == 1 else str(blocks[False])
            continue
        if all(place[other] > place[nodes[-1]] for other in users if other is not user):
            return chain
        reason = f"{several}, not only after the norm or activation of it"
    return reason


def rewrite(graph: fx.Graph, chain: MatchedChain) -> None:
    """One call_function in the place of all nodes."""
    nodes, addition = chain.nodes, chain.addition
    first, last = nodes[0], nodes[-1]
    value = first if addition is None else addition.node
    with graph.inserting_before(value):  # what is added is there then
        modules = [
            graph.create_node("get_attr", str(node.target))
            for node, part in zip(nodes, chain.parts, strict=True)
            if isinstance(part, nn.Module)
        ]
        options = graph.create_node("get_attr", _OPTIONS)
        functions = tuple(part for part in chain.parts if not isinstance(part, nn.Module))
        for function in functions:
            _stateless.setdefault(function, _module_of(function))
        arguments: tuple[Any, ...] = (tuple(modules), functions, options, first.args[0])
        run: Callable[..., Any] = run_traced_with_conv if chain.returns_conv else run_traced
        if addition is not None:
            run = run_traced_with_skip
            arguments += (addition.skip, addition.operation, chain.returns_conv)
        result = graph.call_function(run, arguments)
        if addition is not None or chain.returns_conv:
            pair, result = result, graph.call_function(operator.getitem, (result, 0))
        if chain.returns_conv:
            returned = graph.call_function(operator.getitem, (pair, 1))
            value.replace_all_uses_with(returned, delete_user_cb=lambda user: user is not nodes[1])
    last.replace_all_uses_with(result)
    for node in reversed(nodes[1:]):
        graph.erase_node(node)
    if addition is not None:
        graph.erase_node(addition.node)
    graph.erase_node(first)
