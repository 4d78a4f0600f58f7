"""Footguns of the ladder and of dispatch: cases 1 to 7 and their kin.

Each docstring is a row of the table of docs/footguns.md, or part of one; see `footguns_page`.
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from toy import CPU, WIDTH, double, floats, manager_of

from graphcap.buckets import BucketLadder
from graphcap.errors import FallbackError, InputError, LadderError, SettingsError
from graphcap.inputs import Slot, StaticInputs
from graphcap.manager import CaptureManager
from graphcap.settings import Settings

OFF = Settings(verify="off")
SLOTS = {"x": Slot((WIDTH,), torch.float32)}


def with_ladder(ladder: BucketLadder | None, max_batch: int, settings: Settings = OFF) -> Any:
    return CaptureManager(
        double, StaticInputs(max_batch, SLOTS, CPU), ladder=ladder, settings=settings
    )


def captured(step: Any = double, **options: Any) -> CaptureManager:
    manager = manager_of(step, **options)
    manager.capture()
    return manager


# -- 1 -------------------------------------------------------------------------------------------


def test_01_maximum_42_is_a_bucket():
    """Elsewhere: a ladder by stride stopped at 40, batches of 41 and 42 ran eagerly.
    Here: the exact maximum is always a bucket."""
    manager = with_ladder(BucketLadder.up_to(42), 42)
    manager.capture()
    for rows in (41, 42):
        assert torch.equal(manager.run({"x": floats(rows)})["y"], floats(rows) * 2)
    assert manager.stats().replays == 2
    assert manager.stats().fallbacks == {}


def test_01_kin_a_users_list_or_variable_ends_below_the_maximum():
    """Kin: a list or variable that ends below the maximum."""
    settings = Settings.from_env({"GRAPHCAP_BUCKETS": "8,16", "GRAPHCAP_VERIFY": "off"})
    assert list(with_ladder(None, 42, settings).ladder) == [8, 16, 42]
    with pytest.raises(LadderError, match=r"ends at 16 and the slots have 42.*max_batch=42"):
        with_ladder(BucketLadder([8, 16]), 42)


@given(st.integers(1, 3000))
def test_01_kin_every_batch_up_to_any_maximum_has_a_bucket(limit: int):
    """Kin: any other maximum."""
    ladder = BucketLadder.up_to(limit)
    assert ladder.bucket_for(limit) == limit
    assert ladder.bucket_for(max(1, limit - 1)) is not None


def test_01_kin_a_maximum_that_is_numpys_integer():
    """Kin: a maximum that is numpy's integer."""
    ladder = BucketLadder.up_to(np.int64(42))
    assert ladder == BucketLadder.up_to(42)
    assert {type(size) for size in ladder} == {int}
    assert StaticInputs(np.int32(3), SLOTS, CPU).max_batch == 3
    assert ladder.bucket_for(np.int16(41)) == 42


# -- 2 -------------------------------------------------------------------------------------------


def test_02_maximum_1_is_exactly_one_bucket():
    """Elsewhere: a maximum of 1 gave buckets 1, 2 and 4.
    Here: no bucket is larger than the maximum."""
    assert list(BucketLadder.up_to(1)) == [1]
    report = with_ladder(BucketLadder.up_to(1), 1).capture()
    assert [bucket.size for bucket in report.buckets] == [1]


def test_02_kin_a_users_list_for_a_maximum_of_1():
    """Kin: a user's list for a maximum of 1; other small maxima."""
    assert list(BucketLadder.parse("1,2,4", 1)) == [1]
    assert list(BucketLadder([2, 4], 1)) == [1]
    assert list(BucketLadder.up_to(3)) == [1, 2, 3]


# -- 3 -------------------------------------------------------------------------------------------


def test_03_a_users_list_is_sorted_unique_and_clipped():
    """Elsewhere: `8,4,4,64`, 0, -1 or text in a list was taken as it came.
    Here: sorted, unique, clipped; what is no size is refused by name."""
    assert list(BucketLadder.parse("8,4,4,64", 48)) == [4, 8, 48]
    for bad in ("0", "-1", "many"):
        with pytest.raises(LadderError, match=f"found '{bad}' in '4,{bad}'"):
            BucketLadder.parse(f"4,{bad}", 48)


