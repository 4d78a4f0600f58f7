"""The cuda recorder on a real device; counts come from the profiler and the driver, not from us."""

import gc
import threading

import pytest
import torch

from graphcap import (
    BucketLadder,
    BufferPool,
    CaptureManager,
    PadPolicy,
    Settings,
    Slot,
    StaticInputs,
)
from graphcap.census import GraphNode
from graphcap.decode.measure import activity
from graphcap.errors import CaptureError, StaleRecordingError, StateError
from graphcap.recorders.cuda import CudaRecorder
from graphcap.recorders.graph_nodes import GraphReader
from graphcap.recorders.select import probe_capture

WIDTH = 64
SLOTS = {
    "x": Slot((WIDTH,), torch.float32, PadPolicy.ZERO),
    "count": Slot((), torch.int64, PadPolicy.fill(-1)),
}


class ToyStep:
    """A linear layer on the pool, a random draw, and a slot that advances."""

    def __init__(self, pool, device):
        self.weight = torch.randn(WIDTH, WIDTH, device=device)
        self.pool = pool
        self.calls = 0
        self.fail_at = {}

    def __call__(self, inputs):
        self.calls += 1
        x = inputs["x"]
        hidden = self.pool.take("hidden", (x.shape[0], WIDTH), torch.float32)
        torch.mm(x, self.weight, out=hidden)
        if x.shape[0] in self.fail_at:
            self.fail_at[x.shape[0]](hidden)
        y = torch.relu(hidden) + 1
        self.pool.release("hidden")
        inputs["count"].add_(1)
        return {"y": y, "count": inputs["count"] * 2}


def make(device, max_batch=8, sizes=None, step_class=ToyStep, **settings):
    pool = BufferPool(device)
    step = step_class(pool, device)
    inputs = StaticInputs(max_batch, SLOTS, device)
    ladder = BucketLadder(sizes, max_batch) if sizes else None
    manager = CaptureManager(
        step, inputs, pool=pool, ladder=ladder, settings=Settings(recorder="cuda", **settings)
    )
    return manager, step


def batch(rows, device):
    return {
        "x": torch.randn(rows, WIDTH, device=device),
        "count": torch.arange(rows, device=device),
    }


def expected(step, x):
    return torch.relu(x @ step.weight) + 1


def test_capture_works_here(device):
    probe = probe_capture(device)
    assert probe.works, probe.detail


@pytest.mark.parametrize("rows", [1, 2, 3, 5, 8])
def test_promise_5_a_replay_equals_the_step(device, rows):
    manager, step = make(device)
    report = manager.capture()
    assert report.recorder == "cuda"
    assert not report.failures
    calls = step.calls
    given = batch(rows, device)
    out = manager.run(given)
    torch.testing.assert_close(out["y"], expected(step, given["x"]), rtol=1e-4, atol=1e-4)
    assert out["count"].tolist() == [2 * (i + 1) for i in range(rows)]
    assert step.calls == calls, "a replay must not run the model's Python"


def test_promise_1_one_launch_and_no_allocation_seen_by_the_profiler(device):
    manager, _ = make(device)
    manager.capture()
    for rows in range(1, 9):
        manager.run(batch(rows, device))
        seen = activity(manager.run, device)
        assert seen.calls == {"cudaGraphLaunch": 1}
        assert seen.allocations == 0


def test_a_batch_arrives_in_one_launch(device):
    manager, _ = make(device)
    manager.capture()
    on_device = batch(4, device)
    manager.run(on_device)
    seen = activity(lambda: manager.run(on_device), device)
    assert seen.launches == 2, seen.calls
    on_host = {name: tensor.cpu() for name, tensor in on_device.items()}
    manager.run(on_host)
    for rows in (4, 3):  # also when the row count changes with it
        given = {name: tensor[:rows] for name, tensor in on_host.items()}
        seen = activity(lambda given=given: manager.run(given), device)
        assert seen.launches == 2, seen.calls
        assert seen.calls["cudaGraphLaunch"] == 1


def test_host_batches_in_quick_succession_do_not_overwrite_each_other(device):
    manager, step = make(device)
    manager.capture()
    given = [batch(5, "cpu") for _ in range(40)]
    results = [manager.run(b)["y"].clone() for b in given]
    for b, result in zip(given, results, strict=True):
        want = expected(step, b["x"].to(device))
        torch.testing.assert_close(result, want, rtol=1e-4, atol=1e-4)


