# SPDX-License-Identifier: Apache-2.0
"""accelerate(model): its blocks in one call each, in place, and back."""

import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ._accelerated.block import Block, Options, Way, sized_weight, way_of
from ._accelerated.call import call_of
from ._accelerated.chain import blocks_of, find_block
from ._accelerated.norms import AcceleratedNorm, norms_to_swap
from ._accelerated.proof import UnprovableError
from ._accelerated.recorded import is_open
from ._accelerated.run import admits, takes
from ._accelerated.swap import (
    Accelerated,
    AcceleratedConvTranspose,
    AcceleratedSequential,
    is_sequential,
    is_swapped,
    leaves,
    swap,
    unswap,
    why_not_called,
    why_not_swapped,
)
from ._accelerated.traced import _TRACED, AcceleratedForward, trace
from ._geometry import output_extent
from .explain import explain_norm_act
from .functional import resolve_precision
from .module import ConvTranspose3dReLUGroupNorm
from .norm_act_module import ConvTranspose3dNormAct


@dataclass(frozen=True)
class Finding:
    """What became of one ConvTranspose3d.

    Attributes:
        name: as in model.named_modules().
        replaced: whether calls of it are now calls of conv_transpose3d_norm_act, in at least one mode and
            with at least one combination of its container's flags (arguments whose default is a bool).
        training, evaluation: what runs after model.train() and after model.eval(): the block, or why
            PyTorch's calls do; with the container's flags at their defaults, or as named.
        container: name of the module whose forward runs the block; None where there is none.
        input_size: of its input in the sample call; None without one, or if it was not called.
        plan: the plan that the block would run on that input in eval mode, as explain_norm_act names it, or
            "small: PyTorch's calls"; None without an input_size, on the meta device, and where its modules
            would run themselves (with a BatchNorm3d, elsewhere than on CUDA).
    """

    name: str
    replaced: bool
    training: str
    evaluation: str
    container: str | None = None
    input_size: tuple[int, ...] | None = None
    plan: str | None = None

    def __str__(self) -> str:
        name = self.name or "(the model itself)"
        size = "" if self.input_size is None else f", input {'x'.join(map(str, self.input_size))}"
        plan = "" if self.plan is None else f", {self.plan}"
        if not self.replaced:
            return f"{name}: left alone: {self.evaluation}{size}"
        text = self.evaluation
        if self.training != self.evaluation:
            text = f"{self.evaluation} in eval; in training: {self.training}"
        return f"{name}: {text}{size}{plan}"


@dataclass
class Report:
    """What accelerate() did to a model; print() it.

    Attributes:
        findings: one Finding per ConvTranspose3d.
        norms: names of the norms that were replaced by themselves, on request.
    """

    findings: tuple[Finding, ...]
    norms: tuple[str, ...] = ()
    # Weak: a report that is kept keeps no model's memory.
    _swapped: list["weakref.ref[nn.Module]"] = field(default_factory=list, repr=False, compare=False)

    @property
    def replaced(self) -> tuple[Finding, ...]:
        """The findings of convolutions that became part of a block."""
        return tuple(finding for finding in self.findings if finding.replaced)

    def restore(self) -> None:
        """Gives every changed module its class back. Copies of the model stay as they are: restore(copy)."""
        for reference in self._swapped:
            module = reference()
            if module is not None:
                unswap(module)
        self._swapped.clear()

    def __getstate__(self) -> dict[str, Any]:
        # Of copies and pickles, which are of findings alone: what was changed is not theirs to restore.
        return {"findings": self.findings, "norms": self.norms, "_swapped": []}

    def __str__(self) -> str:
        head = f"upconv3d.accelerate: {len(self.replaced)} of {len(self.findings)} ConvTranspose3d replaced"
        named = "1 norm by itself" if len(self.norms) == 1 else f"{len(self.norms)} norms by themselves"
        norms = [f"  and {named}"] if self.norms else []
        return "\n".join([head, *(f"  {finding}" for finding in self.findings), *norms])


