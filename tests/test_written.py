"""What a step writes in place besides slots and state is held against the eager step as well."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from toy import CPU, WIDTH, Inputs, floats, manager_of

from graphcap.inputs import PadPolicy, Slot
from graphcap.reachable import watch
from graphcap.recorders.tape import TapeRecorder
from graphcap.settings import Settings
from graphcap.written import Contents, InPlace, Place

SLOTS = {
    "x": Slot((WIDTH,), torch.float32),
    "at": Slot((), torch.int64, PadPolicy.fill(8)),
}


def example(rows: int, generator: torch.Generator) -> dict[str, torch.Tensor]:
    x = torch.randn(rows, WIDTH, generator=generator)
    return {"x": x, "at": torch.randperm(8, generator=generator)[:rows]}


class Caching:
    """Writes rows into a cache, whose last entry is for padding, and reads others of it."""

    def __init__(self) -> None:
        self.cache = torch.zeros(9, WIDTH)

    def __call__(self, inputs: Inputs) -> dict[str, torch.Tensor]:
        self.cache.index_copy_(0, inputs["at"], inputs["x"] * 2)
        return {"y": inputs["x"] + 1}


class Misses(TapeRecorder):
    """Its recordings lack the operations of a name, or do `instead`, once `broken`."""

    def __init__(self, name: str, instead: Callable[[], object] = lambda: None) -> None:
        super().__init__(CPU)
        self.name, self.instead, self.broken = name, instead, True

    def record(self, step: Any, bucket: int) -> Any:
        recording = super().record(step, bucket)

        def perhaps(call: Callable[[], object]) -> Callable[[], object]:
            return lambda: self.instead() if self.broken else call()

        recording._entries = tuple(
            perhaps(call) if name.startswith(self.name) else call
            for name, call in zip(recording._names, recording._entries or (), strict=True)
        )
        return recording


def cached(step: Any, **options: Any) -> Any:
    return manager_of(step, slots=SLOTS, example=example, **options)


def places_of(step: Caching) -> Callable[..., list[Place]]:
    return lambda slots: [Place("the cache", step.cache, slots["at"])]


@pytest.mark.parametrize("told", [False, True])
def test_a_missing_cache_write_is_found(told: bool):
    step = Caching()
    failures = (
        cached(
            step,
            recorder=Misses("aten.index_copy"),
            written=places_of(step) if told else None,
        )
        .capture()
        .failures
    )
    assert set(failures) == {2, 4}
    name = "the cache" if told else r"step\.cache"
    for text in failures.values():
        assert re.search(rf"leaves something else in \S*{name} than the eager step does", text)
        assert "misses a write in place" in text


def test_a_wrong_cache_write_is_found():
    step = Caching()
    recorder = Misses("aten.index_copy", lambda: step.cache.add_(0.5))
    assert set(cached(step, recorder=recorder).capture().failures) == {2, 4}


def test_a_right_cache_write_is_not():
    step = Caching()
    manager = cached(step)
    report = manager.capture()
    assert not report.failures
    assert not report.notes
    given = {"x": floats(2), "at": torch.tensor([5, 1])}
    manager.run(given)
    assert torch.equal(step.cache[[5, 1]], floats(2) * 2)


def test_the_row_is_that_of_the_cache():
    cache = torch.zeros(9, 2)
    place = Place("cache", cache, torch.tensor([6, 3]))
    before = Contents([place])
    cache[3] = 1
    found = before.difference(Contents([place]))
    assert found is not None
    assert found[1].row == 3
    cache[5] = 1
    before.put()
    assert cache.nonzero()[:, 0].unique().tolist() == [5]  # what lies beside is left alone


def test_a_counter_that_nobody_reads_is_told_and_put_back_from_then_on():
    hits = torch.zeros(1)

    def step(inputs: Inputs) -> dict[str, torch.Tensor]:
        hits.add_(1)
        return {"y": inputs["x"] * 2}

    manager = manager_of(step, settings=Settings(verify_every=1))
    report = manager.capture()
    assert not report.failures
    (note,) = report.notes
    assert "running the step twice changes" in note
    assert "hits twice" in note
    assert "list it in state=" in note
    hits.zero_()
    for _ in range(5):
        manager.run({"x": floats(3)})
    assert manager.stats().verified == 5
    assert hits.item() == 5  # each of which ran twice
    assert not manager_of(step, state=[hits]).capture().notes


def test_a_missing_cache_write_is_found_while_serving():
    """The request's own row has to be right afterwards, and what other requests wrote untouched."""
    step = Caching()
    recorder = Misses("aten.index_copy")
    recorder.broken = False
    manager = cached(step, recorder=recorder, settings=Settings(verify_every=2))
    assert not manager.capture().failures
    step.cache.copy_(floats(9, 5))
    manager.run({"x": floats(2), "at": torch.tensor([0, 1])})
    recorder.broken = True
    manager.run({"x": floats(2, 1), "at": torch.tensor([2, 3])})
    assert manager.stats().fallbacks == {"verification": 1}
    assert torch.equal(step.cache[:2], floats(2) * 2)
    assert torch.equal(step.cache[2:4], floats(2, 1) * 2)
    assert torch.equal(step.cache[4:8], floats(9, 5)[4:8])


def test_scratch_that_the_step_writes_before_it_reads_is_no_difference():
    scratch = torch.zeros(4, WIDTH)

    def step(inputs: Inputs) -> dict[str, torch.Tensor]:
        rows = inputs["x"].shape[0]
        scratch[:rows].copy_(inputs["x"] * 3)
        return {"y": scratch[:rows] + 1}

    report = manager_of(step).capture()
    assert not report.failures
    assert not report.notes


# -- what is chosen ------------------------------------------------------------------------------


def chosen(limit: int = 2**20, written: Any = None) -> list[str]:
    named = {
        "weight": torch.nn.Parameter(torch.ones(2)),
        "counter": torch.ones(3),
        "alias": torch.ones(3),
        "large": torch.ones(100),
        "expanded": torch.ones(1).expand(50),
        "slots": torch.ones(4),
        "elsewhere": torch.ones(4, device="meta"),
        "sparse": torch.eye(2).to_sparse(),
    }
    named["alias"] = named["counter"][1:]
    watched = [watch(n, named, n, t) for n, t in named.items() if n not in ("elsewhere", "sparse")]
    in_place = InPlace(watched, [named["slots"]], CPU, written, limit)
    return [place.name for place in in_place.places({})]


def test_small_tensors_of_the_step_that_are_no_parameters_are_compared_once():
    assert chosen() == ["counter", "large"]


def test_what_is_beyond_the_limit_is_left_out():
    assert chosen(limit=100) == ["counter"]


def test_places_that_are_told_come_in_place_of_the_whole_tensor():
    cache = torch.zeros(5, 2)
    holder = {"cache": cache}
    watched = [watch("cache", holder, "cache", cache)]
    told = Place("rows of the cache", cache, torch.tensor([1]))
    in_place = InPlace(watched, [], CPU, lambda slots: [told])
    assert in_place.places({}) == [told]


def test_float8_caches_are_compared_as_bytes():
    cache = torch.zeros(4, 2).to(torch.float8_e4m3fn)
    place = Place("cache", cache, torch.tensor([2]))
    before = Contents([place])
    cache[2].view(torch.uint8).fill_(3)
    found = before.difference(Contents([place]))
    assert found is not None
    assert found[1].row == 2
    before.put()
    assert (cache.view(torch.uint8) == 0).all()