@pytest.mark.parametrize(
    "bad", ["", "1e3", "4.0", "+4", "4;8", "[4", "auto", "٤", "²", "9" * 5000, "0x10", "1_0"]
)
def test_03_kin_text_that_looks_like_a_size(bad: str):
    """Kin: `4.0`, `1e3`, `1_0`, empty entries, digits of other scripts."""
    with pytest.raises(LadderError, match="bucket sizes: expected"):
        BucketLadder.parse(f"2,{bad}", 48)


def test_03_kin_spaces_and_huge_sizes_are_fine():
    """Kin: spaces, sizes far above the maximum."""
    assert list(BucketLadder.parse(" 8 , 4\t, 999999999999999999", 48)) == [4, 8, 48]


@pytest.mark.parametrize("bad", [True, 4.0, "4", None, torch.tensor(4), np.float32(4), 0, -3])
def test_03_kin_objects_that_are_no_sizes(bad: object):
    """Kin: booleans, floats, tensors (a host read)."""
    with pytest.raises(LadderError, match="expected an integer of at least 1"):
        BucketLadder([1, bad])  # type: ignore[list-item]
    with pytest.raises(LadderError, match="expected an integer of at least 1"):
        BucketLadder([1]).bucket_for(bad)  # type: ignore[arg-type]


@pytest.mark.parametrize("bad", [5, "1,2,4", None])
def test_03_kin_one_number_or_text_where_several_sizes_belong(bad: Any):
    """Kin: one number, or text, in place of a list; a list in place of a ladder."""
    with pytest.raises(LadderError, match=r"expected several integers.*up_to"):
        BucketLadder(bad)
    with pytest.raises(LadderError, match=r"expected a BucketLadder, found \[1, 4\]"):
        with_ladder([1, 4], 4)  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["4,0", "4,,8", "-1", "", "four"])
def test_03_kin_the_variable_is_refused_at_start_up(text: str):
    """Kin: the same in `GRAPHCAP_BUCKETS`, at start-up."""
    with pytest.raises(SettingsError, match="GRAPHCAP_BUCKETS: expected auto") as caught:
        Settings.from_env({"GRAPHCAP_BUCKETS": text})
    assert repr(text) in str(caught.value)


# -- 4 -------------------------------------------------------------------------------------------


def test_04_the_default_ladder_for_512_is_short_and_said_up_front(
    caplog: pytest.LogCaptureFixture,
):
    """Elsewhere: one bucket for every size recorded hundreds of graphs for 512 sequences.
    Here: 51 by default, and `capture()` says first how many it will record."""
    assert len(BucketLadder.up_to(512)) == 51
    before_any_run: list[int] = []
    records = caplog.records

    def step(inputs: Any) -> Any:
        before_any_run.append(len(records))
        return double(inputs)

    caplog.set_level(logging.INFO, "graphcap")
    captured(step, max_batch=4, buckets=(1, 2), settings=OFF)
    assert before_any_run[0] == 1
    assert caplog.records[0].getMessage().startswith("recording 3 buckets (4, 2, 1)")


def test_04_kin_a_huge_maximum():
    """Kin: a maximum in the millions."""
    assert len(BucketLadder.up_to(1 << 22)) < 300
    assert BucketLadder.up_to(1 << 22).max_batch == 1 << 22


def test_04_kin_progress_tells_the_total_first():
    """Kin: a progress bar without its total."""
    seen: list[tuple[int, int]] = []
    runs: list[int] = []

    def step(inputs: Any) -> Any:
        runs.append(len(seen))
        return double(inputs)

    manager_of(step, buckets=(1, 2)).capture(lambda done, total, what: seen.append((done, total)))
    assert seen[0] == (0, 9)
    assert seen[-1] == (9, 9)
    assert runs[0] == 1


# -- 5 -------------------------------------------------------------------------------------------


def test_05_batches_above_the_maximum_are_counted_and_logged_once(
    caplog: pytest.LogCaptureFixture,
):
    """Elsewhere: batches above the maximum ran eagerly in silence.
    Here: counted by reason in `stats()`, one WARNING with the remedy."""
    manager = captured()
    caplog.set_level(logging.WARNING, "graphcap")
    for rows in (5, 9, 5):
        assert torch.equal(manager.run({"x": floats(rows)})["y"], floats(rows) * 2)
    assert manager.stats().fallbacks == {"above_max_batch": 3}
    (record,) = caplog.records
    assert "above_max_batch, maximum 4" in record.getMessage()
    assert "raise max_batch" in record.getMessage()


