"""The kernel layer: an observer of this thread sees each outermost call."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from graphcap.operations import Operation, current_observer, observed_by, operation


class Witness:
    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []

    def operation(self, op: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.calls.append((op.name, op.implementation))


@operation("fill", "test")
def fill(out: torch.Tensor, *, value: float = 1.0) -> None:
    out.fill_(value)


def test_without_an_observer_it_just_runs():
    out = torch.zeros(2)
    fill(out, value=3.0)
    assert out.tolist() == [3.0, 3.0]


def test_observer_decides_whether_it_runs():
    witness, out = Witness(), torch.zeros(2)
    with observed_by(witness):
        fill(out)
        fill.named("other name")(out)
        with observed_by(None):
            fill(out, value=5.0)
            assert current_observer() is None
        assert current_observer() is witness
    assert current_observer() is None
    assert witness.calls == [("fill", "test"), ("other name", "test")]
    assert out.tolist() == [5.0, 5.0]


def test_observer_is_put_back_after_an_error():
    with pytest.raises(ValueError, match="inside"), observed_by(Witness()):
        raise ValueError("inside")
    assert current_observer() is None


def test_other_threads_are_not_observed():
    witness, out = Witness(), torch.zeros(2)
    with observed_by(witness):
        thread = threading.Thread(target=fill, args=(out,))
        thread.start()
        thread.join()
    assert witness.calls == []
    assert out.tolist() == [1.0, 1.0]


def test_named_keeps_what_runs():
    renamed = fill.named("router GEMM")
    assert (renamed.function, renamed.implementation) == (fill.function, "test")
    assert repr(renamed) == "Operation('router GEMM', 'test')"
