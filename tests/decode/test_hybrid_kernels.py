"""The kernels of hybrids, in plain torch and in Triton, against float64, with everything unwritten
poisoned: the null state, the state of a sequence that starts, scratch and outputs."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from triton_support import (
    DEVICE,
    DTYPES,
    ON_GPU,
    assert_close,
    normal,
    poisoned,
    run,
    sizes,
)

from graphcap.decode.kernels.hybrid import HybridKernels, hybrid_kernels

NAN = float("nan")
BACKENDS = ["reference", *(["triton"] if find_spec("triton") else [])]


@pytest.fixture(params=BACKENDS)
def kernels(request: pytest.FixtureRequest) -> HybridKernels:
    if request.param == "triton":
        pytest.importorskip("triton", minversion="3.0")
    return hybrid_kernels(request.param)


dtypes = pytest.mark.parametrize("dtype", DTYPES)


def between(x: torch.Tensor, before: int = 3, after: int = 5) -> torch.Tensor:
    """x (M, N) as a view into rows with NaN on both sides."""
    m, n = x.shape
    wide = torch.full((m, before + n + after), NAN, dtype=x.dtype, device=x.device)
    view = wide[:, before : before + n]
    view.copy_(x)
    return view


@dataclass
class Rows:
    """Rows of a batch: two that start, two that go on, one that has outgrown its cache, and padding."""

    slots: torch.Tensor
    row_ids: torch.Tensor
    positions: torch.Tensor
    states: int = 9

    @property
    def pads(self) -> torch.Tensor:
        return self.row_ids < 0

    @property
    def real(self) -> list[tuple[int, int]]:
        """Rows that are not padding, with their slots."""
        slots = self.slots.tolist()
        return [(row, slots[row]) for row, pad in enumerate(self.pads.tolist()) if not pad]

    @property
    def index(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The arguments of an operation."""
        return self.slots, self.row_ids, self.positions

    @property
    def unused(self) -> list[int]:
        return sorted(set(range(1, self.states)) - {slot for _, slot in self.real})

    def poison(self, state: torch.Tensor) -> torch.Tensor:
        """NaN where a step must not look; a copy of the state."""
        state[0] = NAN
        for row, slot in self.real:
            if self.positions[row] == 0:
                state[slot] = NAN
        state[self.unused[0]] = NAN
        return state.clone()

    def old(self, state: torch.Tensor) -> torch.Tensor:
        """What each row starts from, float64."""
        old = state[self.slots].double()
        old[(self.positions == 0) | self.pads] = 0
        return old

    def assert_others_untouched(self, state: torch.Tensor, before: torch.Tensor) -> None:
        others = [0, *self.unused]
        kept, was = state[others], before[others]
        assert torch.equal(kept.isnan(), was.isnan())
        assert torch.equal(kept.nan_to_num(0), was.nan_to_num(0))


def draw_rows(kind: str) -> Rows:
    slots, row_ids, positions = {
        "one": ([4], [0], [7]),
        "first": ([8], [70], [0]),
        "mixed": ([3, 8, 0, 1, 5, 2, 0], [9, 0, -1, 30, 5, -1, -1], [0, 12, 0, 1, 0, 24, 4]),
        "pads": ([0, 0, 0], [-1, -1, -1], [0, 0, 3]),
    }[kind]
    return Rows(*(torch.tensor(x, device=DEVICE) for x in (slots, row_ids, positions)))


rows_of = pytest.mark.parametrize("kind", ["one", "first", "mixed", "pads"])


@rows_of
@dtypes
@pytest.mark.parametrize(("c", "w"), sizes([(5, 2), (300, 4), (16, 3)], [(8192, 4)]))
def test_conv_update(kernels: HybridKernels, kind: str, c: int, w: int, dtype: torch.dtype) -> None:
    rows = draw_rows(kind)
    m = len(rows.slots)
    x = between(normal(1, m, c, dtype=dtype))
    weight = normal(2, c, w, dtype=dtype, scale=0.7)
    state = normal(3, rows.states, c, w - 1, dtype=dtype)
    before = rows.poison(state)
    out = poisoned(m, c, dtype=dtype)
    run(kernels.conv_update, x, weight, state, *rows.index, out)
    window = torch.cat([rows.old(before), x.double()[..., None]], -1)
    total = (window * weight.double()).sum(-1).to(dtype).double()  # rounded as the model does
    expected = total * total.sigmoid()
    expected[rows.pads] = 0
    assert_close(out, expected, dtype)
    for row, slot in rows.real:
        assert torch.equal(state[slot].double(), window[row, :, 1:])
    rows.assert_others_untouched(state, before)


