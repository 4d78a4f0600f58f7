"""run_many on the tape: the same as steps one by one, whatever the number of steps, rows and ends."""

from __future__ import annotations

import random

import pytest
import torch
from toy import manager_of, memory_events
from walks import TOKENS, Walk, batch_of, counted, walk, walker, walks

from graphcap.errors import (
    CaptureError,
    FallbackError,
    InputError,
    StaleRecordingError,
    StateError,
)
from graphcap.ring import Ring, Stop
from graphcap.settings import Settings

LENGTH = 8


def rows_of(many, name="token"):
    """The kept outputs row by row."""
    return many.outputs[name].t().tolist()


@pytest.mark.parametrize("seed", range(3))
def test_the_same_as_steps_one_by_one(seed):
    draw = random.Random(seed)
    with walker(LENGTH) as many, walker(LENGTH) as single:
        many.capture()
        single.capture()
        for turn in range(12):
            rows = draw.randint(1, 6)
            given = batch_of(rows, 100 * seed + turn)
            many.inputs.poison_pads(0)
            first = True
            path: list[list[int]] = [[] for _ in range(rows)]
            one_by_one: list[list[int]] = [[] for _ in range(rows)]
            for _ in range(draw.randint(1, 4)):
                steps = draw.randint(1, LENGTH)
                got = many.run_many(steps, given if first else None)
                assert got.counts is None
                assert got.live is None
                assert got.outputs["token"].shape == (steps, rows)
                for row, tokens in enumerate(rows_of(got)):
                    path[row] += tokens
                for index in range(steps):
                    out = single.run(given if first and index == 0 else None)["token"].tolist()
                    for row in range(rows):
                        one_by_one[row].append(out[row])
                first = False
                if draw.random() < 0.5:  # single steps between, which write the ring as well
                    for _ in range(draw.randint(1, LENGTH + 3)):
                        out = many.run()["token"].tolist()
                        single.run()
                        for row in range(rows):
                            path[row].append(out[row])
                            one_by_one[row].append(out[row])
            assert path == walks(given, len(path[0])) == one_by_one


def test_the_ring_goes_round_under_steps_one_by_one():
    with walker(3) as manager:
        manager.capture()
        given = batch_of(2, 4)
        manager.run(given)
        for _ in range(10):
            manager.run()
        many = manager.run_many(3)
        assert rows_of(many) == [tokens[11:] for tokens in walks(given, 14)]
        manager.run()
        # The next place, and no other, was written.
        again = manager._many.buffer.result(3, 2)
        assert rows_of(again) == [[t[14], *t[12:14]] for t in walks(given, 15)]


def test_outputs_of_any_shape_and_dtype_are_kept():
    outputs = {"pair": ((2,), torch.float32), "token": ((), torch.int32), "even": ((), torch.bool)}
    with walker(5, outputs=outputs) as manager:
        manager.capture()
        given = batch_of(3, 1)
        many = manager.run_many(4, given)
        expected = torch.tensor(walks(given, 4)).t()
        assert many.outputs.keys() == outputs.keys()
        assert torch.equal(many.outputs["token"], expected.int())
        assert torch.equal(many.outputs["even"], expected % 2 == 0)
        positions = given["position"] + torch.arange(4)[:, None]
        assert torch.equal(many.outputs["pair"], torch.stack([expected, positions], 2).float())
        with pytest.raises(TypeError):
            many.outputs["token"] = expected


