"""How a paged cache lies in memory, and how its slots are numbered: what the kernels of a step want."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from graphcap.errors import InputError

LAYOUTS = ("tokens", "heads", "packed")

Shape = tuple[int, ...]


@dataclass(frozen=True)
class CacheFormat:
    """Layout of keys and values, dtype of slots.

    Attributes:
        layout: one of

            - ``tokens``: keys and values (blocks, block_size, Hk, D): graphcap's own kernels;
            - ``heads``: keys and values (blocks, Hk, block_size, D);
            - ``packed``: keys (blocks, Hk, D / x, block_size, x) with x elements of 16 bytes, values
              (blocks, Hk, D, block_size): paged attention of vLLM 0.6.3.
        slot_dtype: of the slot mapping, int64 or int32.

    Raises:
        InputError: another layout or dtype.
    """

    layout: str = "tokens"
    slot_dtype: torch.dtype = torch.int64

    def __post_init__(self) -> None:
        if self.layout not in LAYOUTS:
            raise InputError(
                f"CacheFormat.layout: expected one of {', '.join(LAYOUTS)}, found {self.layout!r}"
            )
        if self.slot_dtype not in (torch.int64, torch.int32):
            raise InputError(
                f"CacheFormat.slot_dtype: expected torch.int64 or torch.int32, found {self.slot_dtype}"
            )

    def shapes(
        self, blocks: int, block_size: int, kv_heads: int, dim: int, dtype: torch.dtype
    ) -> tuple[Shape, Shape]:
        """Shapes of the keys and the values of a layer.

        Raises:
            InputError: the layout cannot hold heads of this size, or the slots cannot number so many
                tokens.
        """
        most = torch.iinfo(self.slot_dtype).max
        if blocks * block_size > most:
            raise InputError(
                f"slots of {self.slot_dtype} number {most} tokens at most, and the cache was asked to "
                f"hold {blocks * block_size}; hold fewer sequences or shorter ones"
            )
        if self.layout == "tokens":
            return ((blocks, block_size, kv_heads, dim),) * 2
        if self.layout == "heads":
            return ((blocks, kv_heads, block_size, dim),) * 2
        x = 16 // dtype.itemsize
        if dim % x:
            raise InputError(
                f"the cache layout 'packed' holds heads of a multiple of {x} {dtype} elements, found "
                f"{dim}; use other kernels (GRAPHCAP_KERNELS=triton or reference) for this model"
            )
        return (blocks, kv_heads, dim // x, block_size, x), (blocks, kv_heads, dim, block_size)
