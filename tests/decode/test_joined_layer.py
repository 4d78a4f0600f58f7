"""A layer whose output projection joins the splits of attention is the same layer.

The kernel itself needs a device, see tests/gpu/test_cuda_joined.py; here one of torch's stands in for it."""

from __future__ import annotations

import ctypes
import math
import re
from typing import Any

import pytest
import torch
from decoders import batch_at, make_cache
from fused_shapes import draw_small
from triton_support import ON_GPU

pytest.importorskip("triton", minversion="3.0")

from graphcap.cuda import source
from graphcap.decode import schedule as schedule_module
from graphcap.decode.cache import NULL_BLOCK
from graphcap.decode.kernels import cuda_linear, decode_kernels
from graphcap.decode.kernels.cuda_linear import MOST_PARTS, CudaJoinRows
from graphcap.decode.kernels.triton_fused_attention import AttendTile
from graphcap.decode.layer_plan import LayerPlan
from graphcap.decode.step import DecodeStep
from graphcap.errors import BackendError
from graphcap.moe.kernels import Backend
from graphcap.operations import Operation, observed_by
from graphcap.pool import BufferPool

TRITON = decode_kernels(Backend("triton", "tests"))


def join_and_project(
    partial: torch.Tensor,
    lse: torch.Tensor,
    slots: torch.Tensor,
    seq_lens: torch.Tensor,
    capacity: int,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor,
    tokens: int,
    tile: CudaJoinRows,
    pdl: bool,
) -> None:
    """What `output_residual_joined` says of itself, in float64 and for any number of rows."""
    assert (tile, pdl) == (CudaJoinRows(4), True)
    splits = lse.shape[2] - 1
    joined = torch.zeros(*partial.shape[:2], partial.shape[3], dtype=torch.float64)
    for row in range(len(slots)):
        if slots[row] < 0:
            continue
        cached = min(int(seq_lens[row]), capacity) - 1
        share = max(1, math.ceil(cached / splits / tokens)) * tokens
        there = 1 + math.ceil(cached / share)
        shares = torch.softmax(lse[row, :, :there].double() * torch.log(torch.tensor(2.0)), 1)
        joined[row] = torch.einsum("hs,hsd->hd", shares, partial[row, :, :there].double())
    total = joined.flatten(1) @ weight.double().T
    residual += (total if bias is None else total + bias.double()).to(residual.dtype)


