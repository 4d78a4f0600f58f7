"""vLLM 0.6.3's ``fused_experts`` against the pooled one and float64, through vLLM's own MoE method."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from itertools import product
from types import SimpleNamespace
from typing import Any

import torch
from v0 import kernels
from v0.worker import turn_on

from scenarios.common import set_variables

EXPERTS, HIDDEN, INNER = 8, 64, 48
MOST = 24
SHAPES = tuple(product((1, 2, 7, 16, 17, 24), (1, 2, 4)))
"""Tokens and experts of each token."""

Call = dict[str, Any]


def draw(tokens: int, top_k: int, dtype: torch.dtype, seed: int) -> Call:
    """Arguments of ``fused_experts``, routing apart: x, w1, w2, and router logits in the same dtype."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) * scale).to(dtype)

    return {
        "x": normal(tokens, HIDDEN),
        "w1": normal(EXPERTS, 2 * INNER, HIDDEN, scale=HIDDEN**-0.5),
        "w2": normal(EXPERTS, HIDDEN, INNER, scale=INNER**-0.5),
        "logits": normal(tokens, EXPERTS, scale=2.0),
        "top_k": top_k,
    }


def in_float64(call: Call, renormalize: bool) -> torch.Tensor:
    x, w1, w2 = (call[name].double() for name in ("x", "w1", "w2"))
    # Of equal logits the lower expert comes first.
    ordered = call["logits"].double().softmax(-1).sort(stable=True, dim=-1, descending=True)
    weights, ids = (each[:, : call["top_k"]] for each in ordered)
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    out = torch.zeros_like(x)
    for row, k in product(range(x.shape[0]), range(call["top_k"])):
        gate, up = (w1[ids[row, k]] @ x[row]).chunk(2)
        out[row] += weights[row, k] * (w2[ids[row, k]] @ (torch.nn.functional.silu(gate) * up))
    return out


def through_vllm(call: Call, renormalize: bool) -> torch.Tensor:
    """The layer's method, which routes and calls ``fused_experts`` in place."""
    from vllm.model_executor.layers.fused_moe.layer import UnquantizedFusedMoEMethod

    layer = SimpleNamespace(w13_weight=call["w1"], w2_weight=call["w2"])
    x = call["x"].clone()
    out = UnquantizedFusedMoEMethod().forward_cuda(
        layer, x, False, call["top_k"], call["logits"], renormalize
    )
    assert out is x  # in place
    return out


def difference(one: torch.Tensor, other: torch.Tensor) -> float:
    """The largest, relative to the largest value."""
    return float((one.double() - other.double()).abs().max() / other.double().abs().max())


def pooled(most: int = MOST, kernels_: str = "reference", **variables: str) -> Any:
    """The plugin on, with experts that serve this process as an engine's do."""
    turn_on(kernels=kernels_, **variables)
    from graphcap.hosts.vllm.v0.experts import FusedExperts, serve
    from graphcap.pool import BufferPool
    from graphcap.settings import Settings

    device = torch.device("cpu")
    experts = FusedExperts(BufferPool(device), Settings.from_env(), device, most)
    serve(experts)
    return experts


