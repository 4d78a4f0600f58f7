"""``graphcap decode``: the table's figures, its JSON, and its refusals."""

import json
import os
import subprocess
import sys
from collections import Counter

import pytest
import torch
from torch.profiler import profile

from graphcap.cli import main
from graphcap.decode.layer_plan import LayerPlan
from graphcap.decode.plan_choice import PlanChoice
from graphcap.decode.step import DecodeStep

KEYS = [
    "shape", "device", "recorder", "batch", "max_batch", "bucket", "tokens", "prompt_ids", "eager",
    "replay", "outputs_equal", "token_ids", "buckets", "pool_mib", "pool_lower_bound_mib", "fallbacks",
]  # fmt: skip

on_cpu = pytest.mark.skipif(torch.cuda.is_available(), reason="figures of a CPU")


def decode(capsys, *arguments: str) -> dict:
    assert main(["decode", "--json", *arguments]) == 0
    return json.loads(capsys.readouterr().out)


@on_cpu
def test_without_arguments(capsys):
    result = decode(capsys)
    assert all(key in result for key in KEYS)
    assert (result["shape"], result["batch"], result["max_batch"]) == ("tiny", 3, 8)
    assert (result["bucket"], result["recorder"], result["device"]) == (4, "tape", "cpu")
    assert result["schedule"] == "auto"
    for bucket in result["buckets"]:
        assert bucket["schedule"]["plan"] == {"layers": "plain"}
        assert bucket["schedule"]["source"] == "not supported"
        assert (
            "expected triton kernels, found reference, which have no fused layer"
            in bucket["schedule"]["why"]
        )
    assert result["outputs_equal"] is True
    assert [len(tokens) for tokens in result["token_ids"]] == [32] * 3
    assert len({token for tokens in result["token_ids"] for token in tokens}) > 10
    assert result["replay"]["launches_per_token"] == 1
    assert result["replay"]["allocations_per_token"] == 0
    assert result["replay"]["host_us_per_token"] is None
    assert result["eager"]["launches_per_token"] > 60
    assert result["eager"]["allocations_per_token"] > 40
    assert result["fallbacks"] == {}
    assert [bucket["size"] for bucket in result["buckets"]] == [1, 2, 4, 8]
    assert all(bucket["nodes"] > 60 and bucket["capture_ms"] > 0 for bucket in result["buckets"])
    assert next(b["replays"] for b in result["buckets"] if b["size"] == 4) > 31
    assert result["pool_mib"] <= 1.05 * result["pool_lower_bound_mib"]


@on_cpu
def test_a_hybrid(capsys):
    result = decode(capsys, "--shape", "tiny-hybrid", "--tokens", "8")
    assert result["outputs_equal"] is True
    assert result["replay"]["launches_per_token"] == 1
    assert result["replay"]["allocations_per_token"] == 0
    assert result["fallbacks"] == {}
    operations = {choice["operation"] for choice in result["kernels"]["operations"]}
    assert {"attention", "conv update", "delta rule", "output gate"} <= operations


@on_cpu
@pytest.mark.parametrize("batch", range(1, 9))
def test_every_batch_up_to_the_maximum(capsys, batch):
    result = decode(capsys, "--batch", str(batch), "--tokens", "8", "--layers", "2")
    assert result["outputs_equal"] is True
    assert result["replay"]["launches_per_token"] == 1
    assert result["replay"]["allocations_per_token"] == 0
    assert result["fallbacks"] == {}


