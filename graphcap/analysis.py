"""The launch table of the analysis that started this project: what ours is held against."""

from __future__ import annotations

ANALYSIS = {
    "fused_moe w1": 64,
    "silu_and_mul": 64,
    "fused_moe w2": 64,
    "topk_softmax": 64,
    "moe_align_block_size": 64,
    "merge": 64,
    "attention": 1,
    "rms_norm": 128,
    "fused_add_rms_norm": 64,
    "rotary_embedding": 64,
}
"""Launches of one step in the analysis of Qwen3.6-35B-A3B under vLLM with ixformer that started this
project (shape ``seed-64``). It counts attention once a step, not once a layer, and no projections."""

ANALYSIS_LAYERS = 64
ANALYSIS_TOTAL = 641
ANALYSIS_ALLOCATIONS = 192
"""Three torch.empty calls in each of 64 layers; same source."""