def compared(dtype: torch.dtype, renormalize: bool) -> dict[str, Any]:
    """vLLM's own result, the pooled one outside of a step and in one, by shape."""
    calls = [draw(m, k, dtype, seed) for seed, (m, k) in enumerate(SHAPES)]
    wanted = [in_float64(call, renormalize) for call in calls]
    kernels.calls.clear()
    originals = [through_vllm(call, renormalize) for call in calls]
    of_vllm = dict(kernels.calls)

    experts = pooled()
    kernels.calls.clear()
    outside = [through_vllm(call, renormalize) for call in calls]
    of_outside = dict(kernels.calls)
    slots = [torch.arange(call["x"].shape[0]) for call in calls]

    def in_steps() -> list[torch.Tensor]:
        found = []
        for call, rows in zip(calls, slots, strict=True):
            with experts.pool.step(), experts.in_step(rows):
                found.append(through_vllm(call, renormalize))
        return found

    in_steps()  # plans the pool
    experts.pool.freeze()
    allocated = experts.pool.allocations
    experts.pool.poison()
    kernels.calls.clear()
    inside = in_steps()
    found = {}
    for number, (m, k) in enumerate(SHAPES):
        results = {"vllm": originals, "outside": outside, "inside": inside}
        found[f"{m} {k}"] = {
            **{name: difference(each[number], wanted[number]) for name, each in results.items()},
            "to vllm": difference(inside[number], originals[number]),
            "to outside": difference(inside[number], outside[number]),
        }
    return {
        "shapes": found,
        "kernels of vLLM": [of_vllm, of_outside, dict(kernels.calls)],
        "allocations inside": experts.pool.allocations - allocated,
        "calls": dict(experts.calls),
        "layers": dict(experts.layers),
    }


def padding() -> dict[str, Any]:
    """Rows without a cache slot hold large values; routed by vLLM's own routing, or otherwise."""
    experts = pooled()
    fused = import_module("vllm.model_executor.layers.fused_moe.fused_moe")
    call = draw(9, 2, torch.bfloat16, 99)
    call["x"][6:] = 1e30
    call["logits"][6:] = 1e30
    wanted = in_float64({**call, "x": call["x"][:6], "logits": call["logits"][:6]}, True)
    slots = torch.tensor([3, 4, 5, 6, 7, 8, -1, -1, -1])
    weights, ids = fused.grouped_topk(call["x"], call["logits"], 2, True, 4, 4)
    found = {}
    for name in ("vLLM's top-k", "grouped"):
        with experts.pool.step(), experts.in_step(slots):
            if name == "grouped":
                arguments = (call["x"].clone(), call["w1"], call["w2"], weights, ids)
                out = fused.fused_experts(*arguments)
            else:
                out = through_vllm(call, True)
        found[name] = {
            "real rows": difference(out[:6], wanted),
            "padding": float(out[6:].abs().max()),
        }
    return {**found, "calls": dict(experts.calls)}


