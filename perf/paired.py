# SPDX-License-Identifier: Apache-2.0
"""Ratios of calls that take turns one by one, and how far these ratios can be trusted.

A host's pace changes within a second by a tenth and more, so the times of one call scatter, and so does the
ratio of two medians. Calls made one right after the other meet the same pace: their ratio, taken anew in
every round, scatters less, and the median of these ratios has an interval that assumes no distribution.
"""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

# Of so many ratios an interval leaves out the five outermost on either side: some calls may be disturbed.
MIN_ROUNDS = 21
WARM_UPS = 3
# An interval's ends are judged as tables show them: copies of models that keep the device busy come out at
# 0.9995 to 1.0005, and their intervals can be narrower than what they are off 1.
RATIO_FORMAT = "{:.2f}"


def turns_ms(
    calls: Mapping[str, Callable[[], object]],
    device: torch.device,
    budget_s: float,
    seed: int,
    queued: int = 1,
) -> dict[str, list[float]]:
    """Wall-clock times in ms of each call, one per round, from its start until the device is done.

    In every round each call has one turn, in an order that `seed` determines. Rounds go on until `budget_s`
    seconds are over, and there are MIN_ROUNDS of them at least. A turn is of `queued` calls, none of which
    waits for the one before; its time is divided by their number.
    """

    def wait() -> None:
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    for call in calls.values():
        for _ in range(WARM_UPS):
            call()
    wait()
    order, shuffle = list(calls), random.Random(seed).shuffle
    times: dict[str, list[float]] = {name: [] for name in calls}
    rounds, end = 0, time.perf_counter() + budget_s
    while rounds < MIN_ROUNDS or time.perf_counter() < end:
        shuffle(order)
        for name in order:
            call = calls[name]
            begin = time.perf_counter()
            for _ in range(queued):
                call()
            wait()
            times[name].append(1e3 * (time.perf_counter() - begin) / queued)
        rounds += 1
    return times


def median_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """The median, and two of the values, between which the true one lies in 95 % of all samples or more.

    Of independent values, that is: a pace that drifts over many rounds makes it too narrow. How many of n
    values lie below the true median is then binomial (n, 1/2), whatever their distribution: the
    k-th smallest lies above it with the probability of fewer than k. k is the largest for which that is at
    most 2.5 %; the k-th largest is the other end. (W. J. Conover, Practical Nonparametric Statistics, 3rd
    edition, section 3.2; for many values k is n/2 - 1.96 sqrt(n)/2.)
    """
    ordered, n = sorted(values), len(values)
    # In units of 2**-n, in whole numbers: `ways` to have k values below, `below` to have k or fewer.
    k, ways, below, all_ways = 0, 1, 1, 2**n
    while 40 * below <= all_ways:
        k += 1
        ways = ways * (n - k + 1) // k
        below += ways
    if k == 0:
        raise ValueError(f"an interval of 95 % takes six values; got {n}")
    return statistics.median(ordered), ordered[k - 1], ordered[n - k]


def ratio_fields(key: str, times: Mapping[str, Sequence[float]], one: str, other: str) -> dict[str, Any]:
    """A row's fields of `one` divided by `other`, round by round: the median and its interval's ends.

    None, all three, where one of the two was not timed.
    """
    found: Sequence[float | None] = (None, None, None)
    if one in times and other in times:
        found = median_interval([a / b for a, b in zip(times[one], times[other], strict=True)])
    return dict(zip((key, f"{key}_low", f"{key}_high"), found, strict=True))


def interval(row: Mapping[str, Any], key: str) -> tuple[float, float] | None:
    """The ends of a row's interval of `key`; None where it has none, as in files of ratios of medians."""
    low, high = row.get(f"{key}_low"), row.get(f"{key}_high")
    return None if low is None or high is None else (low, high)


# The ratio of an unchanged copy beside that of what was changed.
COPY_OF = {"x_eager": "x_copy", "x_queued": "x_queued_copy", "x_compile": "x_compiled_copy"}


def verdict(row: Mapping[str, Any], key: str) -> str:
    """What a row's interval of `key` says, to the digits of RATIO_FORMAT, widened by what an unchanged copy
    came out off 1: an interval covers what scatters from round to round, not where two models lie in memory.

    Raises: ValueError: the row has no interval.
    """
    ends = interval(row, key)
    if ends is None:
        raise ValueError(f"a verdict takes an interval; got a row without {key}_low and {key}_high")
    copy = row.get(COPY_OF.get(key, ""))
    off = 0.0 if copy is None else abs(copy - 1)
    if float(RATIO_FORMAT.format(ends[0] - off)) > 1:
        return "slower"
    return "quicker" if float(RATIO_FORMAT.format(ends[1] + off)) < 1 else "alike"
