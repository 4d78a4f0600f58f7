"""Stands in for the parts of vLLM 0.26 that bench/attention_vllm.py calls: the same names and parameters, in
plain torch and, so that they can be told from the reference, by other formulas than it."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

import pytest
import torch


def rms_norm(out: torch.Tensor, input: torch.Tensor, weight: torch.Tensor, epsilon: float) -> None:
    out.copy_(torch.nn.functional.rms_norm(input, input.shape[-1:], weight, epsilon))


def rotary_embedding(
    positions: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    head_size: int,
    cos_sin_cache: torch.Tensor,
    is_neox: bool,
) -> None:
    assert is_neox
    cos, sin = cos_sin_cache[positions][:, None].chunk(2, -1)
    for x in (query, key):
        heads = x.view(len(x), -1, head_size)
        first, second = heads.clone().chunk(2, -1)
        heads.copy_(torch.cat([first, second], -1) * torch.cat([cos, cos], -1))
        heads.add_(torch.cat([-second, first], -1) * torch.cat([sin, sin], -1))


def reshape_and_cache_flash(
    key: torch.Tensor,
    value: torch.Tensor,
    key_cache: torch.Tensor,
    value_cache: torch.Tensor,
    slot_mapping: torch.Tensor,
    kv_cache_dtype: str,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
) -> None:
    assert kv_cache_dtype == "auto"
    size = key_cache.shape[1]
    for row, slot in enumerate(slot_mapping.tolist()):
        key_cache[slot // size, slot % size] = key[row]
        value_cache[slot // size, slot % size] = value[row]


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lengths: torch.Tensor,
    tables: torch.Tensor,
    scale: float,
) -> None:
    """Row by row and head by head."""
    group = q.shape[1] // k.shape[2]
    for row, length in enumerate(lengths.tolist()):
        blocks = tables[row, : -(-length // k.shape[1])].long()
        keys, values = (x[blocks].flatten(0, 1)[:length] for x in (k, v))
        for head in range(q.shape[1]):
            scores = keys[:, head // group] @ q[row, head] * scale
            out[row, head] = torch.softmax(scores, 0) @ values[:, head // group]


class Standin:
    """The modules, put in place of vLLM's until the test ends.

    Attributes:
        scheduled: arguments of each call of `get_scheduler_metadata`.
        attended: of each call of `flash_attn_varlen_func`.
        modules: by name.
    """

    def __init__(self, patch: pytest.MonkeyPatch, version: int | None = 3) -> None:
        self.scheduled: list[dict[str, Any]] = []
        self.attended: list[dict[str, Any]] = []
        self.modules = {
            "vllm": {"__version__": "0.26.0"},
            "vllm._custom_ops": {
                f.__name__: f for f in (rms_norm, rotary_embedding, reshape_and_cache_flash)
            },
            "vllm.vllm_flash_attn": {
                "fa_version_unsupported_reason": lambda version: f"FA{version} is missing"
            },
            "vllm.v1.attention.backends.fa_utils": {
                "flash_attn_varlen_func": self.flash,
                "get_flash_attn_version": lambda head_size=None: version,
                "get_scheduler_metadata": self.schedule,
            },
            "vllm.v1.attention.ops.triton_unified_attention": {"unified_attention": self.unified},
        }
        made: dict[str, ModuleType] = {}
        for name, contents in self.modules.items():
            parts = name.split(".")
            for end in range(1, len(parts) + 1):
                part = ".".join(parts[:end])
                if part not in made:
                    made[part] = ModuleType(part)
                    made[part].__path__ = []  # type: ignore[attr-defined]
                    patch.setitem(sys.modules, part, made[part])
                    if end > 1:
                        setattr(made[".".join(parts[: end - 1])], parts[end - 1], made[part])
            vars(made[name]).update(contents)
        self.named = made

    def schedule(
        self,
        batch_size: int,
        max_seqlen_q: int,
        max_seqlen_k: int,
        num_heads_q: int,
        num_heads_kv: int,
        headdim: int,
        cache_seqlens: torch.Tensor,
        qkv_dtype: torch.dtype = torch.bfloat16,
        cu_seqlens_q: torch.Tensor | None = None,
        page_size: int | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        num_splits: int = 0,
    ) -> torch.Tensor:
        self.scheduled.append(
            {"heads": (num_heads_q, num_heads_kv), "longest": max_seqlen_k, "splits": num_splits}
        )
        return torch.full((1 + 4 * -(-batch_size // 4),), len(self.scheduled), dtype=torch.int32)

    def flash(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        max_seqlen_q: int,
        cu_seqlens_q: torch.Tensor,
        max_seqlen_k: int,
        seqused_k: torch.Tensor,
        softmax_scale: float,
        causal: bool,
        window_size: list[int],
        softcap: float,
        alibi_slopes: None,
        block_table: torch.Tensor,
        out: torch.Tensor,
        scheduler_metadata: torch.Tensor | None,
        q_descale: torch.Tensor,
        k_descale: torch.Tensor,
        v_descale: torch.Tensor,
        num_splits: int,
        fa_version: int,
    ) -> None:
        assert (causal, window_size, softcap, alibi_slopes) == (True, [-1, -1], 0, None)
        assert cu_seqlens_q.tolist() == list(range(len(q) + 1))
        assert k.stride(-1) == v.stride(-1) == 1
        self.attended.append(
            {"version": fa_version, "splits": num_splits, "metadata": scheduler_metadata}
        )
        attend(q, k, v, out, seqused_k, block_table, softmax_scale)

    def unified(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        out: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        max_seqlen_q: int,
        seqused_k: torch.Tensor,
        max_seqlen_k: int,
        softmax_scale: float,
        causal: bool,
        window_size: tuple[int, int],
        block_table: torch.Tensor,
        softcap: float,
        q_descale: None,
        k_descale: torch.Tensor,
        v_descale: torch.Tensor,
        seq_threshold_3D: int,
        num_par_softmax_segments: int,
        softmax_segm_output: torch.Tensor,
        softmax_segm_max: torch.Tensor,
        softmax_segm_expsum: torch.Tensor,
    ) -> None:
        assert len(q) <= seq_threshold_3D, "the sequence is split"
        assert softmax_segm_output.shape[:3] == softmax_segm_max.shape == softmax_segm_expsum.shape
        attend(q, k, v, out, seqused_k, block_table, softmax_scale)
