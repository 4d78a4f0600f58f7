"""GraphLoop on a driver that runs its graphs on the host: what is made, run, refused and given back."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from loop_fakes import FakeDriver

from graphcap.errors import BackendError, StateError
from graphcap.recorders import loop_probe
from graphcap.recorders.base import Recording
from graphcap.recorders.loop import GraphLoop, LoopDriver
from graphcap.recorders.loop_kernels import BEGIN, GO_ON, PTX

MAKING = [
    "cuCtxGetCurrent",
    "cuGraphCreate",
    "cuModuleLoadData",
    "cuModuleGetFunction",
    "cuGraphAddKernelNode",
    "cuGraphConditionalHandleCreate",
    "cuGraphAddNode",
    "cuGraphAddChildGraphNode",
    "cuModuleGetFunction",
    "cuGraphAddKernelNode",
    "cuGraphInstantiate",
    "cuGraphUpload",
]


class Body:
    """A graph that counts its runs and ends one more row at each of them.

    Attributes:
        source: what each launch copies into `place`, in whose last word `left` lies.
    """

    def __init__(
        self, driver: FakeDriver, rows: int, ends: int | None = None, begins: bool = False
    ) -> None:
        self.runs = 0
        self.place, self.source = (torch.full((40,), n, dtype=torch.int64) for n in (-7, 5))
        self.left = self.place[-1:].view(torch.int32)[:1]
        self.live = torch.ones(rows, dtype=torch.bool)
        self._ends = ends
        driver.bodies[11] = self.run
        begin = (self.place, self.source) if begins else None
        self.loop = GraphLoop(LoopDriver(driver), 11, self.left, self.live, lambda: 3, begin)

    def run(self) -> None:
        self.runs += 1
        if self._ends is not None and self.runs >= self._ends:
            self.live[(self.runs - self._ends) % self.live.numel()] = False


@pytest.mark.parametrize("rows", [1, 3, 32, 100])
@pytest.mark.parametrize("steps", [1, 2, 9])
def test_runs_as_often_as_is_left(rows: int, steps: int) -> None:
    driver = FakeDriver()
    body = Body(driver, rows)
    kernel = ["cuModuleLoadData", "cuModuleGetFunction", "cuGraphAddKernelNode"]
    rest = MAKING[MAKING.index("cuGraphConditionalHandleCreate") : -4]
    assert driver.calls == [*MAKING[:2], *rest, *kernel, *MAKING[-2:]]
    for launches in (1, 2):
        body.left.fill_(steps)
        body.loop.launch()
        assert body.runs == driver.runs == launches * steps
        assert int(body.left) == 0
    assert driver.streams == [3, 3]


@pytest.mark.parametrize("steps", [1, 5])
def test_a_loop_that_begins_by_a_copy_is_still_one_launch(steps: int) -> None:
    driver = FakeDriver()
    body = Body(driver, 3, begins=True)
    assert driver.calls == MAKING
    body.source[-1] = steps
    for launches in (1, 2, 3):
        body.place.fill_(-9)
        body.loop.launch()
        assert body.runs == launches * steps
        assert body.place[:-1].tolist() == [5] * 39
        assert int(body.left) == 0
    assert driver.calls == [*MAKING, *["cuCtxGetCurrent", "cuGraphLaunch"] * 3]
    body.loop.close()
    assert not any(driver.open.values())


def test_the_stream_of_each_launch_is_the_current_one_and_wrapped_once() -> None:
    driver = FakeDriver()
    wrapped = []
    driver.CUstream = lambda handle: wrapped.append(handle) or handle
    streams = iter((3, 3, 3, 8, 8, 3, 0))
    loop = GraphLoop(
        LoopDriver(driver), 11, torch.zeros(1).int(), torch.ones(1).bool(), lambda: next(streams)
    )
    driver.bodies[11] = lambda: None
    wrapped.clear()  # of the upload, and of the launches before the first
    for _ in range(5):
        loop.launch()
    assert driver.streams == [3, 8, 8, 3, 0]
    assert wrapped == [8, 3, 0]


def test_ends_with_the_last_live_row_and_runs_at_least_once() -> None:
    driver = FakeDriver()
    body = Body(driver, rows=3, ends=4)
    body.left.fill_(100)
    body.loop.launch()
    assert body.runs == 6
    assert int(body.left) == 94
    body.loop.launch()
    assert body.runs == 7


def test_what_was_made_is_given_back_once() -> None:
    driver = FakeDriver()
    body = Body(driver, 2)
    assert [len(made) for made in driver.open.values()] == [1, 1]
    body.loop.close()
    body.loop.close()
    assert not any(driver.open.values())
    # The executable before the graph that it was made of.
    assert driver.calls[-2:] == ["cuGraphExecDestroy", "cuGraphDestroy"]
    with pytest.raises(StateError, match="capture again"):
        body.loop.launch()
    assert body.runs == 0


@pytest.mark.parametrize("call", dict.fromkeys(MAKING))
def test_a_call_that_fails_is_named_and_leaves_nothing(call: str) -> None:
    driver = FakeDriver()
    driver.fails = {call}
    with pytest.raises(BackendError, match=f"{call} failed: .*NOT_SUPPORTED"):
        Body(driver, 2, begins=True)
    assert not any(driver.open.values())
    driver.fails = set()
    assert Body(driver, 2, begins=True).runs == 0


def test_a_launch_that_fails_is_an_error() -> None:
    driver = FakeDriver()
    body = Body(driver, 2)
    driver.fails = {"cuGraphLaunch"}
    with pytest.raises(BackendError, match="cuGraphLaunch failed"):
        body.loop.launch()


def test_a_thread_without_a_context_is_told_so() -> None:
    driver = FakeDriver()
    driver.cuCtxGetCurrent = lambda: (driver.CUresult.CUDA_SUCCESS, 0)
    with pytest.raises(BackendError, match="no CUDA context"):
        Body(driver, 2)


def test_the_kernel_is_compiled_once_for_all_loops_of_a_driver() -> None:
    fake = FakeDriver()
    driver = LoopDriver(fake)
    left, live = torch.ones(1, dtype=torch.int32), torch.ones(2, dtype=torch.bool)
    for _ in range(3):
        GraphLoop(driver, 11, left, live, lambda: 3).close()
    assert fake.calls.count("cuModuleLoadData") == 1


def test_the_older_name_of_a_call_is_used_where_there_is_one() -> None:
    class Older(FakeDriver):
        def cuGraphAddNode_v2(self, *arguments):
            return FakeDriver.cuGraphAddNode(self, *arguments)

        def cuGraphAddNode(self, *arguments):
            raise AssertionError("takes no edge data")

    driver = Older()
    body = Body(driver, 2)
    body.left.fill_(4)
    body.loop.launch()
    assert body.runs == 4


def test_bindings_or_drivers_without_conditional_nodes_are_refused() -> None:
    with pytest.raises(BackendError, match=r"no conditional graph nodes; install 12\.4"):
        LoopDriver(SimpleNamespace())
    driver = FakeDriver()

    def missing(*_):
        raise RuntimeError('Function "cuGraphConditionalHandleCreate" not found')

    driver.cuGraphConditionalHandleCreate = missing
    with pytest.raises(BackendError, match="ConditionalHandleCreate cannot be called: Function"):
        Body(driver, 2)
    assert not any(driver.open.values())


def test_no_bindings_no_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(BackendError, match=r"pip install 'vllm-graphcap\[cuda\]'"):
        LoopDriver.loaded.__wrapped__()


def test_the_bindings_have_every_name_that_is_used() -> None:
    driver = pytest.importorskip("cuda.bindings.driver")
    calls = {*MAKING, "cuGraphLaunch", "cuGraphExecDestroy", "cuGraphDestroy"}
    calls |= {"cuCtxPushCurrent", "cuCtxPopCurrent"}
    assert all(hasattr(driver, call) for call in calls)
    params = driver.CUgraphNodeParams()
    params.type = driver.CUgraphNodeType.CU_GRAPH_NODE_TYPE_CONDITIONAL
    params.conditional.handle = driver.CUgraphConditionalHandle(2**40 + 1)
    params.conditional.type = driver.CUgraphConditionalNodeType.CU_GRAPH_COND_TYPE_WHILE
    params.conditional.size = 1
    params.conditional.ctx = driver.CUcontext(7)
    # Written through to the structure itself, which the driver reads.
    assert int(params.conditional.handle) == 2**40 + 1
    assert (params.conditional.size, int(params.conditional.ctx)) == (1, 7)
    assert params.conditional.type == driver.CUgraphConditionalNodeType.CU_GRAPH_COND_TYPE_WHILE
    assert driver.CU_GRAPH_COND_ASSIGN_DEFAULT == 1
    kernel = driver.CUDA_KERNEL_NODE_PARAMS()
    kernel.func, kernel.kernelParams = driver.CUfunction(9), 4096
    assert kernel.kernelParams == 4096
    # An edge whose data are all zero is a dependency on the whole node.
    edge = driver.CUgraphEdgeData()
    assert (edge.from_port, edge.to_port, int(edge.type)) == (0, 0, 0)


def test_the_kernel_assembles(tmp_path: Path) -> None:
    backends = pytest.importorskip("triton.backends")
    assembler = Path(backends.__file__).parent / "nvidia" / "bin" / "ptxas"
    if not assembler.exists():
        pytest.skip("this Triton brings no ptxas")
    assert all(f".entry {name} (" in PTX for name in (BEGIN, GO_ON))
    source = tmp_path / "kernel.ptx"
    source.write_text(PTX)
    for arch in ("sm_75", "sm_80", "sm_90"):
        made = subprocess.run(
            [assembler, "-c", f"-arch={arch}", "-o", tmp_path / "kernel.o", source],
            capture_output=True,
            text=True,
        )
        assert made.returncode == 0, made.stderr


class Trial:
    def __init__(self, found):
        self.found = found

    def run(self):
        if isinstance(self.found, Exception):
            raise self.found
        return self.found


def test_the_probe_believes_only_what_it_sees(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop_probe, "keeps_graphs", lambda: True)
    good = loop_probe.run_trial(Trial((3.0, 4.0, 4)))
    assert good.works
    assert "ms" in good.detail
    wrong = loop_probe.run_trial(Trial((1.0, 2.0, 4)))
    assert not wrong.works
    assert "gave 1 and 2 with 4 left, expected 3, 4 and 4 left" in wrong.detail
    failed = loop_probe.run_trial(Trial(BackendError("cuGraphAddNode failed: 801\nmore")))
    assert (failed.works, failed.detail) == (False, "cuGraphAddNode failed: 801")
    monkeypatch.setattr(loop_probe, "keeps_graphs", lambda: False)
    old = loop_probe.run_trial(Trial((3.0, 4.0, 4)))
    assert not old.works
    assert "2.8 or later" in old.detail


def test_other_devices_and_recordings_say_why_they_have_no_loop() -> None:
    probe = loop_probe.probe_loops(torch.device("cpu"))
    assert (probe.works, probe.detail) == (False, "cpu devices have no graphs")
    with pytest.raises(BackendError, match="makes no graphs"):
        Recording.repeated(object(), torch.zeros(1), torch.zeros(1))
