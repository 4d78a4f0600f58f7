"""Real vLLM on a GPU: the plugin in both model runners gives vLLM's own tokens.

Each engine is a process of its own; several run at a time, with a fixed cache each. vLLM has to be
installed, and graphcap with its metadata, so that vLLM finds the plugin.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any

import pytest
import torch

from graphcap.decode.layer_plan import LayerPlan
from graphcap.decode.plan_files import PlanFile, TunedBucket
from graphcap.decode.plan_key import DIMENSIONS, PlanKey, kernels_digest, versions_here
from graphcap.moe.kernels.cuda_down import CudaDown

pytest.importorskip("triton", minversion="3.0")

from graphcap.moe.kernels.triton_gemm import Tile
from graphcap.moe.kernels.triton_pairs import PairTile

pytestmark = pytest.mark.skipif(find_spec("vllm") is None, reason="needs vLLM")

HERE = Path(__file__).resolve().parent
ARRIVALS = HERE.parent / "hosts" / "vllm" / "arrivals.py"
CACHE = {"kv_cache_memory_bytes": 2_000_000_000}
SHAPE = {
    "hidden_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 2048,
}
EXPERTS = {"num_experts": 64, "num_experts_per_tok": 8, "moe_intermediate_size": 128}
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "moe": ("qwen3_moe", {"num_hidden_layers": 4, **EXPERTS, **SHAPE}),
    "tuned": (
        "qwen3_moe",
        {
            "num_hidden_layers": 4,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 256,
            **SHAPE,
        },
    ),
    "flash": ("qwen3_moe", {"num_hidden_layers": 4, **EXPERTS, **SHAPE, "head_dim": 128}),
    "dense": ("qwen3", {"num_hidden_layers": 4, "intermediate_size": 1024, **SHAPE}),
    "hybrid": ("qwen3_next", {**EXPERTS, "shared_expert_intermediate_size": 128, **SHAPE}),
}
STEP = 1 / 16
"""Of bfloat16 at the best logits here, of magnitude 8 to 16. The two best lie within two steps where most
requests part; up to eight steps were seen on an H200, once in 63 partings."""


def start(
    model: Path, log: Path, *words: str, engine: dict[str, Any] | None = None, **variables: str
) -> subprocess.Popen[bytes]:
    command = [sys.executable, str(ARRIVALS), "--model", str(model), "--requests", "64"]
    command += ["--tokens", "128", "--max-seqs", "32", "--longest-prompt", "200"]
    command += ["--vocab", "2048", "--logprobs", "--backend", "TRITON_ATTN"]
    # vLLM's default kernel for the prefill of a gated delta net comes with FlashInfer, a package of its own.
    plain = {**CACHE, "additional_config": {"gdn_prefill_backend": "triton"}}
    command += ["--engine", json.dumps({**plain, **(engine or {})}), *words]
    environment = {**os.environ, "GRAPHCAP": "0", **variables}
    with log.open("wb") as out:
        return subprocess.Popen(command, stdout=out, stderr=out, env=environment, cwd=log.parent)


def finish(process: subprocess.Popen[bytes], log: Path, seconds: float = 420) -> dict[str, Any]:
    code = process.wait(timeout=seconds)
    text = log.read_text(errors="replace")
    lines = [line for line in text.splitlines() if line.startswith("RESULT ")]
    assert code == 0, text[-3000:]
    assert lines, text[-3000:]
    return dict(json.loads(lines[-1].removeprefix("RESULT ")))


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sys.path.insert(0, str(ARRIVALS.parent))
    import checkpoints

    folder = tmp_path_factory.mktemp("models")
    for name, (kind, changes) in KINDS.items():
        checkpoints.write_checkpoint(folder / name, kind, **changes)
    _write_plans(folder / "plans")
    return folder


def _write_plans(folder: Path) -> None:
    """Plans for the experts of "tuned" on this card, as `graphcap tune` writes them: with a kernel in CUDA
    C++ at one token, tiles of their own at others, none at 32."""
    experts = KINDS["tuned"][1]
    sizes = {
        "hidden_size": experts["hidden_size"],
        "num_experts": experts["num_experts"],
        "top_k": experts["num_experts_per_tok"],
        "moe_intermediate_size": experts["moe_intermediate_size"],
    }
    named = tuple((name, sizes.get(name, 1)) for name in DIMENSIONS)
    key = PlanKey(torch.cuda.get_device_name(), named, "bfloat16")
    gated = {"gated_gemm": Tile(32, 64, 4, 3), "down_gemm": Tile(64, 64, 4, 3)}
    plans = {
        1: LayerPlan("fused", tiles={"pair_down": CudaDown(4), "pair_gate_up": PairTile(2, 256)}),
        4: LayerPlan("apart", tiles={"pair_down": PairTile(2, 256)}, block=16),
        16: LayerPlan("apart", tiles=gated, block=16, without_pdl=frozenset({"merge"})),
    }
    buckets = [TunedBucket(rows, 256, plan, 1.0) for rows, plan in plans.items()]
    file = PlanFile(key, "tuned", kernels_digest(), versions_here(), ()).with_buckets(buckets)
    file.write(folder / key.file_name)


V2 = {"VLLM_USE_V2_MODEL_RUNNER": "1"}
VLLMS = {"GRAPHCAP_KERNELS": "vllm"}
TAPE = {"GRAPHCAP": "1", "GRAPHCAP_RECORDER": "tape"}
FLASH = ("--backend", "FLASH_ATTN")
"""vLLM's own choice on Hopper; its mixed batches are recorded whole."""

