"""Small decoders for the tests."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from graphcap.buckets import BucketLadder
from graphcap.decode.cache import NULL_BLOCK, PagedCache
from graphcap.decode.decoder import Decoder
from graphcap.decode.kernels import DecodeKernels, decode_kernels
from graphcap.decode.random_weights import random_weights
from graphcap.decode.shapes import ModelShape
from graphcap.decode.weights import ModelWeights
from graphcap.moe.kernels import Backend
from graphcap.settings import Settings

KERNELS = decode_kernels(Backend("reference", "tests"))
SHAPE = ModelShape(
    name="small",
    num_layers=3,
    hidden_size=32,
    vocab_size=128,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    num_experts=6,
    top_k=2,
    moe_intermediate_size=24,
    intermediate_size=40,
    mlp_only_layers=(1,),
    attention_bias=True,
    max_position_embeddings=64,
)


def draw_weights(dtype: torch.dtype = torch.float32, **changes: object) -> ModelWeights:
    shape = replace(SHAPE, **changes)  # type: ignore[arg-type]
    return random_weights(shape, device="cpu", dtype=dtype, seed=5)


def make_decoder(
    weights: ModelWeights,
    *,
    max_batch: int = 4,
    max_context: int = 24,
    block_size: int = 4,
    sizes: Sequence[int] = (),
    kernels: DecodeKernels = KERNELS,
    strict: bool = True,
) -> Decoder:
    """A captured decoder with the buckets `sizes` and `max_batch`."""
    decoder = Decoder(
        weights,
        kernels,
        max_batch=max_batch,
        max_context=max_context,
        block_size=block_size,
        ladder=BucketLadder(sizes, max_batch),
        settings=Settings(strict=strict),
    )
    assert not decoder.manager.capture().failures
    return decoder


def make_cache(
    weights: ModelWeights,
    num_sequences: int = 4,
    max_context: int = 24,
    block_size: int = 4,
    kernels: DecodeKernels = KERNELS,
) -> PagedCache:
    return PagedCache(
        weights.shape,
        num_sequences=num_sequences,
        max_context=max_context,
        block_size=block_size,
        device="cpu",
        dtype=weights.dtype,
        format=kernels.cache_format,
    )


def by_slot(cache: PagedCache, tensor: torch.Tensor) -> torch.Tensor:
    """A view of keys or values of any layout as (blocks, block_size, elements); writes to a copy of it
    are lost where no view can be had."""
    if cache.format.layout == "heads":
        tensor = tensor.transpose(1, 2)
    elif cache.format.layout == "packed":
        tensor = tensor.permute(0, 3, 1, 2, 4) if tensor.dim() == 5 else tensor.permute(0, 3, 1, 2)
    return tensor.flatten(2)


def free_blocks(cache: PagedCache) -> int:
    """Counted by taking one after the other."""
    taken = []
    for _ in range(cache.num_blocks - 1):
        try:
            taken.append(cache.allocate(1))
        except Exception:
            break
    for table in taken:
        cache.free(table)
    return len(taken)


def tensors(cache: PagedCache) -> list[torch.Tensor]:
    return [*cache.keys, *cache.values]


def poison(cache: PagedCache) -> None:
    for tensor in tensors(cache):
        tensor[NULL_BLOCK + 1 :] = float("nan")


def batch_at(
    tables: torch.Tensor, positions: list[int], tokens: list[int], block_size: int = 4
) -> dict[str, torch.Tensor]:
    """A batch of sequences that stand at `positions`, computed by plain Python."""
    slots = [
        int(table[position // block_size]) * block_size + position % block_size
        for table, position in zip(tables, positions, strict=True)
    ]
    return {
        "token_ids": torch.tensor(tokens, dtype=torch.int32),
        "positions": torch.tensor(positions),
        "seq_lens": torch.tensor([p + 1 for p in positions], dtype=torch.int32),
        "slot_mapping": torch.tensor(slots),
        "block_tables": tables,
    }
