# SPDX-License-Identifier: Apache-2.0
"""Reads machine code: fails where wgmma's descriptors are moved into uniform registers before each wgmma.

    python .ci/check_sass.py LIBRARY_OR_OBJECT...

wgmma takes its descriptors from uniform registers. Where the compiler does not know that an address, or a
loop's count, is the same for a whole warp, it keeps them elsewhere, moves them by R2UR and guards the loop by
WARPSYNC: 1 to 8 % of a block's time, and which unrelated change makes it do so cannot be foreseen
(perf/NOTES.md, "Descriptors in uniform registers"). Prints one line per kernel with wgmma.

Needs cuobjdump and nvdisasm on PATH, of the CUDA toolkit or of the wheels nvidia-cuda-cuobjdump and
nvidia-cuda-nvdisasm. Exit status 2 where they are missing.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from check_ptxas import demangle

# Kernels that may move descriptors: a regular expression for the mangled name, and why.
ALLOWED = {
    r"TwiceTraitsSm90I\w+?(fLb|ES\d_Lb1)": "computed twice, to NCDHW or float32: shuffles in place of the "
    "moves took longer",
}

# Instructions before a loop's first wgmma that belong to it: what lies between the wait for its operands and
# itself; and between two wgmma of one k-block.
BEFORE = 30
APART = 40

FUNCTION = re.compile(r"^\s*Function : (\S+)")
INSTRUCTION = re.compile(r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)")


@dataclass
class Loop:
    """The wgmma of one k-block."""

    wgmma: int = 0
    moves: int = 0  # R2UR before and between them
    guards: int = 0  # WARPSYNC


@dataclass
class Kernel:
    """One function of the machine code."""

    name: str
    loops: list[Loop] = field(default_factory=list)

    @property
    def allowed(self) -> bool:
        return any(re.search(pattern, self.name) for pattern in ALLOWED)

    @property
    def clean(self) -> bool:
        return all(loop.moves == loop.guards == 0 for loop in self.loops)


def parse(lines: Iterable[str]) -> Iterator[Kernel]:
    """Kernels with wgmma, of what `cuobjdump -sass` prints."""
    kernel: Kernel | None = None
    recent: deque[str] = deque(maxlen=APART)  # since the last wgmma, or before the first
    for line in lines:
        if match := FUNCTION.match(line):
            if kernel is not None and kernel.loops:
                yield kernel
            kernel = Kernel(match[1])
            recent.clear()
            continue
        match = INSTRUCTION.match(line)
        if match is None or kernel is None:
            continue
        name = match[1].split(".")[0]
        if name != "HGMMA":
            recent.append(name)
            continue
        between = list(recent)
        if not kernel.loops or len(between) == APART:
            kernel.loops.append(Loop())
            between = between[-BEFORE:]
        loop = kernel.loops[-1]
        loop.wgmma += 1
        loop.moves += between.count("R2UR")
        loop.guards += between.count("WARPSYNC")
        recent.clear()
    if kernel is not None and kernel.loops:
        yield kernel


def kernels_of(file: Path) -> Iterator[Kernel]:
    """Kernels with wgmma in a library or an object.

    Raises:
        RuntimeError: cuobjdump fails.
    """
    command = ["cuobjdump", "-sass", str(file)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        yield from parse(process.stdout)
    if process.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} must succeed; got exit status {process.returncode}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("files", type=Path, nargs="+")
    args = parser.parse_args()
    missing = [tool for tool in ("cuobjdump", "nvdisasm") if shutil.which(tool) is None]
    if missing:
        print(
            f"check_sass: {' and '.join(missing)} must be on PATH; install the CUDA toolkit's, or "
            "pip install nvidia-cuda-cuobjdump nvidia-cuda-nvdisasm and add nvidia/cu13/bin to PATH",
            file=sys.stderr,
        )
        return 2
    kernels = [kernel for file in args.files for kernel in kernels_of(file)]
    problems = [] if kernels else ["no kernel with wgmma in these files"]
    names = demangle([kernel.name for kernel in kernels])
    for kernel, name in zip(kernels, names, strict=True):
        moves = ", ".join(
            f"{loop.wgmma} wgmma with {loop.moves} R2UR, {loop.guards} WARPSYNC" for loop in kernel.loops
        )
        print(f"{moves}: {name}")
        if not kernel.clean and not kernel.allowed:
            problems.append(f"descriptors are moved, {moves}: {name}")
    for problem in problems:
        print(f"check_sass: {problem}", file=sys.stderr)
    print(f"check_sass: {len(kernels)} kernels, {len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
