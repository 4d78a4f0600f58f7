"""Ranks of one engine agree on every bucket, or none of them records."""

from __future__ import annotations

import pytest
from gather import Facts
from test_wheel_first_runner import LADDER, all_equal

SCENARIOS = "scenarios.ranks"


def test_ranks_that_agree_replay(facts: Facts):
    found = facts["two ranks agree"]
    # Recorded 3 + 5 buckets, verified 5.
    assert found["votes"] == [1] * 13
    assert all_equal(found["steps"])
    assert found["replays"] == 3
    assert found["warnings"] == []


@pytest.mark.parametrize(
    ("which", "votes", "why"),
    [
        ("the other rank fails", [1], "the recording failed on another rank"),
        ("this rank fails", [1, 1, 1, 1, 1, 0], "this operation cannot be recorded"),
    ],
)
def test_failure_on_one_rank_costs_every_recording(
    facts: Facts, which: str, votes: list[int], why: str
):
    found = facts[which]
    assert found["votes"] == votes
    assert all_equal(found["steps"])
    assert found["replays"] == 0
    assert found["fallbacks"] == {"rank_failed": 3}
    assert sorted(map(int, found["failures"])) == LADDER
    assert found["warnings"][0].startswith(
        "graphcap records nothing in this engine, steps run eagerly"
    )
    assert why in found["warnings"][0]


def test_an_error_on_this_rank_still_votes(facts: Facts):
    found = facts["this rank fails strictly"]
    assert found["votes"] == [1, 1, 1, 1, 1, 0]
    assert "this operation cannot be recorded" in found["error"]


def test_two_processes_agree_over_gloo(facts: Facts):
    healthy, failed = facts["real ranks"]
    for found in (healthy, failed):
        assert all_equal(found["steps"])
        assert found["replays"] == 0
        assert found["fallbacks"] == {"rank_failed": 3}
    assert "bucket 4 (decode): the recording failed on another rank" in healthy["warnings"][0]
    assert "this operation cannot be recorded" in failed["warnings"][0]