RUNS: dict[str, tuple[str, tuple[str, ...], dict[str, str]]] = {
    "moe reference": ("moe", ("--eager",), {}),
    "moe v1": ("moe", (), {"GRAPHCAP": "1"}),
    "moe v1, vLLM's kernels": ("moe", (), {"GRAPHCAP": "1", **VLLMS}),
    "flash reference": ("flash", ("--eager", *FLASH), {}),
    "flash v1": ("flash", FLASH, {"GRAPHCAP": "1"}),
    "flash v1, vLLM's kernels": ("flash", FLASH, {"GRAPHCAP": "1", **VLLMS}),
    "tuned reference": ("tuned", ("--eager",), {}),
    "tuned v1": ("tuned", (), {"GRAPHCAP": "1"}),
    "tuned v1, without plans": ("tuned", (), {"GRAPHCAP": "1", "GRAPHCAP_SCHEDULE": "plain"}),
    "moe v2": ("moe", (), {"GRAPHCAP": "1", **V2}),
    "moe v2, vLLM's kernels": ("moe", (), {"GRAPHCAP": "1", **V2, **VLLMS}),
    "dense reference": ("dense", ("--eager",), {}),
    "dense v1": ("dense", (), {"GRAPHCAP": "1"}),
    "dense v2": ("dense", (), {"GRAPHCAP": "1", **V2}),
    "sampled reference": ("moe", ("--eager", "--sampled"), {}),
    "sampled v1, vLLM's kernels": ("moe", ("--sampled",), {"GRAPHCAP": "1", **VLLMS}),
    "sampled2 reference": ("moe", ("--eager", "--sampled"), V2),
    "sampled2 v2, vLLM's kernels": ("moe", ("--sampled",), {"GRAPHCAP": "1", **V2, **VLLMS}),
    "moe v1 tape": ("moe", ("--eager",), TAPE),
    "moe v1 tape, vLLM's kernels": ("moe", ("--eager",), {**TAPE, **VLLMS}),
    "moe v2 tape, vLLM's kernels": ("moe", ("--eager",), {**TAPE, **V2, **VLLMS}),
    "dense v1 tape": ("dense", ("--eager",), TAPE),
    "eager-hybrid reference": ("hybrid", ("--eager",), {}),
    "eager-hybrid v1 tape": ("hybrid", ("--eager",), TAPE),
    "eager-hybrid v1 tape, graphcap's": (
        "hybrid",
        ("--eager",),
        {**TAPE, "GRAPHCAP_KERNELS": "triton"},
    ),
    "hybrid reference": ("hybrid", (), {}),
    "hybrid v1, vLLM's kernels": ("hybrid", (), {"GRAPHCAP": "1", **VLLMS}),
    "hybrid v1": ("hybrid", (), {"GRAPHCAP": "1"}),
}


