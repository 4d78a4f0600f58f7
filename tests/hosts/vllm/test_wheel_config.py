"""What the plugin makes of a configuration of a real vLLM, row by row, for each of the wheels."""

from __future__ import annotations

from typing import Any

import pytest
from gather import Facts
from scenarios.config import NOT_TAKEN, ROWS

from graphcap import BucketLadder
from graphcap.hosts.vllm.config import MIXED_SIZES

SCENARIOS = "scenarios.config"

# -- what is expected of an engine of 30 sequences and 8192 tokens -------------------------------

LADDER = [1, 2, 4, 8, 16, 24, 30]
ABOVE = [32, 40, 48, 56, 60]
"""vLLM's own sizes for mixed batches in pieces, up to twice the sequences."""

UNCOMPILED, FULL, SIZES = (
    "no torch.compile (mode=0)",
    "cudagraph_mode=FULL",
    "cudagraph_capture_sizes",
)


def recorded(
    decode: list[int] = LADDER,
    tokens: list[int] | None = None,
    chosen: tuple[str, ...] = (UNCOMPILED, FULL, SIZES),
    left: tuple[str, ...] = (),
) -> dict[str, Any]:
    """Mixed batches are recorded as well, without torch.compile."""
    mixed = list(MIXED_SIZES) if tokens is None else tokens
    return {
        "mixed": "full",
        "mode": "NONE",
        "cudagraph_mode": "FULL",
        "decode": decode,
        "tokens": mixed,
        "sizes": sorted({*decode, *mixed}),
        "chosen": list(chosen),
        "left": list(left),
    }


def pieces(
    decode: list[int] = LADDER,
    sizes: list[int] | None = None,
    chosen: tuple[str, ...] = (SIZES,),
    left: tuple[str, ...] = (),
) -> dict[str, Any]:
    """Mixed batches run in vLLM's compiled pieces."""
    return {
        "mixed": "piecewise",
        "mode": "VLLM_COMPILE",
        "cudagraph_mode": "FULL_AND_PIECEWISE",
        "decode": decode,
        "tokens": [],
        "sizes": LADDER + ABOVE if sizes is None else sizes,
        "chosen": list(chosen),
        "left": list(left),
    }


def decode_only(
    mode: str, chosen: tuple[str, ...] = (SIZES,), left: tuple[str, ...] = ()
) -> dict[str, Any]:
    return {
        "mixed": "eager",
        "mode": mode,
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "decode": LADDER,
        "tokens": [],
        "sizes": LADDER,
        "chosen": list(chosen),
        "left": list(left),
    }


def up_to(limit: int) -> list[int]:
    return [*(size for size in MIXED_SIZES if size < limit), limit]


ONLY = "cudagraph_mode=FULL_DECODE_ONLY"
BOTH = "cudagraph_mode=FULL_AND_PIECEWISE"
COMPILED = "mode=VLLM_COMPILE"

EXPECTED: dict[str, dict[str, Any]] = {
    "nothing set": recorded(),
    "dense": recorded(),
    "hybrid": pieces(),
    "tensor parallel": recorded(),
    "TRITON_ATTN": recorded(),
    "FLASH_ATTN": recorded(),
    "FLASHINFER": pieces(),
    "A100": pieces(),
    "A100, FLASH_ATTN": pieces(),
    "A100, TRITON_ATTN": recorded(),
    "FULL": recorded(chosen=(UNCOMPILED, SIZES), left=(FULL,)),
    "FULL_DECODE_ONLY": decode_only("VLLM_COMPILE", left=(ONLY,)),
    "FULL_DECODE_ONLY, mode 0": decode_only("NONE", left=("mode=NONE", ONLY)),
    "FULL_DECODE_ONLY, mode 3": {
        **pieces(left=(COMPILED, ONLY)),
        "cudagraph_mode": "FULL_DECODE_ONLY",
    },
    "FULL_AND_PIECEWISE": pieces(left=(BOTH,)),
    "mode 0": recorded(chosen=(FULL, SIZES), left=("mode=NONE",)),
    "mode 3": pieces(left=(COMPILED,)),
    "optimization level 1": recorded(),
    "sizes": recorded(
        [1, 2, 4, 8], [1, 2, 4, 8], (UNCOMPILED, FULL), ("cudagraph_capture_sizes=[8, 1, 4, 2, 8]",)
    ),
    "sizes beyond a batch": recorded(
        [4, 16],
        [4, 16, 64],
        (UNCOMPILED, FULL),
        ("cudagraph_capture_sizes=[4, 16, 64, 16384]",),
    ),
    "sizes, A100": pieces([4], [4, 64], (), ("cudagraph_capture_sizes=[4, 64]",)),
    "largest size": recorded(
        [1, 2, 4, 8, 16, 20], [16, 20], left=("max_cudagraph_capture_size=20",)
    ),
    "largest size, A100": pieces(
        sizes=[*LADDER, 32, 40, 48], left=("max_cudagraph_capture_size=48",)
    ),
    "GRAPHCAP_BUCKETS": recorded([1, 2, 30]),
    "64 sequences": recorded([1, 2, 64]),
    "13 sequences": recorded([1, 2, 4, 8, 13]),
    "few tokens": recorded(tokens=[16, 32, 40]),
    "short sequences": recorded(tokens=up_to(480)),
    "tape": decode_only("NONE", chosen=(UNCOMPILED, ONLY, SIZES)),
    "reference kernels": recorded(),
    "additional_config": recorded(),
}


