"""The real engine on a CPU: what graphcap replays is what vLLM computes, and everything is counted.

All engines run in one script (cpu_scenarios.py), one process per scenario; the tests read what it found.
The reference is vLLM's engine uncompiled, since its default on CPUs, torch.compile, rounds differently.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from checkpoints import is_stuck
from cpu_engine import MOST_SEQUENCES, PREFIX, requests
from environments import CPU_ENGINE, run_script

SCRIPT = Path(__file__).resolve().parent / "cpu_scenarios.py"
LAYERS = 2
LADDER = [1, 2, 4, 6]
MIXED = [8, 16, 24, 32, 48]
RECORDED = "graphcap: the decode step is recorded"

Facts = dict[str, Any]


class Scenarios:
    def __init__(self, found: dict[str, dict[str, Any]]) -> None:
        self._found = found

    def __getitem__(self, name: str) -> Any:
        result = self._found[name]
        if "error" in result:
            pytest.fail(f"the scenario {name!r} failed:\n{result['error']}")
        return result["facts"]


@pytest.fixture(scope="module")
def scenarios(cpu_engine: Path) -> Scenarios:
    one_thread = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    found = run_script(cpu_engine, SCRIPT, env=one_thread, timeout=600)
    return Scenarios(found["scenarios"])


@pytest.fixture(scope="module")
def tokens(scenarios: Scenarios) -> Any:
    """What the usual 24 requests are answered with, by vLLM alone."""
    return scenarios["vllm moe"]["served"]["greedy"]


def messages(facts: Facts, level: str, start: str = "") -> list[str]:
    return [r["text"] for r in facts["log"] if r["level"] == level and r["text"].startswith(start)]


def samples(facts: Facts, name: str) -> dict[str, float]:
    """Value by what distinguishes the samples of a metric, other than engine and rank."""
    found = {}
    for sample, labels, value in facts["prometheus"]:
        if sample == name:
            assert (labels.pop("engine"), labels.pop("rank")) == ("0", "0")
            found[",".join(labels.values())] = value
    return found


def bucket_of(rows: int, ladder: Sequence[int] = LADDER) -> int:
    return min(size for size in ladder if size >= rows)


def per_bucket(steps: list[list[int]], ladder: Sequence[int]) -> dict[str, int]:
    """Steps by the bucket that is to serve them; every bucket is there."""
    found = dict.fromkeys(map(str, ladder), 0)
    for rows, count in steps:
        found[str(bucket_of(rows, ladder))] += count
    return found


def padding(steps: list[list[int]], ladder: Sequence[int]) -> int:
    return sum((bucket_of(rows, ladder) - rows) * count for rows, count in steps)


def total(steps: list[list[int]]) -> int:
    return sum(count for _, count in steps)


def replays(statistics: Facts) -> int:
    return statistics["replays"] + sum(statistics["mixed"].values())


# ---------------------------------------------------------------- the same tokens

NAMES = ["moe", "moe, native", "dense", "dense, native"]
"""Checkpoint, and whether norms are the small operations of vLLM's default without a compiler."""


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    "part", ["greedy", "sampled", "aborted", "one longer", "crowd", "batches", "cached tokens"]
)
def test_served_alike(scenarios: Scenarios, name: str, part: str) -> None:
    alone, captured = (scenarios[f"{who} {name}"] for who in ("vllm", "graphcap"))
    assert captured["served"][part] == alone["served"][part]


@pytest.mark.parametrize("name", NAMES)
def test_what_is_served_is_worth_comparing(scenarios: Scenarios, name: str) -> None:
    served = scenarios[f"vllm {name}"]["served"]
    greedy = served["greedy"]
    assert len(greedy) == 24
    assert len({len(answer) for answer in greedy}) > 8
    assert len({token for answer in greedy for token in answer}) > 100
    assert max(len(request.prompt) for request in requests()) > MIXED[-1]  # it comes in chunks
    assert not is_stuck(served["one longer"][0])
    assert len(served["one longer"][0]) == 180
    assert served["aborted"][1:3] == [[], []]
    assert all(len(answer) >= 20 for answer in served["aborted"][3:])
    assert served["before preemption"] == 0
    assert served["preemptions"] > 0
    assert served["cached tokens"] == [PREFIX] * 8
    assert served["batches"][0] == served["batches"][1]
    other = scenarios[f"vllm {'dense' if 'moe' in name else 'moe'}"]["served"]
    assert greedy != other["greedy"]