def test_the_census_is_the_graph_itself(device):
    recorder = CudaRecorder(device)
    x = torch.randn(4, 4, device=device)
    y = torch.empty_like(x)

    def step():
        torch.mm(x, x, out=y)
        y.copy_(x)
        y.zero_()
        return {"y": torch.relu(y)}

    recorder.warm_up(step)
    kept = torch.cuda.CUDAGraph(keep_graph=True)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        kept.capture_begin()
        step()
        kept.capture_end()
    from cuda.bindings import driver

    seen = GraphReader().nodes(driver.CUgraph(kept.raw_cuda_graph()))
    recording = recorder.record(step, 4)
    census = recording.census()
    assert sum(census.nodes.values()) == len(seen) == census.total
    kinds = {}
    for node in seen:
        kinds[node.kind] = kinds.get(node.kind, 0) + 1
    assert dict(census.nodes) == kinds
    assert sum(row.nodes for row in census.rows) == census.total
    kernels = [node for node in seen if isinstance(node, GraphNode) and node.kernel]
    assert kernels
    assert all(k.grid[0] >= 1 and k.block[0] >= 1 for k in kernels)
    assert sum(row.count for row in census.kernels) == len(kernels)


def test_random_numbers_advance_and_a_seed_reproduces_them(device):
    x = torch.zeros(1000, device=device)

    def step(inputs):
        return {"y": inputs["x"] + torch.rand_like(inputs["x"])}

    inputs = StaticInputs(2, {"x": Slot((1000,), torch.float32)}, device)
    manager = CaptureManager(step, inputs, settings=Settings(recorder="cuda"))
    assert not manager.capture().failures
    manager.run({"x": x[None]})
    torch.manual_seed(5)
    first = manager.run()["y"].clone()
    second = manager.run()["y"].clone()
    assert not torch.equal(first, second)
    torch.manual_seed(5)
    assert torch.equal(manager.run()["y"], first)
    assert torch.equal(manager.run()["y"], second)


@pytest.mark.parametrize(
    ("what", "fault"),
    [
        (".item()", lambda h: h.sum().item()),
        ("nonzero", lambda h: h.nonzero()),
        ("index", lambda h: h[h > 0]),
        (".cpu()", lambda h: h.cpu()),
        ("copies between", lambda h: h.copy_(torch.zeros(h.shape))),
        ("ValueError", lambda h: (_ for _ in ()).throw(ValueError("from the step"))),
        ("synchron|capture", lambda h: torch.cuda.synchronize()),
        ("synchron|capture", lambda h: torch.cuda.current_stream().synchronize()),
    ],
    ids=["item", "nonzero", "mask", "cpu", "host copy", "raise", "device sync", "stream sync"],
)
def test_promise_7_a_fault_costs_its_bucket_only(device, what, fault):
    manager, step = make(device)
    armed = threading.Event()

    def only_while_recording(hidden):
        if torch.cuda.is_current_stream_capturing():
            armed.set()
            fault(hidden)

    step.fail_at[4] = only_while_recording
    report = manager.capture()
    assert armed.is_set()
    assert set(report.failures) == {4}
    assert __file__ in report.failures[4]
    import re

    assert re.search(what, report.failures[4]), report.failures[4]
    for rows in (1, 2, 3, 4, 5, 8):
        given = batch(rows, device)
        out = manager.run(given)
        torch.testing.assert_close(out["y"], expected(step, given["x"]), rtol=1e-4, atol=1e-4)
    assert manager.stats().fallbacks == {"not_recorded": 2}
    assert torch.rand(3, device=device).isfinite().all()


def test_out_of_memory_while_recording_gives_everything_back(device):
    manager, step = make(device)

    def hog(hidden):
        if torch.cuda.is_current_stream_capturing():
            step.hogged = [torch.empty(2**38, device=device) for _ in range(2)]

    step.fail_at[2] = hog
    report = manager.capture()
    assert set(report.failures) == {2}
    assert "memory" in report.failures[2]
    for rows in (1, 3, 8):
        given = batch(rows, device)
        torch.testing.assert_close(
            manager.run(given)["y"], expected(step, given["x"]), rtol=1e-4, atol=1e-4
        )


def test_a_failed_recording_returns_its_memory(device):
    torch.cuda.synchronize()
    manager, step = make(device, max_batch=2, sizes=[2])

    def big_then_fail(hidden):
        if torch.cuda.is_current_stream_capturing():
            held = torch.zeros(2**28, device=device)  # 1 GiB in the graph's pool
            raise ValueError(f"after taking {held.numel()}")

    step.fail_at[2] = big_then_fail
    free_before, _ = torch.cuda.mem_get_info()
    assert set(manager.capture().failures) == {2}
    gc.collect()
    torch.cuda.empty_cache()
    free_after, _ = torch.cuda.mem_get_info()
    assert free_before - free_after < 64 * 2**20


