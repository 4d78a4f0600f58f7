"""The decode step on ixformer's operations, each bound to what the imported library has.

Nothing of this was run on a CoreX card: orders of arguments and shapes are those of public code that
calls or copies the library. Where that code leaves something open, the step does what is safe both ways:

- Cache. Generation 0.4 is given the shapes that vLLM 0.6.3 gives it, ``packed``; the newer one ``heads``,
  which its own documentation states for ``vllm_paged_attention`` and ``reshape_and_cache_flash`` alike.
  How the bytes of a block are ordered stays between the operation that writes and the one that reads,
  so the two are bound together or not at all.
- Strides. ``rms_norm`` and attention are not known to take views with gaps between rows, so queries and
  keys are copied out of the fused projection (`DecodeKernels.takes_views`). The write is given the strides
  of its rows by ixformer's own wrappers, so values stay where they are.
- Bounds. The write is not known to leave out negative slots, nor attention to stop at the end of a row of
  the block table: `bound` gives padding rows slot 0 of the null block, which no sequence reads, and cuts
  lengths at the capacity, once a step.

Slots are int32 where 0.4's write wants them (its vLLM wrapper casts at every layer) and int64 for the
newer. Block tables and lengths are int32. Embedding, projections, sampling and the advance to the next
token are no operations of ixformer and stay with the stand-in.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from graphcap.decode.cache_format import CacheFormat
from graphcap.decode.kernels import DecodeKernels
from graphcap.moe.kernels import ixformer as expert_binding
from graphcap.moe.kernels.constants import constant
from graphcap.moe.kernels.ixformer_library import FIRST, NEWER, Form, Found, Library
from graphcap.operations import Operation

_NORM_FIRST = Form("rms_norm", 4, {"input": 0, "weight": 1, "output": 2, "eps": 3}, FIRST)
_NORM_NEWER = Form("rms_norm", 4, {"input": 0, "weight": 1, "eps": 2, "output": 3}, NEWER)
_ADD_FIRST = Form(
    "fused_add_rms_norm", 4, {"input": 0, "residual": 1, "weight": 2, "eps": 3}, FIRST
)
_ADD_NEWER = Form(
    "residual_rms_norm",
    8,
    {
        "input": 0,
        "weight": 1,
        "eps": 2,
        "residual_alpha": 3,
        "residual": 4,
        "residual_bias": 5,
        "output": 6,
        "residual_output": 7,
    },
    NEWER,
)
_ROTARY_PLACES = {"positions": 0, "query": 1, "key": 2, "head_size": 3, "cos_sin_cache": 4}
_ROTARY_FIRST = Form("vllm_rotary_embedding_neox", 6, _ROTARY_PLACES, FIRST)
_ROTARY_NEWER = Form("vllm_rotary_embedding", 6, _ROTARY_PLACES, NEWER)
_WRITE_PLACES = {"key": 0, "value": 1, "key_cache": 2, "value_cache": 3, "slot_mapping": 4}
_WRITE_FIRST = Form("vllm_cache_ops_reshape_and_cache", 5, _WRITE_PLACES, FIRST)
_WRITE_NEWER = Form("reshape_and_cache_flash", 8, {**_WRITE_PLACES, "kv_cache_dtype": 5}, NEWER)
_ATTENTION_PLACES = {
    "output": 0,
    "query": 1,
    "key_cache": 2,
    "value_cache": 3,
    "scale": 5,
    "block_tables": 6,
    "context_lens": 7,
    "block_size": 8,
    "max_context_len": 9,
}
_ATTENTION_FIRST = Form(
    "vllm_single_query_cached_kv_attention", 11, {**_ATTENTION_PLACES, "head_mapping": 4}, FIRST
)
_ATTENTION_NEWER = Form(
    "vllm_paged_attention",
    16,
    {**_ATTENTION_PLACES, "num_kv_heads": 4, "softcap": 11, "causal": 12, "use_cuda_graph": 15},
    NEWER,
)
_ATTENTION_PLAIN = Form(
    "vllm_paged_attention", 10, {**_ATTENTION_PLACES, "num_kv_heads": 4, "alibi_slopes": 10}, NEWER
)
"""The one of ``IXFORMER_PAGED_ATTENTION_ALGO=ixformer``, which is not told of a graph."""

_FORMATS = {
    FIRST: CacheFormat("packed", torch.int32),
    NEWER: CacheFormat("heads", torch.int64),
}


def bind(library: Library, stand_in: DecodeKernels) -> DecodeKernels:
    """ixformer's kernels of a decode step, with those of `stand_in` for what the library lacks."""
    notes = dict.fromkeys(
        ("embedding", "linear", "argmax", "advance"), "ixformer has no such operation"
    )
    norm = library.find(_NORM_FIRST, _NORM_NEWER)
    add = library.find(_ADD_FIRST, _ADD_NEWER)
    rotary = library.find(_ROTARY_FIRST, _ROTARY_NEWER)
    for name, found in (
        ("rms_norm", norm),
        ("fused_add_rms_norm", add),
        ("rotary_embedding", rotary),
    ):
        if isinstance(found, str):
            notes[name] = found
    first = library.generation == FIRST
    write = library.find(_WRITE_FIRST if first else _WRITE_NEWER)
    attention = library.find(
        *((_ATTENTION_FIRST,) if first else (_ATTENTION_NEWER, _ATTENTION_PLAIN))
    )
    format_, bound = CacheFormat(), None
    cache_write, attend = stand_in.cache_write, stand_in.attention
    if isinstance(write, str) or isinstance(attention, str):
        for name, found, other in (
            ("cache_write", write, attention),
            ("attention", attention, write),
        ):
            notes[name] = found if isinstance(found, str) else f"bound only with its pair: {other}"
    else:
        format_, bound = _FORMATS[library.generation], _BOUND
        cache_write, attend = _cache_write(write), _attention(attention)
    return DecodeKernels(
        expert_binding.bind(library, stand_in.experts),
        stand_in.embedding,
        stand_in.linear,
        stand_in.rms_norm if isinstance(norm, str) else _rms_norm(norm),
        stand_in.fused_add_rms_norm if isinstance(add, str) else _fused_add_rms_norm(add),
        stand_in.rotary_embedding if isinstance(rotary, str) else _rotary_embedding(rotary),
        cache_write,
        attend,
        stand_in.argmax,
        stand_in.advance,
        bound=bound,
        cache_format=format_,
        takes_views=False,
        notes=notes,
    )