def test_norms_are_the_ones_asked_for(scenarios: Scenarios) -> None:
    for who in ("vllm", "graphcap"):
        native = scenarios[f"{who} moe, native"]["norms"]
        assert native == {"rms_norm": ["native"], "fused_add_rms_norm": ["native"]}
        kernels = scenarios[f"{who} moe"]["norms"]
        assert all(providers[0] == "graphcap_cpu" for providers in kernels.values())


def test_norm_kernels_differ_from_small_operations_by_rounding_only(scenarios: Scenarios) -> None:
    found = scenarios["norm kernels"]
    assert len(found["differences"]) == 48
    for operation, dtype, shape, strided, units in found["differences"]:
        assert units < 2, (operation, dtype, shape, strided)
    assert found["a row of 20 goes to"] == "native"


# ---------------------------------------------------------------- every step counted


@pytest.mark.parametrize("name", NAMES)
def test_every_decode_step_is_a_replay(scenarios: Scenarios, name: str) -> None:
    facts = scenarios[f"graphcap {name}"]
    decode_steps = facts["steps"]["decode"]
    assert [rows for rows, _ in decode_steps] == list(range(1, MOST_SEQUENCES + 1))
    assert facts["counters"]["replays"] == [
        [bucket_of(rows), rows, count] for rows, count in decode_steps
    ]
    statistics = facts["statistics"]
    assert statistics["replays"] == total(decode_steps)
    assert statistics["rows"] == sum(rows * count for rows, count in decode_steps)
    assert statistics["buckets"] == per_bucket(decode_steps, LADDER)
    assert statistics["padding_rows"] == padding(decode_steps, LADDER)
    assert statistics["failures"] == {}


@pytest.mark.parametrize("name", NAMES)
def test_every_step_with_a_prefill_is_a_replay(scenarios: Scenarios, name: str) -> None:
    facts = scenarios[f"graphcap {name}"]
    steps, statistics = facts["steps"]["other"], facts["statistics"]
    assert total(steps) > 50
    assert statistics["mixed"] == per_bucket(steps, MIXED)
    assert min(statistics["mixed"].values()) > 0
    assert statistics["mixed padding"] == padding(steps, MIXED) > 0
    mixed = {str(size): count for size, count in facts["counters"]["mixed"]}
    assert mixed == statistics["mixed"]


@pytest.mark.parametrize("name", NAMES)
def test_nothing_falls_back(scenarios: Scenarios, name: str) -> None:
    facts = scenarios[f"graphcap {name}"]
    assert facts["statistics"]["fallbacks"] == {}
    assert facts["counters"]["fallbacks"] == {}
    assert facts["counters"]["eager"] == []


def test_large_prefills_are_no_fallbacks(scenarios: Scenarios) -> None:
    """They run eagerly on purpose, also where fallbacks are errors."""
    facts = scenarios["large prefills"]
    assert facts["tokens"] == facts["alone"]
    assert max(tokens for tokens, _ in facts["steps"]["other"]) > 128
    assert facts["statistics"]["fallbacks"] == {}
    assert facts["statistics"]["replays"] == total(facts["steps"]["decode"]) > 0


def test_decode_only(scenarios: Scenarios, tokens: Any) -> None:
    facts = scenarios["decode only"]
    assert facts["tokens"] == tokens
    assert facts["managers"] == ["decode"]
    assert total(facts["steps"]["other"]) > 20
    assert facts["counters"]["mixed"] == []
    assert facts["counters"]["fallbacks"] == {}
    assert [[rows, count] for _, rows, count in facts["counters"]["replays"]] == (
        facts["steps"]["decode"]
    )


@pytest.mark.parametrize("name", NAMES)
def test_prometheus(scenarios: Scenarios, name: str) -> None:
    facts = scenarios[f"graphcap {name}"]
    statistics = facts["statistics"]
    assert samples(facts, "graphcap_replays_total") == {"": statistics["replays"]}
    assert samples(facts, "graphcap_bucket_replays_total") == statistics["buckets"]
    assert samples(facts, "graphcap_padding_rows_total") == {"": statistics["padding_rows"]}
    assert samples(facts, "graphcap_batches_total") == {
        str(rows): count for rows, count in facts["steps"]["decode"]
    }
    assert samples(facts, "graphcap_mixed_replays_total") == statistics["mixed"]
    assert samples(facts, "graphcap_fallbacks_total") == {}
    seconds = samples(facts, "graphcap_capture_seconds")[""]
    managers = facts["report"]["managers"].values()
    assert seconds == pytest.approx(sum(manager["seconds"] for manager in managers))


# ---------------------------------------------------------------- what is told


