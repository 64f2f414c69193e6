# SPDX-License-Identifier: Apache-2.0
"""Autograd of an operator by its public name, as torch.library.register_autograd ties it, and with something
kept for the backward where torch.compile can be told how much that is."""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.compiler.config
from torch import Tensor
from torch._C._functorch import peek_interpreter_stack
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd import forward_ad

from . import _C


def is_traced(tensor: Tensor | None) -> bool:
    """Whether a compiler, of a forward or of a backward pass, records what is done with `tensor`.

    torch 2.11's is_compiling is not set while AOTAutograd traces: its tensors say so.
    """
    return isinstance(tensor, (FakeTensor, FunctionalTensor)) or torch.compiler.is_compiling()


def is_exporting() -> bool:
    """torch.compiler.is_exporting, which Dynamo of torch 2.11 takes for true wherever it traces."""
    return torch.compiler._is_exporting_flag


def has_tangent(arguments: Iterable[Any]) -> bool:
    """Whether a tensor carries a tangent of forward-mode AD."""
    # Level 0 is the only one; of one that torch.func entered in a graph, forward_ad itself knows nothing.
    return any(
        isinstance(argument, Tensor) and torch._VF._unpack_dual(argument, level=0)[1] is not None
        for argument in arguments
    )


def differentiates_again(*gradients: Tensor | None) -> bool:
    """Whether what a backward computes of `gradients` is differentiated: by create_graph, or by tangents."""
    return torch.is_grad_enabled() or (forward_ad._current_level >= 0 and has_tangent(gradients))


def may_consume(ctx: Any) -> bool:
    """Whether a backward may overwrite what its forward kept: nobody reads it again if no graph is kept.

    Raises: RuntimeError where it did, and an error, of memory say, then ended the pass that is run again.
    """
    if getattr(ctx, "is_consumed", False):
        raise RuntimeError(
            "upconv3d: what a forward kept can be read by one backward pass, unless retain_graph=True; got "
            "another one, after one that ended in an error. Remedy: run the forward again, or retain the "
            "graph in the first pass."
        )
    ctx.is_consumed = not torch._C._autograd._get_current_graph_task_keep_graph()
    return ctx.is_consumed  # type: ignore[no-any-return]


def refuse_tangents(arguments: Iterable[Any]) -> None:
    """Raises NotImplementedError where a tensor carries a tangent, which an operator of ours would drop."""
    if has_tangent(arguments):
        raise NotImplementedError(
            "upconv3d: an operator called by its name, or in a graph, has no forward-mode AD (jvp, jacfwd, "
            "dual tensors); got an argument with a tangent. Remedy: call the function, outside of "
            "torch.compile, or use reverse mode."
        )


def tag_compile_cache(build: str) -> None:
    """Lets graphs that torch.compile keeps on disk be found by this build alone, and under this forced plan.

    They say what a forward keeps for its backward, which is a matter of both.
    """
    torch.compiler.config.cache_key_tag += f"|upconv3d {build} {_C.forced_plan()}"


def multiprocessors() -> tuple[int, ...]:
    """Of each CUDA device, as many as this process sees: the Multi-Process Service may grant it a part."""
    if not torch.cuda.is_available():
        return ()
    devices = range(torch.cuda.device_count())
    return tuple(torch.cuda.get_device_properties(i).multi_processor_count for i in devices)


@functools.cache
def tag_multiprocessors() -> None:
    """Lets those graphs be found where CUDA shows as many multiprocessors alone: plans depend on them, too.

    Not a matter of importing, which is not to initialize CUDA: of a process's first graph that has such a
    block, which Dynamo traces before it looks for the graph.
    """
    torch.compiler.config.cache_key_tag += f" {multiprocessors()}"


