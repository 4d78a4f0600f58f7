"""Which plan a bucket runs by, and why: cache, table, rule, or not supported."""

from __future__ import annotations

import json
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from decoders import KERNELS, make_cache
from fused_shapes import draw_small
from plan_samples import H200, SEED, bucket, file_of, pretend, schedule_of

pytest.importorskip("triton", minversion="3.0")

from graphcap.decode import schedule as schedule_module
from graphcap.decode.cache_format import CacheFormat
from graphcap.decode.decoder import Decoder
from graphcap.decode.kernels import decode_kernels
from graphcap.decode.kernels.triton_fused_attention import AttendTile
from graphcap.decode.layer_plan import LayerPlan, default_plan
from graphcap.decode.plan_files import PlanFile, tables
from graphcap.decode.plan_json import plan_to_json
from graphcap.decode.schedule import fitted, nearest
from graphcap.decode.shapes import preset
from graphcap.decode.step import DecodeStep
from graphcap.errors import InputError
from graphcap.moe.kernels import Backend
from graphcap.pool import BufferPool
from graphcap.settings import Settings

TRITON = decode_kernels(Backend("triton", "tests"))


@pytest.fixture(autouse=True)
def _own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRAPHCAP_TUNE_CACHE", str(tmp_path / "tuned"))


@pytest.fixture
def h200(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch)


def in_cache(tmp_path: Path, file: PlanFile) -> Path:
    path = tmp_path / "tuned" / file.key.file_name
    file.write(path)
    return path


# -- tables --------------------------------------------------------------------------------------


def table() -> PlanFile:
    (found,) = [file for name, file in tables() if name == "h200_seed-64.json"]
    return found


@pytest.mark.usefixtures("h200")
def test_the_table_serves_every_batch_up_to_its_largest() -> None:
    plans = {each.rows: each.plan for each in table().buckets if each.context == 256}
    assert sorted(plans) == [1, 2, 4, 8, 16, 32, 64]
    schedule = schedule_of(TRITON)
    for rows in range(1, 65):
        choice = schedule.choice(rows)
        assert choice.source == "table"
        assert choice.plan == plans[min(size for size in plans if size >= rows)]
        assert "h200_seed-64.json" in choice.why
        assert str(choice).startswith(f"{choice.plan.layers} (table: ")
    above = schedule.choice(65)
    assert (above.plan, above.source) == (LayerPlan("plain"), "default")
    assert schedule.may_fuse


@pytest.mark.usefixtures("h200")
def test_long_sequences_take_the_plan_of_long_contexts_or_another_tile_of_attention() -> None:
    by_load = {(each.rows, each.context): each.plan for each in table().buckets}
    schedule = schedule_of(TRITON, context=4096 + 64)
    assert schedule.choice(1).plan == by_load[1, 4096]
    eight = schedule.choice(8)
    short = by_load[8, 256]
    assert "attend" in short.tiles
    tiles = {name: tile for name, tile in short.tiles.items() if name != "attend"}
    assert eight.plan == replace(short, tiles=tiles)
    assert "attention by its own tile, as sequences may have 4160 tokens" in eight.why


def test_packaged_tables_say_where_they_come_from_and_beat_the_plain_schedule() -> None:
    assert tables()
    for name, file in tables():
        assert {"driver", "triton", "torch", "commit"} <= set(file.machine), name
        assert file.key.device.lower().replace("nvidia ", "") in name
        for each in file.buckets:
            assert each.plain_ms is not None
            assert each.default_ms is not None
            assert each.ms <= min(each.plain_ms, each.default_ms), (name, each.rows)


@pytest.mark.usefixtures("h200")
def test_a_table_made_with_other_versions_serves_and_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    other = replace(table(), machine={**table().machine, "triton": "3.1.0"}, kernels="0" * 16)
    monkeypatch.setattr(schedule_module, "tables", lambda: (("some.json", other),))
    choice = schedule_of(TRITON).choice(1)
    assert choice.source == "table"
    assert "some.json (made with triton 3.1.0, here " in choice.why
    assert f"kernels {'0' * 16}, here " in choice.why


