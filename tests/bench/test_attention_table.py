"""The README's table of a result of bench/attention.py."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import attention_table
import pytest
import tables

NAME = "attention_seed-64_h200.json"


def way(us: float, **facts: Any) -> dict[str, Any]:
    times = {"us": us, "low_us": us - 0.1, "high_us": us + 0.25, "tb_s": 4.19 / us}
    added = {"added_us": us / 2, "added_low_us": us / 2 - 0.25, "added_high_us": us / 2 + 0.25}
    times |= added | {"projection_us": 3.0}
    return {"off_by": 0.0021, "operations": 2.0, **facts, **times}


@pytest.fixture
def result() -> dict[str, Any]:
    ways = {
        "graphcap": way(5.0, plan="fused (table)", splits=65),
        "flash": way(7.5, version=3),
        "flash, whole": way(14.0, version=3, operations=6.0),
        "triton": way(8.0),
        "triton, whole": way(13.0, operations=6.0),
        "sdpa": way(9.0, off_by=0.0049),
    }
    row = {"batch": 1, "context": 4096, "capacity": 4192, "cache_mib": 4.0, "floor_us": 0.9423}
    fewer = {name: way(us) for name, us in (("graphcap", 10.0), ("triton", 9.0), ("sdpa", 20.0))}
    return {
        "shape": "seed-64",
        "heads": 16,
        "kv_heads": 2,
        "head_dim": 128,
        "dtype": "bfloat16",
        "layers": 32,
        "rounds": 7,
        "replays": 10,
        "schedule": "auto",
        "l2_mib": 60.0,
        "evicted_by_mib": 240.0,
        "read_tb_s": 4.451,
        "tolerance": 0.02,
        "machine": {
            "card": "NVIDIA H200",
            "driver": "580.1",
            "torch": "2.11.0",
            "triton": "3.6.0",
            "vllm": "0.26.0",
            "commit": "abc1234",
        },
        "rows": [
            {**row, "ways": ways},
            {**row, "batch": 8, "context": 16384, "cache_mib": 128.0, "ways": fewer},
        ],
        "unavailable": {},
        "wrong": [],
        "left_out": [],
    }


def cells(table: str, start: str) -> list[str]:
    line = next(line for line in table.splitlines() if line.startswith(start))
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_every_way_has_its_column_and_graphcap_is_held_against_the_faster_of_vllm(
    result: dict[str, Any],
) -> None:
    table = attention_table.attention_table(result, NAME)
    head = cells(table, "| batch | context | MiB")
    assert dict(zip(head, cells(table, "| 1 | 4,096 | 4.00"), strict=True)) == {
        "batch": "1",
        "context": "4,096",
        "MiB a layer": "4.00",
        "floor": "0.94",
        "**graphcap**, whole": "**5.00**",
        "vLLM FlashAttention 3, kernel alone": "7.50",
        "vLLM FlashAttention 3, whole": "14.00",
        "vLLM Triton, kernel alone": "8.00",
        "vLLM Triton, whole": "13.00",
        "torch SDPA, kernel alone": "9.00",
        "speed-up over vLLM's faster kernel alone": "1.50",
        "over its faster whole": "2.60",
    }
    second = dict(zip(head, cells(table, "| 8 | 16,384 | 128.00"), strict=True))
    assert second["vLLM FlashAttention 3, kernel alone"] == "-"
    assert second["speed-up over vLLM's faster kernel alone"] == "0.90"
    assert second["over its faster whole"] == "-"


def test_every_column_is_there(result: dict[str, Any]) -> None:
    table = attention_table.attention_table(result, NAME)
    assert cells(table, "| 1 | 4,096 | **graphcap**, whole") == [
        *("1", "4,096", "**graphcap**, whole (65 splits)", "5.00", "4.90 to 5.25", "0.84"),
        *("2.50", "2.25 to 2.75", "3.00", "2", "2.1e-03"),
    ]
    assert cells(table, "| 1 | 4,096 | vLLM FlashAttention 3, whole")[9] == "6"
    result["rows"][1]["ways"]["triton"]["operations"] = None
    table = attention_table.attention_table(result, NAME)
    assert cells(table, "| 8 | 16,384 | vLLM Triton")[9] == "-"
    chain, added, every = table.replace("<details>", "The same with").split("The same with")
    for part in (chain, added, every):
        assert len({line.count("|") for line in part.splitlines() if "|" in line}) == 1


def test_what_attention_adds_after_a_projection_has_a_table_of_its_own(
    result: dict[str, Any],
) -> None:
    _, added = attention_table.attention_table(result, NAME).split("The same with")
    head = cells(added, "| batch | context | MiB")
    four = dict(zip(head, cells(added, "| 1 | 4,096 | 4.00"), strict=True))
    assert four["**graphcap**, whole"] == "**2.50**"
    assert four["vLLM FlashAttention 3, kernel alone"] == "3.75"
    for row in result["rows"]:
        for found in row["ways"].values():
            for key in ("added_us", "added_low_us", "added_high_us", "projection_us"):
                del found[key]
    table = attention_table.attention_table(result, NAME)
    assert "The same with" not in table
    assert cells(table, "| 8 | 16,384 | torch SDPA")[6:9] == ["-", "-", "-"]


def test_text_says_what_was_measured_and_how(result: dict[str, Any]) -> None:
    table = attention_table.attention_table(result, NAME)
    for said in (
        "(16 query and 2 key-value heads of 128, bfloat16",
        "driver 580.1, torch 2.11.0, Triton 3.6.0, vLLM 0.26.0), commit `abc1234`",
        f"from `bench/results/{NAME}`",
        "medians of 70 replays of a graph of 32 layers",
        "before each replay 240 MiB are read, four times the L2 cache",
        "at the 4.45 TB/s of a large sum",
        "off by at most 4.9e-03 of the reference's norm (allowed: 2e-02)",
    ):
        assert said in table
    assert not {"Not available", "Wrong", "Left out"} & {
        line.split(":")[0] for line in table.splitlines()
    }


def test_what_did_not_run_is_named(result: dict[str, Any]) -> None:
    result["unavailable"] = {
        "flash": "no FA3",
        "flash, whole": "no FA3",
        "sdpa": "TypeError: enable_gqa",
    }
    result["wrong"] = ["vLLM Triton, whole, batch 1, context 256: off by nan"]
    result["left_out"] = ["batch 8, context 1024: no time left"]
    lines = attention_table.attention_table(result, NAME).splitlines()
    assert (
        "Not available: vLLM FlashAttention, kernel alone and vLLM FlashAttention, whole (no FA3); "
        "torch SDPA, kernel alone (TypeError: enable_gqa)."
    ) in lines
    assert "Wrong, and so not timed: vLLM Triton, whole, batch 1, context 256: off by nan." in lines
    assert "Left out: batch 8, context 1024: no time left." in lines


def test_without_vllm_there_are_no_columns_for_it(result: dict[str, Any]) -> None:
    result["machine"]["vllm"] = None
    for row in result["rows"]:
        row["ways"] = {way: row["ways"][way] for way in ("graphcap", "sdpa")}
    table = attention_table.attention_table(result, NAME)
    assert cells(table, "| batch | context | MiB")[4:] == [
        "**graphcap**, whole",
        "torch SDPA, kernel alone",
    ]
    assert "vLLM" not in table


def test_a_page_has_the_table_once_there_is_a_file(
    result: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = tmp_path / "bench" / "results"
    results.mkdir(parents=True)
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    page = tmp_path / "docs" / "page.md"
    marked = "a\n<!-- measured attention: begin -->\n\n<!-- measured attention: end -->\nb\n"
    assert tables.filled("a\nb\n", page) == "a\nb\n"
    assert tables.filled(marked, page) == marked
    other = copy.deepcopy(result) | {"shape": "qwen3-30b-a3b"}
    (results / "attention_qwen3-30b-a3b_h200.json").write_text(json.dumps(other))
    (results / NAME).write_text(json.dumps(result))
    filled = tables.filled(marked, page)
    assert filled.startswith(
        "a\n<!-- measured attention: begin -->\nAttention of shape `seed-64` (16 query"
    )
    assert filled.index("`seed-64`") < filled.index("`qwen3-30b-a3b`")
    assert filled.endswith("</details>\n<!-- measured attention: end -->\nb\n")
