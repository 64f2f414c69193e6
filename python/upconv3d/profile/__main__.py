# SPDX-License-Identifier: Apache-2.0
"""`python -m upconv3d.profile`, also `upconv3d-profile`: the command; arguments.py says what it takes."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from .._command import piped
from . import arguments, report
from .cases import SHAPES_FILE, Case
from .ceilings import Ceilings
from .measure import environment
from .peers import COMPILE_MODES
from .results import NOT_WRITTEN_STATUS, ResultFileError, ResultFiles, json_text
from .run import STEPS, CaseProfile, prepare, profile_case

WIDTH_OF_A_FILE = 120  # columns, where the output is no terminal
CEILING_SECONDS = 0.5


def check_shapes(cases: list[Case], device: torch.device) -> None:
    """Refuses a shape that the block refuses, before anything is measured.

    Raises: ArgumentError with the block's own words.
    """
    for case in cases:
        try:
            prepare(case, device)
        except (RuntimeError, ValueError, TypeError, ArithmeticError) as error:
            reason = str(error).splitlines()[0]
            name = case.shape.name
            given = case.shape.source == "command line"
            raise arguments.ArgumentError(reason if given else f"shape {name}: {reason}") from error


def has_arithmetic(cases: Iterable[Case]) -> bool:
    """Whether a roofline has a case to show."""
    return any(case.shape.useful_flops > 0 for case in cases)


def write_results(
    files: ResultFiles, env: dict[str, Any], ceilings: Ceilings, profiles: list[CaseProfile]
) -> None:
    """The files that were asked for; after every case, so that an interrupted run keeps what it has."""

    def picture() -> bytes:
        from . import roofline

        return roofline.draw(env, profiles)

    files.write("--json", lambda: json_text(report.to_json(env, ceilings.measured(), profiles)))
    files.write("--csv", lambda: report.to_csv(profiles))
    if has_arithmetic(profile.case for profile in profiles):
        files.write("--png", picture)


def measure_all(
    options: argparse.Namespace,
    env: dict[str, Any],
    cases: list[Case],
    device: torch.device,
    files: ResultFiles,
    profiles: list[CaseProfile],
) -> None:
    """Appends each case's profile, under a progress bar on stderr, so that a pipe gets the tables alone."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    modes = COMPILE_MODES["none" if options.no_compile else "default" if options.quick else "best"]
    budget_s = options.seconds
    if budget_s is None:
        budget_s = arguments.QUICK_SECONDS if options.quick else arguments.DEFAULT_SECONDS
    ceilings = Ceilings(device, min(CEILING_SECONDS, budget_s))
    steps = (*STEPS, "ncu") if options.ncu else STEPS
    description = TextColumn("{task.description}", markup=False)  # names of shapes are anybody's
    columns = (description, BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=len(cases) * len(steps))
        for index, case in enumerate(cases):

            def step(name: str, index: int = index, case: Case = case) -> None:
                done = index * len(steps) + steps.index(name)
                progress.update(task, completed=done, description=f"{case.shape.name}: {name}")

            profiles.append(
                profile_case(
                    case,
                    device,
                    ceilings,
                    modes=modes,
                    budget_s=budget_s,
                    with_ncu=options.ncu,
                    step=step,
                )
            )
            write_results(files, env, ceilings, profiles)


def print_tables(env: dict[str, Any], profiles: list[CaseProfile]) -> None:
    """All tables, where there is a profile."""
    from rich.console import Console

    console = Console(markup=False, emoji=False)  # names of shapes are anybody's
    if not console.is_terminal:
        console = Console(markup=False, emoji=False, width=WIDTH_OF_A_FILE)
    for profile in profiles:
        report.print_case(console, profile)
    if profiles:
        report.print_summary(console, env, profiles)


def exit_status(profiles: list[CaseProfile], files: ResultFiles) -> int:
    """1 where a check failed, else 4 where a file is missing, else 3 where Nsight Compute gave nothing."""
    if any(profile.check != "ok" for profile in profiles):
        return 1
    if files.failures:
        return NOT_WRITTEN_STATUS
    return 3 if any(profile.counters_missing for profile in profiles) else 0


@torch.no_grad()
def main(given: list[str] | None = None) -> int:
    parser = arguments.parser()
    options = parser.parse_args(given)
    try:
        if options.list_shapes:
            for shape in arguments.shapes_of_file(options.shapes_file):
                print(f"{shape.name}: {shape.describe()} ({shape.source})")
            return 0
        arguments.require("rich", "the profile")
        if options.png is not None:
            arguments.require("matplotlib", "--png")
        device = arguments.device_of(options)
        arguments.make_current(device)
        torch.backends.cudnn.benchmark = True  # before the first call: PyTorch keeps the first plan it finds
        cases = arguments.cases(options, device)
        # The package's own shapes are known to run, and their tensors take long to make.
        if options.input is not None or options.shapes_file != SHAPES_FILE:
            check_shapes(cases, device)
        if options.png is not None and not has_arithmetic(cases):
            raise arguments.ArgumentError(
                "--png takes a case with useful arithmetic; got none, every tap lands outside the output. "
                "Remedy: leave it out"
            )
        files = ResultFiles(
            {"--json": options.json, "--csv": options.csv, "--png": options.png},
            inputs=[options.shapes_file],
        )
    except (arguments.ArgumentError, ResultFileError) as error:
        parser.error(str(error))
    command = ["python", "-m", "upconv3d.profile", *(sys.argv[1:] if given is None else given)]
    env = environment(device, command, Path(__file__))
    profiles: list[CaseProfile] = []
    try:
        measure_all(options, env, cases, device, files, profiles)
    finally:  # also of the cases before one that failed or was interrupted
        print_tables(env, profiles)
    for failure in files.failures:
        print(f"{parser.prog}: {failure}", file=sys.stderr)
    return exit_status(profiles, files)


def command() -> int:
    """The program upconv3d-profile."""
    return piped(main)


if __name__ == "__main__":
    raise SystemExit(command())