@pytest.mark.parametrize("ends", [(3,), (3, 17, 20), "even"])
@pytest.mark.parametrize("seed", range(4))
def test_rows_end_where_they_say_so(ends, seed):
    stop = Stop("even") if ends == "even" else Stop("token", ends)
    values = tuple(range(0, 31, 2)) if ends == "even" else ends
    draw = random.Random(seed)
    with walker(LENGTH, stop=stop) as manager:
        manager.capture()
        for turn in range(6):
            rows = draw.randint(1, 6)
            given = batch_of(rows, 10 * seed + turn)
            manager.inputs.poison_pads(0)
            lengths = [draw.randint(1, LENGTH) for _ in range(3)]
            tokens = walks(given, sum(lengths))
            belonging = [counted(t, values) for t in tokens]
            at = 0
            for index, steps in enumerate(lengths):
                many = manager.run_many(steps, given if index == 0 else None)
                expected = [min(steps, max(0, n - at)) for n in belonging]
                assert many.counts.tolist() == expected
                got = [row[:n] for row, n in zip(rows_of(many), expected, strict=True)]
                assert got == [t[at : at + n] for t, n in zip(tokens, expected, strict=True)]
                at += steps
                ended = [any(x in values for x in t[:at]) for t in tokens]
                assert many.live.tolist() == [not e for e in ended]


def test_a_row_ended_by_a_single_step_stays_ended_and_a_batch_makes_it_live():
    with walker(4, stop=Stop("token", (walk(1, 0, 2)[1],))) as manager:
        manager.capture()
        given = {"token": torch.tensor([1, 2]).int(), "position": torch.tensor([0, 0])}
        assert manager.run_many(1, given).live.tolist() == [True, True]
        manager.run()
        many = manager.run_many(2)
        assert many.counts.tolist() == [0, 2]
        assert many.live.tolist()[0] is False
        assert manager.run_many(1, given).counts.tolist() == [1, 1]
        # A batch by run() as well.
        manager.run_many(2, given)
        manager.run(given)
        assert manager.run_many(1).counts.tolist() == [1, 1]


def test_counts_and_what_a_call_costs():
    step = Walk()
    with walker(LENGTH, step=step) as manager:
        report = manager.capture()
        assert any("one by one" in note for note in report.notes)
        calls = step.calls
        manager.run_many(5, batch_of(3))
        manager.run_many(8)
        manager.run()
        stats = manager.stats()
        assert step.calls == calls
        assert (stats.steps, stats.replays, stats.rows) == (14, 14, 42)
        assert stats.padding_rows == 14
        assert [(b.size, b.replays) for b in stats.buckets] == [(2, 0), (4, 14), (6, 0)]
        assert not stats.fallbacks


def test_nothing_is_added_where_no_ring_is_asked_for():
    with walker(LENGTH) as kept:
        with_ring = kept.capture().census
    from toy import manager_of

    plain = manager_of()
    census = plain.capture().census
    assert [row.operation for row in with_ring.rows].count("ring") == 1
    assert "ring" not in [row.operation for row in census.rows]
    with pytest.raises(StateError, match=r"without a ring.*Ring\(length=, outputs=\)"):
        plain.run_many(1)
    plain.close()


@pytest.mark.parametrize("every", [1, 3, 5])
def test_sampled_verification_checks_the_right_replays(every):
    with walker(LENGTH, settings=Settings(verify_every=every), stop=Stop("token", (3,))) as manager:
        manager.capture()
        given = batch_of(3, 2)
        path = [[] for _ in range(3)]
        for index, steps in enumerate((4, 1, 8, 2, 7)):
            many = manager.run_many(steps, given if index == 0 else None)
            for row, tokens in enumerate(rows_of(many)):
                path[row] += tokens
            stats = manager.stats()
            assert stats.verified == stats.replays // every
        assert path == walks(given, 22)


@pytest.mark.parametrize("steps", [4, 8])
def test_sampled_verification_finds_a_wrong_replay_in_the_middle(steps):
    """The steps of the call go on eagerly, from the one that was found on."""
    with walker(LENGTH, settings=Settings(verify_every=3)) as manager:
        manager.capture()
        given = batch_of(2)
        path = rows_of(manager.run_many(2, given))
        recording = manager.recording(2)
        replay = recording.replay

        def wrong():
            replay()
            recording.outputs["pair"].add_(1)
            manager.inputs["token"].add_(1)

        recording.replay = wrong
        path = [a + b for a, b in zip(path, rows_of(manager.run_many(steps)), strict=True)]
        assert path == walks(given, 2 + steps)
        stats = manager.stats()
        assert stats.replays == 2
        assert stats.verified == 0
        assert stats.fallbacks == {"verification": steps}
        more = rows_of(manager.run_many(2))
        path = [a + b for a, b in zip(path, more, strict=True)]
        assert path == walks(given, 4 + steps)


