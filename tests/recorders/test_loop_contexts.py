"""A loop is launched and given back in the context that it was made in, whichever the thread has."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from loop_fakes import CONTEXT, FakeDriver, LoopingRecorder
from walks import batch_of, walker, walks

from graphcap.errors import BackendError
from graphcap.recorders.loop import GraphLoop, LoopDriver


def made(driver: FakeDriver) -> GraphLoop:
    driver.bodies[11] = lambda: None
    left, live = torch.ones(1, dtype=torch.int32), torch.ones(2, dtype=torch.bool)
    return GraphLoop(LoopDriver(driver), 11, left, live, lambda: 0)


def in_a_new_thread(call: Any) -> Any:
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(call())
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if isinstance(found[0], BaseException):
        raise found[0]
    return found[0]


def test_a_thread_that_has_no_context_yet_launches_and_is_left_without_one() -> None:
    driver = FakeDriver()
    loop = made(driver)

    def call() -> list[int]:
        loop.launch()
        loop.launch()
        return list(driver.contexts[threading.get_ident()])

    assert in_a_new_thread(call) == []
    assert driver.runs == 2
    assert driver.default_streams == [CONTEXT, CONTEXT]
    in_a_new_thread(loop.close)
    assert not any(driver.open.values())


def test_a_thread_that_works_on_another_device_launches_on_the_loops_own_default_stream() -> None:
    driver = FakeDriver()
    loop = made(driver)
    stack = driver.contexts[threading.get_ident()]
    stack.append(99)
    loop.launch()
    assert stack == [CONTEXT, 99]
    stack.pop()
    loop.launch()
    assert driver.default_streams == [CONTEXT, CONTEXT]


def test_a_launch_that_fails_elsewhere_leaves_the_thread_its_context() -> None:
    driver = FakeDriver()
    loop = made(driver)
    stack = driver.contexts[threading.get_ident()]
    stack.append(99)
    driver.fails = {"cuGraphLaunch"}
    with pytest.raises(BackendError, match="cuGraphLaunch failed"):
        loop.launch()
    assert stack == [CONTEXT, 99]


def test_a_manager_goes_on_in_a_thread_that_has_done_nothing_on_the_device() -> None:
    """A call that goes on is one launch and no operation of torch, which would have made a context."""
    recorder = LoopingRecorder()
    with walker(8, recorder=recorder) as manager:
        manager.capture()
        given = batch_of(3)
        manager.run_many(4, given)
        many = in_a_new_thread(lambda: manager.run_many(4))
        assert many.outputs["token"].t().tolist() == [row[4:] for row in walks(given, 8)]


def test_an_interrupt_while_a_loop_is_made_leaves_nothing() -> None:
    class Interrupted(FakeDriver):
        def cuGraphUpload(self, executable: int, stream: int) -> Any:
            raise KeyboardInterrupt

    driver = Interrupted()
    with pytest.raises(KeyboardInterrupt):
        made(driver)
    assert not any(driver.open.values())