def test_outputs_survive_allocator_churn(device):
    manager, step = make(device)
    manager.capture()
    given = batch(8, device)
    for _ in range(20):
        junk = [torch.full((2**20,), float("nan"), device=device) for _ in range(8)]
        del junk
        gc.collect()
        torch.cuda.empty_cache()
        out = manager.run(given)
        torch.testing.assert_close(out["y"], expected(step, given["x"]), rtol=1e-4, atol=1e-4)


def test_promise_6_a_rebound_weight_is_named_and_a_copied_one_is_used(device):
    manager, step = make(device)
    manager.capture()
    given = batch(3, device)
    with torch.no_grad():
        step.weight.copy_(torch.randn_like(step.weight))
    torch.testing.assert_close(
        manager.run(given)["y"], expected(step, given["x"]), rtol=1e-4, atol=1e-4
    )
    step.weight = torch.randn_like(step.weight)
    with pytest.raises(StaleRecordingError, match="weight"):
        manager.run(given)


def test_garbage_collection_is_held_during_capture_and_restored(device):
    manager, step = make(device, sizes=[8])
    seen = []

    def look(hidden):
        if torch.cuda.is_current_stream_capturing():
            seen.append(gc.isenabled())

    step.fail_at[8] = look
    assert gc.isenabled()
    manager.capture()
    assert seen == [False]
    assert gc.isenabled()


def test_smaller_buckets_share_the_memory_of_the_largest(device):
    class Wide(ToyStep):
        def __call__(self, inputs):
            # Intermediates outside the pool: 32 MiB a row in the graph's own memory.
            big = inputs["x"][:, :1] + torch.zeros(inputs["x"].shape[0], 2**23, device=device)
            return {"y": inputs["x"] + big[:, :WIDTH]}

    manager, _ = make(device, step_class=Wide)
    report = manager.capture()
    assert not report.failures
    sizes = {bucket.size: bucket.nbytes for bucket in report.buckets}
    assert sizes[8] >= 8 * 2**25
    assert sum(sizes[size] for size in (1, 2, 4)) < 32 * 2**20
    # 2 MiB is the allocator's granularity for small blocks, three buckets' worth of graphs included


def test_recording_inside_a_capture_is_refused(device):
    recorder = CudaRecorder(device)
    x = torch.ones(4, device=device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), pytest.raises(StateError, match="another capture"):
        recorder.record(lambda: {"y": x + 1}, 4)


def test_other_threads_may_use_the_device_during_capture(device):
    manager, step = make(device)
    stop = threading.Event()
    done = []

    def work():
        while not stop.is_set():
            # Not random numbers: torch's generator belongs to the capture while one runs.
            done.append(float(torch.ones(64, device=device).sum()))

    thread = threading.Thread(target=work)
    thread.start()
    try:
        report = manager.capture()
    finally:
        stop.set()
        thread.join()
    assert not report.failures
    assert done
    given = batch(3, device)
    torch.testing.assert_close(
        manager.run(given)["y"], expected(step, given["x"]), rtol=1e-4, atol=1e-4
    )


def test_memory_does_not_grow_over_replays(device):
    manager, _ = make(device)
    manager.capture()
    given = [batch(rows, "cpu") for rows in range(1, 9)]
    for b in given:
        manager.run(b)
    torch.cuda.synchronize()
    before = (torch.cuda.memory_allocated(), torch.cuda.memory_reserved())
    for _ in range(300):
        for b in given:
            manager.run(b)
    torch.cuda.synchronize()
    assert (torch.cuda.memory_allocated(), torch.cuda.memory_reserved()) == before


def test_closing_gives_the_graphs_back(device):
    manager, _ = make(device)
    manager.capture()
    manager.run(batch(3, device))
    manager.close()
    manager.close()
    with pytest.raises(StateError, match="closed"):
        manager.run(batch(3, device))


def test_strict_raises_where_a_bucket_fails(device):
    manager, step = make(device, strict=True)
    step.fail_at[4] = lambda h: h.sum().item()
    with pytest.raises(CaptureError, match="item"):
        manager.capture()


def churn(device):
    for _ in range(5):
        junk = [torch.full((2**20,), float("nan"), device=device) for _ in range(16)]
        del junk
        gc.collect()
        torch.cuda.empty_cache()