def _rms_norm(found: Found) -> Operation:
    call, first = found.call, found.form is _NORM_FIRST

    def rms_norm(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor, eps: float) -> None:
        if first:
            call(x, weight, out, eps)
        else:
            call(x, weight, eps, out)

    return Operation("rms_norm", found.implementation, rms_norm)


def _fused_add_rms_norm(found: Found) -> Operation:
    call, first = found.call, found.form is _ADD_FIRST

    def fused_add_rms_norm(
        x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> None:
        if first:
            call(x, residual, weight, eps)
        else:
            call(x, weight, eps, 1.0, residual, None, x, residual)

    return Operation("fused_add_rms_norm", found.implementation, fused_add_rms_norm)


def _rotary_embedding(found: Found) -> Operation:
    call = found.call

    def rotary_embedding(
        positions: torch.Tensor, q: torch.Tensor, k: torch.Tensor, cos_sin: torch.Tensor
    ) -> None:
        rows, _, dim = q.shape
        call(positions, q.view(rows, -1), k.view(rows, -1), dim, cos_sin, True)

    return Operation("rotary_embedding", found.implementation, rotary_embedding)


def _cache_write(found: Found) -> Operation:
    call = found.call
    last: tuple[Any, ...] = () if found.form is _WRITE_FIRST else ("auto", 1.0, 1.0)

    def cache_write(
        k: torch.Tensor,
        v: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        slot_mapping: torch.Tensor,
    ) -> None:
        call(k, v, key_cache, value_cache, slot_mapping, *last)

    return Operation("cache write", found.implementation, cache_write)


def _attention(found: Found) -> Operation:
    call, first = found.call, found.form is _ATTENTION_FIRST
    # alibi_slopes, softcap, causal, window to the left and right, use_cuda_graph
    last = (None, 0.0, True, -1, -1, True) if found.form is _ATTENTION_NEWER else ()

    def attention(
        q: torch.Tensor,
        key_cache: torch.Tensor,
        value_cache: torch.Tensor,
        block_tables: torch.Tensor,
        seq_lens: torch.Tensor,
        out: torch.Tensor,
        scale: float,
    ) -> None:
        kv_heads, block_size = key_cache.shape[1], key_cache.shape[3 if first else 2]
        longest = block_tables.shape[1] * block_size
        caches = (key_cache, value_cache)
        table = (block_tables, seq_lens, block_size, longest)
        if first:
            mapping = _head_mapping(q.shape[1], kv_heads, q.device)
            call(out, q, *caches, mapping, scale, *table, None)
        else:
            call(out, q, *caches, kv_heads, scale, *table, *last)

    return Operation("attention", found.implementation, attention)


@cache
def _head_mapping(heads: int, kv_heads: int, device: torch.device) -> torch.Tensor:
    """The kv head of each query head, (heads,) int32. Made at the first, warming call and kept."""
    with torch.inference_mode(False):
        each = torch.arange(kv_heads, dtype=torch.int32, device=device)
        return each.repeat_interleave(heads // kv_heads)


def _bound(
    slot_mapping: torch.Tensor,
    seq_lens: torch.Tensor,
    slots: torch.Tensor,
    lengths: torch.Tensor,
    capacity: int,
) -> None:
    """slots (M,) = slot_mapping, 0 where that is negative; lengths (M,) = seq_lens, capacity at most."""
    device = seq_lens.device
    torch.maximum(slot_mapping, constant(0, device, slot_mapping.dtype), out=slots)
    torch.minimum(seq_lens, constant(capacity, device, seq_lens.dtype), out=lengths)


_BOUND = Operation("bounds", "torch", _bound)