def delta_inputs(
    rows: Rows, gk: int, gv: int, dk: int, dv: int, dtype: torch.dtype, decay: float = 0.0
) -> tuple[Any, ...]:
    m = len(rows.slots)
    mixed = between(normal(1, m, 2 * gk * dk + gv * dv, dtype=dtype))
    gates = between(normal(2, m, 2 * gv, dtype=dtype, scale=2.0))
    beta, rate = gates[:, :gv], gates[:, gv:]
    decay_log = normal(3, gv, dtype=dtype, scale=0.5)
    time_bias = normal(4, gv, dtype=dtype) + decay
    state = normal(5, rows.states, gv, dk, dv)
    return mixed, beta, rate, decay_log, time_bias.to(dtype), state


def exact_delta(
    rows: Rows, before: torch.Tensor, inputs: tuple[Any, ...], dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output and new state of each row in float64."""
    mixed, beta, rate, decay_log, time_bias, _ = (x.double() for x in inputs)
    _, gv, dk, dv = before.shape
    keys = (mixed.shape[1] - gv * dv) // 2
    group = gv * dk // keys
    q, k, v = mixed.split((keys, keys, gv * dv), 1)
    q, k = (x.unflatten(1, (-1, dk)).repeat_interleave(group, 1) for x in (q, k))
    q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
    v = v.unflatten(1, (gv, dv))
    share = beta.sigmoid().to(dtype).double()
    alpha = (-decay_log.exp() * torch.nn.functional.softplus(rate + time_bias)).exp()
    state = rows.old(before) * alpha[..., None, None]
    delta = (v - torch.einsum("mhkv,mhk->mhv", state, k)) * share[..., None]
    state = state + torch.einsum("mhk,mhv->mhkv", k, delta)
    out = torch.einsum("mhkv,mhk->mhv", state, q / dk**0.5)
    out[rows.pads] = 0
    return out, state


@rows_of
@dtypes
@pytest.mark.parametrize(
    ("gk", "gv", "dk", "dv"),
    sizes([(1, 1, 4, 3), (2, 6, 12, 10), (3, 3, 16, 40)], [(16, 32, 128, 128)]),
)
def test_delta_rule(
    kernels: HybridKernels, kind: str, gk: int, gv: int, dk: int, dv: int, dtype: torch.dtype
) -> None:
    rows = draw_rows(kind)
    inputs = delta_inputs(rows, gk, gv, dk, dv, dtype)
    state = inputs[-1]
    before = rows.poison(state)
    out = poisoned(len(rows.slots), gv, dv, dtype=dtype)
    run(kernels.delta_rule, *inputs, *rows.index, out)
    expected, new = exact_delta(rows, before, inputs, dtype)
    assert_close(out, expected, dtype)
    for row, slot in rows.real:
        # β is rounded to the model's dtype: a logit between two roundings may go either way.
        assert_close(state[slot], new[row], dtype)
    rows.assert_others_untouched(state, before)


@pytest.mark.parametrize("decay", [-60.0, -12.0, 19.0, 40.0])
def test_decay_at_its_ends(kernels: HybridKernels, decay: float) -> None:
    """All is kept, nearly all, none, and none beyond where exp() would overflow."""
    rows = draw_rows("one")
    inputs = delta_inputs(rows, 1, 2, 4, 3, torch.float32, decay)
    before = rows.poison(inputs[-1])
    out = poisoned(1, 2, 3, dtype=torch.float32)
    run(kernels.delta_rule, *inputs, *rows.index, out)
    expected, new = exact_delta(rows, before, inputs, torch.float32)
    assert_close(out, expected, torch.float32)
    assert_close(inputs[-1][4], new[0], torch.float32)


@dtypes
def test_gates_of_a_key_of_zeros(kernels: HybridKernels, dtype: torch.dtype) -> None:
    rows = draw_rows("one")
    inputs = delta_inputs(rows, 1, 2, 4, 3, dtype)
    inputs[0].zero_()
    before = rows.poison(inputs[-1])
    out = poisoned(1, 2, 3, dtype=dtype)
    run(kernels.delta_rule, *inputs, *rows.index, out)
    assert (out == 0).all()
    assert_close(inputs[-1][4], exact_delta(rows, before, inputs, dtype)[1][0], torch.float32)


def exact_norm(x: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.double()
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps)


@dtypes
@pytest.mark.parametrize(
    ("m", "heads", "d"), sizes([(1, 1, 6), (3, 6, 10), (2, 9, 128)], [(1, 32, 128), (64, 32, 128)])
)
@pytest.mark.parametrize("in_place", [False, True])
def test_gated_rms_norm(
    kernels: HybridKernels, m: int, heads: int, d: int, in_place: bool, dtype: torch.dtype
) -> None:
    x = normal(1, m, heads, d, dtype=dtype, scale=3.0)
    gate = between(normal(2, m, heads * d, dtype=dtype, scale=2.0)).unflatten(1, (heads, d))
    weight = normal(3, d, dtype=dtype)
    wide = gate.double()
    expected = exact_norm(x, 1e-5) * weight.double() * wide * wide.sigmoid()
    out = x if in_place else poisoned(m, heads, d, dtype=dtype)
    run(kernels.gated_rms_norm, x, gate, weight, out, 1e-5)
    assert_close(out, expected, dtype)


@dtypes
@pytest.mark.parametrize(
    ("m", "heads", "d"), sizes([(1, 1, 6), (3, 5, 12), (2, 4, 256)], [(1, 16, 256), (64, 16, 256)])
)
def test_output_gate(
    kernels: HybridKernels, m: int, heads: int, d: int, dtype: torch.dtype
) -> None:
    x = normal(1, m, heads, d, dtype=dtype)
    # Of each head its query, then its gate, as the projection gives them.
    both = normal(2, m, heads, 2, d, dtype=dtype, scale=3.0)
    both[:, :, 0] = NAN
    gate = both[:, :, 1]
    expected = x.double() * gate.double().sigmoid()
    run(kernels.output_gate, x, gate)
    assert_close(x, expected, dtype)


@dtypes
@pytest.mark.parametrize(("m", "h"), sizes([(1, 8), (3, 72), (2, 1000)], [(1, 2048), (64, 2048)]))
def test_shared_gate(kernels: HybridKernels, m: int, h: int, dtype: torch.dtype) -> None:
    if dtype == torch.float16 and kernels.shared_gate.implementation == "torch":
        try:
            torch.mm(
                torch.ones(1, 1, dtype=dtype, device=DEVICE), torch.ones(1, 1).to(DEVICE, dtype)
            )
        except RuntimeError:
            pytest.skip("this torch multiplies no float16 matrices on a CPU")
    hidden, x = normal(1, m, h, dtype=dtype), normal(2, m, h, dtype=dtype)
    weight = normal(3, 1, h, dtype=dtype, scale=h**-0.5)
    expected = x.double() * (hidden.double() @ weight.double().T).sigmoid()
    run(kernels.shared_gate, hidden, weight, x)
    assert_close(x, expected, dtype)


@dtypes
@pytest.mark.parametrize("shape", sizes([(1, 8), (3, 1000), (3, 5, 10)], [(1, 2048), (4, 16, 256)]))
def test_rms_norm(kernels: HybridKernels, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight = normal(1, *shape, dtype=dtype, scale=3.0), normal(2, shape[-1], dtype=dtype)
    out = poisoned(*shape, dtype=dtype)
    run(kernels.rms_norm, x, weight, out, 1e-6)
    assert_close(out, exact_norm(x, 1e-6) * (1 + weight.double()), dtype)
    expected = out.clone()
    run(kernels.rms_norm, x, weight, x, 1e-6)
    assert torch.equal(x, expected)


@dtypes
@pytest.mark.parametrize(("m", "h"), sizes([(1, 8), (3, 200)], [(1, 2048), (64, 2048)]))
def test_fused_add_rms_norm(kernels: HybridKernels, m: int, h: int, dtype: torch.dtype) -> None:
    x, residual = normal(1, m, h, dtype=dtype), normal(2, m, h, dtype=dtype, scale=4.0)
    weight = normal(3, h, dtype=dtype)
    total = x.double() + residual.double()
    run(kernels.fused_add_rms_norm, x, residual, weight, 1e-6)
    assert_close(residual, total, dtype)
    assert_close(x, exact_norm(residual, 1e-6) * (1 + weight.double()), dtype)


def test_roundings_are_those_of_transformers() -> None:
    """bfloat16, bit by bit, in plain torch: norms and gates of Qwen3-Next."""
    modeling = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    if ON_GPU:
        pytest.skip("compares results of one device")
    kernels = hybrid_kernels("reference")
    x, weight = normal(1, 50, 4, 64, dtype=torch.bfloat16), normal(2, 64, dtype=torch.bfloat16)
    gate = normal(3, 50, 4, 64, dtype=torch.bfloat16, scale=2.0)
    out = poisoned(50, 4, 64, dtype=torch.bfloat16)
    with torch.no_grad():
        norm = modeling.Qwen3NextRMSNorm(64).bfloat16()
        norm.weight.copy_(weight)
        run(kernels.rms_norm, x, weight, out, 1e-6)
        assert torch.equal(out, norm(x))
        gated = modeling.Qwen3NextRMSNormGated(64).bfloat16()
        gated.weight.copy_(weight)
        run(kernels.gated_rms_norm, x, gate, weight, out, 1e-6)
        assert torch.equal(out, gated(x, gate))
        run(kernels.output_gate, out.copy_(x), gate)
        assert torch.equal(out, x * gate.sigmoid())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_one_by_one_are_those_of_transformers(
    kernels: HybridKernels, dtype: torch.dtype
) -> None:
    """Convolution and delta rule over a sequence: transformers' over the whole of it."""
    modeling = pytest.importorskip("transformers.models.qwen3_next.modeling_qwen3_next")
    tokens, gk, gv, dk, dv, w = 11, 2, 4, 8, 6, 4
    c = 2 * gk * dk + gv * dv
    x, weight = normal(1, tokens, c, dtype=dtype), normal(2, c, w, dtype=dtype, scale=0.7)
    beta, rate = normal(3, tokens, gv, dtype=dtype), normal(4, tokens, gv, dtype=dtype)
    decay_log, time_bias = normal(5, gv, dtype=dtype, scale=0.5), normal(6, gv, dtype=dtype)
    conv, state = poisoned(3, c, w - 1, dtype=dtype), poisoned(3, gv, dk, dv, dtype=torch.float32)
    slots = torch.tensor([2], device=DEVICE)
    found = []
    for token in range(tokens):
        at = torch.tensor([token], device=DEVICE)
        mixed, out = poisoned(1, c, dtype=dtype), poisoned(1, gv, dv, dtype=dtype)
        one = slice(token, token + 1)
        run(kernels.conv_update, x[one], weight, conv, slots, at, at, mixed)
        gates = (beta[one], rate[one], decay_log, time_bias)
        run(kernels.delta_rule, mixed, *gates, state, slots, at, at, out)
        found.append(out)
    whole = modeling.causal_conv1d_fn(x.T[None], weight, activation="silu")[0].T
    q, k, v = whole.split((gk * dk, gk * dk, gv * dv), 1)
    # Newer versions repeat heads inside the function, older ones before they call it.
    q, k = (part.reshape(1, tokens, gk, dk).repeat_interleave(gv // gk, 2) for part in (q, k))
    g = -decay_log.float().exp() * torch.nn.functional.softplus(rate.float() + time_bias)
    expected, last = modeling.torch_chunk_gated_delta_rule(
        q,
        k,
        v.reshape(1, tokens, gv, dv),
        g=g[None],
        beta=beta.sigmoid()[None],
        output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )
    assert_close(torch.cat(found), expected[0], dtype)
    assert_close(state[2], last[0], dtype)
