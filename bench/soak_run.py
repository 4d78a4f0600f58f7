"""One decoder under random traffic, held against eager decoding; bench/soak.py runs it at length.

Of a random share of the steps the whole outcome (tokens, logits, slots, every byte of the caches) is held
against the step run eagerly on what was there before; of some requests all tokens against an eager decoder
that served nothing else.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from soak_memory import Memory, read_memory

from graphcap.buckets import BucketLadder
from graphcap.checks import compare
from graphcap.decode.cache import PagedCache
from graphcap.decode.decoder import Decoder, EagerDecoder
from graphcap.decode.kernels import decode_kernels
from graphcap.decode.random_weights import random_weights
from graphcap.decode.shapes import preset
from graphcap.errors import VerificationError
from graphcap.inputs import NUM_ROWS
from graphcap.moe.kernels import choose_backend
from graphcap.settings import Settings

CONTEXT, BLOCK = 64, 8


@dataclass
class Request:
    """A sequence that is being served: `at` tokens of it are in the cache."""

    prompt: list[int]
    wanted: int
    table: torch.Tensor
    state: int | None
    at: int = 0
    answer: list[int] = field(default_factory=list)

    @property
    def token(self) -> int:
        """What goes in next."""
        return self.prompt[self.at] if self.at < len(self.prompt) else self.answer[-1]


class Soak:
    """One decoder under random traffic.

    Args:
        sample: share of the steps, and of the answered requests, that are also run eagerly.
        seed: of weights and traffic.

    Attributes:
        checked: steps and requests that were held against eager ones.
        batches: rows of a step -> steps.
    """

    def __init__(
        self,
        device: torch.device,
        *,
        shape: str = "tiny",
        layers: int | None = None,
        max_batch: int = 8,
        sample: float = 0.01,
        seed: int = 0,
        recorder: str = "auto",
    ) -> None:
        model = preset(shape)
        weights = random_weights(
            model if layers is None else model.with_layers(layers),
            device=device,
            dtype=torch.float32,
            seed=seed,
        )
        kernels = decode_kernels(choose_backend("auto", device))
        self.decoder = Decoder(
            weights,
            kernels,
            max_batch=max_batch,
            max_context=CONTEXT,
            block_size=BLOCK,
            ladder=BucketLadder(range(1, max_batch + 1, 2), max_batch),
            settings=Settings(recorder=recorder),
        )
        self.manager, self.cache = self.decoder.manager, self.decoder.cache
        self.report = self.manager.capture()
        self.cache.fill_random(seed)  # no sequence may depend on what its blocks held before
        self.checked: Counter[str] = Counter()
        self.batches: Counter[int] = Counter()
        self.requests = 0
        self._eager = EagerDecoder(weights, self.cache, kernels)
        alone = PagedCache(
            weights.shape,
            num_sequences=1,
            max_context=CONTEXT,
            block_size=BLOCK,
            device=device,
            dtype=torch.float32,
            format=kernels.cache_format,
        )
        self._alone = EagerDecoder(weights, alone, kernels)
        self._vocabulary = weights.shape.vocab_size
        self._device, self._max_batch, self._sample = device, max_batch, sample
        self._random = random.Random(seed)
        self._active: list[Request] = []
        self._moved = True  # the slots do not hold the active requests in their order
        self._target = 1
        self._warm_up()

    def leg(self, replays: int) -> Memory:
        """So many steps, and then as many as it takes until the last request has left.

        Raises:
            VerificationError: a result differs from the eager one.
        """
        end = self.steps + replays
        while self.steps < end or self._active:
            self._come_and_go(arrivals=self.steps < end)
            if self._active:
                self._step()
        return self._memory()

    @property
    def steps(self) -> int:
        return sum(self.batches.values())

    # -- traffic ---------------------------------------------------------------------------------

    def _warm_up(self) -> None:
        """Every batch size once, replayed and checked: what is kept by batch size is there from now on."""
        for rows in range(1, self._max_batch + 1):
            while len(self._active) < rows:
                self._arrive()
            self._checked_step(self._batch())
            for request in list(self._active):
                self._leave(request)
        self._alone.decode([[1, 2]], 2)
        self.checked.clear()
        self.requests = 0

    def _come_and_go(self, arrivals: bool) -> None:
        draw = self._random
        if draw.random() < 0.1:
            self._target = draw.randint(0, self._max_batch)
        if draw.random() < 0.02 and self._active:  # the client has hung up
            self._leave(draw.choice(self._active))
        if draw.random() < 0.02 and len(self._active) > 1:
            draw.shuffle(self._active)
            self._moved = True
        while arrivals and len(self._active) < self._target and draw.random() < 0.7:
            self._arrive()

    def _arrive(self) -> None:
        draw, states = self._random, self.cache.states
        prompt = [draw.randrange(self._vocabulary) for _ in range(draw.randint(1, 12))]
        wanted = draw.randint(1, CONTEXT - len(prompt))
        table = self.cache.allocate(len(prompt) + wanted)
        state = None if states is None else states.allocate()
        request = Request(prompt, wanted, table, state)
        self._active.insert(draw.randint(0, len(self._active)), request)
        self.requests += 1
        self._moved = True

    def _leave(self, request: Request) -> None:
        self._active.remove(request)
        self.cache.free(request.table)
        if request.state is not None:
            assert self.cache.states is not None
            self.cache.states.free(request.state)
        self._moved = True

    def _batch(self) -> dict[str, torch.Tensor]:
        """What goes into the slots, on the host."""
        active = self._active
        positions = torch.tensor([request.at for request in active])
        tables = torch.stack([request.table for request in active])
        blocks = tables.gather(1, (positions // BLOCK)[:, None])[:, 0].long()
        batch = {
            "token_ids": torch.tensor([r.token for r in active], dtype=torch.int32),
            "positions": positions,
            "seq_lens": (positions + 1).int(),
            "slot_mapping": (blocks * BLOCK + positions % BLOCK).to(self.cache.format.slot_dtype),
            "block_tables": tables,
        }
        if self.cache.states is not None:
            batch["state_slots"] = torch.tensor([request.state for request in active])
        return batch

    def _step(self) -> None:
        fed = self._moved or any(r.at < len(r.prompt) for r in self._active)
        # A step advances the slots by itself: where it can go on from there, often nothing is given.
        given = self._batch() if fed or self._random.random() < 0.2 else None
        if self._random.random() < self._sample:
            tokens = self._checked_step(given)
        else:
            tokens = self.manager.run(given)["token_ids"].tolist()
        self.batches[len(self._active)] += 1
        self._moved = False
        for request, token in zip(list(self._active), tokens, strict=True):
            request.at += 1
            if request.at >= len(request.prompt):
                request.answer.append(token)
            if len(request.answer) == request.wanted:
                self._leave(request)
                if self._random.random() < self._sample:
                    self._check_request(request)

    # -- checks ----------------------------------------------------------------------------------

    def _checked_step(self, given: dict[str, torch.Tensor] | None) -> list[int]:
        """A step by replay and, from the same state, eagerly, padded alike; the replay's is kept."""
        batch = self._batch()
        rows = len(self._active)
        size = self.manager.ladder.bucket_for(rows)
        assert size is not None
        slots = self.decoder.inputs
        padded = {
            name: torch.full((size, *slot.row_shape), slot.pad.value, dtype=slot.dtype)
            for name, slot in slots.slots.items()
        }
        for name, tensor in batch.items():
            padded[name][:rows] = tensor
        before = self._state()
        outputs = self.manager.run(given)
        replayed = {name: tensor.clone() for name, tensor in outputs.items()}
        replayed |= {f"slot {name}": slots[name][:rows].clone() for name in slots.slots}
        after = self._state()
        self._put_back(before)
        self._eager.load(padded)
        self._eager.slots[NUM_ROWS].fill_(rows)
        eager = {name: tensor[:rows] for name, tensor in self._eager.run().items()}
        eager |= {f"slot {name}": self._eager.slots[name][:rows] for name in slots.slots}
        now = self._state()
        replayed |= {f"cache {i}": tensor for i, tensor in enumerate(after)}
        eager |= {f"cache {i}": tensor for i, tensor in enumerate(now)}
        worst = compare(replayed, eager, f"step {self.steps} of {rows} rows in bucket {size}")
        self.checked["steps"] += 1
        self.checked["bitwise equal steps"] += worst == 0
        self._put_back(after)
        return list(replayed["token_ids"].tolist())

    def _check_request(self, request: Request) -> None:
        wanted = self._alone.decode([request.prompt], request.wanted).token_ids[0]
        if wanted != request.answer:
            raise VerificationError(
                f"step {self.steps}: prompt {request.prompt} was answered {request.answer} among other "
                f"requests and {wanted} alone"
            )
        self.checked["requests"] += 1

    def _held(self) -> Iterator[torch.Tensor]:
        yield from (*self.cache.keys, *self.cache.values)
        if self.cache.states is not None:
            yield from (*self.cache.states.conv, *self.cache.states.recurrent)

    def _state(self) -> list[torch.Tensor]:
        return [tensor.clone() for tensor in self._held()]

    def _put_back(self, saved: list[torch.Tensor]) -> None:
        for tensor, value in zip(self._held(), saved, strict=True):
            tensor.copy_(value)

    def _memory(self) -> Memory:
        self._eager.slots = {}
        return read_memory(self._device)

    def close(self) -> None:
        self.decoder.close()
