"""Compile every Triton kernel for an H200 (sm_90) at real sizes, without a GPU: a program, not a test.

The operations are called on tensors without storage; each launch they would make is compiled with
the specialisation that the launch would choose. Prints one JSON object a line.
"""

from __future__ import annotations

import json
import time
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from graphcap.decode.delta_shape import DeltaShape
from graphcap.decode.kernels import triton as decode
from graphcap.decode.kernels import triton_hybrid as hybrid
from graphcap.decode.kernels.triton_fused_linear import DotTile
from graphcap.moe.kernels import triton as moe
from graphcap.moe.kernels import triton_pdl
from graphcap.operations import Operation

TARGET = GPUTarget("cuda", 90, 32)

POINTERS = {
    torch.float32: "*fp32",
    torch.bfloat16: "*bf16",
    torch.float16: "*fp16",
    torch.int32: "*i32",
    torch.int64: "*i64",
}

OPTIONS = ("num_warps", "num_stages", "maxnreg", "launch_pdl")

launches: list[tuple[JITFunction, tuple[Any, ...], dict[str, Any]]] = []


def record(kernel: JITFunction, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
    launches.append((kernel, args, kwargs))


def compile_launch(
    kernel: JITFunction, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, object]:
    signature: dict[str, str] = {}
    constants: dict[tuple[int], object] = {}
    attributes: dict[tuple[int], list[list[object]]] = {}
    values = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
    for parameter in kernel.params:
        value, at = values[parameter.name], (parameter.num,)
        free = not parameter.do_not_specialize
        if (
            parameter.is_constexpr
            or value is None
            or (free and isinstance(value, int) and value == 1)
        ):
            signature[parameter.name] = "constexpr"
            constants[at] = value
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = POINTERS[value.dtype]
            attributes[at] = [["tt.divisibility", 16]]
        elif isinstance(value, float):
            signature[parameter.name] = "fp32"
        else:
            signature[parameter.name] = "i32" if value < 2**31 else "i64"
            if free and value % 16 == 0:
                attributes[at] = [["tt.divisibility", 16]]
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes)
    options = {name: kwargs[name] for name in OPTIONS if name in kwargs}
    began = time.perf_counter()
    compiled = triton.compile(source, target=TARGET, options=options)
    return {
        "kernel": kernel.__name__,
        "shared": compiled.metadata.shared,
        "bytes": len(compiled.asm["cubin"]),
        "constants": {
            kernel.arg_names[at[0]]: value
            for at, value in constants.items()
            if isinstance(value, int)
        },
        "options": options,
        "waits": compiled.asm["ptx"].count("griddepcontrol.wait"),
        "seconds": round(time.perf_counter() - began, 2),
    }


