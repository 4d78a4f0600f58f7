"""Where a decode step writes in vLLM's key-value caches, so that verification can compare it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch

from graphcap.written import Place


def cache_places(
    caches: Iterable[tuple[str, torch.Tensor]],
    slots: Mapping[str, torch.Tensor],
    blocks: int | None,
    block_size: int | None,
) -> list[Place]:
    """The blocks that rows write, of every cache in which a dimension has as many entries as there are
    blocks. Backends lay caches out differently; where no dimension tells, or several do, a cache is left
    out.

    Args:
        caches: name and tensor.
        slots: of a step; ``slot_mapping`` (rows,) holds the cache slot of each row, -1 for none.
        blocks, block_size: of the engine's cache; None: not known.
    """
    mapping = slots.get("slot_mapping")
    if mapping is None or not blocks or not block_size:
        return []
    index = torch.unique((mapping.long() // block_size).clamp(0, blocks - 1))
    places = []
    for name, cache in caches:
        dims = [dim for dim, entries in enumerate(cache.shape) if entries == blocks]
        if len(dims) == 1 and cache.device == index.device:
            places.append(Place(name, cache, index, dims[0]))
    return places
