# SPDX-License-Identifier: Apache-2.0
"""Dispatch modes that several tests look on with."""

from torch.utils._python_dispatch import TorchDispatchMode


class OperatorNames(TorchDispatchMode):
    """Names of the operators that reach PyTorch's dispatch modes."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.name())
        return func(*args, **(kwargs or {}))