@pytest.fixture(scope="module")
def results(
    models: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> dict[str, Any]:
    """All engines that the selected tests ask for, eight at a time: each spends most of its life on the
    host. Hybrid ones first: they compile for minutes."""
    folder = tmp_path_factory.mktemp("logs")

    def run(name: str) -> dict[str, Any]:
        kind, words, variables = RUNS[name]
        log = folder / f"{name.replace(' ', '-')}.log"
        plans = {"GRAPHCAP_TUNE_CACHE": str(models / "plans")}
        process = start(models / kind, log, *words, **plans, **variables)
        try:
            return finish(process, log)
        except (AssertionError, subprocess.TimeoutExpired) as error:
            process.kill()
            return {"error": f"{error}: {log.read_text(errors='replace')[-3000:]}"}

    asked = {
        getattr(item, "callspec", None) and item.callspec.params.get("name")
        for item in request.session.items
    }
    asked |= {reference_of(name) for name in RUNS if name in asked}
    names = sorted(asked & RUNS.keys(), key=lambda name: "hybrid" not in name)
    with ThreadPoolExecutor(8) as pool:
        return dict(zip(names, pool.map(run, names), strict=True))


def _no_flash_attention() -> str | None:
    """A vLLM that was unpacked without its large libraries has none."""
    from vllm.vllm_flash_attn import flash_attn_interface as flash

    return None if flash.FA3_AVAILABLE else f"no FlashAttention 3: {flash.FA3_UNAVAILABLE_REASON}"


def of(results: dict[str, Any], name: str) -> dict[str, Any]:
    if name.startswith("flash") and (why := _no_flash_attention()):
        pytest.skip(why)
    found = results[name]
    assert "error" not in found, found["error"]
    return dict(found)


def reference_of(name: str) -> str:
    return f"{name.split(' ')[0]} reference"


OTHER_SPLITS = "flash v1, vLLM's kernels"
"""FlashAttention 3 chooses into how many splits a sequence is divided; in graphs vLLM bounds them
(`max_num_splits`, which it calls the heuristics not fit for graphs), so eager vLLM adds in another order."""

SAME_KERNELS = [
    n for n in RUNS if ("vLLM's kernels" in n and n != OTHER_SPLITS) or n.startswith("dense v")
]
SAME_KERNELS.append("eager-hybrid v1 tape")  # experts stay on vLLM's there
OTHER_KERNELS = [
    "eager-hybrid v1 tape, graphcap's",
    "moe v1",
    "moe v2",
    "moe v1 tape",
    "tuned v1",
    "tuned v1, without plans",
    "flash v1",
    "hybrid v1",
]


@pytest.mark.parametrize("name", SAME_KERNELS)
def test_the_tokens_are_those_of_vllm_where_the_kernels_are(
    results: dict[str, Any], name: str
) -> None:
    assert of(results, name)["tokens"] == of(results, reference_of(name))["tokens"]


@pytest.mark.parametrize("name", [*OTHER_KERNELS, OTHER_SPLITS])
def test_tokens_part_only_at_near_ties_where_kernels_differ(
    results: dict[str, Any], name: str
) -> None:
    ours, theirs = of(results, name), of(results, reference_of(name))
    compared, parted = 0, []
    for mine, yours, gaps in zip(ours["tokens"], theirs["tokens"], theirs["gaps"], strict=True):
        for a, b, gap in zip(mine, yours, gaps, strict=True):
            if a != b:
                parted.append(gap)
                break
            compared += 1
    assert median(parted) <= 2 * STEP
    assert max(parted) <= 10 * STEP
    assert compared > 1000


@pytest.mark.parametrize("name", [n for n in RUNS if not n.endswith("reference")])
def test_every_decode_batch_was_served_by_a_bucket(results: dict[str, Any], name: str) -> None:
    """Promises 1 and 2: batches of 1 to the maximum, growing and shrinking."""
    found = of(results, name)["graphcap"]
    assert found["decode"]["fallbacks"] == {}
    assert found["failures"] == {kind: {} for kind in found["failures"]}
    assert found["decode"]["replays"] > 150
    assert all(count > 0 for count in found["decode"]["buckets"].values())


@pytest.mark.parametrize("name", OTHER_KERNELS)
def test_moe_layers_run_on_the_pool(results: dict[str, Any], name: str) -> None:
    found = of(results, name)["graphcap"]
    assert sum(found["layers"].values()) == 4
    assert all(text.startswith("graphcap's triton") for text in found["layers"])
    assert found["plans"]
    assert "failed" not in {source for source, *_ in found["plans"].values()}
    assert found["pool_bytes"] > 0


@pytest.mark.parametrize(
    ("name", "sources"),
    [
        ("tuned v1", {"1": "cache", "4": "cache", "16": "cache", "32": "default"}),
        ("tuned v1, without plans", dict.fromkeys(("1", "4", "16", "32"), "not supported")),
    ],
)
def test_experts_run_by_the_plans_of_this_machine(
    results: dict[str, Any], name: str, sources: dict[str, str]
) -> None:
    """Each batch by its own; and by none where none is wanted."""
    plans = of(results, name)["graphcap"]["plans"]
    assert {rows: plans[rows][0] for rows in sources} == sources
    assert not any(lacks for _, lacks, *_ in plans.values())
    in_cuda = {rows for rows, (_, _, *kernels) in plans.items() if kernels}
    assert in_cuda == ({"1"} if name == "tuned v1" else set())


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
class TestTensorParallel:
    @pytest.fixture(scope="class")
    def pair(self, models: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
        folder, found = tmp_path_factory.mktemp("tp"), {}
        two = {"tensor_parallel_size": 2}
        broken = {**two, "worker_extension_cls": "fail_one_rank.FailOneRank"}
        path = os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])
        for name, words, engine, variables in (
            ("reference", ("--eager",), two, {}),
            ("on", (), two, {"GRAPHCAP": "1", **VLLMS}),
            ("one rank fails", (), broken, {"GRAPHCAP": "1", **VLLMS, "PYTHONPATH": path}),
        ):
            log = folder / f"{name}.log"
            process = start(models / "moe", log, *words, engine=engine, **variables)
            try:
                found[name] = {**finish(process, log), "log": log.read_text(errors="replace")}
            except subprocess.TimeoutExpired:
                process.kill()
                found[name] = {"error": "it hung:\n" + log.read_text(errors="replace")[-3000:]}
            except AssertionError as error:
                found[name] = {"error": str(error)}
        return found

    def test_two_ranks_replay_and_agree(self, pair: dict[str, Any]) -> None:
        assert of(pair, "on")["tokens"] == of(pair, "reference")["tokens"]
        assert "the decode step is recorded" in pair["on"]["log"]

    def test_a_failure_on_one_rank_ends_recording_on_both(self, pair: dict[str, Any]) -> None:
        found = of(pair, "one rank fails")
        assert found["tokens"] == of(pair, "reference")["tokens"]
        assert found["log"].count("graphcap records nothing in this engine") == 2