# -- cache ---------------------------------------------------------------------------------------


@pytest.mark.usefixtures("h200")
def test_the_cache_comes_before_the_table_where_it_has_a_plan(tmp_path: Path) -> None:
    path = in_cache(tmp_path, file_of(bucket(4)))
    schedule = schedule_of(TRITON)
    assert [schedule.choice(rows).source for rows in (1, 2, 3, 4, 5, 8)] == [
        "table", "table", "cache", "cache", "table", "table",
    ]  # fmt: skip
    assert schedule.choice(3).plan == bucket(4).plan
    assert schedule.choice(3).why == f"{path}: tuned for 4 rows at context 256"


@pytest.mark.usefixtures("h200")
def test_a_folder_that_is_given_comes_before_the_environment(tmp_path: Path) -> None:
    file_of(bucket(1)).write(tmp_path / "given" / file_of().key.file_name)
    assert schedule_of(TRITON).choice(1).source == "table"
    assert schedule_of(TRITON, tune_cache=tmp_path / "given").choice(1).source == "cache"


def broken(kind: str) -> Any:
    """Contents of a cache file that must not be used, and what the warning says of it."""
    good = file_of(bucket(1)).to_json()
    if kind == "old":
        machine = {**good["machine"], "triton": "2.9"}
        return {**good, "machine": machine}, "it was made with triton 2.9, here"
    if kind == "other kernels":
        return {**good, "kernels": "0123"}, "it was made with kernels 0123, here"
    if kind == "foreign":
        return {**good, "device": "NVIDIA A100"}, "found plans for NVIDIA A100"
    if kind == "another shape":
        sizes = {**good["sizes"], "num_experts": 9}
        return {**good, "sizes": sizes}, "num_experts 9"
    if kind == "newer format":
        return {**good, "format": "graphcap plans 2"}, "expected format 'graphcap plans 1', found"
    if kind == "a bad tile":
        tile = {"tile": "AttendTile", "splits": "four", "tokens": 16, "warps": 1}
        bad = {**good["buckets"][0], "plan": {"layers": "fused", "tiles": {"attend": tile}}}
        return {**good, "buckets": [bad]}, "splits of a tile is a count, found 'four'"
    if kind == "no time":
        return {**good, "buckets": [{**good["buckets"][0], "ms": -1}]}, "takes -1 ms"
    if kind == "a list":
        return [1, 2], "found 'list'"
    raise AssertionError(kind)


KINDS = (
    "old", "other kernels", "foreign", "another shape", "newer format", "a bad tile", "no time", "a list",
)  # fmt: skip


@pytest.mark.usefixtures("h200")
@pytest.mark.parametrize("kind", [*KINDS, "no JSON", "a folder"])
def test_a_cache_that_cannot_be_used_is_warned_about_and_not_used(
    kind: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = in_cache(tmp_path, file_of(bucket(1)))
    if kind == "a folder":
        path.unlink()
        path.mkdir()
        told = "expected a file, found a folder"
    elif kind == "no JSON":
        path.write_text('{"format": "graphcap pl')
        told = "JSONDecodeError"
    else:
        contents, told = broken(kind)
        path.write_text(json.dumps(contents))
    before = None if path.is_dir() else path.read_bytes()
    with caplog.at_level(logging.WARNING, "graphcap"):
        choices = [schedule_of(TRITON).choice(1) for _ in range(2)]
    assert [choice.source for choice in choices] == ["table", "table"]
    (record,) = caplog.records  # once, not for every step that is built
    text = record.getMessage()
    assert str(path) in text
    assert told in text
    assert text.endswith("(graphcap explain tune-cache)")
    assert before is None or path.read_bytes() == before


@pytest.mark.usefixtures("h200")
def test_where_nothing_is_tuned_nothing_is_said(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "graphcap"):
        schedule_of(TRITON).choice(1)
    assert not caplog.records


# -- rules ---------------------------------------------------------------------------------------


def test_elsewhere_the_rule_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "NVIDIA B200", (10, 0))
    schedule = schedule_of(TRITON)
    for rows in (1, 2, 3, 64, 65, 512):
        choice = schedule.choice(rows)
        assert (choice.plan, choice.source) == (default_plan(rows), "default")
    assert "graphcap tune finds one" in schedule.choice(1).why


