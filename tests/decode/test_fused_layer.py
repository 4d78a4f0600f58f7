"""The fused schedule runs the same step in fewer kernels. The Triton kernels run interpreted here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from decoders import KERNELS, batch_at, make_cache
from fused_shapes import draw_small
from triton_support import ON_GPU

pytest.importorskip("triton", minversion="3.0")

from graphcap.buckets import BucketLadder
from graphcap.decode import layer_plan
from graphcap.decode.cache import NULL_BLOCK, PagedCache
from graphcap.decode.cache_format import CacheFormat
from graphcap.decode.decoder import Decoder
from graphcap.decode.kernels import DecodeKernels, decode_kernels
from graphcap.decode.kernels.triton_fused_attention import AttendTile
from graphcap.decode.kernels.triton_fused_linear import DotTile, RowsTile
from graphcap.decode.layer_plan import LayerPlan, default_plan
from graphcap.decode.step import DecodeStep
from graphcap.errors import InputError
from graphcap.manager import CaptureManager
from graphcap.moe.kernels import Backend
from graphcap.moe.kernels.triton_gemm import Tile
from graphcap.operations import Operation, observed_by
from graphcap.pool import BufferPool
from graphcap.settings import Settings

pytestmark = pytest.mark.skipif(ON_GPU, reason="the small decoders of these tests live on the CPU")

TRITON = decode_kernels(Backend("triton", "tests"))
POSITIONS = [7, 0, 13]

PAIRED = [
    "norm_qkv",
    "attend",
    "output_residual",
    "norm_router",
    "pair_gate_up",
    "pair_down",
]
DENSE = [
    "norm_qkv",
    "attend",
    "output_residual",
    "norm_gate_up",
    "silu_and_mul",
    "projections",
]

ATTENTION = ["projections", "attend", "projections", "fused_add_rms_norm"]
APART = [
    *ATTENTION,
    "router GEMM",
    "pair_gate_up",
    "pair_down",
    "fused_add_rms_norm",
    *ATTENTION,
    "projections",
    "silu_and_mul",
    "projections",
    "fused_add_rms_norm",
]


class Names:
    """Notes the operations of a step and runs them."""

    def __init__(self) -> None:
        self.names: list[str] = []

    def operation(self, operation: Operation, args: tuple[Any, ...], kwargs: dict) -> None:
        self.names.append(operation.name)
        with observed_by(None):
            operation(*args, **kwargs)


class Stepping:
    """A step over a cache of its own with three rows, the last of them padding."""

    def __init__(
        self, weights, kernels: DecodeKernels, schedule: str, plan: LayerPlan | None = None
    ) -> None:
        self.cache = make_cache(weights)
        self.cache.fill_random(3)
        self.pool = BufferPool("cpu")
        plans = None if plan is None else lambda rows: plan
        self.step = DecodeStep(
            weights, self.cache, kernels, self.pool, schedule=schedule, plans=plans
        )
        tables = torch.stack([self.cache.allocate(24) for _ in POSITIONS])
        self.slots = batch_at(tables, POSITIONS, [5, 6, 7])
        self.slots["block_tables"][-1] = NULL_BLOCK
        self.slots["slot_mapping"][-1] = -1
        self.slots["positions"][-1], self.slots["seq_lens"][-1] = 0, 1

    def run(self) -> Mapping[str, torch.Tensor]:
        """The outputs of the real rows, copied."""
        return {name: tensor[:2].clone() for name, tensor in self.step(self.slots).items()}


TILES = {
    "attend": AttendTile(2, 16, 1),
    "qkv": DotTile(16, 16, 4, 2, early=True),
    "output": RowsTile(2, 2, 3, registers=80),
    "gated_gemm": Tile(16, 16, 4, 2),
    "down_gemm": Tile(32, 16, 4, 3),
}


@pytest.mark.parametrize(
    ("num_experts", "plan", "steps"),
    [
        (6, LayerPlan("fused"), 1),
        (16, LayerPlan("fused"), 1),
        (6, LayerPlan("apart", block=16), 2),
        (16, LayerPlan("apart", without_pdl=frozenset({"attend", "router"})), 1),
        (6, LayerPlan("apart", TILES), 1),
        (6, LayerPlan("apart", {}, frozenset({"qkv", "output"})), 1),
    ],
)
def test_it_is_the_plain_step(num_experts: int, plan: LayerPlan, steps: int) -> None:
    """Against the reference kernels, by expert (6) and by pair (16), biases, a dense layer, a block
    boundary; a second step goes on from where the first one ends."""
    weights = draw_small(num_experts=num_experts, num_layers=2)
    plain = Stepping(weights, KERNELS, "plain")
    fused = Stepping(weights, TRITON, "fused", plan)
    fused.slots = {name: tensor.clone() for name, tensor in plain.slots.items()}
    for _ in range(steps):
        expected, seen = plain.run(), fused.run()
        torch.testing.assert_close(seen["logits"], expected["logits"], rtol=2e-4, atol=2e-4)
        assert torch.equal(seen["token_ids"], expected["token_ids"])
        for name, tensor in plain.slots.items():
            assert torch.equal(fused.slots[name][:2], tensor[:2]), name
    for ours, theirs in zip(
        (*fused.cache.keys, *fused.cache.values),
        (*plain.cache.keys, *plain.cache.values),
        strict=True,
    ):
        torch.testing.assert_close(ours[1:], theirs[1:], rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize(
    ("layers", "expected"),
    [("fused", [*PAIRED, *DENSE, "fused_add_rms_norm"]), ("apart", ["rms_norm", *APART])],
)
def test_few_operations_a_layer_and_the_same_bits_on_a_frozen_poisoned_pool(
    layers: str, expected: list[str]
) -> None:
    weights = draw_small(num_experts=16, num_layers=2)
    fused = Stepping(weights, TRITON, "fused", LayerPlan(layers))
    start = {name: tensor.clone() for name, tensor in fused.slots.items()}
    first = fused.run()
    fused.pool.freeze()
    before = fused.pool.allocations
    for name, tensor in start.items():
        fused.slots[name].copy_(tensor)
    fused.pool.poison()
    seen = Names()
    with observed_by(seen):
        again = fused.run()
    assert fused.pool.allocations == before
    assert torch.equal(first["logits"], again["logits"])
    assert seen.names == ["embedding", *expected, "projections", "sampling", "advance"]


def test_more_rows_run_by_the_plain_schedule(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layer_plan, "FUSED_ROWS", 1)
    monkeypatch.setattr(layer_plan, "APART_ROWS", 2)
    weights = draw_small(num_layers=1)
    seen = Names()
    with observed_by(seen):
        Stepping(weights, TRITON, "fused").run()
    assert "rotary_embedding" in seen.names
    assert not {"norm_qkv", "attend"} & set(seen.names)


def test_a_captured_decoder_of_both_schedules_verifies_and_agrees(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Buckets on either side of the limit share one pool; capture checks each against eager."""
    monkeypatch.setattr(layer_plan, "FUSED_ROWS", 1)
    # Replays are slow here, and nobody reads their times.
    monkeypatch.setattr(CaptureManager, "time", lambda self, size: None)
    weights = draw_small(num_layers=1, mlp_only_layers=())
    tokens = {}
    for schedule in ("plain", "fused"):
        decoder = Decoder(
            weights,
            TRITON if schedule == "fused" else KERNELS,
            max_batch=2,
            max_context=8,
            block_size=4,
            ladder=BucketLadder((1,), 2),
            settings=Settings(strict=True),
            schedule=schedule,
        )
        decoder.cache.fill_random(1)
        assert not decoder.manager.capture().failures
        decoder.cache.clear()
        tokens[schedule] = decoder.decode([[5, 7]], 3).token_ids
        decoder.close()
    assert tokens["fused"] == tokens["plain"]