def test_promise_6_what_only_a_cache_held_stays_alive(device):
    import functools

    @functools.lru_cache
    def table():
        return torch.full((WIDTH,), 3.0, device=device)

    inputs = StaticInputs(4, SLOTS, device)
    manager = CaptureManager(
        lambda i: {"y": i["x"] + table()}, inputs, settings=Settings(recorder="cuda")
    )
    report = manager.capture()
    assert not report.failures
    assert any("rebinding them is not noticed" in note for note in report.notes)
    table.cache_clear()
    churn(device)
    given = batch(3, device)
    assert torch.equal(manager.run(given)["y"], given["x"] + 3.0)


def test_autocast_around_capture_follows_a_changed_weight(device):
    weight = torch.nn.Parameter(torch.ones(WIDTH, WIDTH, device=device))
    inputs = StaticInputs(4, SLOTS, device)
    manager = CaptureManager(
        lambda i: {"y": i["x"] @ weight}, inputs, settings=Settings(recorder="cuda")
    )
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert not manager.capture().failures
    churn(device)
    weight.data.mul_(2)
    given = {"x": torch.ones(3, WIDTH, device=device), "count": torch.arange(3, device=device)}
    assert (manager.run(given)["y"].float() == 2 * WIDTH).all()


def test_a_temporary_may_change_its_shape_in_place(device):
    inputs = StaticInputs(4, SLOTS, device)

    def step(i):
        y = i["x"] * 2
        y.unsqueeze_(1)
        return {"y": y}

    manager = CaptureManager(step, inputs, settings=Settings(recorder="cuda"))
    assert not manager.capture().failures
    given = batch(3, device)
    assert torch.equal(manager.run(given)["y"], (given["x"] * 2)[:, None])


def test_promise_4_padding_that_reaches_real_rows_is_found(device):
    inputs = StaticInputs(4, SLOTS, device)

    def step(i):
        return {"y": i["x"] - i["x"].mean(0, keepdim=True)}

    ladder = BucketLadder([1, 4])
    manager = CaptureManager(step, inputs, ladder=ladder, settings=Settings(recorder="cuda"))
    assert set(manager.capture().failures) == {4}


def test_capture_that_was_interrupted_can_be_made_again(device):
    manager, step = make(device)

    def interrupt(done, total, what):
        if what == "recording bucket 2":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        manager.capture(progress=interrupt)
    assert not manager.capture().failures
    given = batch(3, device)
    torch.testing.assert_close(
        manager.run(given)["y"], expected(step, given["x"]), rtol=1e-4, atol=1e-4
    )


def test_the_largest_bucket_may_fail_and_keep_a_tensor(device):
    manager, step = make(device)

    def keep_then_fail(hidden):
        if torch.cuda.is_current_stream_capturing():
            step.kept = hidden * 2  # lies in the memory of a graph that will not be
            raise ValueError("after keeping a tensor")

    step.fail_at[8] = keep_then_fail
    assert set(manager.capture().failures) == {8}
    given = batch(3, device)
    torch.testing.assert_close(
        manager.run(given)["y"], expected(step, given["x"]), rtol=1e-4, atol=1e-4
    )


def test_a_generator_of_the_steps_own_draws_anew(device):
    generator = torch.Generator(device).manual_seed(3)

    def step(i):
        return {"y": i["x"] * 0 + torch.rand(WIDTH, generator=generator, device=device)}

    inputs = StaticInputs(2, SLOTS, device)
    manager = CaptureManager(step, inputs, state=[generator], settings=Settings(recorder="cuda"))
    assert not manager.capture().failures
    first = manager.run(batch(2, device))["y"].clone()
    second = manager.run()["y"].clone()
    assert not torch.equal(first, second)
    want = torch.rand(WIDTH, generator=torch.Generator(device).manual_seed(3), device=device)
    assert torch.equal(first[0], want)


def test_an_unwatched_recording_replays_and_counts_the_same_nodes(device: torch.device) -> None:
    """What a host does for all buckets but the first of a kind."""
    recorder = CudaRecorder(device)
    weight = torch.randn(64, 64, device=device)
    given = torch.randn(8, 64, device=device)

    def step() -> dict[str, torch.Tensor]:
        return {"out": torch.relu(given @ weight) @ weight}

    recorder.warm_up(step)
    watched = recorder.record(step, 8)
    recorder.watched = False
    unwatched = recorder.record(step, 8)
    assert unwatched.census().total == watched.census().total
    given.copy_(torch.randn(8, 64, device=device))
    for recording in (watched, unwatched):
        recording.outputs["out"].fill_(float("nan"))
        recording.replay()
        torch.cuda.synchronize()
        torch.testing.assert_close(recording.outputs["out"], step()["out"])
    assert watched.pinned
    assert not unwatched.pinned  # its host keeps the model alive
    for recording in (watched, unwatched):
        recording.close()
