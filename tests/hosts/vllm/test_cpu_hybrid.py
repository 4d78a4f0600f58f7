"""A model with recurrent layers in the real engine on the CPU: its rows are told from padding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from checkpoints import is_stuck
from environments import run_script

SCRIPT = Path(__file__).resolve().parent / "cpu_hybrid.py"

Facts = dict[str, Any]


@pytest.fixture(scope="module")
def facts(cpu_engine: Path) -> Facts:
    one_thread = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    return run_script(cpu_engine, SCRIPT, env=one_thread, timeout=300)


def test_every_real_row_has_a_slot_and_no_padding_has_one(facts: Facts) -> None:
    """Promise 4. A real row that looks like padding would reach no expert."""
    steps = facts["steps"]
    assert [s["look real"] for s in steps] == [s["rows"] for s in steps]
    assert [s["look like padding"] for s in steps] == [s["padding"] for s in steps]
    assert any(s["padding"] for s in steps)


def test_mappings_of_recurrent_layers_tell_nothing(facts: Facts) -> None:
    """Why: it is them that a hybrid model has first."""
    first = [next(iter(s["by layer"])) for s in facts["steps"]]
    assert set(first) == {"model.layers.0.linear_attn"}
    decode = [s for s in facts["steps"] if s["rows"] <= 6]
    assert decode
    assert all(s["by layer"]["model.layers.0.linear_attn"] == 0 for s in decode)


def test_a_hybrid_is_replayed_and_decodes_as_vllm_alone(facts: Facts) -> None:
    assert facts["tokens"] == facts["alone"]
    assert not all(is_stuck(tokens) for tokens in facts["tokens"])
    assert facts["replays"] > 50
    assert facts["fallbacks"] == {}
