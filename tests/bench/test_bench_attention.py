"""bench/attention.py on a CPU: its reference, what it writes, and that a wrong way does not pass."""

from __future__ import annotations

import functools
import inspect
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from bench_modules import (
    attention,
    attention_load,
    attention_timing,
    attention_vllm,
    attention_ways,
)
from vllm_attention_standin import Standin

from graphcap.decode.kernels import reference
from graphcap.decode.shapes import preset
from graphcap.operations import Operation

CPU = torch.device("cpu")
QUICK = ["--device", "cpu", "--shape", "tiny", "--layers", "2", "--rounds", "1", "--replays", "1"]
WAYS = ["graphcap", "flash", "flash, whole", "triton", "triton, whole", "sdpa"]


def load_of(rows: int = 2, context: int = 37, layers: int = 2, seed: int = 3) -> Any:
    return attention_load.AttentionLoad(
        preset("tiny"), rows, context, layers, CPU, torch.float32, seed
    )


def with_scratch(op: Operation, *args: Any) -> None:
    plan = {} if op.scratch is None else op.scratch(*args)
    op(*args, **{name: torch.empty(*size, dtype=dtype) for name, (size, dtype) in plan.items()})


# -- the reference -------------------------------------------------------------------------------


@pytest.mark.parametrize(("rows", "context"), [(1, 1), (3, 16), (2, 37), (1, 200)])
def test_the_reference_is_what_the_reference_kernels_do(rows: int, context: int) -> None:
    load = load_of(rows, context)
    shape = load.shape
    for layer in range(2):
        q, k, v = (part.clone() for part in load.heads())
        key_cache, value_cache = (x[layer].clone() for x in (load.cache.keys, load.cache.values))
        out = torch.empty_like(q)
        with_scratch(reference.rms_norm, q, load.q_norms[layer], q, shape.rms_norm_eps)
        with_scratch(reference.rms_norm, k, load.k_norms[layer], k, shape.rms_norm_eps)
        with_scratch(reference.rotary_embedding, load.positions, q, k, load.cos_sin)
        with_scratch(reference.cache_write, k, v, key_cache, value_cache, load.slots)
        caches = (key_cache, value_cache, load.tables, load.lengths)
        with_scratch(reference.attention, q, *caches, out, shape.head_dim**-0.5)
        expected = load.expected(layer)
        for found, wanted in ((q, expected.query), (k, expected.key), (v, expected.value)):
            torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(out.double(), expected.out, rtol=1e-5, atol=1e-5)


def test_layers_and_rows_and_seeds_differ() -> None:
    load, other = load_of(), load_of(seed=4)
    outs = [*load.expected(0).out, *load.expected(1).out, *other.expected(0).out]
    for index, out in enumerate(outs):
        assert all((out - before).norm() > 0.1 * out.norm() for before in outs[:index])
    assert load.tables.unique().numel() == load.tables.numel(), "no block is in two tables"
    assert (load.tables[0].diff() != 1).any(), "blocks are in no order"


