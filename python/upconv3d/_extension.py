# SPDX-License-Identifier: Apache-2.0
"""Loads the compiled module upconv3d._C, or says what is missing and what to do about it."""

import importlib
import re
from types import ModuleType

MINIMUM_TORCH = (2, 11)


def require_torch() -> None:
    """Refuses a PyTorch whose stable ABI is older than the one that upconv3d._C calls.

    Raises:
        ImportError: torch is missing or older than MINIMUM_TORCH; names what was found and the remedy.
    """
    needed = ".".join(map(str, MINIMUM_TORCH))
    try:
        import torch
    except ImportError as error:
        raise ImportError(
            f"upconv3d: PyTorch {needed} or later is needed, and importing torch failed: {error}. "
            f"Remedy: pip install 'torch>={needed}'."
        ) from error
    found = re.match(r"(\d+)\.(\d+)", torch.__version__)
    if found is None or (int(found[1]), int(found[2])) < MINIMUM_TORCH:
        raise ImportError(
            f"upconv3d: PyTorch {needed} or later is needed, because the compiled module uses the stable ABI "
            f"of that release; found torch {torch.__version__}. Remedy: pip install 'torch>={needed}'."
        )


def load_extension() -> ModuleType:
    """Imports upconv3d._C, which defines torch.ops.upconv3d.

    Raises:
        ImportError: the compiled module is missing or the loader refuses it; names the cause and the remedy.
    """
    try:
        return importlib.import_module("upconv3d._C")
    except ModuleNotFoundError as error:
        if error.name != "upconv3d._C":
            raise
        raise ImportError(
            "upconv3d: the compiled module upconv3d._C is missing beside the Python files, so this is "
            "a source tree that was not built for this Python. Remedy: run "
            "`pip install --no-build-isolation .` at the root of the repository, with the Python that is to "
            "import it."
        ) from error
    except ImportError as error:
        import torch

        raise ImportError(
            f"upconv3d: the compiled module upconv3d._C is there but cannot be loaded beside torch "
            f"{torch.__version__}: {error}. Remedy: reinstall upconv3d with the Python and the torch "
            f"that are to use it (`pip install --force-reinstall --no-deps --no-build-isolation .` at the "
            f"root of the repository)."
        ) from error