def empty(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.empty(*shape, dtype=dtype, device="meta")


def call(op: Operation, *args: Any) -> None:
    plan = {} if op.scratch is None else op.scratch(*args)
    op(*args, **{name: empty(*shape, dtype=dtype) for name, (shape, dtype) in plan.items()})


def moe_layer(
    m: int, k: int, e: int, h: int, i: int, block: int, renormalize: bool, dtype: torch.dtype
) -> None:
    pairs = m * k
    capacity = min(pairs + e * (block - 1), pairs * block)
    ids, order = empty(m, k), empty(capacity)
    owners, count = empty(-(-capacity // block)), empty(1)
    logits, weights = empty(m, e, dtype=torch.float32), empty(m, k, dtype=torch.float32)
    hidden = empty(m, h, dtype=dtype)
    gate_up, act = empty(pairs, 2 * i, dtype=dtype), empty(pairs, i, dtype=dtype)
    down = empty(pairs, h, dtype=dtype)
    call(moe.router_gemm, hidden, empty(e, h, dtype=dtype), logits)
    call(moe.topk_softmax, logits, empty(m, dtype=torch.int64), weights, ids, renormalize)
    call(moe.align, ids, order, owners, count, e, block)
    w1, w2 = empty(e, 2 * i, h, dtype=dtype), empty(e, h, i, dtype=dtype)
    routing = (logits, empty(m, dtype=torch.int64))
    call(moe.pair_gate_up, hidden, *routing, w1, act, weights, ids, renormalize)
    call(moe.pair_down, act, *routing, weights, ids, w2, hidden, renormalize)
    call(moe.expert_gemm, hidden, w1, order, owners, count, gate_up, k, block)
    call(moe.silu_and_mul, gate_up, act)
    call(moe.expert_gemm, act, w2, order, owners, count, down, 1, block)
    call(moe.merge, down.view(m, k, h), weights, ids, hidden)


def decode_layer(
    m: int, heads: int, kv_heads: int, d: int, h: int, v: int, table: int, dtype: torch.dtype
) -> None:
    qkv = empty(m, (heads + 2 * kv_heads) * d, dtype=dtype)
    q, k, value = qkv.split([heads * d, kv_heads * d, kv_heads * d], 1)
    q, k, value = q.view(m, heads, d), k.view(m, kv_heads, d), value.view(m, kv_heads, d)
    cache = empty(1000, 16, kv_heads, d, dtype=dtype)
    ids, longs, tables = empty(m), empty(m, dtype=torch.int64), empty(m, table)
    hidden, weight = empty(m, h, dtype=dtype), empty(h, dtype=dtype)
    call(decode.embedding, ids, empty(v, h, dtype=dtype), hidden)
    call(decode.rms_norm, hidden, weight, hidden, 1e-6)
    call(decode.fused_add_rms_norm, hidden, hidden, weight, 1e-6)
    call(decode.rms_norm, q, empty(d, dtype=dtype), q, 1e-6)
    call(decode.rotary_embedding, longs, q, k, empty(4096, d, dtype=torch.float32))
    call(decode.cache_write, k, value, cache, cache, longs)
    out = empty(m, heads, d, dtype=dtype)
    call(decode.attention, q, cache, cache, tables, ids, out, d**-0.5)
    call(decode.argmax, empty(m, v, dtype=dtype), ids)
    call(decode.advance, ids, ids, longs, ids, longs, tables, 16)


def fused_layer(
    m: int, heads: int, kv_heads: int, d: int, h: int, e: int, table: int, dtype: torch.dtype
) -> None:
    width = (heads + 2 * kv_heads) * d
    x, norm = empty(m, h, dtype=dtype), empty(h, dtype=dtype)
    qkv, out = empty(m, width, dtype=dtype), empty(m, heads, d, dtype=dtype)
    w, bias = empty(width, h, dtype=dtype), empty(width, dtype=dtype)
    call(decode.norm_qkv, x, x, norm, 1e-6, w, None, qkv, x)
    call(decode.norm_qkv, x, None, norm, 1e-6, w, bias, qkv, None)
    of_head, ids, longs = empty(d, dtype=dtype), empty(m), empty(m, dtype=torch.int64)
    cache = empty(1000, 16, kv_heads, d, dtype=dtype)
    tables, angles = empty(m, table), empty(4096, d, dtype=dtype)
    slots = (longs, longs, tables, ids)
    call(decode.attend, qkv, of_head, of_head, angles, *slots, cache, cache, out, 1e-6, 0.1)
    call(decode.output_residual, out.view(m, -1), empty(h, heads * d, dtype=dtype), None, x)
    logits = empty(m, e, dtype=torch.float32)
    call(decode.norm_router, x, norm, 1e-6, empty(e, h, dtype=dtype), x, logits)
    call(decode.project, x, w, bias, qkv)
    if h * dtype.itemsize % 128 == 0:
        call(decode.project, x, w, None, qkv, DotTile(16, 128, 4, 4, early=True))
    call(decode.fused_add_rms_norm, x, x, norm, 1e-6, True)
    ids = empty(m, 8)
    lists = (empty(m * 8 * 16), empty(m * 8), empty(1))
    call(moe.topk_softmax, logits, longs, empty(m, 8, dtype=torch.float32), ids, True, True)
    call(moe.align, ids, *lists, e, 16, True)
    gated = empty(m * 8, h // 4, dtype=dtype)
    call(decode.gated_gemm, x, empty(e, h // 2, h, dtype=dtype), *lists, gated, 8, 16)
    pairs = empty(m, 8, h, dtype=dtype)
    down = empty(e, h, h // 4, dtype=dtype)
    call(moe.expert_gemm, gated, down, *lists, pairs.view(m * 8, h), 1, 16, None, True)
    call(moe.merge, pairs, empty(m, 8, dtype=torch.float32), ids, x, True)


def hybrid_layers(
    m: int, delta: DeltaShape, heads: int, d: int, h: int, dtype: torch.dtype
) -> None:
    longs, projected = empty(m, dtype=torch.int64), empty(m, delta.projection_rows, dtype=dtype)
    gates = delta.num_value_heads
    new, z, beta, decay = projected.split((delta.channels, delta.values, gates, gates), 1)
    conv = empty(m + 1, delta.channels, delta.conv_width - 1, dtype=dtype)
    state = (m + 1, gates, delta.key_dim, delta.value_dim)
    small, mixed = empty(gates, dtype=dtype), empty(m, delta.channels, dtype=dtype)
    read = empty(m, gates, delta.value_dim, dtype=dtype)
    taps = empty(delta.channels, delta.conv_width, dtype=dtype)
    call(hybrid.conv_update, new, taps, conv, longs, longs, longs, mixed)
    states = empty(*state, dtype=torch.float32)
    call(hybrid.delta_rule, mixed, beta, decay, small, small, states, longs, longs, longs, read)
    gate = z.unflatten(1, (gates, delta.value_dim))
    call(hybrid.gated_rms_norm, read, gate, empty(delta.value_dim, dtype=dtype), read, 1e-6)
    q, gate = empty(m, heads, 2, d, dtype=dtype).unbind(2)
    hidden, weight = empty(m, h, dtype=dtype), empty(h, dtype=dtype)
    call(hybrid.rms_norm, q, empty(d, dtype=dtype), q, 1e-6)
    cos_sin, k = empty(4096, d // 4, dtype=dtype), empty(m, 1, d, dtype=dtype)
    call(decode.rotary_embedding, longs, q[..., : d // 4], k[..., : d // 4], cos_sin)
    call(hybrid.output_gate, empty(m, heads, d, dtype=dtype), gate)
    call(hybrid.fused_add_rms_norm, hidden, hidden, weight, 1e-6)
    call(hybrid.shared_gate, hidden, weight.view(1, h), hidden)


def main() -> None:
    JITFunction.run = record
    triton_pdl._on_device = lambda device: triton_pdl.IN_TRITON  # as on an H200
    # Batch 1 and a full batch of the models in use, then odd sizes with every tail masked.
    moe_layer(1, 8, 256, 2048, 512, 16, True, torch.bfloat16)
    moe_layer(64, 8, 128, 2048, 768, 64, False, torch.bfloat16)
    moe_layer(33, 5, 100, 72, 40, 32, True, torch.float16)
    moe_layer(3, 1, 7, 200, 24, 16, True, torch.float32)
    moe_layer(33, 16, 512, 2048, 512, 16, True, torch.float32)
    decode_layer(1, 16, 2, 256, 2048, 151936, 256, torch.bfloat16)
    decode_layer(32, 32, 4, 128, 2048, 151936, 8, torch.bfloat16)
    decode_layer(3, 5, 1, 40, 200, 999, 100, torch.float16)
    decode_layer(1, 16, 2, 256, 2048, 151936, 256, torch.float32)
    for m in (1, 8, 32):
        fused_layer(m, 16, 2, 128, 2048, 256, 16, torch.bfloat16)
    fused_layer(1, 16, 2, 128, 2048, 256, 256, torch.bfloat16)
    fused_layer(1, 32, 4, 128, 2048, 128, 16, torch.bfloat16)
    fused_layer(4, 16, 2, 256, 2048, 256, 256, torch.bfloat16)
    fused_layer(3, 5, 1, 40, 200, 7, 100, torch.float16)
    fused_layer(1, 16, 2, 128, 2048, 256, 256, torch.float32)
    qwen36 = DeltaShape(16, 32, 128, 128, 4)
    hybrid_layers(1, qwen36, 16, 256, 2048, torch.bfloat16)
    hybrid_layers(64, qwen36, 16, 256, 2048, torch.bfloat16)
    hybrid_layers(3, DeltaShape(3, 9, 40, 72, 3), 5, 40, 200, torch.float16)
    hybrid_layers(1, qwen36, 16, 256, 2048, torch.float32)
    seen = set()
    for kernel, args, kwargs in launches:
        key = f"{kernel.__name__} {[getattr(a, 'dtype', a) for a in args]} {kwargs}"
        if key not in seen:
            seen.add(key)
            print(json.dumps(compile_launch(kernel, args, kwargs)), flush=True)


if __name__ == "__main__":
    main()