@pytest.mark.parametrize("context", [256, 4096])
def test_the_new_token_counts_at_every_length(context: int) -> None:
    load = attention_load.AttentionLoad(
        preset("seed-64"), 1, context, 1, CPU, torch.float32, seed=context
    )
    expected = load.expected(0)
    keys = load.flat(0)[0][0, :-1].double()
    group = load.shape.num_heads // load.shape.num_kv_heads
    for head, query in enumerate(expected.query[0]):
        others = keys[:, head // group] @ query / math.sqrt(load.shape.head_dim)
        new = expected.key[0, head // group] @ query / math.sqrt(load.shape.head_dim)
        weight = float(torch.cat([others, new[None]]).softmax(0)[-1])
        assert 0.005 < weight < 0.9, "a share that neither hides it nor all others"


# -- the script ----------------------------------------------------------------------------------


def test_the_whole_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton", minversion="3.0")
    vllm, out = Standin(monkeypatch), tmp_path / "new" / "attention.json"
    cases = ["--batches", "1", "--contexts", "33", "--schedule", "fused"]
    assert attention.main([*QUICK, *cases, "--commit", "abc", "--out", str(out)]) == 0
    result = json.loads(out.read_text())
    assert (result["shape"], result["heads"], result["kv_heads"]) == ("tiny", 4, 2)
    assert (result["machine"]["vllm"], result["machine"]["commit"]) == ("0.26.0", "abc")
    assert [(row["batch"], row["context"]) for row in result["rows"]] == [(1, 33)]
    assert (result["wrong"], result["unavailable"], result["left_out"]) == ([], {}, [])
    for row in result["rows"]:
        assert list(row["ways"]) == WAYS
        for way in row["ways"].values():
            assert 0 < way["off_by"] < 1e-5
            assert 0 < way["low_us"] <= way["us"] <= way["high_us"]
            added = [way[f"added_{which}us"] for which in ("low_", "", "high_")]
            assert added == sorted(added)
            assert way["projection_us"] > 0
        assert row["cache_mib"] * 2**20 == 2 * row["context"] * 2 * 32 * 4
        assert row["ways"]["flash"]["version"] == 3
        assert row["ways"]["graphcap"]["plan"].startswith("fused")
    # As vLLM does: the schedule is for what the sequences have, the graph for what they may have.
    assert [call["longest"] for call in vllm.scheduled] == [33]
    assert {call["splits"] for call in (*vllm.scheduled, *vllm.attended)} == {32}
    assert {int(call["metadata"][0]) for call in vllm.attended} == {1}


def test_each_way_is_timed_after_its_own_projection() -> None:
    """What is taken off is what was measured with the same projection; layers differ in weights."""
    run = attention.Run(attention.options_of([*QUICK, "--batches", "1"]))
    replays: dict[str, float] = {
        **{"a": 5.0, "a, after projection": 9.0, "projection, a": 6.0},
        **{"b": 2.0, "b, after projection": 4.0, "projection, torch": 1.0},
    }
    times = {name: [[us, us + 1], [us, us + 1]] for name, us in replays.items()}
    row: dict[str, Any] = {"ways": {"a": {}, "b": {}, "c": {}}}
    times["c"] = [[1.0], [3.0]]
    run.timings(row, load_of(), times, {"a": "a", "b": "torch"})
    assert [way["us"] for way in row["ways"].values()] == [5.5, 2.5, 2.0]
    assert [way.get("added_us") for way in row["ways"].values()] == [3.0, 3.0, None]
    assert (row["ways"]["c"]["low_us"], row["ways"]["c"]["high_us"]) == (1.0, 3.0)
    assert run.projections is not None
    run.projections.for_rows(2)
    outs = []
    for layer in range(2):
        run.projections.by_torch(layer)
        outs.append(run.projections.out.clone())
    torch.testing.assert_close(outs[1], run.projections.hidden @ run.projections.weights[1].T)
    assert (outs[0] - outs[1]).norm() > 0.1 * outs[0].norm()


def test_every_round_gives_every_way_its_turn() -> None:
    clock, turns = attention_timing.ColdClock(CPU, 2), []
    replays = {name: functools.partial(turns.append, name) for name in "abc"}
    times = clock.times(replays, rounds=3, each=2)
    assert {name: [len(turn) for turn in found] for name, found in times.items()} == {
        name: [2, 2, 2] for name in "abc"
    }
    assert "".join(turns) == "ccaabb" + "aabbcc" + "bbccaa" + "ccaabb"


def test_without_vllm_it_is_named_and_the_rest_is_timed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "vllm", None)
    out = tmp_path / "attention.json"
    assert attention.main([*QUICK, "--batches", "1", "--contexts", "5", "--out", str(out)]) == 0
    result = json.loads(out.read_text())
    assert list(result["rows"][0]["ways"]) == ["sdpa"]
    assert result["machine"]["vllm"] is None
    assert sorted(result["unavailable"]) == sorted(set(WAYS) - {"sdpa"})
    assert "'auto' runs plain here: the device is cpu" in result["unavailable"]["graphcap"]
    assert "vllm" in result["unavailable"]["triton, whole"]
    printed = capsys.readouterr().out
    assert printed.count("vLLM Triton, whole is not available: ") == 1


def test_a_wrong_way_is_named_and_not_timed_and_the_exit_code_is_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    vllm, out = Standin(monkeypatch), tmp_path / "attention.json"
    ops = vllm.named["vllm._custom_ops"]
    monkeypatch.setattr(ops, "reshape_and_cache_flash", lambda *_: None)
    assert attention.main([*QUICK, "--batches", "1", "--contexts", "9", "--out", str(out)]) == 1
    result = json.loads(out.read_text())
    assert list(result["rows"][0]["ways"]) == ["flash", "triton", "sdpa"]
    assert result["wrong"] == [
        "vLLM FlashAttention, whole, batch 1, context 9: off by nan",
        "vLLM Triton, whole, batch 1, context 9: off by nan",
    ]


def test_without_time_what_is_left_out_is_named(tmp_path: Path) -> None:
    out = tmp_path / "attention.json"
    assert attention.main([*QUICK, "--seconds", "0", "--batches", "1", "--out", str(out)]) == 0
    result = json.loads(out.read_text())
    contexts = (256, 1024, 4096, 16384)
    assert result["left_out"] == [f"batch 1, context {each}: no time left" for each in contexts]
    assert result["rows"] == []


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--contexts", "256,0"], "expected positive numbers, found '256,0'"),
        (["--batches", "-1"], "expected positive numbers, found '-1'"),
        (["--shape", "qwen3.6-35b-a3b"], "qwen3.6-35b-a3b is a hybrid"),
    ],
)
def test_options_that_cannot_be(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        attention.options_of(arguments)
    assert said in capsys.readouterr().err


def test_defaults_are_what_the_issue_asks_for() -> None:
    options = attention.options_of([])
    assert (options.contexts, options.batches) == ([256, 1024, 4096, 16384], [1, 8])


# -- ways ----------------------------------------------------------------------------------------


def run(way: Any, load: Any) -> float:
    attention_ways.prepare(way, load)
    for layer in range(load.layers):
        way.run(layer)
    return float(attention_ways.off_by(way, load))


@pytest.mark.parametrize(("rows", "context"), [(1, 1), (3, 50)])
def test_ways_of_vllm_are_right(rows: int, context: int, monkeypatch: pytest.MonkeyPatch) -> None:
    Standin(monkeypatch)
    load = load_of(rows, context)
    ways, missing = attention_vllm.vllm_ways(load)
    assert ([way.name for way in ways], missing) == (WAYS[1:5], {})
    for way in ways:
        assert run(way, load) < 1e-5, way.name
    # They have caches of their own, of vLLM's layout.
    keys, values = ways[0].store.keys[1], ways[0].store.values[1]
    assert keys.shape == load.cache.keys[1].shape
    assert values.data_ptr() - keys.data_ptr() == 32 * 4
    assert keys.untyped_storage().nbytes() == 2 * load.cache.keys[1].nbytes


def test_an_operation_that_vllm_lacks_costs_the_ways_that_need_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    vllm = Standin(monkeypatch)
    monkeypatch.delattr(vllm.named["vllm._custom_ops"], "rotary_embedding")
    monkeypatch.delattr(vllm.named["vllm.v1.attention.backends.fa_utils"], "get_scheduler_metadata")
    ways, missing = attention_vllm.vllm_ways(load_of())
    assert [way.name for way in ways] == ["triton"]
    assert "get_scheduler_metadata" in missing["flash"]
    assert missing["flash"] == missing["flash, whole"]
    assert "rotary_embedding" in missing["triton, whole"]


def test_a_call_of_another_version_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    vllm = Standin(monkeypatch)

    def unified_attention(q: torch.Tensor, k: torch.Tensor) -> None: ...

    module = vllm.named["vllm.v1.attention.ops.triton_unified_attention"]
    monkeypatch.setattr(module, "unified_attention", unified_attention)
    ways, missing = attention_vllm.vllm_ways(load_of())
    assert [way.name for way in ways] == ["flash", "flash, whole"]
    assert missing["triton"].startswith("TypeError: ")


@pytest.mark.parametrize("version", [2, None])
def test_flash_attention_is_of_the_version_that_vllm_takes(
    version: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    vllm = Standin(monkeypatch, version)
    ways, missing = attention_vllm.vllm_ways(load_of())
    assert vllm.scheduled == [], "only version 3 has a schedule"
    if version is None:
        assert missing["flash"] == (
            "vLLM has no FlashAttention that runs here: FA3 is missing; FA2 is missing"
        )
    else:
        assert ways[0].facts == {"version": 2}
        assert {(call["version"], call["splits"]) for call in vllm.attended} == {(2, 0)}


def test_torch_is_right() -> None:
    if "enable_gqa" not in (torch.nn.functional.scaled_dot_product_attention.__doc__ or ""):
        pytest.skip("this torch has no enable_gqa")
    load = load_of(3, 50)
    assert run(attention_ways.sdpa_way(load), load) < 1e-5


def forgotten_new_token(way: Any, load: Any) -> Callable[[int], None]:
    def run_layer(layer: int) -> None:
        load.lengths -= 1
        way_run(layer)
        load.lengths += 1

    way_run = way.run
    return run_layer


def one_row_left_out(way: Any, load: Any) -> Callable[[int], None]:
    def run_layer(layer: int) -> None:
        before = way.outs[layer][1].clone()
        way_run(layer)
        way.outs[layer][1] = before

    way_run = way.run
    return run_layer


def another_layer(way: Any, load: Any) -> Callable[[int], None]:
    def run_layer(layer: int) -> None:
        way_run(0)
        way.outs[layer].copy_(way.outs[0])

    way_run = way.run
    return run_layer


@pytest.mark.parametrize("name", ["triton", "triton, whole"])
@pytest.mark.parametrize("fault", [forgotten_new_token, one_row_left_out, another_layer])
def test_what_is_wrong_is_far_off(
    name: str, fault: Callable[[Any, Any], Callable[[int], None]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Farther than bfloat16 may be."""
    Standin(monkeypatch)
    load = load_of(2, 1500)
    (way,) = (way for way in attention_vllm.vllm_ways(load)[0] if way.name == name)
    assert run(way, load) < 1e-5
    way.run = fault(way, load)
    assert not run(way, load) <= 2 * attention_ways.TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("missing", ["norm of keys", "RoPE", "values"])
def test_what_the_cache_lacks_is_seen(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    vllm = Standin(monkeypatch)
    ops, load = vllm.named["vllm._custom_ops"], load_of(2, 30)
    if missing == "RoPE":
        monkeypatch.setattr(ops, "rotary_embedding", lambda *_: None)
    elif missing == "norm of keys":
        norm = ops.rms_norm
        copied = load.shape.num_kv_heads
        monkeypatch.setattr(
            ops,
            "rms_norm",
            lambda out, x, *more: out.copy_(x) if x.shape[1] == copied else norm(out, x, *more),
        )
    else:
        write = ops.reshape_and_cache_flash
        monkeypatch.setattr(
            ops, "reshape_and_cache_flash", lambda k, v, *more: write(k, v * 0, *more)
        )
    (way,) = (w for w in attention_vllm.vllm_ways(load)[0] if w.name == "flash, whole")
    assert not run(way, load) <= 2 * attention_ways.TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("factor", [1.0, 1.1, float("nan")])
@pytest.mark.parametrize("which", ["key", "value"])
def test_a_way_that_attends_right_must_also_write_right(which: str, factor: float) -> None:
    """graphcap's attends to the new token without reading it from the cache."""
    load = load_of(2, 30)
    outs = attention_ways.new_outs(load)
    store = attention_ways.PagedStore(load, load.cache.keys, load.cache.values)

    def run_layer(layer: int) -> None:
        expected = load.expected(layer)
        outs[layer].copy_(expected.out)
        written = {"key": expected.key.float(), "value": expected.value.float()}
        if layer == 1:
            written[which][1] *= factor
        store.put(layer, **written)

    off = run(attention_ways.AttentionWay("own", True, run_layer, outs, store), load)
    assert off < 1e-6 if factor == 1.0 else not off <= 0.09


def test_the_standin_takes_what_the_script_gives() -> None:
    """The parameters that it has are those that vLLM's functions are called with, by name."""
    source = inspect.getsource(attention_vllm)
    for call, function in (
        ("flash_attn_varlen_func(\n", Standin.flash),
        ("unified_attention(\n", Standin.unified),
        ("metadata = get_scheduler_metadata(\n", Standin.schedule),
    ):
        body = source.split(call)[1].split("\n        )\n")[0]
        given = {line.split("=")[0].strip() for line in body.splitlines() if "=" in line}
        assert given == set(inspect.signature(function).parameters) - {"self"}