@dataclass
class _Place:
    """A container and what it makes of a convolution, in calls that give its forward these flags."""

    container: nn.Module
    name: str
    blocks: dict[bool, Block | str]
    flags: dict[str, bool] = field(default_factory=dict)

    def length(self) -> int:
        return max((b.length for b in self.blocks.values() if isinstance(b, Block)), default=0)


def _sequential_places(model: nn.Module) -> Iterator[tuple[nn.Module, _Place]]:
    """Every (convolution, Sequential that runs it)."""
    for name, module in model.named_modules():
        if is_sequential(module):
            chain = leaves(module)
            for at, leaf in enumerate(chain):
                if isinstance(leaf, nn.ConvTranspose3d):
                    yield leaf, _Place(module, name, blocks_of(chain, at))


def _callers(model: nn.Module, wanted: set[int]) -> Iterator[tuple[str, nn.Module]]:
    """Modules that hold wanted convolutions, directly or through containers that have no forward to read."""

    def holds(module: nn.Module) -> bool:
        for child in module._modules.values():
            if child is None:
                continue
            through = isinstance(child, (nn.ModuleList, nn.ModuleDict)) or (
                is_sequential(child) and is_open(child)
            )
            if id(child) in wanted or (through and holds(child)):
                return True
        return False

    for name, module in model.named_modules():
        listed = is_sequential(module) or isinstance(module, (nn.ModuleList, nn.ModuleDict))
        if not listed and holds(module):
            yield name, module


# Modules that call our kernels with what their children hold, whose own forwards do not run.
_OURS = (ConvTranspose3dReLUGroupNorm, ConvTranspose3dNormAct)


class _Planner:
    """Decides before anything is changed."""

    def __init__(self, model: nn.Module) -> None:
        self.convs = {
            id(module): (name, module)
            for name, module in model.named_modules()
            if isinstance(module, nn.ConvTranspose3d)
        }
        self.held = {
            id(child): type(module).__name__
            for module in model.modules()
            if isinstance(module, _OURS)
            for child in module.children()
        }
        self.places: dict[int, _Place] = {}
        self.swaps: dict[int, tuple[nn.Module, type[Accelerated]]] = {}
        self.reasons = {
            key: f"{name} calls our kernels with what it holds" for key, name in self.held.items()
        }
        self.traces: dict[int, Any] = {}
        self.normalizers: set[int] = set()  # of blocks in forwards, by id
        self.norms: tuple[str, ...] = ()

    def sequentials(self, model: nn.Module) -> None:
        best: dict[int, _Place] = {}
        for conv, place in _sequential_places(model):
            why = place.blocks[False]
            if isinstance(why, str):
                self.reasons[id(conv)] = why
            known = best.get(id(conv))
            # The innermost of those that see as much: they come later, and what is outside keeps its class.
            if place.length() > 0 and (known is None or place.length() >= known.length()):
                best[id(conv)] = place
        for key, place in best.items():
            self._take(key, place, AcceleratedSequential)

    def _take(self, key: int, place: _Place, mixin: type[Accelerated]) -> None:
        why = why_not_swapped(place.container, mixin)
        if why is not None:
            self.reasons[key] = why
            return
        self.places[key] = place
        self.swaps[id(place.container)] = (place.container, mixin)

    def forwards(self, model: nn.Module) -> None:
        wanted = set(self.convs) - set(self.places)
        for name, module in _callers(model, wanted):
            if any(type(module).forward is cls.forward for cls in _OURS):
                continue
            why = why_not_called(module) or why_not_swapped(module, AcceleratedForward)
            try:
                if why is not None:
                    raise UnprovableError(why)
                traced = trace(module)
            except UnprovableError as unprovable:
                for part in module.modules():
                    if id(part) in wanted and id(part) not in self.places:
                        self.reasons[id(part)] = f"{type(module).__name__}: {unprovable}"
                continue
            for path, why in traced.reasons.items():
                self.reasons[id(module.get_submodule(path))] = why
            self.normalizers |= traced.normalizers
            for path, blocks in traced.found.items():
                place = _Place(module, name, blocks, traced.flags[path])
                self._take(id(module.get_submodule(path)), place, AcceleratedForward)
                self.traces[id(module)] = traced.traced

    def bare(self) -> None:
        for key, (name, conv) in self.convs.items():
            if key in self.places or key in self.held:
                continue
            alone = find_block([conv, nn.ReLU()], 0)
            if isinstance(alone, str):
                self.reasons[key] = alone
                continue
            block = Block(alone.conv, 1, "norm_act", None, None, None, None)
            self._take(key, _Place(conv, name, {True: block, False: block}), AcceleratedConvTranspose)

    def norms_alone(self, model: nn.Module) -> None:
        blocks = (block for place in self.places.values() for block in place.blocks.values())
        taken = (
            self.normalizers
            | self.held.keys()
            | {id(block.normalizer) for block in blocks if isinstance(block, Block)}
        )
        found = norms_to_swap(model, taken)
        self.norms = tuple(name for name, _ in found)
        self.swaps |= {id(norm): (norm, AcceleratedNorm) for _, norm in found}


