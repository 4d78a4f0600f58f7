"""Realistic batches of the decode step, which verification and lint draw."""

from __future__ import annotations

import torch

from graphcap.decode.cache import PagedCache
from graphcap.decode.prompts import Batch
from graphcap.decode.state_cache import NULL_SLOT
from graphcap.drawing import Example


def example_batches(cache: PagedCache, vocab_size: int) -> Example:
    """Batches of sequences of any length, each with blocks and a state of its own, for verification."""

    def example(rows: int, generator: torch.Generator) -> Batch:
        size = cache.block_size
        blocks = torch.randperm(cache.num_blocks - 1, generator=generator)[
            : rows * cache.blocks_per_sequence
        ]
        tables = (blocks + 1).view(rows, -1).int()
        positions = torch.randint(cache.max_context, (rows,), generator=generator)
        own = tables.gather(1, (positions // size)[:, None])[:, 0].long()
        batch = {
            "token_ids": torch.randint(vocab_size, (rows,), generator=generator).int(),
            "positions": positions,
            "seq_lens": (positions + 1).int(),
            "slot_mapping": (own * size + positions % size).to(cache.format.slot_dtype),
            "block_tables": tables,
        }
        if cache.states is not None:
            slots = torch.randperm(cache.states.num_sequences, generator=generator)[:rows]
            batch["state_slots"] = slots + NULL_SLOT + 1
        return batch

    return example
