# SPDX-License-Identifier: Apache-2.0
"""What the package's programs share: ends of their output that are not the terminal's."""

import os
import sys
from collections.abc import Callable


def piped(main: Callable[[], int]) -> int:
    """main's exit status; 1, without a traceback, where who reads its output has left (`| head`)."""
    try:
        status = main()
        if sys.stdout is not None:  # closed by the caller
            sys.stdout.flush()
    except BrokenPipeError:
        # What is left goes nowhere, at exit too.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    return status
