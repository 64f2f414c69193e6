# SPDX-License-Identifier: Apache-2.0
"""An optional pass of Inductor, torch.compile's compiler, for models that accelerate() does not change."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx

from ._accelerated import functions
from ._accelerated import graph as _graph
from ._graphs import multiprocessors
from .functional import _torch_conv_precision

_SLOT = "pre_grad_custom_pass"

# Inductor is no public API, and upconv3d is to work with a PyTorch whose Inductor has none of these.
_config: Any = None
_CustomGraphPass: Any = object
try:
    from torch._inductor import config as _config
    from torch._inductor.custom_graph_pass import CustomGraphPass as _CustomGraphPass
    from torch._inductor.custom_graph_pass import get_hash_for_files
except ImportError as error:
    _missing: ImportError | None = error
else:
    _missing = None


def _require_slot() -> None:
    """Raises RuntimeError where this PyTorch's Inductor takes no pass before autograd."""
    if _missing is not None or not hasattr(_config, _SLOT):
        raise RuntimeError(
            f"upconv3d: InductorPass needs torch._inductor.config.{_SLOT} and CustomGraphPass; got torch "
            f"{torch.__version__}, which lacks them. Remedy: upconv3d.accelerate(model) before torch.compile."
        ) from _missing


class InductorPass(_CustomGraphPass):  # type: ignore[misc]
    """Makes one call of conv_transpose3d, norm and activation, in either order, in the graphs of Inductor.

        torch.compile(model, options={"pre_grad_custom_pass": upconv3d.InductorPass()})

    Norms are group_norm and instance_norm without running statistics; activations are those of
    conv_transpose3d_norm_act. A block is replaced where nothing else reads the values between its calls, and
    nothing that has an effect (a change in place, say) stands between them; the result's dtype and strides
    stay what they were. Where gradients are recorded, what goes into a block must not be changed in place
    after it. Blocks in an autocast region inside the compiled code, or inside a transform of torch.func, are
    left alone.

    Args, and attribute:
        devices: types of the devices on which blocks are replaced, such as "cuda".

    Attributes:
        rewritten: blocks replaced so far. A graph that PyTorch compiles twice counts twice, one that it takes
            from its caches may not count.

    Raises: RuntimeError where this PyTorch's Inductor takes no such pass; TypeError for devices as a string.
    """

    def __init__(self, *, devices: Iterable[str] = ("cuda",)) -> None:
        _require_slot()
        if isinstance(devices, str):
            raise TypeError(
                f"upconv3d: devices must be a collection of device types; got devices={devices!r}. Remedy: "
                f"devices=({devices!r},)."
            )
        self.devices = frozenset(devices)
        self.rewritten = 0

    def __call__(self, graph: fx.Graph) -> None:
        self.rewritten += _graph.rewrite(graph, self.devices)

    def uuid(self) -> Any:
        """What the rewritten graph depends on beside the graph, for the keys of PyTorch's caches."""
        files = tuple(str(module.__file__) for module in (_graph, functions))
        devices = tuple(sorted(self.devices)), multiprocessors()
        return get_hash_for_files(files), devices, _torch_conv_precision()


@contextmanager
def inductor_pass(*, devices: Iterable[str] = ("cuda",)) -> Iterator[InductorPass]:
    """InductorPass for all that is compiled inside the context: the call that compiles has to be in it.

        with upconv3d.inductor_pass():
            torch.compile(model)(x)

    Args: devices as of InductorPass. Yields the pass, whose `rewritten` counts the blocks.

    Raises: RuntimeError where another pass is set already, or this PyTorch takes none; TypeError for devices
        as a string.
    """
    own = InductorPass(devices=devices)
    present = getattr(_config, _SLOT)
    if present is not None:
        raise RuntimeError(
            f"upconv3d: inductor_pass() needs torch._inductor.config.{_SLOT} to be free; got {present!r}. "
            f"Remedy: a pass of your own that calls both, with a uuid() of both."
        )
    with _config.patch({_SLOT: own}):
        yield own