def test_the_choices_of_kernels_name_what_is_fused() -> None:
    weights = draw_small(num_layers=1)
    names = {
        schedule: {
            choice.operation for choice in Stepping(weights, TRITON, schedule).step.kernel_choices
        }
        for schedule in ("plain", "fused")
    }
    assert names["fused"] - names["plain"] == {
        "norm_qkv",
        "attend",
        "output_residual",
        "norm_router",
        "fused_moe w1",
    }


def test_a_plan_names_only_what_exists() -> None:
    with pytest.raises(InputError, match="layers of a plan: expected one of fused, apart, plain"):
        LayerPlan("quick")
    with pytest.raises(InputError, match=r"tiles of a plan: expected names among .*found 'qvk'"):
        LayerPlan(tiles={"qvk": None})
    assert default_plan(1).layers == "fused"
    assert default_plan(8).layers == "apart"
    assert default_plan(512).layers == "plain"


def test_refusals_say_what_was_expected() -> None:
    weights = draw_small(num_layers=1)
    with pytest.raises(InputError, match="expected one of auto, fused, plain, found 'fast'"):
        Stepping(weights, TRITON, "fast")
    with pytest.raises(
        InputError,
        match="expected triton kernels, found reference, which have no fused layer; use schedule 'auto'",
    ):
        Stepping(weights, KERNELS, "fused")
    other = CacheFormat(layout="heads")
    cache = PagedCache(
        weights.shape,
        num_sequences=1,
        max_context=8,
        device="cpu",
        dtype=weights.dtype,
        format=other,
    )
    with pytest.raises(InputError, match="schedule 'fused': expected a cache of format"):
        DecodeStep(
            weights,
            cache,
            replace(TRITON, cache_format=other),
            BufferPool("cpu"),
            schedule="fused",
        )