@pytest.mark.parametrize(
    ("capability", "changes", "dtype", "why"),
    [
        ((7, 5), {}, torch.bfloat16, "compute capability is below 8.0"),
        ((9, 0), {}, torch.float32, "weights are float32, and tiles are for 16 bits"),
        ((9, 0), {"hidden_size": 16384}, torch.bfloat16, "rows of 16384 values do not fit"),
        ((9, 0), {"num_heads": 128}, torch.bfloat16, "rows of 16384 values do not fit"),
        ((9, 0), {"head_dim": 512}, torch.bfloat16, "heads of 512 values were not measured"),
    ],
)
def test_what_was_not_measured_runs_plain_by_default_and_tuned_where_it_was_tuned(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capability: tuple[int, int],
    changes: dict[str, int],
    dtype: torch.dtype,
    why: str,
) -> None:
    pretend(monkeypatch, "NVIDIA T4", capability)
    shape = replace(SEED, **changes)
    schedule = schedule_of(TRITON, shape, dtype)
    choice = schedule.choice(1)
    assert (choice.plan, choice.source) == (LayerPlan("plain"), "default")
    assert why in choice.why
    assert not schedule.may_fuse
    in_cache(tmp_path, file_of(bucket(1), shape=shape, dtype=dtype, device="NVIDIA T4"))
    assert schedule_of(TRITON, shape, dtype).choice(1).plan == bucket(1).plan


def test_a_device_of_another_vendor_runs_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend(monkeypatch, "AMD Instinct MI300X")
    monkeypatch.setattr(torch.version, "cuda", None)
    choice = schedule_of(TRITON).choice(1)
    assert (choice.plan, choice.source) == (LayerPlan("plain"), "default")
    assert "none of NVIDIA's" in choice.why


@pytest.mark.usefixtures("h200")
def test_what_cannot_be_fused_runs_plain_and_says_why() -> None:
    cases = [
        (
            schedule_of(KERNELS),
            "expected triton kernels, found reference, which have no fused layer",
        ),
        (schedule_of(TRITON, preset("qwen3.6-35b-a3b")), "found qwen3.6-35b-a3b, a hybrid"),
        (schedule_of(TRITON, cache_format=CacheFormat(layout="heads")), "a cache of format"),
    ]
    for schedule, why in cases:
        choice = schedule.choice(1)
        assert (choice.plan, choice.source) == (LayerPlan("plain"), "not supported")
        assert why in choice.why
        assert not schedule.may_fuse


def test_on_a_cpu_nothing_changes() -> None:
    choice = schedule_of(TRITON, device="cpu").choice(1)
    assert (choice.plan, choice.source) == (LayerPlan("plain"), "default")
    assert "the device is cpu" in choice.why


@pytest.mark.usefixtures("h200")
def test_what_is_asked_for_asks_neither_cache_nor_table(tmp_path: Path) -> None:
    in_cache(tmp_path, file_of(bucket(1)))
    plain = schedule_of(TRITON, name="plain").choice(1)
    assert (plain.plan, plain.source) == (LayerPlan("plain"), "asked for")
    fused = schedule_of(TRITON, name="fused").choice(1)
    assert (fused.plan, fused.source) == (default_plan(1), "asked for")
    own = LayerPlan("apart", block=32)
    assert schedule_of(TRITON, name="fused", plans=lambda rows: own).choice(1).plan == own
    for name in ("auto", "plain"):
        with pytest.raises(InputError, match=f"plans go with schedule 'fused', found .*{name}"):
            schedule_of(TRITON, name=name, plans=lambda rows: own)


