# SPDX-License-Identifier: Apache-2.0
"""A pytest plugin for other projects' tests: every model is accelerated when it is first called.

    PYTHONPATH=tests/outside python -m pytest -p accelerated_everywhere /path/to/MONAI/tests/networks

The first call of a module that nobody else is calling runs twice, before and after upconv3d.accelerate, from
the same random state; the results must agree. The summary says how many models and blocks there were, and
what kept convolutions from being replaced. UPCONV3D_BARE=1 replaces those by themselves too.
"""

import collections
import copy
import os
import threading

import torch
import upconv3d
from torch import nn
from torch.utils._pytree import tree_map_only
from upconv3d._accelerated import block
from upconv3d._accelerated.swap import unswap

_call = nn.Module.__call__
_busy = threading.local()
_counts = collections.Counter()
_reasons = collections.Counter()
_SEEN = "_accelerated_everywhere"


def _tensors(value):
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from _tensors(part)
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _tensors(part)


def _replaces_something(model):
    if any(type(module).__name__ == "LazyConvTranspose3d" for module in model.modules()):
        return False
    report = upconv3d.accelerate(model, bare=os.environ.get("UPCONV3D_BARE") == "1")
    _counts["models"] += 1
    _counts["convolutions"] += len(report.findings)
    _counts["replaced"] += len(report.replaced)
    for finding in report.findings:
        if not finding.replaced:
            _reasons[finding.evaluation] += 1
    return bool(report.replaced)


def _first_call(model, args, kwargs):
    for module in model.modules():  # a test may have called a part of it before
        unswap(module)
    twin = copy.deepcopy(model)
    # Either run may change its arguments; tensors that have a history cannot be deepcopied.
    twin_args, twin_kwargs = tree_map_only(torch.Tensor, torch.clone, (args, kwargs))
    if not _replaces_something(model):
        return _call(model, *args, **kwargs)
    random = torch.get_rng_state()
    expected = _call(twin, *twin_args, **twin_kwargs)
    torch.set_rng_state(random)
    found = _call(model, *args, **kwargs)
    for ours, theirs in zip(_tensors(found), _tensors(expected), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
        _counts["compared"] += 1
    return found


def _accelerating_call(self, *args, **kwargs):
    if getattr(_busy, "depth", 0) > 0 or self.__dict__.get(_SEEN) or torch.jit.is_tracing():
        return _call(self, *args, **kwargs)
    _busy.depth = 1
    try:
        self.__dict__[_SEEN] = True
        if not any(isinstance(module, nn.ConvTranspose3d) for module in self.modules()):
            return _call(self, *args, **kwargs)
        return _first_call(self, args, kwargs)
    finally:
        _busy.depth = 0


def pytest_configure(config):
    block.SMALL_BLOCK_VALUES = 0  # else blocks as small as a test's stay PyTorch's calls
    nn.Module.__call__ = _accelerating_call


def pytest_terminal_summary(terminalreporter):
    terminalreporter.write_line(f"accelerated_everywhere: {dict(_counts)}")
    for reason, count in _reasons.most_common():
        terminalreporter.write_line(f"  left alone, {count}: {reason}")