def test_05_kin_a_bucket_that_failed_is_counted_for_its_own_reason(
    caplog: pytest.LogCaptureFixture,
):
    """Kin: batches of a bucket that was not recorded, or that the host gave up."""

    def step(inputs: Any) -> Any:
        if inputs["x"].shape[0] == 2:
            inputs["x"].tolist()
        return double(inputs)

    manager = captured(step, buckets=(1, 2))
    manager.drop(1, "rank_failed", "bucket 1: another rank could not record it")
    caplog.clear()
    for rows in (2, 1, 2, 5, 4):
        assert torch.equal(manager.run({"x": floats(rows)})["y"], floats(rows) * 2)
    assert manager.stats().fallbacks == {"not_recorded": 2, "rank_failed": 1, "above_max_batch": 1}
    assert manager.stats().replays == 1
    assert len(caplog.records) == 3


def test_05_kin_strict_refuses_before_anything_is_launched():
    """Kin: with `GRAPHCAP_STRICT=1` an error, before a launch."""
    manager = captured(settings=Settings(strict=True))
    manager.run({"x": floats(3)})
    before = manager.inputs.arena.clone(), manager.stats()
    with pytest.raises(FallbackError, match="above_max_batch"):
        manager.run({"x": floats(5)})
    assert torch.equal(manager.inputs.arena, before[0])
    assert manager.stats() == before[1]


# -- 6 -------------------------------------------------------------------------------------------


@pytest.fixture
def served() -> CaptureManager:
    manager = captured()
    manager.run({"x": floats(3)})
    return manager


def refused(manager: CaptureManager, words: str, *arguments: Any, **options: Any) -> None:
    """`run` raises `InputError`, and has changed and counted nothing."""
    before = manager.inputs.arena.clone(), manager.stats()
    with pytest.raises(InputError, match=words):
        manager.run(*arguments, **options)
    assert torch.equal(manager.inputs.arena, before[0])
    assert manager.stats() == before[1]
    assert torch.equal(manager.run()["y"], floats(3) * 2)


def test_06_a_batch_of_0_launches_nothing(served: CaptureManager):
    """Elsewhere: a batch of 0 was launched.
    Here: refused, nothing is launched, nothing is counted."""
    refused(served, "at least one row.*found 0; skip the step", {"x": floats(0)})


@pytest.mark.parametrize("rows", [0, -1, True, 2.0, "2", torch.tensor(2)])
def test_06_kin_row_counts_that_are_none(rows: Any, served: CaptureManager):
    """Kin: 0, -1, `True`, 2.0 or a tensor as `rows=`."""
    refused(served, "at least one row, as an integer", rows=rows)


def test_06_kin_no_batch_at_all_yet():
    """Kin: `run()` before any batch."""
    with pytest.raises(InputError, match="at least one row"):
        captured().run()


BAD_BATCHES: dict[str, tuple[Any, str]] = {
    "dtype": (lambda: {"x": floats(2).double()}, "expected dtype"),
    "shape": (lambda: {"x": floats(2)[:, 0]}, r"expected shape \(n, 3\), found \(2,\)"),
    "unknown slot": (lambda: {"z": floats(2)}, "unknown slot 'z'; this step has x"),
    "the row count as a slot": (lambda: {"num_rows": torch.ones(1)}, "unknown slot 'num_rows'"),
    "device": (lambda: {"x": floats(2).to("meta")}, "found one on meta"),
    "sparse": (lambda: {"x": floats(2).to_sparse()}, "layout torch.sparse_coo"),
    "nested": (lambda: {"x": torch.nested.nested_tensor([floats(1)])}, "a nested one"),
    "numpy": (lambda: {"x": floats(2).numpy()}, "expected a tensor, found ndarray"),
    "list": (lambda: {"x": [1.0]}, "expected a tensor, found list"),
    "none": (lambda: {"x": None}, "expected a tensor, found NoneType"),
    "a tensor for the batch": (lambda: floats(2), "expected a mapping .* found Tensor"),
    "a list for the batch": (lambda: [floats(2)], "expected a mapping .* found list"),
}


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested")
@pytest.mark.parametrize("what", BAD_BATCHES)
def test_06_kin_a_batch_of_another_kind(what: str, served: CaptureManager):
    """Kin: another dtype, shape, device, layout, an unknown or missing slot."""
    make, words = BAD_BATCHES[what]
    refused(served, words, make())