@on_cpu
def test_the_eager_figures_are_what_the_profiler_sees():
    from graphcap.decode.cache import PagedCache
    from graphcap.decode.decoder import EagerDecoder
    from graphcap.decode.kernels import decode_kernels
    from graphcap.decode.prompts import Prompts
    from graphcap.decode.random_weights import random_weights
    from graphcap.decode.shapes import preset
    from graphcap.moe.kernels import choose_backend

    device = torch.device("cpu")
    weights = random_weights(preset("tiny"), device=device, dtype=torch.float32, seed=0)
    cache = PagedCache(
        weights.shape, num_sequences=2, max_context=64, device=device, dtype=torch.float32
    )
    eager = EagerDecoder(weights, cache, decode_kernels(choose_backend("reference", device)))
    for batch in Prompts([[1, 2], [3, 4]], 8, cache, 512).batches():
        eager.load(batch)
        eager.run()
    before = eager.pool.allocations
    with profile(profile_memory=True) as seen:
        eager.run()
    requests = [
        event for event in seen.profiler.kineto_results.events()
        if event.name() == "[memory]" and event.nbytes() > 0
    ]  # fmt: skip
    assert len(requests) == eager.pool.allocations - before


def test_prompts_and_order(capsys):
    result = decode(
        capsys,
        "--prompt-ids",
        "1,2,3",
        "--prompt-ids",
        "4",
        "--prompt-ids",
        "5, 6",
        "--tokens",
        "4",
    )
    assert result["prompt_ids"] == [[1, 2, 3], [4], [5, 6]]
    alone = decode(capsys, "--prompt-ids", "4", "--tokens", "4")
    assert result["token_ids"][1] == alone["token_ids"][0]


def test_the_seed_decides(capsys):
    first = decode(capsys, "--tokens", "4", "--seed", "1")
    assert first["token_ids"] == decode(capsys, "--tokens", "4", "--seed", "1")["token_ids"]
    assert first["token_ids"] != decode(capsys, "--tokens", "4", "--seed", "2")["token_ids"]


def test_a_batch_above_the_maximum_is_counted(capsys):
    result = decode(capsys, "--batch", "5", "--max-batch", "3", "--tokens", "6")
    assert result["bucket"] is None
    assert result["outputs_equal"] is True
    assert result["fallbacks"]["above_max_batch"] > 5
    assert result["replay"]["launches_per_token"] == result["eager"]["launches_per_token"]


def test_buckets_as_the_user_wrote_them(capsys):
    result = decode(capsys, "--buckets", "8,4,4,64", "--max-batch", "6", "--tokens", "2")
    assert [bucket["size"] for bucket in result["buckets"]] == [4, 6]


def test_a_checkpoint(capsys, tmp_path):
    from graphcap.decode.random_weights import random_weights
    from graphcap.decode.save_checkpoint import save_checkpoint
    from graphcap.decode.shapes import preset

    shape = preset("tiny").with_layers(2)
    weights = random_weights(shape, device="cpu", dtype=torch.float32, seed=4)
    save_checkpoint(weights, tmp_path / "model")
    arguments = ["--prompt-ids", "7,8", "--tokens", "5", "--dtype", "float32"]
    by_file = decode(capsys, "--checkpoint", str(tmp_path / "model"), *arguments)
    by_seed = decode(capsys, "--shape", "tiny", "--layers", "2", "--seed", "4", *arguments)
    assert by_file["outputs_equal"]
    assert by_file["shape"] == "model"
    if not torch.cuda.is_available():  # on a device other weights are drawn from the same seed
        assert by_file["token_ids"] == by_seed["token_ids"]


@pytest.mark.parametrize("length", [14, 15, 16])
def test_one_token_at_the_end_of_a_block(capsys, length):
    ids = ",".join(map(str, range(length)))
    result = decode(capsys, "--tokens", "1", "--prompt-ids", ids, "--timeline")
    assert result["outputs_equal"] is True


@on_cpu
def test_the_timeline_has_every_operation_of_both_ways(capsys):
    result = decode(capsys, "--tokens", "4", "--timeline")
    counts = {row["operation"]: row["count"] for row in result["census"]["rows"]}
    for way, also in (("eager", {}), ("replay", {"padding": 1})):
        timeline = result["timeline"][way]
        assert (timeline["clock"], timeline["device"]) == ("host", None)
        names, operations = timeline["host"]["names"], timeline["host"]["operations"]
        seen = Counter(names[index] for index, _, _ in operations)
        assert seen == {k: n for k, n in counts.items() if k != "padding"} | also
        starts = [start for _, start, _ in operations]
        assert starts[0] == 0
        assert starts == sorted(starts)
        ends = [start + length for _, start, length in operations]
        assert all(end <= later + 0.02 for end, later in zip(ends, starts[1:], strict=False))
        assert timeline["us"] == pytest.approx(max(ends), abs=0.02)
    assert decode(capsys, "--tokens", "4")["timeline"] is None


