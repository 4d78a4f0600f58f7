"""Ctrl-C in front of any line of graphcap in a call: the next call is served, and right."""

from __future__ import annotations

import linecache
import sys
from pathlib import Path

import pytest
import torch
from loop_fakes import LoopingRecorder
from walks import batch_of, counted, walker, walks

import graphcap
from graphcap.errors import InputError, StateError
from graphcap.recorders import loop
from graphcap.ring import Stop
from graphcap.settings import Settings

PACKAGE = str(Path(graphcap.__file__).parent)
LOCK = {"_alone", "call"}  # of one_caller, see test_interrupts
FIRST, OTHER, LAST = batch_of(2, 1), batch_of(3, 5), batch_of(3, 2)
END = (walks(FIRST, 2)[0][1],)
LARGE = {name: tensor.repeat(3) for name, tensor in OTHER.items()}
CALLS = {
    "run_many": lambda manager: manager.run_many(3),
    "run_many of a batch": lambda manager: manager.run_many(4, OTHER),
    "run_many of a large batch": lambda manager: manager.run_many(2, LARGE),
    "run of a batch": lambda manager: manager.run(OTHER),
    "run": lambda manager: manager.run(),
    "replay": lambda manager: manager.replay(2, 2),
}


def interrupted(call, at):
    """Call, with a KeyboardInterrupt in front of the line number `at` that is reached. Returns that line;
    None: so many were not reached."""
    left, where = at, None

    def trace(frame, event, argument):
        code = frame.f_code
        return line if code.co_filename.startswith(PACKAGE) and code.co_name not in LOCK else None

    def line(frame, event, argument):
        nonlocal left, where
        if event == "line":
            left -= 1
            if left < 0:
                name, number = frame.f_code.co_filename, frame.f_lineno
                where = f"{Path(name).name}:{number}: {linecache.getline(name, number).strip()}"
                sys.settrace(None)
                raise KeyboardInterrupt
        return line

    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        assert where is not None
    finally:
        sys.settrace(None)
    return where


def captured(looped, stop=END):
    recorder = LoopingRecorder() if looped else None
    options = {"settings": Settings(verify="off"), "stop": Stop("token", stop)}
    manager = walker(8, recorder=recorder, **options)
    manager.capture()
    return manager


def is_right(manager, steps, given, ends):
    """Whether run_many gives what plain Python does, for a batch whose rows are all live."""
    many = manager.run_many(steps, given)
    tokens = walks(LAST, steps)
    counts = [counted(row, ends) for row in tokens]
    got = many.outputs["token"].t().tolist()
    return many.counts.tolist() == counts and all(
        row[:n] == expected[:n] for row, expected, n in zip(got, tokens, counts, strict=True)
    )


@pytest.mark.parametrize("looped", [True, False], ids=["loop", "replays"])
@pytest.mark.parametrize("call", CALLS)
def test_the_next_batch_is_served_and_right(looped, call):
    with captured(looped) as manager:
        at = 0
        while True:
            manager.run_many(8, FIRST)
            where = interrupted(lambda: CALLS[call](manager), at)
            if where is None:
                break
            assert not manager._lock._is_owned(), where
            assert is_right(manager, 8, LAST, END), where
            at += 1
        assert at > 50


@pytest.mark.parametrize("looped", [True, False], ids=["loop", "replays"])
def test_a_batch_that_had_come_in_goes_on_with_all_its_rows(looped):
    """And not with the rows that had ended of the batch before."""
    other = {name: tensor[:2] for name, tensor in OTHER.items()}  # as many rows
    with captured(looped, (walks(FIRST, 1)[0][0],)) as manager:
        went_on = at = 0
        while True:
            assert manager.run_many(1, FIRST).live.tolist() == [False, True]
            where = interrupted(lambda: manager.run(other), at)
            if where is None:
                break
            at += 1
            came = torch.equal(manager.inputs["token"][:2], other["token"])
            try:
                many = manager.run_many(2)
            except InputError:
                continue  # interrupted in the copy: no batch is in place
            if came:
                went_on += 1
                assert int(many.counts[0]) > 0, where
        assert went_on > 5


def test_close_ends_what_an_interrupt_left():
    at = 0
    while True:
        manager = captured(True)
        driver = manager.recorder.driver
        manager.run_many(2, FIRST)
        where = interrupted(manager.close, at)
        if where is None:
            break
        at += 1
        if manager.state == "closed":
            for call in (*CALLS.values(), lambda manager: manager.run(LAST)):
                with pytest.raises(StateError):
                    call(manager)
        manager.close()
        assert manager.state == "closed", where
        # The one handle that was being given back is not given back twice.
        assert sum(map(len, driver.open.values())) <= (
            1 if where.startswith(Path(loop.__file__).name) else 0
        ), where
    assert at > 100
    manager.close()
