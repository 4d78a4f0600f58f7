"""Every batch finds its bucket: vLLM's dispatcher (first model runner) and graph manager (second)."""

from __future__ import annotations

from typing import Any

import pytest
from gather import Facts
from scenarios.dispatch import MOST, MOST_TOKENS

from graphcap.hosts.vllm.config import MIXED_SIZES

SCENARIOS = "scenarios.dispatch"

LADDER = [1, 2, 4, 8, 16, 24, 30]
MIXED = [*(size for size in MIXED_SIZES if size < MOST_TOKENS), MOST_TOKENS]
GIVEN = [3, 7, 40, 100]
"""Sizes that a user chose; decode batches are of up to 30 sequences."""


def bucket(sizes: list[int], rows: int) -> int | None:
    return next((size for size in sizes if size >= rows), None)


# -- first model runner: [mode, tokens, sequences, uniform] --------------------------------------


def first(answers: list[Any], uniform: bool) -> dict[int, Any]:
    """Rows -> what the dispatcher answered."""
    return {rows: pair[0 if uniform else 1] for rows, pair in enumerate(answers, 1)}


def test_first_every_decode_batch_has_the_smallest_bucket(facts: Facts):
    answers = first(facts["first"]["answers"], uniform=True)
    for rows in range(1, MOST + 1):
        size = bucket(LADDER, rows)
        assert answers[rows] == ["FULL", size, size, True], rows


def test_first_every_mixed_batch_has_the_smallest_bucket(facts: Facts):
    answers = first(facts["first"]["answers"], uniform=False)
    for tokens in range(1, MOST_TOKENS + 1):
        size = bucket(MIXED, tokens)
        assert size is not None
        assert answers[tokens] == ["FULL", size, min(size, MOST), False], tokens


def test_first_larger_batches_have_none(facts: Facts):
    assert facts["first"]["answers"][MOST_TOKENS] == [["NONE", MOST_TOKENS + 1, None, False]] * 2


def test_first_captures_exactly_the_two_ladders(facts: Facts):
    captures = facts["first"]["captures"]
    assert sorted(captures) == sorted(
        [["FULL", size, size, True] for size in LADDER]
        + [["FULL", size, min(size, MOST), False] for size in MIXED]
    )
    assert [tokens for _, tokens, _, _ in captures] == sorted([*LADDER, *MIXED], reverse=True)


def test_first_decode_batch_above_the_users_sizes_has_a_mixed_graph(facts: Facts):
    answers = first(facts["first, custom buckets"]["answers"], uniform=True)
    assert [answers[rows] for rows in (3, 7)] == [["FULL", 3, 3, True], ["FULL", 7, 7, True]]
    for rows in range(8, MOST + 1):
        assert answers[rows] == ["FULL", 40, MOST, False], rows


def test_first_mixed_batches_keep_to_the_users_sizes(facts: Facts):
    answers = first(facts["first, custom buckets"]["answers"], uniform=False)
    for tokens in range(1, 101):
        size = bucket(GIVEN, tokens)
        assert size is not None
        assert answers[tokens] == ["FULL", size, min(size, MOST), False], tokens
    assert answers[101][0] == "NONE"


def test_first_in_pieces_decode_batches_have_full_graphs_all_the_same(facts: Facts):
    found = facts["first, pieces"]
    decode, mixed = (first(found["answers"], uniform) for uniform in (True, False))
    for rows in range(1, MOST + 1):
        size = bucket(LADDER, rows)
        assert decode[rows] == ["FULL", size, size, True], rows
    for tokens in range(1, 61):
        assert mixed[tokens] == ["PIECEWISE", bucket(found["sizes"], tokens), None, False], tokens


def test_first_backend_that_records_decode_only_is_warned_about(facts: Facts):
    found = facts["first, decode only"]
    decode, mixed = (first(found["answers"], uniform) for uniform in (True, False))
    assert {decode[rows][0] for rows in range(1, MOST + 1)} == {"FULL"}
    assert {mixed[tokens][0] for tokens in range(1, MOST_TOKENS + 1)} == {"NONE"}
    (warning,) = found["warnings"]
    assert warning.startswith("mixed prefill-decode batches run eagerly: the attention backend")
    assert "mode=3" in warning
    assert facts["first"]["warnings"] == []


