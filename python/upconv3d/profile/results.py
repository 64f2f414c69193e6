# SPDX-License-Identifier: Apache-2.0
"""Result files of the profile and of perf's scripts: tried before anything is measured, written whole."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NOT_WRITTEN_STATUS = 4  # exit status where all was measured and printed, but a file could not be written


class ResultFileError(Exception):
    """A path that cannot take a result; says the rule, the value and the remedy."""


def _finite(data: Any) -> Any:
    """Plain data with None for every number that is infinite or none."""
    if isinstance(data, Mapping):
        return {key: _finite(value) for key, value in data.items()}
    if isinstance(data, (list, tuple)):
        return [_finite(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data


def json_text(data: Any) -> str:
    """The content of a JSON file. An error that is NaN, as where a check fails, is null: JSON has no NaN."""
    return json.dumps(_finite(data), indent=1, allow_nan=False) + "\n"


def _target(path: Path) -> Path:
    """What `path` leads to, which need not exist.

    Raises: OSError where its links lead to one another in a circle.
    """
    target = Path(os.path.realpath(path))  # Path.resolve raises RuntimeError for circles before Python 3.13
    if target.is_symlink():
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
    return target


@contextmanager
def _beside(target: Path) -> Iterator[Path]:
    """A path that can replace `target`, in a folder beside it that is gone at the end; makes target's own.

    No file of a user's lies there, and one that is made there has the mode that open() gives.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="upconv3d-", suffix=".part") as folder:
        yield Path(folder) / target.name


def write_whole(path: Path, content: str | bytes) -> None:
    """A file, written whole or not at all; through a link, what it points to. Makes its folder."""
    target = _target(path)
    with _beside(target) as part:
        part.write_bytes(content.encode() if isinstance(content, str) else content)
        if target.is_file():
            shutil.copymode(target, part)
        part.replace(target)


def _is_open_as(path: Path, number: int) -> bool:
    """Whether `path` is what the process has open as standard output (1) or error (2)."""
    try:
        return os.path.samestat(path.stat(), os.fstat(number))
    except OSError:  # closed
        return False


def _try_to_write(option: str, path: Path) -> None:
    """Does what write_whole does, short of the file itself.

    Raises: ResultFileError where `path` is no regular file. OSError where it cannot be written.
    """
    if path.exists() and not path.is_file():
        kind = "a directory" if path.is_dir() else "a device or pipe"
        raise ResultFileError(f"{option} must name a file; got {path}, {kind}. Remedy: another name")
    if path.exists() and any(_is_open_as(path, number) for number in (1, 2)):
        raise ResultFileError(
            f"{option} must name a file of its own; got {path}, where this command prints. Remedy: another "
            f"name"
        )
    with _beside(_target(path)) as part:
        part.write_bytes(b"")


class ResultFiles:
    """The files that a command line asks for, by option (None where it does not), and what became of them.

    Args:
        asked: path of each option.
        inputs: files that the command reads, which no result may replace.
    Raises: ResultFileError where a path cannot be written, is no regular file, is another option's or an
        input's too, or is --png's and does not end in .png. Folders that are missing are made.
    """

    def __init__(self, asked: Mapping[str, Path | None], inputs: Iterable[Path] = ()) -> None:
        self._paths = {option: path for option, path in asked.items() if path is not None}
        self._failures: dict[str, str] = {}
        owners = {os.path.realpath(path): "which this command reads" for path in inputs}
        for option, path in self._paths.items():
            if option == "--png" and path.suffix.lower() != ".png":
                raise ResultFileError(
                    f"--png must name a file that ends in .png; got {path}. Remedy: --png {path}.png"
                )
            owner = owners.setdefault(os.path.realpath(path), f"which is {option}'s")
            if owner != f"which is {option}'s":
                raise ResultFileError(
                    f"{option} must name a file of its own; got {path}, {owner}. Remedy: another name"
                )
        for option, path in self._paths.items():
            try:
                _try_to_write(option, path)
            except OSError as error:
                raise ResultFileError(
                    f"{option} must name a file that can be written; got {path}: {error.strerror}. "
                    "Remedy: a folder that exists and is yours"
                ) from error

    def write(self, option: str, make: Callable[[], str | bytes]) -> None:
        """Writes what `make` returns to the option's file, where there is one.

        A failure, of `make` too, is kept in `failures` until a later write of the same file succeeds: what
        was measured is worth more than the file.
        """
        path = self._paths.get(option)
        if path is None:
            return
        try:
            write_whole(path, make())
        except Exception as error:  # a full disk, or what the drawing library could not do
            self._failures[option] = f"{option} {path} was not written: {type(error).__name__}: {error}"
        else:
            self._failures.pop(option, None)

    @property
    def failures(self) -> list[str]:
        """Of each file whose last write failed, which and why."""
        return list(self._failures.values())