# -- between tuned sizes -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "served"),
    [(1, None), (2, None), (3, 5), (4, 5), (5, 5), (6, None), (20, None), (21, 40), (41, None)],
)
def test_a_size_serves_smaller_ones_down_to_more_than_half(rows: int, served: int | None) -> None:
    found = nearest([bucket(40), bucket(5)], rows, 320)
    assert (None if found is None else found.rows) == served


def test_of_several_contexts_the_nearest_by_ratio() -> None:
    tuned = [bucket(8, context) for context in (128, 1024, 8192)]
    seen = {c: nearest(tuned, 8, c) for c in (16, 300, 400, 2000, 4000, 10**6)}
    assert {c: b.context for c, b in seen.items() if b} == {
        16: 128, 300: 128, 400: 1024, 2000: 1024, 4000: 8192, 10**6: 8192,
    }  # fmt: skip


def test_a_tile_of_attention_serves_contexts_up_to_twice_as_long_or_short() -> None:
    plan = LayerPlan("fused", {"attend": AttendTile(4, 64, 4)})
    tuned = bucket(1, 256, plan)
    kept = {capacity: fitted(tuned, 1, capacity)[0] == plan for capacity in (96, 128, 512, 528)}
    assert kept == {96: False, 128: True, 512: True, 528: False}


# -- a step --------------------------------------------------------------------------------------


def test_a_captured_step_runs_by_the_tuned_plan_and_the_report_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    weights = draw_small(num_layers=1, mlp_only_layers=())
    plan = LayerPlan("fused", {"attend": AttendTile(2, 16, 1)})
    file = file_of(bucket(1, 8, plan), shape=weights.shape, dtype=weights.dtype, device="cpu")
    monkeypatch.setattr(
        schedule_module, "measured_plans", lambda weights, folder: [("cache", "a file", file)]
    )
    tokens = {}
    for schedule in ("auto", "plain"):
        decoder = Decoder(
            weights,
            TRITON if schedule == "auto" else KERNELS,
            max_batch=1,
            max_context=8,
            block_size=4,
            settings=Settings(strict=True, verify="off"),
            schedule=schedule,
        )
        (report,) = decoder.manager.capture().buckets
        decoder.cache.clear()
        tokens[schedule] = decoder.decode([[5, 7]], 3).token_ids
        names = {row.operation for row in decoder.manager.recording(1).census().rows}
        if schedule == "auto":
            assert report.choice == "fused (cache: a file: tuned for 1 rows at context 8)"
            assert "norm_qkv" in names
        else:
            assert report.choice == "plain (asked for: schedule 'plain')"
            assert "norm_qkv" not in names
        decoder.close()
    assert tokens["auto"] == tokens["plain"]


def test_a_choice_is_made_once_and_files_are_read_when_the_step_is_built(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So nothing is read, and nothing can change, inside a capture."""
    read = []
    monkeypatch.setattr(schedule_module, "measured_plans", lambda *of: read.append(of) or [])
    weights = draw_small(num_layers=1)
    step = DecodeStep(weights, make_cache(weights), TRITON, BufferPool("cpu"))
    assert len(read) == 1
    assert step.bucket_choice(2) is step.bucket_choice(2)
    assert plan_to_json(step.bucket_choice(2).plan) == {"layers": "plain"}
    assert len(read) == 1


def test_the_device_is_the_keys(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A cache shared by machines holds a file for each."""
    for device, rows in ((H200, 3), ("NVIDIA B200", 5)):
        in_cache(tmp_path, file_of(bucket(rows), device=device))
    pretend(monkeypatch, "NVIDIA B200", (10, 0))
    schedule = schedule_of(TRITON)
    assert [schedule.choice(rows).source for rows in (3, 5)] == ["cache", "cache"]
    assert schedule.choice(2).source == "default"
