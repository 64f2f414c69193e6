# SPDX-License-Identifier: Apache-2.0
"""Answers about plans: remembered by kind of call, in bounded number, never wrongly shared."""

import torch
from upconv3d._plan_questions import PlanQuestion, about_values


def test_asked_once_per_kind_and_bounded():
    asked = []

    def ask(n):
        asked.append(n)
        return n % 2 == 0

    question = PlanQuestion(ask, kinds=2)
    for _ in range(3):
        assert question(("a",), 2) is True
        assert question(("b",), 3) is False
    assert asked == [2, 3]
    # One more than are remembered: all are forgotten, and asked about again.
    assert question(("c",), 4) is True
    assert question(("c",), 4) is True
    assert question(("b",), 3) is False
    assert asked == [2, 3, 4, 3]


def test_kinds_without_hash_are_not_asked_about():
    def ask():
        raise AssertionError("asked")

    assert PlanQuestion(ask)((1, [2, 3])) is False


def test_about_values():
    weight = torch.empty(4, 6, 3, 3, 3)
    x = torch.empty(2, 4, 5, 6, 7)
    assert about_values(x, weight, (1, 2, 3), 1) == 2 * 6 * 5 * 12 * 21
    assert about_values(x[0], weight, (1, 1, 1), 2) == 12 * 5 * 6 * 7
    assert about_values(x[:, :0], weight, (1, 1, 1), 1) == 0
