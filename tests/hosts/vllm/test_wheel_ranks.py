"""Ranks of one engine agree on every bucket, or none of them records."""

from __future__ import annotations

import pytest
from gather import Facts
from test_wheel_first_runner import LADDER, all_equal

SCENARIOS = "scenarios.ranks"


def test_ranks_that_agree_replay(facts: Facts):
    found = facts["two ranks agree"]
    # Which recorder, then recorded 3 + 5 buckets, checked pointers, verified 5 and timed them. While each is
    # verified, after the replay and the eager step, and where there is padding after another replay: whether
    # it ran, what it found, and whether all of it ran.
    assert found["votes"] == [1] * (20 + 5 * 2 + 3 * 3)
    assert all_equal(found["steps"])
    assert found["replays"] == 3
    assert found["warnings"] == []


@pytest.mark.parametrize(
    ("which", "votes", "why"),
    [
        ("the other rank fails", [1, 1], "the recording failed on another rank"),
        ("this rank fails", [1, 1, 1, 1, 1, 1, 0], "this operation cannot be recorded"),
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
    assert found["votes"] == [1, 1, 1, 1, 1, 1, 0]
    assert "this operation cannot be recorded" in found["error"]


def test_two_processes_agree_over_gloo(facts: Facts):
    healthy, failed = facts["real ranks"]
    for found in (healthy, failed):
        assert all_equal(found["steps"])
        assert found["replays"] == 0
        assert found["fallbacks"] == {"rank_failed": 3}
    assert "bucket 4 (decode): the recording failed on another rank" in healthy["warnings"][0]
    assert "this operation cannot be recorded" in failed["warnings"][0]


@pytest.mark.parametrize("pair", ["cuda cuda", "cuda tape", "tape tape"])
def test_ranks_of_different_cards_take_the_same_recorder(facts: Facts, pair: str):
    one, other = facts["recorders"][pair]
    assert one["name"] == other["name"] == ("cuda" if pair == "cuda cuda" else "tape")
    told = "the tape was chosen: another tensor-parallel rank cannot capture graphs"
    assert one["why"] == (told if pair == "cuda tape" else None)
    assert other["why"] is None


@pytest.mark.parametrize("pair", ["cuda none", "none tape", "none none"])
def test_a_recorder_that_one_rank_cannot_have_is_had_by_none(facts: Facts, pair: str):
    for found, own in zip(facts["recorders"][pair], pair.split(), strict=True):
        here = "GRAPHCAP_RECORDER=cuda: expected it to work on every tensor-parallel rank"
        assert found["error"].startswith("this card cannot" if own == "none" else here)