def test_too_many_steps_and_bad_numbers_are_refused_before_anything_runs():
    step = Walk()
    with walker(LENGTH, step=step) as manager:
        with pytest.raises(StateError, match=r"run_many\(\) was called on a manager that is new"):
            manager.run_many(1, batch_of(2))
        manager.capture()
        manager.run(batch_of(2))
        before = manager.inputs["token"].clone()
        with pytest.raises(InputError, match=r"at most 8 steps.*found 9.*Ring\(length=9"):
            manager.run_many(9)
        for bad in (0, -1, True, 2.0, None):
            with pytest.raises(InputError, match="at least 1, found"):
                manager.run_many(bad)
        with pytest.raises(InputError, match="unknown slot"):
            manager.run_many(2, {"x": before})
        assert torch.equal(manager.inputs["token"], before)
        assert manager.stats().replays == 1
    with pytest.raises(StateError, match="closed"):
        manager.run_many(1)


class TwoWays(Walk):
    """Holds a tensor that the recordings read."""

    def __init__(self):
        super().__init__()
        self.offset = torch.zeros((), dtype=torch.int32)

    def __call__(self, inputs):
        outputs = super().__call__(inputs)
        return {**outputs, "token": outputs["token"] + self.offset}


def test_a_rebound_tensor_is_found_once_a_call():
    step = TwoWays()
    with walker(LENGTH, step=step) as manager:
        manager.capture()
        manager.run_many(2, batch_of(2))
        step.offset = torch.ones((), dtype=torch.int32)
        with pytest.raises(StaleRecordingError, match="offset"):
            manager.run_many(2)
        assert manager.stats().replays == 2


@pytest.mark.parametrize("rows", [3, 6, 9])
def test_batches_without_a_recording_run_eagerly_with_the_same_results(rows, caplog):
    step = Walk()
    step.fail_at = {4, 6}
    with walker(LENGTH, step=step, stop=Stop("token", (3, 17))) as manager:
        manager.capture()
        assert manager.stats().failures.keys() == {4, 6}
        step.fail_at = set()
        given = batch_of(rows, 3)
        tokens = walks(given, 8 + 5 + 1 + 2)
        belonging = [counted(t, (3, 17)) for t in tokens]
        at = 0
        for index, steps in enumerate((8, 5, None, 2)):
            if steps is None:  # one by one between
                assert manager.run()["token"].tolist() == [t[at] for t in tokens]
                at += 1
                continue
            many = manager.run_many(steps, given if index == 0 else None)
            assert rows_of(many) == [t[at : at + steps] for t in tokens]
            assert many.counts.tolist() == [min(steps, max(0, n - at)) for n in belonging]
            at += steps
        reason = "above_max_batch" if rows > 6 else "not_recorded"
        assert manager.stats().fallbacks == {reason: 16}
        assert manager.stats().rows == 16 * rows
        assert sum("runs eagerly" in record.message for record in caplog.records) == 1
        # A batch that is recorded comes next, and the large one again.
        small = batch_of(2, 5)
        assert rows_of(manager.run_many(4, small)) == walks(small, 4)
        assert rows_of(manager.run_many(4, given)) == [t[:4] for t in tokens]
        assert manager.run_many(1, given).counts.tolist() == [1] * rows


def test_fallbacks_are_errors_where_the_user_says_so():
    step = Walk()
    with walker(LENGTH, step=step, settings=Settings(strict=True)) as manager:
        manager.capture()
        calls = step.calls
        with pytest.raises(FallbackError, match=r"9 rows.*maximum 6"):
            manager.run_many(2, batch_of(9))
        assert step.calls == calls