def _plan(block: Block | str, meta: Tensor | None, options: Options) -> str | None:
    """Name of the plan that the block would run on an input of these sizes, without gradients."""
    if meta is None or not isinstance(block, Block):
        return None
    conv = block.conv
    device = next((parameter.device for parameter in conv.parameters()), meta.device)
    if device.type == "meta":
        return None
    x = torch.empty_strided(meta.size(), meta.stride(), dtype=meta.dtype, device=device)
    if not takes(x) or not admits(block, x):
        return None
    weight = sized_weight(conv, x, device)
    with torch.no_grad():
        way = Way.PLANNED if options.precision is not None else way_of(block, x, weight)
    if way is Way.MODULES:
        return "small: PyTorch's calls"
    positional, named = call_of(block, x, options, weight)
    if block.adds_skip:
        if not x.is_cuda:
            return None
        stride, padding, output_padding, groups, dilation = positional[3:]
        extent = output_extent(x, weight, stride, padding, output_padding, dilation)
        skip = x.new_empty((x.size(0), weight.size(1) * groups, *extent))
        named |= {"skip": skip, "return_conv": False}
        # A sum that is returned is what the forward for training keeps.
        return explain_norm_act(*positional, **named, training=block.returns_conv).algorithm
    return explain_norm_act(*positional, **named, spares_host=way is Way.SPARING).algorithm


def _finding(planner: _Planner, key: int, sizes: dict[int, Tensor], options: Options) -> Finding:
    name, _ = planner.convs[key]
    size = tuple(sizes[key].shape) if key in sizes else None
    place = planner.places.get(key)
    if place is None:
        why = planner.reasons.get(key, "nothing that calls it was found")
        return Finding(name, False, why, why, input_size=size)
    given = ", ".join(f"{flag}={value}" for flag, value in place.flags.items())
    said = {
        mode: block.describe() + (f", called with {given}" if given else "")
        if isinstance(block, Block)
        else f"PyTorch's calls, {block}"
        for mode, block in place.blocks.items()
    }
    plan = _plan(place.blocks[False], sizes.get(key), options)
    return Finding(name, True, said[True], said[False], place.name, size, plan)


def _sample_inputs(model: nn.Module, planner: _Planner, sample: Any) -> dict[int, Tensor]:
    """What each convolution gets in model(*sample), as tensors without memory.

    The model runs once, in the mode that it is in and without gradients; batch norm's statistics move if it
    is in training.
    """
    inputs: dict[int, Tensor] = {}
    handles = []
    try:
        for key, (_, conv) in planner.convs.items():

            def keep(
                module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], key: int = key
            ) -> None:
                inputs[key] = (args[0] if args else kwargs["input"]).to("meta")

            handles.append(conv.register_forward_pre_hook(keep, with_kwargs=True))
        with torch.no_grad():
            model(*sample)
    finally:
        for handle in handles:
            handle.remove()
    return inputs


def _require_module(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"upconv3d: model must be a torch.nn.Module; got {model!r}. Remedy: an instance of one."
        )


def _require_arguments(sample: Any) -> None:
    if sample is not None and not isinstance(sample, (tuple, list)):
        raise TypeError(
            f"upconv3d: sample must be a tuple of the arguments of a call of the model; got "
            f"{type(sample).__name__}. Remedy: sample=(x,) for model(x)."
        )


