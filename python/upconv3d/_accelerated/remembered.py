# SPDX-License-Identifier: Apache-2.0
"""What an accelerated Sequential found and decided at a call, for further calls that are alike.

In a model, between PyTorch's operators, a host has little of ours in its caches: what is found and decided in
12 us in a loop takes 50 to 90 there, as long as three operators (perf/NOTES.md). So a Sequential keeps it,
beside what it was found from: the modules' classes and their forwards, attributes, parameters, buffers and
children, all by identity, and that nobody has hooks; of the tensors in a call their kinds. The next call asks
whether that is still so. What was exchanged since is kept until then. Where all its blocks are left to
PyTorch, the next call asks for its input's kind alone: what the modules have become is PyTorch's affair then.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import chain as chained
from operator import attrgetter, is_
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from .._autocast import autocast_dtype
from .._tail_arguments import runs_kernels
from .._tail_call import CudaCall, cuda_call, is_recorded_by_pytorch, run_checked, run_decided
from ..functional import (
    _autocast_enabled,
    _torch_conv_precision,
    _tracing,
    _transforms_active,
    is_overridden,
    is_recorded,
)
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


_forward_of = attrgetter("forward")


class _State:
    """Modules as they are, and that nobody has hooks on them."""

    def __init__(self, containers: Sequence[nn.Module], modules: Sequence[nn.Module]) -> None:
        outer, *nested = containers
        watched = [*nested, *modules]
        self._children = outer._modules
        self._modules = watched
        self._classes = [type(module) for module in watched]
        # Those that accelerated Sequentials had, too.
        bases = [getattr(type(container), "_upconv3d_base", type(container)) for container in nested]
        self._forward_classes = [*self._classes, *bases]
        self._forwards = list(map(_forward_of, self._forward_classes))
        self._hooks = [hooks for module in watched for hooks in _hooks_of(module)]
        self._dicts: list[dict[str, Any]] = [container._modules for container in containers]
        self._dicts += [module.__dict__ for module in watched]
        # A module of a known class that registers none, as an activation, would not read any either.
        self._dicts += [module._parameters for module in modules if module._parameters]
        self._dicts += [module._buffers for module in modules if module._buffers]
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
            and list(map(type, self._modules)) == self._classes
            and list(map(_forward_of, self._forward_classes)) == self._forwards
        )


# Whether a CUDA graph is captured, of calls on CUDA.
_capturing = torch.cuda.is_current_stream_capturing
_dtype_of, _shape_of = attrgetter("dtype"), attrgetter("shape")

Kind = tuple[torch.dtype, torch.Size, tuple[int, ...], torch.device, torch.dtype | None]


def _kind_of(x: Tensor) -> Kind:
    """What decisions depend on of a tensor, and autocast's dtype for it."""
    return x.dtype, x.shape, x.stride(), x.device, autocast_dtype(x)


def _is_of_kind(x: Any, kind: Kind) -> bool:
    dtype, shape, stride, device, low = kind
    return (
        type(x) is Tensor
        and x.dtype is dtype
        and x.shape == shape
        and x.stride() == stride
        and x.device == device
        and (autocast_dtype(x) if _autocast_enabled() else None) is low
    )


def left_kind(x: Any) -> Kind | None:
    """What calls have in common that is_left() is to find alike; None of no plain tensor."""
    return _kind_of(x) if type(x) is Tensor else None


def is_left(x: Any, kind: Kind) -> bool:
    """Whether a call with x is of that kind, and blocks may be left to PyTorch in it."""
    # torch.jit.trace has sizes that are tensors, and warns where they are compared.
    return not _tracing() and _is_of_kind(x, kind) and not (x.is_cuda and _capturing())