@pytest.mark.parametrize("name", NAMES)
def test_report(scenarios: Scenarios, name: str) -> None:
    report = scenarios[f"graphcap {name}"]["report"]
    assert report["host"] == "vllm"
    assert report["vllm"].split("+")[0] == CPU_ENGINE
    managers = report["managers"]
    for manager, ladder in ((managers["decode"], LADDER), (managers["mixed"], MIXED)):
        assert manager["recorder"] == "tape"
        assert [bucket["size"] for bucket in manager["buckets"]] == ladder
        for bucket in manager["buckets"]:
            assert bucket["nodes"] > 10 * LAYERS
            assert bucket["allocations"] == 0
        assert manager["failures"] == {}
        assert set(manager["versions"]) == {"graphcap", "python", "torch", "cuda"}
    for bucket in managers["decode"]["buckets"]:
        assert bucket["largest_difference"] == 0
    assert report["breaks"] == 2 * LAYERS
    layers = sum(report["moe_layers"].values())
    assert layers == (LAYERS if "moe" in name else 0)
    assert report["fallbacks"] == {}
    choice = report["choice"]
    assert (choice["taken"], choice["mixed"], choice["recorder"]) == (True, "full", "tape")
    assert choice["decode"] == LADDER
    assert choice["mixed_tokens"] == MIXED
    own_norms = "RMS norms by vLLM's C kernels"
    if "native" in name:
        assert choice["chosen"] == ["no torch.compile (mode=0)"]
        assert "ir_op_priority.rms_norm=native" in choice["left_alone"]
    else:
        assert choice["chosen"] == ["no torch.compile (mode=0)", own_norms]
        assert choice["left_alone"] == []


@pytest.mark.parametrize("name", NAMES)
def test_told_once_and_without_warnings(scenarios: Scenarios, name: str) -> None:
    facts = scenarios[f"graphcap {name}"]
    (block,) = messages(facts, "INFO", RECORDED)
    assert "decode: 4 buckets of 1 to 6 sequences" in block
    assert "mixed: 5 buckets of 8 to 48 tokens" in block
    assert f"breaks: {2 * LAYERS} operations of a step run live" in block
    (choice,) = messages(facts, "INFO", "graphcap takes the decode step")
    assert "decode buckets 1, 2, 4, 6; mixed batches: full" in choice
    assert messages(facts, "WARNING") == []


# ---------------------------------------------------------------- checks while serving


