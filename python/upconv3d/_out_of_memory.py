# SPDX-License-Identifier: Apache-2.0
"""Out of memory on CUDA as PyTorch's own exception.

PyTorch's stable ABI hands on that something failed, not as what: an operator in C++ can only throw what
Python gets as RuntimeError. Callers that try again with a smaller batch catch torch.OutOfMemoryError.
"""

import torch

# As PyTorch words it, and throw_allocation_error of cpp/bindings/torch_calls.cpp where it does not.
_WORDS = "CUDA out of memory."


def raise_out_of_memory(error: RuntimeError) -> None:
    """Returns unless `error` says that an operator found no memory.

    Raises: torch.OutOfMemoryError, with the operator's message.
    """
    if isinstance(error, torch.OutOfMemoryError):
        raise error
    message = str(error)
    if _WORDS in message:
        raise torch.OutOfMemoryError(message) from None