@pytest.mark.parametrize(
    ("outputs", "stop", "message"),
    [
        ({"tokens": ((), torch.int32)}, None, r"keeps output 'tokens'.*even, pair, token"),
        (
            {"token": ((), torch.int64)},
            None,
            r"one element a row of torch.int64, found.*torch.int32",
        ),
        (
            {"pair": ((3,), torch.float32)},
            None,
            r"rows of shape \(3,\) of torch.float32, found shape \(6, 2\)",
        ),
        (TOKENS, Stop("pair", (1,)), "'pair' to have one element a row, found"),
        (TOKENS, Stop("token"), "one element a row of torch.bool, found"),
        (TOKENS, Stop("done"), "keeps output 'done'"),
    ],
)
def test_an_output_that_is_not_what_was_declared_is_named(outputs, stop, message):
    manager = walker(LENGTH, outputs=outputs, stop=stop, settings=Settings(strict=True))
    with pytest.raises(CaptureError, match=message):
        manager.capture()


@pytest.mark.parametrize("length", [0, -1, 2.0, True])
def test_a_ring_has_a_length(length):
    with pytest.raises(InputError, match=r"Ring\.length: expected an integer of at least 1"):
        Ring(length, TOKENS)
    with pytest.raises(InputError, match="at least one output"):
        Ring(1, {})


def test_capture_leaves_the_ring_as_it_was_and_counts_it_in_verification():
    """A step whose eager run gives other tokens than its replay is refused through the ring as well."""
    with walker(LENGTH) as manager:
        buffer = manager._many.buffer
        manager.capture()
        assert all(not tensor.any() for tensor in buffer.tensors)
        assert [b.largest_difference for b in manager.report.buckets] == [0.0] * 3


def test_results_of_the_same_kind_are_the_same_views():
    with walker(LENGTH) as manager:
        manager.capture()
        assert manager.run_many(4, batch_of(2)) is manager.run_many(4)


def test_a_call_allocates_nothing_whatever_its_number_of_steps():
    with walker(LENGTH) as manager:
        manager.capture()
        given = batch_of(2, 1)
        ring = manager._many.buffer
        ring.begin(1, 2)
        assert memory_events(lambda: [ring.begin(steps, 2) for steps in range(1, LENGTH + 1)]) == 0
        assert int(ring.left) == LENGTH
        for steps in (3, 1, 3, 2):
            assert rows_of(manager.run_many(steps, given)) == walks(given, steps)


@pytest.mark.parametrize("values", [(1.5,), (2**70,), 5, ("2",), (True,), None])
def test_what_ends_a_row_is_integers(values):
    with pytest.raises(InputError, match=r"Stop\.values: expected a tuple of integers"):
        Stop("token", values)


@pytest.mark.parametrize(
    "outputs",
    [
        {"y": 3},
        {"y": ((-1,), torch.int32)},
        {"y": ("a", torch.int32)},
        {"y": ((), "int32")},
        {"y": torch.int32},
        ["y"],
    ],
)
def test_what_a_ring_keeps_is_said_by_shape_and_dtype(outputs):
    with pytest.raises(InputError, match=r"Ring\.outputs.*expected"):
        Ring(2, outputs)


@pytest.mark.parametrize(("dtype", "value"), [(torch.int32, 2**40), (torch.uint8, -1)])
def test_a_value_that_the_output_cannot_hold_ends_no_other_row(dtype, value):
    """Cut to the bits of the output it would be 0, or 255."""
    ring = Ring(2, {"y": ((), dtype)}, Stop("y", (value,)))
    manager = manager_of(lambda i: {"y": i["x"][:, 0].to(dtype)}, ring=ring)
    with pytest.raises(CaptureError, match=rf"is {value}, expected a value of its dtype"):
        manager.run_many(2, {"x": torch.zeros(2, 3)}) if manager.capture() else None