def test_every_third_replay_is_checked(scenarios: Scenarios, tokens: Any) -> None:
    facts = scenarios["verified"]
    assert facts["tokens"] == tokens
    statistics = facts["statistics"]
    mixed = sum(statistics["mixed"].values())
    assert min(statistics["replays"], mixed) > 20
    assert statistics["verified"] == [statistics["replays"] // 3, mixed // 3]


def test_third_replay_finds_what_is_wrong(scenarios: Scenarios) -> None:
    facts = scenarios["verification finds a difference"]
    assert facts["error"].startswith(
        "VerificationError: bucket 1 with 1 rows: output 'hidden_states'"
    )
    assert facts["replays"] == 2


def test_above_the_maximum_runs_eagerly_and_is_counted(scenarios: Scenarios, tokens: Any) -> None:
    facts = scenarios["above maximum"]
    assert facts["tokens"] == tokens
    above = [(rows, count) for rows, count in facts["steps"]["decode"] if rows > 2]
    served = [[rows, rows, count] for rows, count in facts["steps"]["decode"] if rows <= 2]
    assert above
    assert served
    assert facts["counters"]["replays"] == served
    assert facts["counters"]["eager"] == [list(pair) for pair in above]
    fallbacks = {"above_max_batch": sum(count for _, count in above)}
    assert facts["statistics"]["fallbacks"] == fallbacks
    assert samples(facts, "graphcap_fallbacks_total") == fallbacks
    assert samples(facts, "graphcap_batches_total") == {
        str(rows): count for rows, count in facts["steps"]["decode"]
    }
    (warning,) = messages(facts, "WARNING")
    assert "above_max_batch, maximum 2" in warning
    assert "cudagraph_capture_sizes" in warning
    (choice,) = messages(facts, "INFO", "graphcap takes the decode step")
    assert "left as the user set it: cudagraph_capture_sizes=[1, 2]" in choice


def test_above_the_maximum_is_an_error_where_asked_for(scenarios: Scenarios, tokens: Any) -> None:
    strict = scenarios["above maximum"]["strict"]
    assert strict["two tokens"] == tokens[:2]  # it does serve what it has recorded
    assert strict["error"].startswith("FallbackError: a step of ")
    assert "above_max_batch" in strict["error"]


def test_an_exception_costs_its_bucket_only(scenarios: Scenarios, tokens: Any) -> None:
    facts = scenarios["one bucket fails"]
    assert facts["tokens"] == tokens
    statistics = facts["statistics"]
    assert list(statistics["failures"]) == ["2"]
    for told in (statistics["failures"]["2"], messages(facts, "INFO", RECORDED)[0]):
        assert "ValueError at" in told
        assert "cpu_scenarios.py" in told
        assert "injected into bucket 2" in told
    steps = dict(facts["steps"]["decode"])
    assert steps[2] > 0
    assert statistics["fallbacks"] == {"not_recorded": steps[2]}
    assert statistics["replays"] == sum(steps.values()) - steps[2]
    assert len([text for text in messages(facts, "WARNING") if "run eagerly" in text]) == 1
    assert len([text for text in messages(facts, "WARNING") if "not_recorded" in text]) == 1


# ---------------------------------------------------------------- weights


def test_weights_copied_in_place_are_served(scenarios: Scenarios, tokens: Any) -> None:
    facts = scenarios["weights copied"]
    assert facts["before"] == tokens
    assert facts["after"] == scenarios["tokens of other norms"]
    assert facts["after"] != tokens
    assert facts["statistics"]["fallbacks"] == {}
    assert replays(facts["statistics"]) == 2 * replays(facts["statistics before"])


@pytest.mark.parametrize(
    ("how", "told"),
    [
        ("rebound", "norm.weight is another tensor now"),
        ("moved", "norm.weight has moved to another address"),
        ("moved inside", "norm.weight has moved to another address"),
    ],
)
def test_rebound_weights_are_never_replayed(
    scenarios: Scenarios, tokens: Any, how: str, told: str
) -> None:
    facts = scenarios[f"weights {how}"]
    assert facts["before"] == tokens
    assert facts["after"] == scenarios["tokens of other norms"]
    before, statistics = facts["statistics before"], facts["statistics"]
    assert replays(statistics) == replays(before)
    assert statistics["fallbacks"] == {"stale_recording": replays(before)}
    assert messages(facts, "WARNING")
    for warning in messages(facts, "WARNING"):
        assert told in warning


def test_reloaded_weights_are_recorded_anew(scenarios: Scenarios) -> None:
    """vLLM packs them anew and frees what it had packed before, to which recordings point."""
    facts = scenarios["weights reloaded"]
    assert facts["before"] == scenarios["vllm dense"]["served"]["greedy"]
    assert facts["after"] == scenarios["tokens of other dense"]
    assert facts["after"] != facts["before"]
    assert facts["counters"]["fallbacks"] == {}
    assert facts["statistics"] == facts["statistics before"]  # of the new recordings
    assert len(messages(facts, "INFO", RECORDED)) == 2
    assert messages(facts, "WARNING") == []


def test_weights_packed_anew_are_noticed(scenarios: Scenarios) -> None:
    facts = scenarios["weights repacked"]
    assert facts["after"] == facts["before"]
    before, statistics = facts["statistics before"], facts["statistics"]
    assert replays(statistics) == replays(before)
    assert statistics["fallbacks"] == {"stale_recording": replays(before)}
    assert messages(facts, "WARNING")
    for warning in messages(facts, "WARNING"):
        assert "cpu_linear is another object now" in warning


# ---------------------------------------------------------------- engines come and go


def test_engines_one_after_the_other(scenarios: Scenarios, tokens: Any) -> None:
    first, second, third = scenarios["one after the other"]
    assert first["tokens"] == third["tokens"] == tokens
    assert second["tokens"] == scenarios["vllm dense"]["served"]["greedy"]
    for engine in (first, second, third):
        assert engine["statistics"]["fallbacks"] == {}
        assert engine["statistics"]["replays"] > 30  # each counts its own
        assert engine["statistics"]["replays"] == first["statistics"]["replays"]
        assert len(messages(engine, "INFO", RECORDED)) == 1


def test_shutdown_gives_back_everything(scenarios: Scenarios) -> None:
    assert scenarios["alive without graphcap"] == []  # else the next would say nothing
    for engine in scenarios["one after the other"]:
        assert set(engine["states"]) == {"closed"}
        assert engine["alive"] == []


def test_unwritable_report_does_not_stop_the_engine(scenarios: Scenarios) -> None:
    first, second, _ = scenarios["one after the other"]
    (warning,) = messages(first, "WARNING")
    assert warning.startswith("the capture report was not written to /dev/full: ")
    assert messages(second, "WARNING") == []