def restore(model: nn.Module) -> None:
    """Undoes accelerate() in every module of a model: a copy, one that was loaded, a slice, a part.

    Modules that are not accelerated stay as they are. Those that were parametrized after accelerate() stay
    parametrized; those that were given yet another class keep it, and run the forward that they had before.
    Parts that another model shares are restored there too.

    Raises: TypeError: model is no nn.Module.
    """
    _require_module(model)
    for module in model.modules():
        unswap(module)


def accelerate(
    model: nn.Module,
    *,
    precision: str | None = None,
    bare: bool = False,
    norms: bool = False,
    sample: tuple[Any, ...] | None = None,
) -> Report:
    """Replaces transposed convolutions and what follows them by calls of conv_transpose3d_norm_act, in place.

    A chain is a ConvTranspose3d, a norm (GroupNorm, InstanceNorm3d; on CUDA BatchNorm3d in eval mode) and an
    activation, in either order, with Identity or inactive Dropout between them; norm or activation may be
    missing. Chains are found

    - in nn.Sequential, however nested;
    - in forwards whose source shows that they make the same calls every time, which torch.fx traces; and in
      modules that such a forward calls with a convolution's result, or whose list of results it takes apart.

    A flag is an argument of such a forward whose default is a bool. Up to three flags may have either value:
    each combination has a trace of its own. Calls that give another argument with a default any other value
    run the forward as it was. A method by which a forward refuses its arguments is asked at each call.

    Where other calls read the convolution too, later than the chain does, the block returns it as well. A
    skip that is added right after the convolution, before a group or instance norm, is part of the block on
    CUDA, which returns the sum where other calls read that.

    Only the class of the modules that call the chain changes, to a subclass: parameters, names, state
    dict, hooks and the modules of the chain stay. What runs is decided at each call: with hooks on a module
    of the chain, with an active Dropout in it or with batch norm in training, PyTorch's calls do.

    Args:
        model: any module; what is found depends on its submodules.
        precision: as in conv_transpose3d_relu_group_norm, of every block.
        bare: whether a transposed convolution that nothing known follows is replaced too, by itself.
        norms: whether GroupNorm and InstanceNorm3d that are in no block run our kernels too, by themselves.
            They do on CUDA where a norm group of a sample has at least 16384 values, 65536 while gradients
            are recorded, and 16 times as many in volumes of up to 4 million values.
        sample: arguments of a call of the model, a tuple; the model is run once with them, in the mode that
            it is in and without gradients, for the sizes and plans in the report.

    Do not call this while another thread traces with torch.compile: while forwards are traced here, nn.Module
    has a __getattribute__ that Dynamo does not look into.

    Returns: a Report, which print() shows and whose restore() undoes it all, as restore(model) does in copies
        and loaded models, too.

    Raises:
        TypeError: model is no nn.Module, or sample no tuple (nor list).
        ValueError: an unknown precision, or a model with modules that were accelerated before.
    """
    _require_module(model)
    _require_arguments(sample)
    resolve_precision(torch.empty(0), precision)
    for name, module in model.named_modules():
        if is_swapped(module):
            raise ValueError(
                f"upconv3d: a model is accelerated once; got one whose {name or type(module).__name__!r} is "
                f"accelerated. Remedy: upconv3d.restore(model) first."
            )
    restore(model)  # slices of accelerated modules have the class, and nothing else
    planner = _Planner(model)
    sizes = {} if sample is None else _sample_inputs(model, planner, sample)
    planner.sequentials(model)
    planner.forwards(model)
    if bare:
        planner.bare()
    if norms:
        planner.norms_alone(model)
    options = Options(precision)
    findings = tuple(_finding(planner, key, sizes, options) for key in planner.convs)
    # A model is changed as a whole, or not at all.
    try:
        for module, mixin in planner.swaps.values():
            swap(module, mixin, options)
            if id(module) in planner.traces:
                module.__dict__[_TRACED] = planner.traces[id(module)]
    except BaseException:
        restore(model)
        raise
    return Report(findings, planner.norms, [weakref.ref(module) for module, _ in planner.swaps.values()])