def test_no_timeline_of_a_replay_that_does_not_exist(capsys):
    result = decode(capsys, "--batch", "5", "--max-batch", "3", "--tokens", "2", "--timeline")
    assert result["timeline"]["replay"] is None
    assert result["timeline"]["eager"]["us"] > 0
    assert result["census"] is None


def test_what_a_page_is_drawn_from(capsys):
    result = decode(capsys, "--tokens", "4", "--batch", "3")
    assert result["census"]["total"] == result["buckets"][2]["nodes"]
    four = next(bucket for bucket in result["buckets"] if bucket["size"] == 4)
    assert four["padding_rows"] > 0
    assert four["largest_difference"] == 0
    assert max(b["offset"] + b["nbytes"] for b in result["pool_layout"]["buffers"]) == (
        result["pool_mib"] * 2**20
    )
    assert {"graphcap", "torch"} <= set(result["versions"])
    assert result["capture_seconds"] > 0


def test_one_token(capsys):
    result = decode(capsys, "--tokens", "1")
    assert [len(tokens) for tokens in result["token_ids"]] == [1] * 3
    assert result["replay"]["ms_per_token"] is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--shape", "huge"], "huge"),
        (["--layers", "99"], "4 layers"),
        (["--prompt-ids", "1,x"], "1,x"),
        (["--prompt-ids", "1,,2"], "1,,2"),
        (["--prompt-ids", ""], "expected token ids"),
        (["--prompt-ids", "512"], "outside the vocabulary"),
        (["--prompt-ids", "1", "--batch", "2"], "do not go together"),
        (["--timeline"], "add --json"),
        (["--buckets", "1,zero"], "zero"),
        (["--buckets", "0"], "'0'"),
        (["--checkpoint", "/nowhere"], "/nowhere"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(capsys, arguments, message):
    assert main(["decode", *arguments]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("graphcap: error: ")
    assert message in printed.err
    assert printed.err.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [["--batch", "0"], ["--batch", "-1"], ["--tokens", "no"], ["--recorder", "disk"], ["--frob"]],
)
def test_bad_options_are_one_line_and_exit_code_2(capsys, arguments):
    with pytest.raises(SystemExit) as stopped:
        main(["decode", *arguments])
    assert stopped.value.code == 2
    printed = capsys.readouterr()
    assert printed.err.count("\n") == 1
    assert arguments[-1] in printed.err


@on_cpu
def test_what_this_machine_cannot_do_is_said(capsys):
    assert main(["decode", "--recorder", "cuda"]) == 2
    assert "cannot capture" in capsys.readouterr().err


@on_cpu
def test_a_schedule_that_the_kernels_lack_is_refused_before_anything_is_drawn(capsys, monkeypatch):
    monkeypatch.setattr(
        "graphcap.decode.random_weights.random_weights", lambda *_, **__: pytest.fail("drawn")
    )
    assert main(["decode", "--schedule", "fused"]) == 2
    assert (
        "expected triton kernels, found reference, which have no fused layer"
        in capsys.readouterr().err
    )


@on_cpu
def test_the_fused_schedule(capsys, monkeypatch):
    pytest.importorskip("triton", minversion="3.0")
    monkeypatch.setenv("GRAPHCAP_KERNELS", "triton")  # interpreted: slow
    arguments = ["--layers", "1", "--max-batch", "1", "--prompt-ids", "7,8", "--tokens", "2"]
    result = decode(capsys, "--schedule", "fused", "--dtype", "float32", *arguments)
    assert result["schedule"] == "fused"
    assert "attend" in {choice["operation"] for choice in result["kernels"]["operations"]}
    assert result["outputs_equal"] is True


@on_cpu
def test_a_model_that_does_not_fit_is_refused_before_it_is_drawn(capsys):
    assert main(["decode", "--shape", "seed-64", "--dtype", "float32"]) == 2
    error = capsys.readouterr().err
    assert "GiB" in error
    assert "--layers" in error or "fewer layers" in error


def test_a_bad_variable_is_named(capsys, monkeypatch):
    monkeypatch.setenv("GRAPHCAP_VERIFY", "sometimes")
    assert main(["decode"]) == 2
    error = capsys.readouterr().err
    assert "GRAPHCAP_VERIFY" in error
    assert "sometimes" in error


def test_the_module_runs_like_the_script():
    run = subprocess.run(
        [sys.executable, "-m", "graphcap", "decode", "--tokens", "2", "--layers", "1"],
        capture_output=True,
        text=True,
        env={**os.environ, "COLUMNS": "100"},
    )
    assert run.returncode == 0, run.stderr
    assert "launches" in run.stdout
    assert "equal" in run.stdout


@pytest.mark.parametrize("at_once", ["2", "7", "40"])
def test_many_tokens_by_one_call_are_the_same_tokens(capsys, at_once):
    arguments = ["--tokens", "9", "--layers", "2", "--seed", "3"]
    single = decode(capsys, *arguments)
    many = decode(capsys, *arguments, "--tokens-per-launch", at_once)
    assert many["token_ids"] == single["token_ids"]
    assert many["outputs_equal"]
    assert (single["tokens_per_launch"], many["tokens_per_launch"]) == (1, int(at_once))
    assert single["notes"] == []
    assert "one by one" in many["notes"][0]
    assert many["replay"]["launches_per_token"] == 1  # the tape enqueues each step
    assert many["replay"]["allocations_per_token"] == 0


def test_the_schedule_comes_from_the_environment_where_none_is_given(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("GRAPHCAP_SCHEDULE", "plain")
    words = ["decode", "--tokens", "2", "--layers", "1", "--json"]
    for more, schedule, source in (
        ([], "plain", "asked for"),
        (["--schedule", "auto"], "auto", "not supported"),
    ):
        assert main([*words, *more]) == 0
        result = json.loads(capsys.readouterr().out)
        assert result["schedule"] == schedule
        assert {bucket["schedule"]["source"] for bucket in result["buckets"]} == {source}


def test_plans_of_a_hybrids_experts_are_told(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plain = LayerPlan("plain")
    own = PlanChoice(2, LayerPlan("apart", block=16), "table", "a.json: tuned for 2 rows")
    choice = PlanChoice(2, plain, "not supported", "it is a hybrid", own)
    monkeypatch.setattr(DecodeStep, "bucket_choice", lambda self, rows: choice)
    words = ["decode", "--tokens", "2", "--layers", "1", "--batch", "2"]
    assert main(words) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "it is a hybrid; experts by table: a.json: tuned for 2 rows" in printed
    assert main([*words, "--json"]) == 0
    bucket = json.loads(capsys.readouterr().out)["buckets"][0]
    assert bucket["schedule"]["experts"]["plan"] == {"layers": "apart", "block": 16}


@on_cpu
@pytest.mark.parametrize("every", ["1", "5"])
@pytest.mark.parametrize("at_once", ["1", "4"])
def test_checks_of_every_nth_replay_are_not_counted_as_a_step(capsys, monkeypatch, every, at_once):
    """`GRAPHCAP_VERIFY=1` holds each replay against eager; the figures are of one that is not."""
    arguments = ("--tokens", "6", "--tokens-per-launch", at_once)
    plain = decode(capsys, *arguments)
    monkeypatch.setenv("GRAPHCAP_VERIFY", every)
    checked = decode(capsys, *arguments)
    for name in ("launches_per_token", "allocations_per_token"):
        assert checked["replay"][name] == plain["replay"][name]
    assert checked["replay"]["allocations_per_token"] == 0
    assert checked["outputs_equal"] is True