class _Decided:
    """A decision, and the calls of the block that it is for."""

    def __init__(self, block: Block, x: Tensor, options: Options, decision: Decision) -> None:
        self.settings, self._tensors, self._norm = decision.settings, decision.tensors, block.norm
        self._kind = _kind_of(x)
        self._precise = options.precision is not None
        self._parameters = [tensor for tensor in decision.tensors if tensor is not None]
        self._recording = self._records(x)
        # Parameters are the same objects when they are given other .data. What is decided of any dtype and
        # sizes would be wrong of others: of a convolution's bias and a norm's vectors, the operator refuses
        # sizes that PyTorch does. Of other strides another plan may be the quicker one.
        self._dtypes = list(map(_dtype_of, self._parameters))
        weight, slopes = decision.tensors[0], decision.tensors[4]
        self._shaped = [weight] if slopes is None else [weight, slopes]
        self._shapes = list(map(_shape_of, self._shaped))
        self._precision: str | None = None
        if self.settings is not None and not self._precise and x.is_cuda and x.dtype is torch.float32:
            self._precision = self.settings[7]
        # While a CUDA graph is captured no block is left to PyTorch; otherwise, all is decided alike.
        self._spares_host = decision.spares_host
        self._captured: bool | None = None
        if x.is_cuda and (self.settings is None or _capturing()):
            self._captured = self.settings is not None
        self._call: CudaCall | None = None
        if self.settings is not None and runs_kernels(x):
            tensors = (x, *self._tensors, None)
            by_pytorch = self._recording and is_recorded_by_pytorch(tensors, self.settings, self._precise)
            if not by_pytorch:
                decided = (self._norm, self._recording, self._spares_host)
                self._call = cuda_call(tensors, self.settings, self._kind[4], *decided)

    def _records(self, x: Tensor) -> bool:
        return is_recorded(x, *self._parameters)

    def is_for(self, x: Any) -> bool:
        """Whether run_block would decide so of x, in the state that the modules were in."""
        return (
            _is_of_kind(x, self._kind)
            and self._records(x) is self._recording
            and forward_ad._current_level < 0
            and list(map(_dtype_of, self._parameters)) == self._dtypes
            and list(map(_shape_of, self._shaped)) == self._shapes
            and (self._precision is None or _torch_conv_precision() == self._precision)
            and (self._captured is None or _capturing() is self._captured)
        )

    def run(self, x: Tensor) -> Tensor:
        """The block on x by our call, where it is not left to PyTorch. Raises: RuntimeError."""
        settings, call = self.settings, self._call
        assert settings is not None
        tensors = (x, *self._tensors, None)
        if call is None or _transforms_active() or is_overridden(tensors):
            return run_checked(tensors, settings, self._norm, self._precise, self._spares_host)[0]
        return run_decided(tensors, settings, self._norm, self._precise, call)


def _is_no_more(container: nn.Module) -> bool:
    """The chain of a container is to be looked at anew."""
    return False


class Remembered:
    """A chain with one block in it, and how that was last computed."""

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()  # it is of these very modules: a copy has None in its place

    def __init__(self, containers: Sequence[nn.Module], chain: Sequence[nn.Module], at: int, block: Block):
        end = at + block.length
        self._block = block
        self._before, self._modules, self._after = chain[:at], chain[at:end], chain[end:]
        # Whether the block of a Sequential is still this one.
        self._is_same: Callable[[nn.Module], bool] = _State(containers, self._modules).holds
        # Whether to begin with this chain. Of a block that others run before, that is asked when they have.
        self.holds = _State(containers, ()).holds if at > 0 else self._is_same
        self._decided: _Decided | None = None

    def run(self, sequential: nn.Module, x: Any, options: Options) -> tuple[Any, bool]:
        """What run_chain returns of sequential's chain, and whether the block was left to PyTorch.

        options: always the same.
        """
        if self._before:
            for module in self._before:
                x = module(x)
            # In this very call, too, one may have changed what comes behind it.
            if not self._is_same(sequential):
                self.holds = _is_no_more
                return run_chain([*self._modules, *self._after], x, options), False
        decided = self._decided  # once: another thread may decide about other calls
        if decided is None or not decided.is_for(x):
            x, decided = self._run_and_decide(x, options)
        elif decided.settings is None:
            x = run_modules(self._block, self._modules, x)
        else:
            x = decided.run(x)
        for module in self._after:
            x = module(x)
        return x, decided is not None and decided.settings is None

    def _run_and_decide(self, x: Any, options: Options) -> tuple[Any, _Decided | None]:
        self._decided = None
        if type(x) is not Tensor or not takes(x):
            return run_chain(self._modules, x, options), None
        told: list[Decision] = []
        y = run_block(self._block, x, options, told)
        decided = _Decided(self._block, x, options, told[0]) if told else None
        self._decided = decided
        return run_modules(self._block, self._modules, x) if y is None else y, decided


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
