"""What meets a capture() between two of its phases, when the lock is free: from its own progress function
or from another thread."""

from __future__ import annotations

import threading

import pytest
from loop_fakes import LoopingRecorder
from walks import batch_of, walker, walks

from graphcap.errors import StateError

both = pytest.mark.parametrize("thread", [False, True], ids=["itself", "another thread"])
moments = pytest.mark.parametrize(
    "moment", [0, 1, 3, 4, 6, 8, 9]
)  # of 10, the last when all is done


def captured_and_met(manager, moment, thread, call):
    """capture(), met by `call` at its progress number `moment`. Returns what the call raised."""
    raised = []

    def meet():
        try:
            call()
        except StateError as error:
            raised.append(str(error))

    def progress(done, total, what):
        if done == moment:
            if not thread:
                meet()
                return
            other = threading.Thread(target=meet)
            other.start()
            other.join()

    manager.capture(progress)
    return raised


@both
@moments
def test_a_second_capture_is_refused_and_harms_nothing(moment, thread):
    with walker(8, recorder=LoopingRecorder()) as manager:
        (raised,) = captured_and_met(manager, moment, thread, manager.capture)
        assert "while this manager is in use" in raised
        given = batch_of(3)
        assert manager.run_many(4, given).outputs["token"].t().tolist() == walks(given, 4)


@both
@moments
def test_a_close_ends_it_and_the_manager_stays_closed(moment, thread):
    manager = walker(8, recorder=LoopingRecorder())
    with pytest.raises(StateError, match="closed"):
        captured_and_met(manager, moment, thread, manager.close)
    assert manager.state == "closed"
    assert not any(manager.recorder.driver.open.values())
    for call in (manager.capture, manager.run, lambda: manager.run_many(2), manager.freeze):
        with pytest.raises(StateError, match="closed"):
            call()


def test_abandon_does_not_open_a_closed_manager_again():
    manager = walker(8, recorder=LoopingRecorder())
    manager.capture()
    manager.close()
    manager.abandon()
    assert manager.state == "closed"
    with pytest.raises(StateError, match="closed"):
        manager.capture()


def test_a_capture_that_failed_can_be_tried_again():
    with walker(8, recorder=LoopingRecorder()) as manager:

        def interrupt(done, total, what):
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            manager.capture(interrupt)
        assert manager.state == "new"
        manager.capture()
        given = batch_of(3)
        assert manager.run_many(4, given).outputs["token"].t().tolist() == walks(given, 4)