class Seen:
    """Notes the operations of a step and runs them."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.kernels: list[str] = []

    def operation(self, operation: Operation, args: tuple[Any, ...], kwargs: dict) -> None:
        self.names.append(operation.name)
        self.kernels.append(operation.implementation)
        with observed_by(None):
            operation(*args, **kwargs)


@pytest.mark.skipif(ON_GPU, reason="the small decoders of these tests live on the CPU")
@pytest.mark.parametrize("tile", [AttendTile(2, 16, 1), AttendTile(5, 16, 1)])
def test_a_joined_layer_is_the_fused_layer(
    monkeypatch: pytest.MonkeyPatch, tile: AttendTile
) -> None:
    """Rows of one, some and many cached tokens, and padding; on a frozen pool that is poisoned."""
    monkeypatch.setattr(schedule_module, "cuda_obstacles", lambda *_: {})
    own = Operation("output_residual", "tests", join_and_project)
    monkeypatch.setattr(cuda_linear, "output_residual_joined", own)
    weights = draw_small(num_layers=2)
    found = {}
    plans = {"fused": LayerPlan("fused", {"attend": tile})}
    plans["joined"] = plans["fused"].with_tile("output_residual", CudaJoinRows(4))
    for name, plan in plans.items():
        cache = make_cache(weights, max_context=64)
        cache.fill_random(3)
        pool = BufferPool("cpu")
        how: Any = {"schedule": "fused", "plans": lambda rows, plan=plan: plan}
        step = DecodeStep(weights, cache, TRITON, pool, **how)
        tables = torch.stack([cache.allocate(64) for _ in range(4)])
        slots = batch_at(tables, [0, 7, 60, 1], [5, 6, 7, 8])
        slots["block_tables"][-1], slots["slot_mapping"][-1] = NULL_BLOCK, -1
        slots["positions"][-1], slots["seq_lens"][-1] = 0, 1
        start = {key: tensor.clone() for key, tensor in slots.items()}
        first = step(slots)["logits"][:3].clone()
        pool.freeze()
        pool.poison()
        for key, tensor in start.items():
            slots[key].copy_(tensor)
        seen = Seen()
        with observed_by(seen):
            again = step(slots)["logits"][:3].clone()
        assert torch.equal(first, again)
        buffers = set(pool.plan.offsets)
        assert ("attended" in buffers) == (name == "fused")
        assert {"attend/partial", "attend/lse"} <= buffers
        found[name] = (first, seen, cache)
    torch.testing.assert_close(found["joined"][0], found["fused"][0], rtol=1e-4, atol=1e-4)
    assert found["joined"][1].names == found["fused"][1].names
    assert found["joined"][1].kernels.count("tests") == 2
    assert found["joined"][1].kernels.count("triton: fused_attention, not joined") == 2
    caches = [[*found[name][2].keys, *found[name][2].values] for name in plans]
    for ours, theirs in zip(*caches, strict=True):
        torch.testing.assert_close(ours[1:], theirs[1:], rtol=1e-4, atol=1e-4)


# -- code ---------------------------------------------------------------------------------------


def test_the_kernel_gets_what_linear_cu_names_in_its_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the language does not check between Python and CUDA C++."""
    made, launched = [], []

    def function(file: str, name: str, constants: source.Constants, *_: object) -> str:
        made.append((file, name, dict(constants)))
        return "handle"

    def launch(kernel: source.CudaKernel, device: torch.device, *arguments: object) -> None:
        launched.append((kernel, arguments))

    monkeypatch.setattr(cuda_linear, "function", function)
    monkeypatch.setattr(source.CudaKernel, "launch", launch)
    partial, lse = torch.empty(1, 4, 6, 64), torch.empty(1, 4, 6)
    slots, lengths = torch.empty(1, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    weight, bias = torch.empty(37, 256, dtype=torch.float16), torch.empty(37, dtype=torch.float16)
    residual = torch.empty(1, 37, dtype=torch.float16)
    given = (partial, lse, slots, lengths, 320, weight, bias, residual)
    cuda_linear._kernel.cache_clear()
    try:
        cuda_linear.output_residual_joined(*given, tokens=32, tile=CudaJoinRows(5), pdl=False)
    finally:
        cuda_linear._kernel.cache_clear()  # of the handle that is none
    ((file, name, constants),) = made
    assert (file, name) == ("linear.cu", "project")
    expected = {"PARTS": 6, "HEAD": 64, "TOKENS": 32, "SLOT64": 0, "COLUMNS": 256, "OUTPUTS": 37}
    expected |= {"ROWS": 5, "HALF": 1, "BIAS": 1, "RESIDUAL": 1, "PDL": 0}
    expected |= dict.fromkeys(("NORM", "DELTA", "NORMED", "FLOAT_OUT"), 0)
    assert constants == {name: str(value) for name, value in expected.items()}
    ((kernel, arguments),) = launched
    assert (kernel.grid, kernel.threads, kernel.pdl) == (8, 32, False)
    text = (source.HERE / "linear.cu").read_text()
    head = text[text.index("project(") + len("project(") :]
    head = re.sub(r"#else.*?#endif", "", head[: head.index("{")], flags=re.DOTALL).replace(
        "#if PARTS", ""
    )
    names = [word.split()[-1].strip("*)") for word in head.split(",")]
    by_name = dict(zip(names, arguments, strict=True))
    none = {"delta", "norm", "total", "normed"}
    assert {name for name, value in by_name.items() if value is None} == none
    ours = {"parts_in": partial, "lse": lse, "slots": slots, "lengths": lengths, "weight": weight}
    ours |= {"bias": bias, "out": residual}
    assert all(by_name[name] is tensor for name, tensor in ours.items())
    assert by_name["capacity"] == 320
    assert isinstance(by_name["eps"], float)


def test_an_integer_is_passed_as_one() -> None:
    assert source._passed(320) == (320, ctypes.c_int32)
    assert source._passed(1e-6) == (1e-6, ctypes.c_float)


@pytest.mark.parametrize("parts", [2, 5, 6, MOST_PARTS])
def test_it_compiles_without_a_device(parts: int) -> None:
    try:
        source.libraries()
    except BackendError as error:
        pytest.skip(str(error))
    values = {
        "HALF": 0,
        "PDL": 1,
        "COLUMNS": 2048,
        "OUTPUTS": 37,
        "ROWS": 16,
        "BIAS": 1,
        "RESIDUAL": 1,
    }
    values |= {"NORM": 0, "DELTA": 0, "NORMED": 0, "FLOAT_OUT": 0}
    values |= {"PARTS": parts, "HEAD": 128, "TOKENS": 64, "SLOT64": 1}
    assert source.compiled("linear.cu", source.as_constants(values), (9, 0))