def above_the_largest_bucket(tokens: int = 2 * MOST + 3) -> dict[str, Any]:
    """vLLM's own function with its chunk loop; eight tokens a chunk."""
    experts = pooled()
    set_variables({"VLLM_FUSED_MOE_CHUNK_SIZE": "8"})
    found: dict[str, Any] = {"chunks": -(-tokens // 8)}
    for name, rows in (("above", tokens), ("at", MOST)):
        call = draw(rows, 2, torch.bfloat16, rows)
        kernels.calls.clear()
        out = through_vllm(call, False)
        found[name] = {
            "error": difference(out, in_float64(call, False)),
            "kernels": dict(kernels.calls),
        }
    return {**found, "calls": dict(experts.calls)}


def quantised() -> dict[str, Any]:
    """Experts of eight bits with a scale for each output."""
    experts = pooled()
    fused = import_module("vllm.model_executor.layers.fused_moe.fused_moe")
    call = draw(5, 2, torch.bfloat16, 5)
    scales = {name: call[name].float().abs().amax(-1) / 127 for name in ("w1", "w2")}
    eight = {
        name: (call[name].float() / s[..., None]).round().to(torch.int8)
        for name, s in scales.items()
    }
    wide = {name: eight[name].double() * s[..., None].double() for name, s in scales.items()}
    weights, ids = fused.fused_topk(call["x"], call["logits"], 2, True)
    kernels.calls.clear()
    out = fused.fused_experts(
        hidden_states=call["x"],
        w1=eight["w1"],
        w2=eight["w2"],
        topk_weights=weights,
        topk_ids=ids,
        inplace=False,
        use_int8_w8a16=True,
        w1_scale=scales["w1"],
        w2_scale=scales["w2"],
    )
    return {
        "error": difference(out, in_float64({**call, **wide}, True)),
        "kernels": dict(kernels.calls),
        "calls": dict(experts.calls),
    }


def others() -> dict[str, Any]:
    """Calls that go to vLLM's own function, by what is special about them."""
    experts = pooled()
    fused = import_module("vllm.model_executor.layers.fused_moe.fused_moe")
    found = {}
    for name in OTHERS:
        dtype = torch.float32 if name == "float32" else torch.bfloat16
        call = draw(5, 2, dtype, 6)
        weights, ids = fused.fused_topk(call["x"], call["logits"], 2, True)
        given: dict[str, Any] = {}
        if name == "configuration":
            given["override_config"] = {"BLOCK_SIZE_M": 16}
        if name == "routing":
            weights = weights.to(dtype)
        experts.calls.clear()
        out = fused.fused_experts(call["x"], call["w1"], call["w2"], weights, ids, **given)
        (reason,) = experts.calls
        found[name] = {"reason": reason, "error": difference(out, in_float64(call, True))}
    return found


OTHERS = ("configuration", "float32", "routing")


def without_kernels() -> dict[str, Any]:
    """GRAPHCAP_KERNELS=vllm: layers stay on vLLM's kernels."""
    experts = pooled(kernels_="vllm")
    call = draw(3, 2, torch.bfloat16, 7)
    with experts.pool.step(), experts.in_step(torch.arange(3)):
        out = through_vllm(call, True)
    return {
        "error": difference(out, in_float64(call, True)),
        "calls": dict(experts.calls),
        "layers": dict(experts.layers),
    }


def prefill() -> dict[str, Any]:
    """A prompt of as many tokens as a decode step may have, then a decode step."""
    from vllm.forward_context import set_forward_context

    experts = pooled()
    call = draw(5, 2, torch.bfloat16, 8)
    kernels.calls.clear()
    with set_forward_context(SimpleNamespace(num_prefills=1, num_decode_tokens=0)):
        out = through_vllm(call, True)
    found = {"kernels": dict(kernels.calls), "error": difference(out, in_float64(call, True))}
    with set_forward_context(SimpleNamespace(num_prefills=0, num_decode_tokens=5)):
        through_vllm(call, True)
    return {**found, "calls": dict(experts.calls)}


def ranges() -> dict[str, Any]:
    """GRAPHCAP_NVTX=1, with something in the place of torch's NVTX, which a CPU build lacks."""
    names: list[str] = []
    torch.cuda.nvtx.range_push = names.append
    torch.cuda.nvtx.range_pop = lambda: names.append("end")
    experts = pooled(nvtx="1")
    call = draw(3, 2, torch.bfloat16, 9)
    found = {}
    names.clear()
    with experts.pool.step(), experts.in_step(torch.arange(3)):
        through_vllm(call, True)
    found["in a step"] = names.copy()
    names.clear()
    through_vllm(call, True)
    return {**found, "outside": names}


def no_engine() -> dict[str, Any]:
    """The plugin is on and no engine has been taken: nothing of graphcap's serves."""
    turn_on(kernels="reference")
    call = draw(3, 2, torch.bfloat16, 8)
    kernels.calls.clear()
    out = through_vllm(call, True)
    return {"error": difference(out, in_float64(call, True)), "kernels": dict(kernels.calls)}


SCENARIOS: dict[str, Callable[[], Any]] = {
    f"{dtype} {'renormalized' if renormalize else 'plain'}": partial(
        compared, getattr(torch, dtype), renormalize
    )
    for dtype, renormalize in product(("bfloat16", "float16"), (True, False))
} | {
    "padding": padding,
    "above": above_the_largest_bucket,
    "quantised": quantised,
    "others": others,
    "prefill": prefill,
    "ranges": ranges,
    "without kernels": without_kernels,
    "no engine": no_engine,
}
