# SPDX-License-Identifier: Apache-2.0
"""What an accelerated Sequential found and decided at a call, for further calls that are alike.

In a model, between PyTorch's operators, a host has little of ours in its caches: what is found and decided in
12 us in a loop takes 50 to 90 there, as long as three operators (perf/NOTES.md). So a Sequential keeps it,
beside what it was found from: the modules' classes and their forwards, attributes, parameters, buffers and
children, all by identity, and that nobody has hooks; of the tensors in a call their kinds. The next call asks
whether that is still so. What was exchanged since is kept until then.
"""

from collections.abc import Iterable, Sequence
from itertools import chain as chained
from operator import is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from .._autocast import autocast_dtype
from .._tail_call import CudaCall, cuda_call, run_checked
from ..functional import resolve_precision
from .block import Block, Options
from .chain import find_block, is_of_known_class
from .run import Decision, run_block, run_chain, run_modules, takes


def _hooks_of(module: nn.Module) -> tuple[Any, ...]:
    return (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
    )


class _State:
    """Modules as they are, and that nobody has hooks on them."""

    def __init__(self, containers: Sequence[nn.Module], modules: Sequence[nn.Module]) -> None:
        outer, *nested = containers
        watched = [*nested, *modules]
        self._children = outer._modules
        self._modules = watched
        self._classes = [type(module) for module in watched]
        self._forwards = [cls.forward for cls in self._classes]
        self._hooks = [hooks for module in watched for hooks in _hooks_of(module)]
        self._dicts: list[dict[str, Any]] = [container._modules for container in containers]
        for module in watched:
            self._dicts += [module.__dict__, module._parameters, module._buffers]
        self._values = list(self._all_values())

    def _all_values(self) -> Iterable[Any]:
        return chained.from_iterable(map(dict.values, self._dicts))

    def holds(self, container: nn.Module) -> bool:
        """container: the outermost; a shallow copy of it has other children."""
        values = self._values
        return (
            container._modules is self._children
            and not any(self._hooks)
            and sum(map(len, self._dicts)) == len(values)
            and all(map(is_, self._all_values(), values))
            and all(map(is_, map(type, self._modules), self._classes))
            and [cls.forward for cls in self._classes] == self._forwards
        )


def _kinds_of(tensors: Sequence[Tensor]) -> list[Any]:
    """What plans depend on of parameters, which are the same objects when they are given other .data."""
    return [(tensor.dtype, tensor.shape, tensor.stride()) for tensor in tensors]


def _is_capturing(x: Tensor) -> bool:
    """Whether a CUDA graph is captured: replays cost the host nothing, and no block is left to PyTorch."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


class _Decided:
    """A decision, and the calls of the block that it is for."""

    def __init__(self, block: Block, x: Tensor, options: Options, decision: Decision) -> None:
        self.settings, self._tensors, self._norm = decision.settings, decision.tensors, block.norm
        self._options = options
        self._x = (x.shape, x.stride(), x.dtype, x.device)
        self._grad = torch.is_grad_enabled()
        self._low = autocast_dtype(x)
        self._precision = resolve_precision(x, options.precision)
        self._parameters = [tensor for tensor in decision.tensors if tensor is not None]
        self._kinds = _kinds_of(self._parameters)
        self._captured = _is_capturing(x)
        self._call: CudaCall | None = None
        if self.settings is not None and x.is_cuda:
            self._call = cuda_call((x, *self._tensors, None), self.settings, self._low, block.norm, False)

    def is_for(self, x: Any) -> bool:
        """Whether run_block would decide so of x, in the state that the modules were in."""
        return (
            type(x) is Tensor
            and (x.shape, x.stride(), x.dtype, x.device) == self._x
            and torch.is_grad_enabled() is self._grad
            and autocast_dtype(x) is self._low
            and resolve_precision(x, self._options.precision) == self._precision
            and forward_ad._current_level < 0
            and _kinds_of(self._parameters) == self._kinds
            and _is_capturing(x) is self._captured
        )

    def run(self, x: Tensor) -> Tensor:
        """The block on x by our call, where it is not left to PyTorch. Raises: RuntimeError."""
        assert self.settings is not None
        precise = self._options.precision is not None
        return run_checked((x, *self._tensors, None), self.settings, self._norm, precise, self._call)[0]


class Remembered:
    """A chain with one block in it, and how that was last computed."""

    def __init__(self, containers: Sequence[nn.Module], chain: Sequence[nn.Module], at: int, block: Block):
        end = at + block.length
        self._block = block
        self._before, self._modules, self._after = chain[:at], chain[at:end], chain[end:]
        self._state = _State(containers, self._modules)
        self._decided: _Decided | None = None

    def holds(self, container: nn.Module) -> bool:
        """Whether the chain of that Sequential is still this one."""
        return self._state.holds(container)

    def run(self, x: Any, options: Options) -> Any:
        """What run_chain returns of the whole chain. options: always the same."""
        for module in self._before:
            x = module(x)
        decided = self._decided  # once: another thread may decide about other calls
        if decided is None or not decided.is_for(x):
            x = self._run_and_decide(x, options)
        elif decided.settings is None:
            x = run_modules(self._block, self._modules, x)
        else:
            x = decided.run(x)
        for module in self._after:
            x = module(x)
        return x

    def _run_and_decide(self, x: Any, options: Options) -> Any:
        self._decided = None
        if type(x) is not Tensor or not takes(x):
            return run_chain(self._modules, x, options)
        told: list[Decision] = []
        y = run_block(self._block, x, options, told)
        if told:
            self._decided = _Decided(self._block, x, options, told[0])
        return run_modules(self._block, self._modules, x) if y is None else y


def remember(containers: Sequence[nn.Module], chain: Sequence[nn.Module]) -> Remembered | None:
    """None where the chain has not one block, or one of which not all can be told from its attributes.

    containers: the Sequential whose chain it is, and those inside it.
    """
    places = [at for at, module in enumerate(chain) if isinstance(module, nn.ConvTranspose3d)]
    block = find_block(chain, places[0]) if len(places) == 1 else None
    if not isinstance(block, Block) or block.norm == "batch":
        return None
    conv_parameters = block.conv._parameters
    if "weight" not in conv_parameters or "bias" not in conv_parameters:
        return None
    modules = chain[places[0] : places[0] + block.length]
    if not all(map(is_of_known_class, modules)):
        return None
    # Whatever else stands in a parameter's place for one call may keep that call's graph alive.
    tensors = (tensor for module in modules for tensor in module._parameters.values())
    if not all(tensor is None or type(tensor) is nn.Parameter for tensor in tensors):
        return None
    return Remembered(containers, chain, places[0], block)