def test_06_kin_a_missing_slot():
    """Kin: a batch that grows and leaves slots out."""
    slots = {"a": Slot((), torch.float32), "b": Slot((), torch.float32)}
    manager = captured(lambda i: {"y": i["a"] + i["b"]}, slots=slots)
    manager.run({"a": torch.ones(2), "b": torch.ones(2)})
    for rows in (3, 9):
        with pytest.raises(InputError, match=r"leaves out slot\(s\) b"):
            manager.run({"a": torch.zeros(rows)})
    assert manager.run()["y"].tolist() == [2, 2]


@pytest.mark.parametrize(
    "make",
    [
        lambda: floats(8)[::2],
        lambda: floats(3)[:3].t(),
        lambda: torch.ones(1, WIDTH).expand(4, WIDTH),
        lambda: floats(4).requires_grad_(),
        lambda: torch.nn.Parameter(floats(4)),
        lambda: torch._neg_view(floats(4)),
    ],
    ids=["strided", "transposed", "expanded", "requires grad", "parameter", "negated"],
)
def test_06_kin_unusual_tensors_are_read_as_they_are(make: Any, served: CaptureManager):
    """Kin: strided, expanded or differentiable batches, which are fine."""
    given = make()
    out = served.run({"x": given})["y"]
    assert torch.equal(out, given.detach() * 2)
    assert not out.requires_grad


# -- 7 -------------------------------------------------------------------------------------------


def replayed(manager: CaptureManager) -> list[int]:
    return [bucket.size for bucket in manager.stats().buckets if bucket.replays]


def test_07_ranks_choose_the_same_bucket():
    """Elsewhere: two ranks chose different buckets, and the collective hung.
    Here: the choice follows from ladder and batch alone; `agreed_batch=` tells a rank both."""
    ranks = [captured(buckets=(1, 2)) for _ in range(2)]
    for manager, rows in zip(ranks, (1, 3), strict=True):
        out = manager.run({"x": floats(rows)}, agreed_batch=3)["y"]
        assert torch.equal(out, floats(rows) * 2)
    assert [replayed(manager) for manager in ranks] == [[4], [4]]


def test_07_kin_an_agreed_batch_above_the_maximum():
    """Kin: an agreed batch above the maximum: all ranks run eagerly."""
    ranks = [captured(buckets=(1, 2)) for _ in range(2)]
    for manager, rows in zip(ranks, (1, 4), strict=True):
        manager.run({"x": floats(rows)}, agreed_batch=9)
    assert [manager.stats().fallbacks for manager in ranks] == [{"above_max_batch": 1}] * 2


@pytest.mark.parametrize("agreed", [1, 0, True, 2.0, "2", torch.tensor(4)])
def test_07_kin_an_agreed_batch_that_cannot_be(agreed: Any, served: CaptureManager):
    """Kin: an agreed batch below the rank's own, or no integer."""
    refused(
        served, "this rank has 2 rows; agree on the maximum", {"x": floats(2)}, agreed_batch=agreed
    )


def test_07_kin_an_agreement_is_for_one_step():
    """Kin: an agreement that lasts longer than its step."""
    manager = captured(buckets=(1, 2))
    manager.run({"x": floats(1)}, agreed_batch=4)
    manager.run()
    assert replayed(manager) == [1, 4]


def test_07_kin_the_order_of_a_list_changes_nothing():
    """Kin: ladders given in another order."""
    lists = ([8, 1, 4, 4], [4, 8, 1], (1, 4, 8))
    ladders = [BucketLadder(sizes, 16) for sizes in lists]
    assert len(set(ladders)) == 1
    assert len({tuple(ladder.bucket_for(n) for n in range(1, 18)) for ladder in ladders}) == 1
