"""The slots of a decode step of vLLM 0.6.3, and batches to verify it with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from graphcap.drawing import Example
from graphcap.inputs import PadPolicy, Slot, StaticInputs

PAD_SLOT = -1
"""vLLM's PAD_SLOT_ID: a row with this cache slot is written nowhere."""


def decode_inputs(max_batch: int, blocks: int, device: torch.device) -> StaticInputs:
    """Slots for steps of up to `max_batch` sequences of up to `blocks` cache blocks each.

    Padding is what vLLM's own graphs have: token 0 at position 0, a sequence of one token whose cache
    block is block 0, written nowhere.
    """
    slots = {
        "input_ids": Slot((), torch.int64),
        "positions": Slot((), torch.int64),
        "slot_mapping": Slot((), torch.int64, PadPolicy.fill(PAD_SLOT)),
        "seq_lens": Slot((), torch.int32, PadPolicy.ONE),
        "block_tables": Slot((blocks,), torch.int32),
    }
    return StaticInputs(max_batch, slots, device)


def batch_of(input_ids: Any, positions: Any, metadata: Any) -> dict[str, torch.Tensor]:
    """The batch of a step that vLLM has prepared for its graphs, unpadded."""
    decode = metadata.decode_metadata
    return {
        "input_ids": input_ids,
        "positions": positions,
        "slot_mapping": metadata.slot_mapping,
        "seq_lens": decode.seq_lens_tensor,
        "block_tables": decode.block_tables,
    }


def example(vocabulary: int, cache_blocks: int, block_size: int, blocks: int) -> Example:
    """Batches for verification: any tokens, each sequence within one cache block.

    Args:
        vocabulary: token ids to draw from.
        cache_blocks: blocks of the cache; block 0, where padding reads, is left alone if there is
            another.
        block_size: tokens of a block.
        blocks: width of the block tables.
    """
    first = min(1, cache_blocks - 1)
    usable = cache_blocks - first

    def draw(rows: int, generator: torch.Generator) -> Mapping[str, torch.Tensor]:
        index = torch.arange(rows)
        block = first + index % usable
        if rows <= usable:
            offset = torch.randint(0, block_size, (rows,), generator=generator)
        else:  # sequences share blocks: each has a slot of its own, as long as there are some
            offset = (index // usable) % block_size
        tables = torch.zeros((rows, blocks), dtype=torch.int32)
        tables[:, 0] = block
        return {
            "input_ids": torch.randint(0, vocabulary, (rows,), generator=generator),
            "positions": offset,
            "slot_mapping": block * block_size + offset,
            "seq_lens": (offset + 1).to(torch.int32),
            "block_tables": tables,
        }

    return draw
