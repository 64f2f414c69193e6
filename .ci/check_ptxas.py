# SPDX-License-Identifier: Apache-2.0
"""Reads a verbose build log: fails where ptxas spilled, used a stack frame, or serialized wgmma.

    python .ci/check_ptxas.py BUILD_LOG INSTANCE...

BUILD_LOG is what ninja printed for a whole build with -Xptxas -v; INSTANCE... the kernel variants that must
be in it (`python .ci/check_ptxas.py --list-instances` prints those of the installed build). Prints one line
per kernel: source, registers, spilled bytes, stack frame.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

# Kernels that may spill or use a stack frame: a regular expression for "SOURCE FUNCTION", and why.
ALLOWED: dict[str, str] = {}

SOURCE = re.compile(r"([\w.+-]+)\.cu\.o\b")
FUNCTION = re.compile(r"Function properties for (\S+)")
ENTRY = re.compile(r"Compiling entry function '(\S+)' for '(\w+)'")
FRAME = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
REGISTERS = re.compile(r"Used (\d+) registers")
SERIALIZED = re.compile(r"Potential Performance Loss: wgmma.*")


@dataclass
class Kernel:
    """What ptxas said of one function for one architecture."""

    source: str
    arch: str
    function: str
    is_entry: bool
    stack: int = 0  # bytes
    spill_stores: int = 0  # bytes
    spill_loads: int = 0  # bytes
    registers: int = 0

    @property
    def clean(self) -> bool:
        return self.stack == self.spill_stores == self.spill_loads == 0

    @property
    def allowed(self) -> bool:
        return any(re.search(pattern, f"{self.source} {self.function}") for pattern in ALLOWED)


def parse(log: str) -> tuple[list[Kernel], list[str]]:
    """Kernels, and the lines that report serialized wgmma, each after its source.

    ninja prints a job's command or description before its output, and outputs of jobs whole.
    """
    kernels: list[Kernel] = []
    serialized: list[str] = []
    source, entry, arch = "", "", ""
    for line in log.splitlines():
        if match := SERIALIZED.search(line):
            serialized.append(f"{source}: {match[0]}")
        elif match := ENTRY.search(line):
            entry, arch = match[1], match[2]
        elif match := FUNCTION.search(line):
            kernels.append(Kernel(source, arch, match[1], is_entry=match[1] == entry))
        elif kernels and (match := FRAME.search(line)):
            kernels[-1].stack, kernels[-1].spill_stores, kernels[-1].spill_loads = map(int, match.groups())
        elif kernels and (match := REGISTERS.search(line)):
            kernels[-1].registers = int(match[1])
        elif match := SOURCE.search(line):
            source = match[1]
    return kernels, serialized


def demangle(names: list[str]) -> list[str]:
    """Readable names where c++filt is installed, the names as they are elsewhere."""
    if not names or shutil.which("c++filt") is None:
        return names
    done = subprocess.run(
        ["c++filt", "-p"], input="\n".join(names), capture_output=True, text=True, check=True
    )
    return done.stdout.splitlines()


def installed_instances() -> list[str]:
    """Names of the convolution kernels that the installed build says it has."""
    import upconv3d

    config = upconv3d.build_config()
    return [kernel["name"] for kernel in config["kernels"] + config["grad_w_kernels"] if kernel["compiled"]]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("log", type=Path, nargs="?")
    parser.add_argument("instances", nargs="*")
    parser.add_argument("--list-instances", action="store_true")
    args = parser.parse_args()
    if args.list_instances:
        print("\n".join(installed_instances()))
        return 0
    if args.log is None:
        parser.error("BUILD_LOG is missing")
    kernels, serialized = parse(args.log.read_text(errors="replace"))
    problems = [f"wgmma serialized in {line}" for line in serialized]
    sources = {kernel.source for kernel in kernels if kernel.is_entry}
    problems += [f"no kernel of {name} in the log" for name in args.instances if name not in sources]
    if not args.instances:
        problems.append("no instances were named; a build with CUDA has at least one")
    names = demangle([kernel.function for kernel in kernels])
    for kernel, name in zip(kernels, names, strict=True):
        spilled = f"spills {kernel.spill_stores}+{kernel.spill_loads} bytes, stack {kernel.stack} bytes"
        if kernel.is_entry:
            print(f"{kernel.source} {kernel.arch} {kernel.registers} registers, {spilled}: {name[:90]}")
        if not kernel.clean and not kernel.allowed:
            problems.append(f"{kernel.source} {kernel.arch} {spilled}: {name}")
    for problem in problems:
        print(f"check_ptxas: {problem}", file=sys.stderr)
    print(f"check_ptxas: {len(kernels)} functions of {len(sources)} sources, {len(problems)} problems")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
