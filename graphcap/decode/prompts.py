"""Prompts: laid into a cache, and the batches that bring them in token by token."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch

from graphcap.decode.cache import PagedCache
from graphcap.errors import InputError

Batch = Mapping[str, torch.Tensor]


class Prompts:
    """Prompts laid into a cache, longest first, and the batches that bring them in.

    Prompts enter token by token through the decode step itself, aligned at their ends: a shorter
    one joins the batch later, and the last batch gives every prompt its first new token.

    Raises:
        InputError: no prompt, an empty one, a token outside the vocabulary, no new token asked for,
            or no room in the cache.
    """

    def __init__(
        self, prompts: Sequence[Sequence[int]], tokens: int, cache: PagedCache, vocab_size: int
    ) -> None:
        if not prompts or not all(prompts):
            raise InputError("decoding needs at least one prompt, each of at least one token id")
        if tokens < 1:
            raise InputError(f"tokens: expected at least 1 new token a prompt, found {tokens}")
        for prompt in prompts:
            for token in prompt:
                if isinstance(token, bool) or not isinstance(token, int):
                    raise InputError(f"token ids are integers, found {token!r}")
                if not 0 <= token < vocab_size:
                    raise InputError(
                        f"token id {token} is outside the vocabulary (0 to {vocab_size - 1})"
                    )
        self._order = sorted(range(len(prompts)), key=lambda i: -len(prompts[i]))
        self._prompts = [list(prompts[i]) for i in self._order]
        self._cache = cache
        self._states: list[int] = []
        tables: list[torch.Tensor] = []
        try:
            for prompt in self._prompts:
                # The last token sampled is never written, but the step makes room for it.
                tables.append(cache.allocate(len(prompt) + tokens))
                if cache.states is not None:
                    self._states.append(cache.states.allocate())
        except InputError:
            self._free(tables)
            raise
        self.tables = torch.stack(tables)

    def __len__(self) -> int:
        return len(self._prompts)

    def batches(self) -> Iterator[Batch]:
        longest = len(self._prompts[0])
        for time_step in range(longest):
            rows = [
                (prompt, time_step - (longest - len(prompt)))
                for prompt in self._prompts
                if time_step >= longest - len(prompt)
            ]
            yield self._batch(rows)

    def _batch(self, rows: list[tuple[list[int], int]]) -> Batch:
        count = len(rows)
        positions = torch.tensor([position for _, position in rows])
        size = self._cache.block_size
        tables = self.tables[:count]
        blocks = tables.gather(1, (positions // size)[:, None])[:, 0].long()
        batch = {
            "token_ids": torch.tensor([p[at] for p, at in rows], dtype=torch.int32),
            "positions": positions,
            "seq_lens": (positions + 1).int(),
            "slot_mapping": (blocks * size + positions % size).to(self._cache.format.slot_dtype),
            "block_tables": tables,
        }
        if self._states:
            batch["state_slots"] = torch.tensor(self._states[:count])
        return batch

    def in_order(self, steps: Sequence[torch.Tensor]) -> list[list[int]]:
        """Sampled tokens, step by step in batch order -> prompt by prompt in the caller's order."""
        by_row = torch.stack(list(steps), 1).tolist()
        result: list[list[int]] = [[] for _ in by_row]
        for row, original in enumerate(self._order):
            result[original] = by_row[row]
        return result

    def close(self) -> None:
        self._free(list(self.tables))

    def _free(self, tables: list[torch.Tensor]) -> None:
        for table in tables:
            self._cache.free(table)
        for slot in self._states:
            assert self._cache.states is not None
            self._cache.states.free(slot)
