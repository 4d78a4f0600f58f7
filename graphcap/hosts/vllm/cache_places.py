"""vLLM's weights and key-value caches: what must stay in place, and where a decode step writes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from graphcap.reachable import Watched, module_tensors, watch
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


def watched_of(model: torch.nn.Module, layers: Mapping[str, Any]) -> list[Watched]:
    """What recordings of `model` point at: parameters, buffers, packed weights, and caches.

    Args:
        layers: by name, those that have a cache: an engine's ``static_forward_context``.
    """
    found = module_tensors(model)
    for name, module in model.named_modules():
        packed = vars(module).get("cpu_linear")  # holds what vLLM made of the weights for a CPU
        if packed is not None:
            found.append(Watched(f"{name}.cpu_linear", module, "cpu_linear", packed))
    for name, layer in layers.items():
        caches = getattr(layer, "kv_cache", None)
        if isinstance(caches, (list, tuple)):
            found.append(Watched(f"the caches of {name}", layer, "kv_cache", caches))
    return found + [watch(*cache) for cache in caches_of(layers)]


def caches_of(layers: Mapping[str, Any]) -> list[tuple[str, Any, Any, torch.Tensor]]:
    """Of each cache its name, its holder, its key there, the tensor."""
    found: list[tuple[str, Any, Any, torch.Tensor]] = []
    for name, layer in layers.items():
        caches = getattr(layer, "kv_cache", None)
        if isinstance(caches, torch.Tensor):
            found.append((f"the cache of {name}", layer, "kv_cache", caches))
        elif isinstance(caches, (list, tuple)):
            found += [
                (f"the cache {number} of {name}", caches, number, cache)
                for number, cache in enumerate(caches)
                if isinstance(cache, torch.Tensor)
            ]
    return found
