"""Which files are a step's own, in messages that name a line."""

from __future__ import annotations

from types import ModuleType

import pytest

from graphcap import batch_check, inputs, pool
from graphcap.moe import experts
from graphcap.recorders import source, torch_capture


@pytest.mark.parametrize("module", [batch_check, inputs, pool, torch_capture])
def test_what_runs_a_step_is_none_of_it(module: ModuleType) -> None:
    assert module.__file__ is not None
    assert not source.is_users(module.__file__)


def test_a_step_of_graphcap_is_one() -> None:
    assert source.is_users(experts.__file__)
    assert source.is_users(__file__)
