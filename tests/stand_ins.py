# SPDX-License-Identifier: Apache-2.0
"""Stand-ins for the internal CUDA operators, which let what Python does around these run on the CPU too."""

import torch
from upconv3d import _norm_alone, _tail, _tail_call, _tail_gradients, _tail_op, _tail_sum
from upconv3d._accelerated import norms, remembered, run
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
        settings, skip = _tail_op._settings[arguments[7]], arguments[6]
        if settings[5] == 0 and skip is None:
            if _tail.begins_with_result(settings):
                return None, None
            convolution = _tail.Settings(*settings).convolution()
            conv = _tail.convolution(batched(arguments[0]), arguments[1], None, convolution)
            return self.forward(*arguments)[0], conv
        if not self.keeps and settings[5] > 0:
            return None, None
        if settings[-1]:  # the sum with a skip is kept
            y, conv = self.forward(*arguments)
            return y, batched(conv + skip)
        return self.forward(*arguments)[0], torch.ones(8, dtype=torch.uint8)

    def norm_act(self, value, gamma, beta, slopes, number):
        self.calls.append("norm_act")
        settings = _tail.Settings(*_tail_op._settings[number])
        assert settings.return_conv and settings.order == "norm_act" and settings.num_groups > 0
        vectors = _tail.Tensors(value, value, None, gamma, beta, slopes, None)
        assert all(v is None or v.dtype is value.dtype for v in vectors)
        y = _tail._normalize(value, vectors, settings, instance=False)
        return _tail._activate(y, settings, slopes, in_place=False).clone()  # no view, as of a kernel

    def backward(self, grad_y, *arguments):
        self.calls.append("backward")
        *tensors, saved, number, wanted, consume_saved = arguments
        settings = _tail_op._settings[number]
        tensors = list(self._cast(tensors, number))
        assert len(tensors) == 6 and grad_y.dim() == tensors[0].dim() == 5
        self.consumed.append(consume_saved)
        mask = [bool(wanted >> i & 1) for i in range(6)]
        if settings[-1] or settings[5] == 0:
            return self._from_operand(grad_y, tensors, saved, _tail.Settings(*settings), mask, consume_saved)
        assert saved.dtype == torch.uint8
        # Weights' gradients only: the input's is left to the caller, with grad_c.
        found = _tail.tail_backward(grad_y, None, [*tensors, None], settings, [False, *mask[1:], False])
        with_skip = [*tensors, torch.zeros_like(grad_y)]
        grad_c = _tail.tail_backward(grad_y, None, with_skip, settings, [False] * 6 + [True])[6]
        return (*found[:6], grad_c)

    @staticmethod
    def _from_operand(grad_y, tensors, operand, settings, mask, consume):
        """What norm and activation make of the operand alone, differentiated."""
        assert operand.dtype == tensors[0].dtype and operand.shape == grad_y.shape
        given, lacks_bias = operand, settings.num_groups == 0 and not settings.return_conv
        if lacks_bias and not _tail.begins_with_result(settings) and tensors[2] is not None:
            given = operand + tensors[2].view(1, -1, 1, 1, 1)
        leaves = [None if t is None else t.detach().clone().requires_grad_() for t in (given, *tensors[3:])]
        value, gamma, beta, slopes = leaves
        norm = _tail.Tensors(*[None] * 3, gamma, beta, *[None] * 2)
        with torch.enable_grad():
            y = value
            for step in ("activation", "norm") if settings.activation_first() else ("norm", "activation"):
                if step == "activation":
                    y = _tail._activate(y, settings, slopes, in_place=False)
                elif settings.num_groups > 0:
                    y = _tail._normalize(y, norm, settings, instance=False)
            given = [leaf for leaf in leaves if leaf is not None]
            found = iter(torch.autograd.grad(y, given, grad_y, allow_unused=True))
        grad_c, *of_norm = (None if leaf is None else next(found) for leaf in leaves)
        grad_bias = grad_c.sum((0, 2, 3, 4)) if mask[2] else None
        if not mask[0]:
            grad_c = None
        elif consume:
            grad_c = operand.copy_(grad_c)
        vectors = (gradient if wanted else None for gradient, wanted in zip(of_norm, mask[3:], strict=True))
        return (None, None, grad_bias, *vectors, grad_c)


def install(kernels, monkeypatch):
    """Lets calls on the CPU be treated as those on CUDA are."""
    for module in (_tail_op, _tail_call, _tail_sum, norms, remembered, run):
        monkeypatch.setattr(module, "runs_kernels", lambda input: True)
    for module in (_tail_op, _tail_call, _tail_sum):
        monkeypatch.setattr(module, "numbered_tail", kernels.forward)
    for module in (_tail_op, _tail_sum):
        monkeypatch.setattr(module, "_numbered_tail_for_training", kernels.for_training)
    monkeypatch.setattr(_norm_alone, "_numbered_norm_act", kernels.norm_act)
    for module in (_tail_gradients, _norm_alone):
        monkeypatch.setattr(module, "_numbered_tail_backward", kernels.backward)
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
