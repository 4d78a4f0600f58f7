"""Ctrl-C at any instruction of a call leaves a manager that serves the next one."""

from __future__ import annotations

import inspect
import signal
import sys
import threading

import pytest
from walks import batch_of, walker, walks

from graphcap import one_caller
from graphcap.errors import InputError, StateError
from graphcap.manager import CaptureManager
from graphcap.settings import Settings

CALLS = {
    "run": lambda manager: manager.run(),
    "run_many": lambda manager: manager.run_many(2),
    "replay": lambda manager: manager.replay(2, 2),
    "capture": lambda manager: manager.capture(),  # refused: it is captured already
    "refused": lambda manager: manager.run_many(0),
}


@pytest.fixture
def manager():
    made = walker(4, settings=Settings(verify="off"))
    made.capture()
    made.run(batch_of(2))
    yield made
    made.close()


def is_free(manager):
    """Whether the next call is served, also from another thread."""
    try:
        manager.run_many(1, batch_of(2))
    except StateError:
        return False
    found = []

    def other():
        try:
            found.append(manager.run_many(3, batch_of(2)).outputs["token"].t().tolist())
        except StateError:
            found.append(None)

    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    return found == [walks(batch_of(2), 3)]


class Interrupted:
    """The lock of a manager; a SIGINT comes in front of, or while, one of its methods returns."""

    def __init__(self, lock, method, when):
        self._lock, self._method, self._when = lock, method, when

    def _call(self, name, *args, **kwargs):
        hit = name == self._method
        if hit and self._when == "before":
            self._method = None
            signal.raise_signal(signal.SIGINT)
        result = getattr(self._lock, name)(*args, **kwargs)
        if hit and self._when == "after":
            self._method = None
            signal.raise_signal(signal.SIGINT)  # it is acquired, and nobody has been told
        return result

    def acquire(self, *args, **kwargs):
        return self._call("acquire", *args, **kwargs)

    def release(self):
        return self._call("release")

    def _is_owned(self):
        return self._call("_is_owned")


@pytest.mark.parametrize("call", ["run", "run_many", "replay", "capture"])
@pytest.mark.parametrize(
    ("method", "when"),
    [
        ("_is_owned", "before"),
        ("_is_owned", "after"),
        ("acquire", "before"),
        ("acquire", "after"),
        ("release", "after"),
    ],
)
def test_an_interrupt_while_the_lock_is_taken_or_given_back(manager, call, method, when):
    lock = manager._lock
    manager._lock = Interrupted(lock, method, when)
    with pytest.raises(KeyboardInterrupt):
        CALLS[call](manager)
    manager._lock = lock
    assert not lock._is_owned()
    assert is_free(manager)


def _gives_back(frame):
    """Whether the instruction that comes next belongs to giving the lock back: what remains."""
    if frame.f_lineno is None:  # of the unwinding itself
        return True
    line = frame.f_lineno - frame.f_code.co_firstlineno
    lines = _source_of(frame.f_code)
    return any(word in lines[line] for word in ("lock.release()", "try:  # noqa", "finally:"))


_sources: dict[object, list[str]] = {}


def _source_of(code):
    if code not in _sources:
        _sources[code] = inspect.getsource(code).splitlines()
    return _sources[code]


@pytest.mark.parametrize("call", ["run", "run_many", "replay", "refused"])
def test_an_interrupt_in_front_of_any_instruction_of_the_lock(manager, call):
    """Python looks for interrupts after calls and at the start of functions; here they come in front of
    each single instruction of the module that keeps the lock, until the lock is given back."""
    at = 0
    while True:
        left = [at]

        def trace(frame, event, argument, left=left):
            if frame.f_code.co_filename != one_caller.__file__:
                return None
            frame.f_trace_opcodes = True
            if event == "opcode" and not _gives_back(frame):
                left[0] -= 1
                if left[0] < 0:
                    sys.settrace(None)
                    raise KeyboardInterrupt
            return trace

        sys._getframe().f_trace_opcodes = True  # otherwise 3.12 tells of none
        sys.settrace(trace)
        interrupted = False
        try:
            CALLS[call](manager)
        except InputError:
            pass
        except KeyboardInterrupt:
            interrupted = True
        finally:
            sys.settrace(None)
        assert not manager._lock._is_owned(), f"instruction {at}"
        if not interrupted:
            break
        at += 1
    assert at > 20
    assert is_free(manager)


def test_a_call_from_the_step_itself_and_from_another_thread_are_refused():
    refused = []

    class Own:
        manager = None

        def __call__(self, inputs):
            if self.manager is not None and self.manager.state == "recorded":
                try:
                    self.manager.run()
                except StateError as error:
                    refused.append(str(error))
            token = inputs["token"]
            token.add_(1)
            return {"token": token}

    step = Own()
    with walker(step=step, settings=Settings(verify="off")) as manager:
        manager.capture()
        step.manager = manager
        given = {name: tensor.repeat(9) for name, tensor in batch_of(1).items()}
        manager.run(given)  # eagerly, above the maximum: the step runs
        (text,) = refused
        assert "by its own step" in text
        assert not manager._lock._is_owned()

        entered, leave = threading.Event(), threading.Event()
        step.manager = None

        def held():
            with manager._alone("another call"):
                entered.set()
                leave.wait()

        thread = threading.Thread(target=held)
        thread.start()
        entered.wait()
        for refused_call in (*CALLS.values(), lambda m: m.drop(2, "reason", "text")):
            with pytest.raises(StateError, match="in use, by another thread"):
                refused_call(manager)
        leave.set()
        thread.join()
        assert manager.run(batch_of(2))["token"].tolist() == (batch_of(2)["token"] + 1).tolist()


def test_the_decorated_methods_keep_their_names_and_documentation():
    for name in ("run", "run_many", "replay"):
        method = getattr(CaptureManager, name)
        assert method.__name__ == name
        assert "Raises:" in method.__doc__
    assert list(inspect.signature(CaptureManager.run_many).parameters) == [
        *("self", "steps", "batch", "rows")
    ]