@pytest.mark.parametrize("name", ROWS)
def test_engine_is_taken_with(facts: Facts, name: str):
    found = facts[name]
    choice = found["choice"]
    assert choice["taken"]
    assert choice["why_not"] == []
    assert EXPECTED[name] == {
        "mixed": choice["mixed"],
        "mode": found["mode"],
        "cudagraph_mode": found["cudagraph_mode"],
        "decode": choice["decode"],
        "tokens": choice["mixed_tokens"],
        "sizes": found["sizes"],
        "chosen": choice["chosen"],
        "left": choice["left_alone"],
    }
    assert found["largest"] == found["sizes"][-1]


@pytest.mark.parametrize("name", ROWS)
def test_choice_is_one_line(facts: Facts, name: str):
    (line,) = facts[name]["lines"]
    expected = EXPECTED[name]
    assert line["level"] == "INFO"
    assert line["text"].startswith("graphcap takes the decode step: decode buckets ")
    assert f"mixed batches: {expected['mixed']}" in line["text"]
    if expected["chosen"]:
        assert f"; set {', '.join(expected['chosen'])}" in line["text"]
    if expected["left"]:
        assert f"; left as the user set it: {', '.join(expected['left'])}" in line["text"]


@pytest.mark.parametrize(("name", "most"), [("nothing set", 30), ("13 sequences", 13)])
def test_ladder_is_the_default_one_and_ends_at_the_exact_maximum(
    facts: Facts, name: str, most: int
):
    assert facts[name]["choice"]["decode"] == list(BucketLadder.up_to(most))


def test_recorder_and_kernels_are_kept(facts: Facts):
    assert [facts[name]["choice"]["recorder"] for name in ("nothing set", "tape")] == [
        "cuda",
        "tape",
    ]
    assert [facts[name]["choice"]["kernels"] for name in ("nothing set", "reference kernels")] == [
        "auto",
        "reference",
    ]


def test_additional_config_of_the_user_stays(facts: Facts):
    assert facts["additional_config"]["additional"] == {"mine": 1}


# -- engines that are left to vLLM ---------------------------------------------------------------

FOR_MIXED = (
    "cudagraph_mode=FULL was set for mixed batches as well, which graphcap does not record here; "
    "FULL_AND_PIECEWISE or FULL_DECODE_ONLY leaves them out"
)
NEEDS_COMPILED = "cudagraph_mode=FULL_AND_PIECEWISE was set, which needs a compiled model"