def test_first_dispatcher_of_an_engine_that_is_not_taken_is_vllms_own(facts: Facts):
    ours, theirs = facts["first, not taken"], facts["first, without"]
    assert not ours["choice"]["taken"]
    assert theirs["choice"] is None
    assert ours["answers"] == theirs["answers"]
    assert ours["captures"] == theirs["captures"]


# -- second model runner: [mode, tokens, sequences, tokens of each] ------------------------------


def sequences(size: int) -> int:
    """Of a mixed descriptor: at most one for two tokens."""
    return max(1, min(size // 2, MOST))


def test_second_every_decode_batch_has_the_smallest_bucket(facts: Facts):
    uniform = facts["second"]["uniform"]
    for rows in range(1, MOST + 1):
        size = bucket(LADDER, rows)
        assert uniform[rows - 1] == ["FULL", size, size, 1], rows


def test_second_every_prefill_has_the_smallest_bucket(facts: Facts):
    for tokens, answer in enumerate(facts["second"]["one prefill"][:MOST_TOKENS], 1):
        size = bucket(MIXED, tokens)
        assert size is not None
        assert answer == ["FULL", size, sequences(size), None], tokens


def test_second_more_sequences_than_a_descriptor_holds_go_to_a_larger_one(facts: Facts):
    moved_on = 0
    for tokens, answer in enumerate(facts["second"]["many sequences"][: MOST_TOKENS - 1], 2):
        count = min(tokens - 1, MOST)
        size = next(s for s in MIXED if s >= tokens and sequences(s) >= count)
        assert answer == ["FULL", size, sequences(size), None], tokens
        moved_on += size != bucket(MIXED, tokens)
    assert moved_on


@pytest.mark.parametrize("kind", ["uniform", "one prefill", "many sequences"])
def test_second_larger_batches_have_none(facts: Facts, kind: str):
    assert facts["second"][kind][-1][:2] == ["NONE", MOST_TOKENS + 1]


def test_second_captures_exactly_the_two_ladders(facts: Facts):
    captures = facts["second"]["captures"]
    assert sorted(captures, key=str) == sorted(
        [["FULL", size, size, 1] for size in LADDER]
        + [["FULL", size, sequences(size), None] for size in MIXED],
        key=str,
    )
    assert [tokens for _, tokens, _, _ in captures] == sorted([*LADDER, *MIXED], reverse=True)


def test_second_decode_batch_above_the_users_sizes_has_a_mixed_graph(facts: Facts):
    uniform = facts["second, custom buckets"]["uniform"]
    assert [uniform[rows - 1] for rows in (3, 7)] == [["FULL", 3, 3, 1], ["FULL", 7, 7, 1]]
    for rows in range(8, MOST + 1):
        size = 40 if rows <= 20 else 100
        assert uniform[rows - 1] == ["FULL", size, sequences(size), None], rows


@pytest.mark.parametrize("name", ["second, pieces", "second, decode only"])
def test_second_decode_batches_have_full_graphs_in_other_modes_too(facts: Facts, name: str):
    uniform = facts[name]["uniform"]
    for rows in range(1, MOST + 1):
        size = bucket(LADDER, rows)
        assert uniform[rows - 1] == ["FULL", size, size, 1], rows
    mixed = "PIECEWISE" if name == "second, pieces" else "NONE"
    assert {answer[0] for answer in facts[name]["one prefill"][1:60]} == {mixed}


def test_second_manager_of_an_engine_that_is_not_taken_is_vllms_own(facts: Facts):
    ours, theirs = facts["second, not taken"], facts["second, without"]
    assert not ours["choice"]["taken"]
    assert theirs["choice"] is None
    for kind in ("uniform", "one prefill", "many sequences", "captures"):
        assert ours[kind] == theirs[kind], kind


@pytest.mark.parametrize("which", ["base", "derived", "draft"])
def test_managers_of_other_kinds_are_left_alone(facts: Facts, which: str):
    ours, theirs = facts["other managers"], facts["other managers, without"]
    assert ours[which] == theirs[which]
    assert ours["model"] != theirs["model"]