def _recorded(op: Any, setup_context: Callable[..., None], backward: Callable[..., Any]) -> Any:
    """What torch.library.register_autograd makes of `op`, a node whose last argument is dispatch keys."""

    class Recorded(torch.autograd.Function):
        """The kernel's keys come last, so that arguments keep their places."""

        @staticmethod
        def forward(ctx: Any, *arguments: Any) -> Any:
            *given, keys = arguments
            with torch._C._AutoDispatchBelowAutograd():
                output = op.redispatch(keys, *given)
            setup_context(ctx, tuple(given), output)
            return output

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            return (*backward(ctx, *gradients), None)

    return Recorded


def _refuse_tangents_here(arguments: tuple[Any, ...]) -> None:
    """refuse_tangents where there can be any."""
    if forward_ad._current_level >= 0 or peek_interpreter_stack() is not None:
        refuse_tangents(arguments)


def record_plainly(
    library: torch.library.Library,
    name: str,
    setup_context: Callable[..., None],
    backward: Callable[..., Any],
) -> None:
    """Ties `backward` to upconv3d::name as torch.library.register_autograd does, which drops tangents."""
    op = getattr(torch.ops.upconv3d, name).default
    node = _recorded(op, setup_context, backward)

    def kernel(keyset: Any, *arguments: Any) -> Any:
        _refuse_tangents_here(arguments)
        keys = keyset & torch._C._after_autograd_keyset
        if torch.is_grad_enabled() and torch._C._any_requires_grad(*arguments):
            return node.apply(*arguments, keys)
        with torch._C._AutoDispatchBelowAutograd():
            return op.redispatch(keys, *arguments)

    library.impl(name, kernel, "Autograd", with_keyset=True)  # type: ignore[no-untyped-call]


def record_operator(
    library: torch.library.Library,
    name: str,
    setup_context: Callable[[Any, tuple[Any, ...], Any], None],
    backward: Callable[..., Any],
    keeps: Callable[..., bool],
    inference: Callable[..., Any] | None = None,
    in_training: Callable[..., Any] | None = None,
) -> None:
    """Ties `backward` to upconv3d::name, and to upconv3d::name_for_training, which returns one tensor more.

    While a compiler traces, `name` is recorded as name_for_training where keeps(*arguments) says that what
    it keeps is known; its last result is then among those that setup_context gets. Others than compilers call
    `name` itself: torch.jit.trace and modes, to whom what is kept is of no use.

    inference: what a compiler records instead where nothing is differentiated, if it returns anything.
    in_training: the same in the place of name_for_training.
    """
    training = f"{name}_for_training"
    kept_op = getattr(torch.ops.upconv3d, training).default
    op = getattr(torch.ops.upconv3d, name).default
    results = len(op._schema.returns)

    node = _recorded(op, setup_context, backward)

    class Kept(torch.autograd.Function):
        """What name_for_training's own node is, around in_training()."""

        @staticmethod
        def forward(ctx: Any, *arguments: Any) -> Any:
            with torch._C._AutoDispatchBelowAutograd():
                output = in_training(*arguments)  # type: ignore[misc]  # not None where this runs
                if output is None:
                    output = kept_op(*arguments)
            setup_context(ctx, arguments, output)
            return output

        @staticmethod
        def backward(ctx: Any, *gradients: Any) -> Any:
            return backward(ctx, *gradients)

    def kernel(keyset: Any, *arguments: Any) -> Any:
        _refuse_tangents_here(arguments)
        keys = keyset & torch._C._after_autograd_keyset
        if not torch.is_grad_enabled() or not torch._C._any_requires_grad(*arguments):
            with torch._C._AutoDispatchBelowAutograd():
                if inference is not None and is_traced(arguments[0]):
                    output = inference(*arguments)
                    if output is not None:
                        return output
                return op.redispatch(keys, *arguments)
        if is_traced(arguments[0]) and keeps(*arguments):
            record: Any = kept_op if in_training is None else Kept.apply
            output = record(*arguments)
            return output[0] if results == 1 else output[:results]
        return node.apply(*arguments, keys)

    library.impl(name, kernel, "Autograd", with_keyset=True)  # type: ignore[no-untyped-call]
    torch.library.register_autograd(f"upconv3d::{training}", backward, setup_context=setup_context)
