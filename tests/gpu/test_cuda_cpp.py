"""The kernels in CUDA C++ against float64 and Triton's, with everything unwritten poisoned."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch
from cpp_checks import BF16, HALF, NAN, STEP, compiles, error  # noqa: F401 - compiles is a fixture

pytest.importorskip("triton", minversion="3.2")

from graphcap.cuda import source
from graphcap.decode.kernels import cuda_linear, decode_kernels, triton_fused_linear
from graphcap.decode.kernels.cuda_linear import CudaRows
from graphcap.decode.random_weights import random_weights
from graphcap.decode.shapes import preset
from graphcap.moe.kernels import choose_backend, cuda_down, triton_pairs
from graphcap.moe.kernels.cuda_down import CudaDown


def poisoned(device: torch.device, *shape: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.full(shape, NAN, device=device, dtype=dtype)


@pytest.mark.parametrize(
    ("columns", "outputs", "dtype", "delta", "bias", "tile"),
    [
        (2048, 2560, BF16, True, False, None),
        (2048, 256, BF16, False, False, CudaRows(2)),
        (2048, 2567, HALF, True, True, CudaRows(7)),
        (1024, 5120, BF16, True, True, CudaRows(20)),
        (4096, 131, HALF, False, False, CudaRows(3)),
        (256, 9, BF16, True, True, CudaRows(1)),
    ],
)
def test_norm_and_projection(device, columns, outputs, dtype, delta, bias, tile) -> None:
    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device).to(dtype)

    x, norm, eps = draw(1, columns), draw(columns), 1e-6
    weight = (torch.randn(outputs, columns, device=device) * columns**-0.5).to(dtype)
    d, b = draw(1, columns) if delta else None, draw(outputs) if bias else None
    out, total, logits, normed = (
        poisoned(device, 2, n, dtype=t)
        for n, t in ((outputs, dtype), (columns, dtype), (outputs, torch.float32), (columns, dtype))
    )
    given = (x, d, norm, eps, weight, b)
    cuda_linear.norm_qkv(*given, out[:1], total[:1] if delta else None, tile=tile)
    cuda_linear.norm_router(x, norm, eps, weight, normed[:1], logits[:1], tile=tile)
    again = poisoned(device, 1, outputs, dtype=dtype)
    cuda_linear.norm_qkv(*given, again, total[1:] if delta else None, tile=tile)
    assert torch.equal(out[:1], again)  # the same bits at every run

    stream = x if d is None else x + d
    if delta:
        assert torch.equal(total[:1], stream)

    def normal(value: torch.Tensor) -> torch.Tensor:
        value = value.double()
        return value * torch.rsqrt(value.square().mean() + eps) * norm.double()

    expected = normal(stream) @ weight.double().T
    if b is not None:
        expected = expected + b.double()
    assert error(out[:1], expected) < 2 * STEP[dtype]
    assert out[1:].isnan().all()
    assert error(normed[:1], normal(x)) < 2 * STEP[dtype]
    assert error(logits[:1], normed[:1].double() @ weight.double().T) < STEP[dtype]
    assert torch.equal(logits[:1], logits[:1].to(dtype).float())
    assert logits[1:].isnan().all()
    assert normed[1:].isnan().all()


@pytest.mark.parametrize(
    ("columns", "outputs", "dtype", "bias"),
    [(2048, 2048, BF16, False), (4096, 2048, HALF, True), (512, 77, BF16, True)],
)
def test_output_projection_adds_to_the_residual(device, columns, outputs, dtype, bias) -> None:
    x = torch.randn(1, columns, device=device).to(dtype)
    weight = (torch.randn(outputs, columns, device=device) * columns**-0.5).to(dtype)
    b = torch.randn(outputs, device=device).to(dtype) if bias else None
    residual = torch.randn(2, outputs, device=device).to(dtype)
    before, theirs = residual.clone(), residual[:1].clone()
    cuda_linear.output_residual(x, weight, b, residual[:1])
    triton_fused_linear.output_residual(x, weight, b, theirs)
    product = x.double() @ weight.double().T + (0 if b is None else b.double())
    expected = product.to(dtype).double() + before[:1].double()
    assert error(residual[:1], expected) < 2 * STEP[dtype]
    assert error(residual[:1], theirs) < 2 * STEP[dtype]
    assert torch.equal(residual[1:], before[1:])


@pytest.mark.parametrize("pdl", [True, False])
@pytest.mark.parametrize(
    ("hidden", "inner", "experts", "top_k", "dtype", "renormalize", "row_id", "tile"),
    [
        (2048, 512, 256, 8, BF16, True, torch.int64, None),
        (2048, 512, 256, 8, HALF, False, torch.int64, CudaDown(8)),
        (2048, 768, 128, 8, BF16, True, torch.int32, None),
        (512, 256, 128, 4, BF16, False, torch.int64, CudaDown(4)),
        (2560, 1024, 128, 8, HALF, True, torch.int64, None),
        (1024, 256, 512, 10, BF16, True, torch.int32, None),
        (256, 256, 384, 1, BF16, True, torch.int64, None),
    ],
)
def test_down_projection_and_merge(
    device, hidden, inner, experts, top_k, dtype, renormalize, row_id, tile, pdl
) -> None:
    x = torch.randn(1, hidden, device=device).to(dtype)
    logits = torch.randn(1, experts, device=device).to(dtype).float()
    top = logits[0].topk(2).indices
    logits[0, top[1]] = logits[0, top[0]]  # a tie, which goes to the lower expert
    gate_up = (torch.randn(experts, 2 * inner, hidden, device=device) * hidden**-0.5).to(dtype)
    down = (torch.randn(experts, hidden, inner, device=device) * inner**-0.5).to(dtype)
    weights = poisoned(device, 1, top_k, dtype=torch.float32)
    ids = torch.full((1, top_k), -7, device=device, dtype=torch.int32)
    act = poisoned(device, top_k, inner, dtype=dtype)
    out = poisoned(device, 2, hidden, dtype=dtype)

    def run(row: int) -> None:
        rows = torch.tensor([row], device=device, dtype=row_id)
        routing = (weights, ids)
        triton_pairs.pair_gate_up(x, logits, rows, gate_up, act, *routing, renormalize, pdl=pdl)
        cuda_down.pair_down(
            act, logits, rows, *routing, down, out[:1], renormalize, pdl=pdl, tile=tile
        )

    run(3)
    chosen = ids[0].long()
    each = torch.einsum("khi,ki->kh", down[chosen].double(), act.double())
    expected = (weights[0].double()[:, None] * each).sum(0)
    assert error(out[0], expected) < 2 * STEP[dtype]
    assert out[1:].isnan().all()
    first = out[:1].clone()
    run(3)
    assert torch.equal(out[:1], first)
    for tensor in (x, logits, act, out):  # what padding has may be anything
        tensor.fill_(NAN)
    run(-1)
    assert (out[:1] == 0).all()
    assert out[1:].isnan().all()
    assert act.isnan().all()


def test_a_step_in_cuda_cpp_gives_the_logits_of_the_plain_schedule(device) -> None:
    from graphcap.decode.cuda_kernels import cuda_plan
    from graphcap.decode.layer_plan import CUDA_TILES
    from graphcap.tuning.trials import Trials

    shape = replace(preset("seed-64").with_layers(2), vocab_size=1024)
    weights = random_weights(shape, device=device, dtype=BF16, seed=7)
    plan = cuda_plan(shape, BF16, device)
    assert plan is not None
    assert set(plan.in_cuda) == set(CUDA_TILES)
    trials = Trials(weights, decode_kernels(choose_backend("triton", device)), 1, 100)
    trial = trials.run(plan, turns=1, calls=4)
    assert trial.difference < 0.05
    with torch.no_grad():
        trials.reset()
        first = trials.first_logits(plan).clone()
        assert torch.equal(first, trials.first_logits(plan))


def test_the_first_launch_of_a_thread_and_the_first_of_the_process_may_be_one(device) -> None:
    """A new thread has no context before its first call of the runtime; loading and launching need one."""
    x, norm = torch.randn(1, 512, device=device).to(BF16), torch.ones(512, device=device).to(BF16)
    weight = torch.randn(24, 512, device=device).to(BF16)
    outs = [poisoned(device, 1, 24, dtype=BF16) for _ in range(3)]
    cuda_linear._kernel.cache_clear()
    source.function.cache_clear()
    torch.cuda.synchronize()
    failed: list[BaseException] = []

    def run(out: torch.Tensor) -> None:
        try:
            cuda_linear.norm_qkv(x, None, norm, 1e-6, weight, None, out, None)
        except BaseException as error:
            failed.append(error)

    for out in outs[:2]:  # loaded and launched; launched alone
        thread = threading.Thread(target=run, args=(out,))
        thread.start()
        thread.join()
    run(outs[2])
    torch.cuda.synchronize()
    assert not failed
    assert outs[2].isfinite().all()
    assert torch.equal(outs[0], outs[2])
    assert torch.equal(outs[1], outs[2])
