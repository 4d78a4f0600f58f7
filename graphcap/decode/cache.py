"""PagedCache: keys and values of all attention layers in blocks, and who owns which block."""

from __future__ import annotations

import torch

from graphcap.decode.cache_format import CacheFormat
from graphcap.decode.model_shape import ModelShape
from graphcap.decode.state_cache import StateCache
from graphcap.errors import InputError

NULL_BLOCK = 0
"""Never given to a sequence: padding rows and unused entries of block tables point at it."""


class PagedCache:
    """Owns the cache tensors: per attention layer keys and values, of (blocks, block_size, Hk, D) if
    nothing else is asked for, and for layers with a gated delta net the states of sequences.

    Args:
        shape: the model's.
        num_sequences: sequences that can be held at the same time, each of up to `max_context`.
        max_context: tokens of the longest sequence; rounded up to whole blocks.
        block_size: tokens of one block.
        format: the kernels' `cache_format`.

    Attributes:
        keys, values: in the order of the attention layers.
        states: of the layers with a gated delta net; None where there are none.
    """

    def __init__(
        self,
        shape: ModelShape,
        *,
        num_sequences: int,
        max_context: int,
        block_size: int = 16,
        device: torch.device | str,
        dtype: torch.dtype,
        format: CacheFormat = CacheFormat(),  # noqa: B008 - frozen
    ) -> None:
        self.format = format
        self.block_size = block_size
        self.blocks_per_sequence = -(-max_context // block_size)
        self.num_blocks = num_sequences * self.blocks_per_sequence + 1
        keys, values = format.shapes(
            self.num_blocks, block_size, shape.num_kv_heads, shape.head_dim, dtype
        )
        layers = range(shape.num_layers - shape.num_linear_layers)
        self.keys = [torch.zeros(keys, device=device, dtype=dtype) for _ in layers]
        self.values = [torch.zeros(values, device=device, dtype=dtype) for _ in layers]
        self.states = (
            StateCache(
                shape.delta,
                shape.num_linear_layers,
                num_sequences=num_sequences,
                device=device,
                dtype=dtype,
            )
            if shape.delta is not None and shape.num_linear_layers
            else None
        )
        self._device = torch.device(device)
        self._free = list(range(self.num_blocks - 1, NULL_BLOCK, -1))

    @property
    def max_context(self) -> int:
        """Tokens that one sequence can hold."""
        return self.blocks_per_sequence * self.block_size

    @property
    def nbytes(self) -> int:
        states = 0 if self.states is None else self.states.nbytes
        return states + sum(tensor.nbytes for tensor in (*self.keys, *self.values))

    def allocate(self, tokens: int) -> torch.Tensor:
        """Blocks for a sequence of up to `tokens` tokens: a row of the block table.

        Returns:
            int32 (blocks_per_sequence,) on the host: the blocks in order, then the null block.

        Raises:
            InputError: more tokens than a sequence can hold, or no free blocks; nothing is taken.
        """
        needed = -(-tokens // self.block_size)
        if not 1 <= tokens <= self.max_context:
            raise InputError(
                f"a sequence of {tokens} tokens was asked for, the cache holds 1 to "
                f"{self.max_context} a sequence; ask for fewer tokens or raise max_context"
            )
        if needed > len(self._free):
            raise InputError(
                f"{needed} cache blocks are needed and {len(self._free)} are free; "
                f"free a sequence first"
            )
        table = torch.full((self.blocks_per_sequence,), NULL_BLOCK, dtype=torch.int32)
        table[:needed] = torch.tensor([self._free.pop() for _ in range(needed)])
        return table

    def free(self, table: torch.Tensor) -> None:
        """Give the blocks of a row of the block table back.

        Raises:
            InputError: a block is free already; it would be given to two sequences. Nothing is freed.
        """
        blocks = [block for block in table.tolist() if block != NULL_BLOCK]
        twice = sorted(set(blocks).intersection(self._free))
        if twice:
            raise InputError(f"cache blocks {twice} are free already; free a sequence once")
        self._free += blocks

    def fill_random(self, seed: int) -> None:
        """Fill every real block and state from N(0, 1): what verification of a step reads there."""
        generator = torch.Generator(self._device).manual_seed(seed)
        for tensor in (*self.keys, *self.values):
            tensor[NULL_BLOCK + 1 :].normal_(generator=generator)
        if self.states is not None:
            self.states.fill_random(generator)

    def clear(self) -> None:
        for tensor in (*self.keys, *self.values):
            tensor.zero_()
        if self.states is not None:
            self.states.clear()