WHY_NOT: dict[str, list[str]] = {
    "enforce_eager": ["--enforce-eager (no graphs were asked for)"],
    "optimization level 0": ["optimization level 0 (no graphs were asked for)"],
    "PIECEWISE": ["cudagraph_mode=PIECEWISE was set: no whole step is to be captured"],
    "NONE": ["cudagraph_mode=NONE was set: no whole step is to be captured"],
    "FULL, mode 3": [FOR_MIXED],
    "FULL, A100": [FOR_MIXED],
    "FULL_AND_PIECEWISE, mode 0": [NEEDS_COMPILED],
    "sizes above the sequences": [
        "cudagraph_capture_sizes=[64, 128] has no size up to 30 sequences"
    ],
    "tape, mode 3": ["mode=VLLM_COMPILE was set: a tape cannot hold compiled code"],
    "tape, FULL_AND_PIECEWISE": [NEEDS_COMPILED],
    "speculative decoding": ["speculative decoding"],
    "LoRA": ["LoRA adapters"],
    "pipeline parallelism": ["pipeline parallelism"],
    "data parallelism": ["data parallelism"],
    "expert parallelism": ["expert parallelism"],
    "context parallelism": ["context parallelism (DCP)"],
    "KV connector": ["a KV transfer connector"],
    "KV offloading": ["KV cache offloading"],
    "weight offloading": ["weight offloading"],
    "pooling": ["a pooling model"],
    "two of them": ["LoRA adapters", "--enforce-eager (no graphs were asked for)"],
}


@pytest.mark.parametrize("name", NOT_TAKEN)
def test_engine_is_left_to_vllm_and_the_reason_named(facts: Facts, name: str):
    choice = facts[name]["choice"]
    assert not choice["taken"]
    assert choice["why_not"] == WHY_NOT[name]
    assert choice["chosen"] == []


@pytest.mark.parametrize("name", NOT_TAKEN)
def test_reason_is_one_warning(facts: Facts, name: str):
    assert facts[name]["lines"] == [
        {
            "level": "WARNING",
            "by": "graphcap.hosts.vllm.install",
            "text": f"graphcap leaves this engine to vLLM: {'; '.join(WHY_NOT[name])} "
            "(graphcap explain left-to-vllm)",
        }
    ]


@pytest.mark.parametrize("name", NOT_TAKEN)
def test_configuration_of_such_an_engine_is_vllms_own(facts: Facts, name: str):
    ours, theirs = facts[name], facts[f"{name}, without graphcap"]
    assert theirs["choice"] is None
    for field in ("mode", "cudagraph_mode", "sizes", "largest", "additional"):
        assert ours[field] == theirs[field], field


def test_engine_that_vllm_leaves_without_full_graphs_is_given_back(facts: Facts):
    found = facts["vLLM ends elsewhere"]
    reason = "vLLM came to cudagraph_mode=PIECEWISE, in which no whole step is captured"
    assert not found["choice"]["taken"]
    assert found["choice"]["why_not"] == [reason]
    (line,) = found["lines"]
    assert line["level"] == "WARNING"
    assert line["text"] == (
        f"graphcap leaves this engine to vLLM: {reason} (graphcap explain left-to-vllm)"
    )
    assert found["mode"] == "VLLM_COMPILE"
    assert max(found["sizes"]) <= ABOVE[-1]
    assert found["same objects"] == [True, True]  # the user may hold them
    assert "of the first time" not in found["norms"]


def test_additional_config_that_is_no_dictionary_is_named_and_left(facts: Facts):
    found = facts["other additional_config"]
    assert found["type"] == "Theirs"
    assert found["lines"][-1] == (
        "graphcap leaves this engine to vLLM: additional_config is not a dictionary, the plugin "
        "cannot travel in it (graphcap explain left-to-vllm)"
    )


# -- a configuration that goes on ----------------------------------------------------------------


@pytest.mark.parametrize("which", ["sent", "copied"])
def test_choice_travels_with_the_configuration_and_is_not_made_again(facts: Facts, which: str):
    found = facts["decided once"]
    assert found["decisions"] == 1
    for field in ("choice", "mode", "cudagraph_mode", "sizes", "largest"):
        assert found[which][field] == found["first"][field], field
    assert len(found[which]["lines"]) == 1


def test_sent_configuration_has_the_same_hash(facts: Facts):
    found = facts["decided once"]
    assert found["sent"]["hash"] == found["first"]["hash"]


def test_rows_that_choose_otherwise_hash_otherwise(facts: Facts):
    names = ("nothing set", "GRAPHCAP_BUCKETS", "tape", "reference kernels", "enforce_eager")
    assert len({facts[name]["hash"] for name in names}) == len(names)
