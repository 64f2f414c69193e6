# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for the internal CUDA operators, which let what Python does around these run on the CPU too."""

import torch
from upconv3d import _tail, _tail_call, _tail_gradients, _tail_op
from upconv3d._accelerated import remembered, run
from upconv3d._geometry import batched


class Kernels:
    """The internal operators in PyTorch's, with a count of their calls."""

    def __init__(self, keeps=True):
        self.keeps, self.calls, self.consumed = keeps, [], []
        self.given = None  # the tensors of the last forward

    def forward(self, *arguments):
        self.calls.append("forward")
        *tensors, number = arguments
        self.given = tensors
        return _tail.composite(self._cast(tensors, number), _tail_op._settings[number], precise=True)

    @staticmethod
    def _cast(tensors, number):
        """The tensors in one dtype; in several only where the number says so."""
        dtype, low = tensors[0].dtype, number in _tail_op._casting
        parameters = [t if t is None or not low else t.to(dtype) for t in tensors[1:6]]
        cast = [tensors[0], *parameters, *tensors[6:]]
        assert all(t is None or t.dtype is dtype for t in cast[1:6])
        return cast

    def for_training(self, *arguments):
        self.calls.append("for_training")
        self.skip = arguments[6]
        if not self.keeps:
            return None, None
        if _tail_op._settings[arguments[7]][-1]:  # the sum with a skip is kept
            y, conv = self.forward(*arguments)
            return y, batched(conv + self.skip)
        return self.forward(*arguments)[0], torch.ones(8, dtype=torch.uint8)

    def backward(self, grad_y, *arguments):
        self.calls.append("backward")
        *tensors, saved, number, wanted, consume_saved = arguments
        settings = _tail_op._settings[number]
        tensors = list(self._cast(tensors, number))
        returned = settings[-1]
        if returned:  # the kernels read what it is, whatever is convolved
            assert tensors[2] is None
            self.skip = saved - _tail._convolution(*tensors[:3], _tail.Settings(*settings).convolution())
        # The kernels keep the sum.
        tensors.append(None if self.skip is None else batched(self.skip))
        assert len(tensors) == 7 and grad_y.dim() == tensors[0].dim() == 5
        assert saved.dtype == (tensors[0].dtype if returned else torch.uint8)
        self.consumed.append(consume_saved)
        mask = [bool(wanted >> i & 1) for i in range(7)]
        # Weights' gradients and the skip's only: the input's is left to the caller, with grad_c.
        found = _tail.tail_backward(grad_y, None, tensors, settings, [False, *mask[1:]])
        everything = [*tensors[:6], torch.zeros_like(grad_y) if tensors[6] is None else tensors[6]]
        grad_c = _tail.tail_backward(grad_y, None, everything, settings, [False] * 6 + [True])[6]
        if consume_saved and returned:
            grad_c = saved.copy_(grad_c)
        return (*found[:6], grad_c)


def install(kernels, monkeypatch):
    """Lets calls on the CPU be treated as those on CUDA are."""
    for module in (_tail_op, _tail_call, remembered, run):
        monkeypatch.setattr(module, "runs_kernels", lambda input: True)
    for module in (_tail_op, _tail_call):
        monkeypatch.setattr(module, "numbered_tail", kernels.forward)
    monkeypatch.setattr(_tail_op, "_numbered_tail_for_training", kernels.for_training)
    monkeypatch.setattr(_tail_gradients, "_numbered_tail_backward", kernels.backward)
    numbers, settings, casting = {}, {}, set()

    def remember(key):
        numbers[key] = len(numbers)
        settings[numbers[key]] = key[: len(_tail.Settings._fields)]
        if len(key) > len(_tail.Settings._fields) and key[-1]:
            casting.add(numbers[key])
        return numbers[key]

    monkeypatch.setattr(_tail_op, "_numbers", numbers)
    monkeypatch.setattr(_tail_op, "_settings", settings)
    monkeypatch.setattr(_tail_op, "_casting", casting)
    monkeypatch.setattr(_tail_op, "_remember", remember)
