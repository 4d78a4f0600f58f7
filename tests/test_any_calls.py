"""Any calls one after another give what plain Python does: batches, fewer rows, parts of batches, batches
that are too large, single steps and many, buckets that are given up, calls that are refused."""

from __future__ import annotations

import random

import pytest
import torch
from loop_fakes import LoopingRecorder
from walks import MODULUS, batch_of, draw, walk, walker

from graphcap.errors import InputError
from graphcap.ring import Stop
from graphcap.settings import Settings

MAXIMUM = 6
BUCKETS = (2, 4, 6)


class Rows:
    """What the rows of the batch are, in plain Python."""

    def __init__(self, ends):
        self.ends, self.tokens, self.positions, self.ended = ends, [], [], []

    def take(self, batch, rows):
        """A batch, of which slots may be left out, or (None) so many rows of the present one."""
        batch = {} if batch is None else batch
        self.tokens = batch["token"].tolist() if "token" in batch else self.tokens[:rows]
        self.positions = (
            batch["position"].tolist() if "position" in batch else self.positions[:rows]
        )
        self.ended = [False] * rows if batch else self.ended[:rows]

    def step(self):
        pairs = zip(self.tokens, self.positions, strict=True)
        self.tokens = [walk(token, position, 1)[0] for token, position in pairs]
        self.positions = [position + 1 for position in self.positions]
        seen = zip(self.ended, self.tokens, strict=True)
        self.ended = [ended or token in self.ends for ended, token in seen]
        return self.tokens


class Calls:
    """A manager and what it should hold, called at random."""

    def __init__(self, seed):
        self.random = chance = random.Random(seed)
        self.length = chance.choice([1, 3, 8])
        ends = tuple(chance.sample(range(MODULUS), chance.randint(0, 4)))
        every = chance.choice([None, None, 1, 3, 7])
        self.rows, self.stops = Rows(ends), bool(ends)
        self.manager = walker(
            self.length,
            stop=Stop("token", ends) if ends else None,
            recorder=LoopingRecorder() if chance.random() < 0.6 else None,
            settings=Settings(verify="off") if every is None else Settings(verify_every=every),
        )
        self.manager.capture()

    def batch(self):
        """(batch or None, rows or None): what a call is given; its rows are taken."""
        chance, held = self.random, len(self.rows.tokens)
        kinds = ["batch", "large"] + ["on", "on", "part", "fewer"] * bool(held)
        kind = chance.choice(kinds)
        small = 0 < held <= MAXIMUM
        batch, rows, count = None, None, held
        if kind in ("batch", "large"):
            few, many = (1, MAXIMUM) if kind == "batch" else (MAXIMUM + 1, MAXIMUM + 3)
            count = chance.randint(few, many)
            batch = draw(count, torch.Generator().manual_seed(chance.randrange(9999)))
        elif kind == "part" and small:
            count = chance.randint(1, held)
            batch = {"token": batch_of(count, chance.randrange(9999))["token"]}
        elif kind == "fewer":
            rows = count = chance.randint(1, held) if small else held
        self.rows.take(batch, count)
        return batch, rows

    def run(self):
        batch, rows = self.batch()
        count = len(self.rows.tokens)
        given = {"agreed_batch": count + 1} if self.random.random() < 0.3 else {}
        found = self.manager.run(batch, rows=rows, **given)["token"].tolist()
        assert found == self.rows.step()

    def run_many(self):
        batch, rows = self.batch()
        steps, held, chosen = self.random.randint(1, self.length), self.rows, self.manager.inputs
        ended_before = list(held.ended)
        first = held.positions[0]
        many = self.manager.run_many(steps, batch, rows=rows)
        small = len(held.tokens) <= MAXIMUM
        ran = int(chosen["position"][0]) - first if small else steps
        counts, tokens = [0] * len(held.tokens), []
        for _ in range(ran):
            counts = [n + (not ended) for n, ended in zip(counts, held.ended, strict=True)]
            tokens.append(held.step())
        assert ran == steps or (0 < ran < steps and all(held.ended)), (ran, ended_before)
        if self.stops:
            assert many.counts.tolist() == counts
            assert many.live.tolist() == [not ended for ended in held.ended]
        for row, found in enumerate(many.outputs["token"].t().tolist()):
            belong = counts[row] if self.stops else steps
            assert found[:belong] == [each[row] for each in tokens[:belong]]

    def replay(self):
        """By a host, to which each is a batch of its own."""
        held = len(self.rows.tokens)
        size = next((size for size in BUCKETS if size >= held), 0)
        if held and self.manager.serves(size):
            self.rows.ended = [False] * held
            found = self.manager.replay(size, held)["token"][:held].tolist()
            assert found == self.rows.step()

    def drop(self):
        if self.random.random() < 0.2:
            self.manager.drop(self.random.choice(BUCKETS), "not_recorded", "the host says so")

    def refused(self):
        manager = self.manager
        for call in (
            lambda: manager.run_many(0),
            lambda: manager.run_many(1.0),
            lambda: manager.run_many(True),
            lambda: manager.run_many(self.length + 1),
            lambda: manager.run_many(1, [1]),
            lambda: manager.run_many(1, {"token": torch.zeros(2)}),
            lambda: manager.run({"another": torch.zeros(2)}),
            lambda: manager.run(rows=0),
            lambda: manager.run(rows=500),
            lambda: manager.run(agreed_batch=-1),
        ):
            with pytest.raises(InputError):
                call()


@pytest.mark.parametrize("seed", range(24))
def test_any_calls_one_after_another(seed):
    calls = Calls(seed)
    kinds = [*[calls.run] * 2, *[calls.run_many] * 3, calls.replay, calls.drop, calls.refused]
    with calls.manager:
        for _ in range(30):
            calls.random.choice(kinds)()
        assert calls.manager.state == "recorded"


@pytest.mark.parametrize("looped", [True, False], ids=["loop", "replays"])
@pytest.mark.parametrize("drops", [False, True], ids=["recorded", "eager"])
@pytest.mark.parametrize("rows", [3, 8])
def test_a_row_that_the_first_step_of_a_batch_ends_has_ended(looped, drops, rows):
    """Also where that step is a run() of its own, in front of run_many()."""
    given = batch_of(rows, 1)
    first = [walk(t, p, 1)[0] for t, p in zip(*(x.tolist() for x in given.values()), strict=True)]
    stop, recorder = Stop("token", (first[1],)), LoopingRecorder() if looped else None
    with walker(8, stop=stop, recorder=recorder) as manager:
        manager.capture()
        if drops:
            manager.drop(4, "not_recorded", "the host says so")
        manager.run(batch_of(2, 7))
        manager.run(given)
        many = manager.run_many(1)
        assert many.counts.tolist() == [int(token != first[1]) for token in first]
        assert many.counts.tolist()[1] == 0
