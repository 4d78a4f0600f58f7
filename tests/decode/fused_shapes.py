"""The smallest model whose fused step still crosses every edge of its tiles: Triton's interpreter takes
time for each program and each row, whatever it holds.

No size is a multiple of a tile: hidden 26 (rows of 4 weights, depths of 16 and 32), 32 rows of qkv by 16,
heads of 8 in blocks of 16, experts of 20 and a dense layer of 22 by 16.
"""

from __future__ import annotations

from typing import Any

from decoders import draw_weights

from graphcap.decode.weights import ModelWeights

SIZES: dict[str, Any] = {
    "hidden_size": 26,
    "vocab_size": 48,
    "num_heads": 2,
    "num_kv_heads": 1,
    "head_dim": 8,
    "moe_intermediate_size": 20,
    "intermediate_size": 22,
}


def draw_small(**changes: Any) -> ModelWeights:
    return draw_weights(**{**SIZES, **changes})
