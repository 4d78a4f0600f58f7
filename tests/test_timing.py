"""How long a replay takes, as it is measured."""

from __future__ import annotations

import time

import pytest
import torch

from graphcap.timing import least_ms


def test_the_least_of_some_times_each_from_the_same_start():
    seen: list[str] = []
    naps = iter((0.03, 0.001, 0.02))

    def call() -> None:
        seen.append("call")
        time.sleep(next(naps))

    def before() -> None:
        seen.append("before")
        time.sleep(0.02)

    took = least_ms(call, torch.device("cpu"), before=before)
    assert seen == ["before", "call"] * 3
    assert 1 <= took < 20


def test_what_fails_is_not_hidden():
    def fails() -> None:
        raise ValueError("it broke")

    with pytest.raises(ValueError, match="it broke"):
        least_ms(fails, torch.device("cpu"), before=lambda: None)
