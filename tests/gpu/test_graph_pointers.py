"""The pointers of graphs that a real driver captured: what is read, what passes, what is named."""

from __future__ import annotations

import gc
from collections import Counter
from dataclasses import replace

import pytest
import torch
from walks import batch_of, walker, walks

from graphcap import (
    BucketLadder,
    CaptureManager,
    PadPolicy,
    Settings,
    Slot,
    StaticInputs,
)
from graphcap.decode.decoder import Decoder
from graphcap.decode.kernels import decode_kernels
from graphcap.decode.random_weights import random_weights
from graphcap.decode.shapes import preset
from graphcap.errors import DanglingPointerError
from graphcap.graph_addresses import SHOWN
from graphcap.moe.kernels import choose_backend
from graphcap.recorders.cuda import CudaRecorder
from graphcap.recorders.graph_pointers import PointerReader
from graphcap.recorders.loop import LoopDriver
from graphcap.recorders.loop_probe import keeps_graphs, kept_graph, probe_loops
from graphcap.recorders.pointer_watch import named_ranges

driver = pytest.importorskip("cuda.bindings.driver")
triton = pytest.importorskip("triton")
tl = pytest.importorskip("triton.language")

N = 1000
BLOCK = 1024


@triton.jit
def _add_table(x, table, y, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    mask = at < n
    tl.store(y + at, tl.load(x + at, mask=mask) + tl.load(table + at, mask=mask), mask=mask)


@triton.jit
def _add_at(x, address, y, n, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    mask = at < n
    table = address.to(tl.pointer_type(tl.float32))
    tl.store(y + at, tl.load(x + at, mask=mask) + tl.load(table + at, mask=mask), mask=mask)


def add_table(x, table, y):
    """Launched where no recorder sees it: nothing but the graph knows of `table`."""
    _add_table[(1,)](x, table, y, x.numel(), BLOCK=BLOCK)


def capturing():
    return torch.cuda.is_current_stream_capturing()


@pytest.fixture
def xy(device):
    return torch.randn(N, device=device), torch.empty(N, device=device)


@pytest.fixture
def recorder(device, xy):
    made = CudaRecorder(device)
    made.named = named_ranges(zip("xy", xy, strict=True), "named")
    yield made
    made.close()


def tables(device, count=1):
    """Tensors between others that stay, so that their memory is not given back to the driver."""
    made = [torch.full((N,), float(i), device=device) for i in range(2 * count + 1)]
    return made[1::2], made[::2]


def recorded(recorder, step):
    recorder.warm_up(step)
    return recorder.record(step, N)


def clean(report):
    """Everything was read, and all of it is alive."""
    assert dict(report.not_checked) == {}
    assert report.nodes_checked == report.nodes > 0
    assert len(report.unsure) == min(report.pointers - report.pointers_checked, SHOWN)
    assert report.pointers >= report.nodes
    assert sum(report.owners.values()) == report.pointers_checked
    return report


# -- what is read ------------------------------------------------------------------------------------


def addresses_in(device, step):
    """What the nodes of a captured step hold, by node."""
    if not keeps_graphs():
        pytest.skip("this torch keeps no graph to read")
    graph, stream = kept_graph(), torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
        stream.synchronize()
        graph.capture_begin(pool=torch.cuda.graph_pool_handle(), capture_error_mode="thread_local")
        step()
        graph.capture_end()
    found = PointerReader(driver).read(driver.CUgraph(graph.raw_cuda_graph()))
    assert not found.unread
    nodes = [{w.address for w in found.words if w.node == i} for i in range(len(found.nodes))]
    return found, nodes, graph


def test_the_pointers_of_kernels_copies_and_memsets_are_those_that_were_passed(device, xy):
    x, y = xy
    (table,), _kept = tables(device)
    a = torch.randn(64, 256, device=device, dtype=torch.bfloat16)
    b = torch.randn(256, 128, device=device, dtype=torch.bfloat16)
    c = torch.empty(64, 128, device=device, dtype=torch.bfloat16)
    nbytes = N * 4

    def step():
        stream = driver.CUstream(torch.cuda.current_stream().cuda_stream)
        add_table(x, table, y)
        torch.add(x, table, out=y)
        (error,) = driver.cuMemsetD8Async(driver.CUdeviceptr(y.data_ptr()), 0, nbytes, stream)
        assert error == driver.CUresult.CUDA_SUCCESS
        (error,) = driver.cuMemcpyDtoDAsync(
            driver.CUdeviceptr(y.data_ptr()), driver.CUdeviceptr(x.data_ptr()), nbytes, stream
        )
        assert error == driver.CUresult.CUDA_SUCCESS
        torch.mm(a, b, out=c)

    found, nodes, graph = addresses_in(device, step)
    print("\n", [(n.path, n.what[:60]) for n in found.nodes])
    passed = {t.data_ptr() for t in (x, table, y)}
    assert found.nodes[0].what == "kernel _add_table"
    assert nodes[0] == passed
    assert [w.argument for w in found.words if w.node == 0] == [0, 1, 2]
    # A structure of three pointers, and perhaps what only looks like one.
    assert passed <= nodes[1]
    assert {w.size for w in found.words if w.node == 1 and w.address in passed} == {24}
    assert found.nodes[2].what == "memset"
    assert nodes[2] == {y.data_ptr(), y.data_ptr() + nbytes - 1}
    assert found.nodes[3].what == "memcpy"
    assert nodes[3] == {t.data_ptr() + end for t in (x, y) for end in (0, nbytes - 1)}
    # A library may hide addresses in descriptors.
    seen = [t.data_ptr() in set().union(*nodes[4:]) for t in (a, b, c)]
    print("cuBLAS shows a, b, c:", seen)
    del graph


def test_pinned_host_memory_is_alive_by_the_drivers_word(device, recorder, xy):
    host = torch.randn(N, pin_memory=True)
    for watched, owner in ((False, "host"), (True, "kept by the recording")):
        recorder.watched = watched  # then the recording keeps what operations of torch read
        recording = recorded(recorder, lambda: {"y": xy[1].copy_(host, non_blocking=True)})
        assert clean(recording.pointers).owners == {owner: 1, "named": 1}
        recording.close()


# -- what passes -------------------------------------------------------------------------------------


@pytest.mark.parametrize("kernels", ["triton", "reference"])
@pytest.mark.parametrize("shape", ["tiny", "tiny-hybrid"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_no_finding_in_a_decode_step_and_every_node_is_checked(device, shape, kernels, dtype):
    decoder = Decoder(
        random_weights(preset(shape), device=device, dtype=dtype, seed=3),
        decode_kernels(choose_backend(kernels, device)),
        max_batch=8,
        max_context=64,
        settings=Settings(recorder="cuda", strict=kernels == "triton"),
    )
    decoder.cache.fill_random(1)
    manager = decoder.manager
    report = manager.capture()
    assert not report.failures
    for bucket in report.buckets:
        print(
            "\n", bucket.size, bucket.pointers, dict(bucket.pointers.owners), bucket.pointers.unsure
        )
        clean(bucket.pointers)
        kinds = manager.recording(bucket.size).census().nodes
        assert bucket.pointers.nodes == sum(kinds.get(k, 0) for k in ("kernel", "memcpy", "memset"))
        if kernels == "triton":
            assert bucket.pointers.owners["pool"] > 0
            assert bucket.pointers.owners["slots"] > 0
            assert bucket.pointers.owners["named"] > 0
    assert not any("pointer" in note for note in report.notes)
    decoder.close()


def test_no_finding_with_cublas_reductions_sorts_and_joined_tensors(device, recorder):
    """Workspaces, semaphores, and structures of which a part is never set."""
    a = torch.randn(8, 4096, device=device, dtype=torch.bfloat16)
    b = torch.randn(4096, 64, device=device, dtype=torch.bfloat16)
    w = torch.randn(512, 512, device=device)

    def step():
        tall = a @ b
        x = torch.cat([tall.float(), tall.float() * 2, torch.ones(8, 384, device=device)], 1) @ w
        junk = torch.cat([x[:, i : i + 1] for i in range(40)], 1)
        order = junk.sort(1).indices
        picked = (
            junk.gather(1, order).cumsum(1).index_select(0, torch.arange(8, device=device).flip(0))
        )
        top = torch.topk(x, 8).values.softmax(-1)
        norm = torch.nn.functional.layer_norm(x, (512,)).sum(0) + x.amax() + x.var()
        batched = torch.bmm(x.view(8, 16, 32), x.view(8, 32, 16))
        torch._foreach_add_([picked, top], 1.0)
        return {"y": picked.sum() + top.sum() + norm.sum() + batched.sum() + x}

    for watched in (True, False):
        recorder.watched = watched
        recording = recorded(recorder, step)
        report = clean(recording.pointers)
        print("\n", report, dict(report.owners), report.unsure)
        assert not recorder.dangling({N: recording})
        recording.replay()
        torch.cuda.synchronize()
        recording.close()


def test_random_numbers_need_no_name(device, recorder, xy):
    x, _ = xy
    recording = recorded(recorder, lambda: {"y": x + torch.rand_like(x)})
    report = clean(recording.pointers)
    print("\n", report.owners)  # with seed and offset, which torch keeps
    assert report.pointers >= 6
    recording.close()


def test_a_graph_of_1100_nodes_is_checked_within_50_ms(device, recorder, xy):
    x, y = xy

    def step():
        for _ in range(1100):
            torch.add(x, y, out=y)
        return {"y": y}

    recorder.watched = False
    took = []
    for _ in range(3):
        recording = recorded(recorder, step)
        report = clean(recording.pointers)
        assert report.nodes == 1100
        assert report.pointers >= 3300
        took.append(report.ms)
        recording.close()
    print("\n", took)
    assert min(took) < 50


# -- what is named -----------------------------------------------------------------------------------


def test_a_tensor_that_is_freed_while_it_is_recorded(device, recorder, xy):
    x, y = xy
    made, _kept = tables(device)

    def step():
        add_table(x, made.pop() if capturing() else x, y)
        return {"y": y}

    address = made[0].data_ptr()
    recorder.warm_up(step)
    with pytest.raises(DanglingPointerError) as raised:
        recorder.record(step, N)
    text = str(raised.value)
    print("\n", text)
    assert text.startswith(f"bucket {N}: node 0 (kernel _add_table), argument 1: expected")
    assert f"found {address:#x}, " in text
    assert "it was in use when the recording began" in text
    assert "(nearest is " in text
    # The device and the recorder work on.
    recording = recorded(recorder, lambda: {"y": x + 1})
    recording.replay()
    assert torch.equal(recording.outputs["y"], x + 1)


def test_the_same_tensor_kept_alive_passes_and_is_counted_as_unnamed(device, recorder, xy):
    x, y = xy
    (table,), _kept = tables(device)
    table.fill_(3)
    recording = recorded(recorder, lambda: add_table(x, table, y) or {"y": y})
    report = clean(recording.pointers)
    assert report.owners == {"named": 2, "unnamed": 1}
    assert (report.unnamed_blocks, report.unsure) == (1, ())
    y.fill_(float("nan"))
    recording.replay()
    assert torch.equal(y, x + 3)
    assert not recorder.dangling({N: recording})
    recording.close()


def test_a_tensor_that_is_freed_between_recording_and_replay(device, recorder, xy):
    x, y = xy
    made, _kept = tables(device)
    # Not its first byte, which may be where the tensor before it ends. The view is made here: a step that
    # made it would have its tensor kept, see below.
    views = [made.pop()[8:]]
    recording = recorded(recorder, lambda: add_table(x[8:], views[0], y[8:]) or {"y": y})
    assert clean(recording.pointers).owners["unnamed"] == 1
    address = views.pop().data_ptr()
    gc.collect()
    (error,) = recorder.dangling({N: recording}).values()
    assert f"argument 1: expected the address of live memory, found {address:#x}, " in str(error)
    assert " bytes into a free block of " in str(error)
    assert "it was in use when the recording was made" in str(error)
    assert not recorder.dangling({N: recording}), "it was the last look"
    recording.close()


def test_a_tensor_of_which_the_step_takes_a_view_is_kept_by_the_recording(device, recorder, xy):
    x, y = xy
    made, _kept = tables(device)
    made[0].fill_(3)
    recording = recorded(recorder, lambda: add_table(x[8:], made[0][8:], y[8:]) or {"y": y})
    assert clean(recording.pointers).owners["kept by the recording"] == 1
    made.clear()
    gc.collect()
    junk = [torch.full((N,), float("nan"), device=device) for _ in range(50)]
    assert not recorder.dangling({N: recording})
    y.fill_(float("nan"))
    recording.replay()
    assert torch.equal(y[8:], x[8:] + 3)
    del junk
    recording.close()


def test_an_operation_of_torch_keeps_its_tensor_where_it_is_watched_and_is_named_where_not(
    device, recorder, xy
):
    x, _ = xy
    made, _kept = tables(device, 2)

    def step():
        return {"y": x + (made.pop() if capturing() else x)[None, :][0]}

    value = float(made[-1][0])
    recorder.warm_up(step)
    recording = recorder.record(step, N)
    assert clean(recording.pointers).owners["kept by the recording"] == 1
    junk = [torch.full((N,), float("nan"), device=device) for _ in range(50)]
    recording.outputs["y"].fill_(float("nan"))
    recording.replay()
    assert torch.equal(recording.outputs["y"], x + value)
    del junk
    recorder.watched = False
    with pytest.raises(
        DanglingPointerError, match=r"argument \d at byte \d+ of 24: .* in use when the rec"
    ):
        recorder.record(step, N)


def test_an_address_that_outlived_its_tensor(device, recorder, xy):
    x, y = xy
    made, _kept = tables(device)
    address = made.pop().data_ptr() + 64

    def step():
        _add_at[(1,)](x, address, y, N - 16, BLOCK=BLOCK)
        return {"y": y}

    recorder.warm_up(step)
    with pytest.raises(
        DanglingPointerError, match="it was free already when the recording began"
    ) as raised:
        recorder.record(step, N)
    assert "(kernel _add_at), argument 1: " in str(raised.value)


def test_an_address_that_the_allocator_has_given_back(device, recorder, xy):
    x, y = xy
    large = torch.zeros(2**28, device=device)  # a segment of its own, 1 GiB
    address = large.data_ptr() + 2**29
    del large

    def step():
        _add_at[(1,)](x, address, y, N, BLOCK=BLOCK)
        return {"y": y}

    recorder.warm_up(step)  # the memory is still held: the first recording gives it back
    with pytest.raises(DanglingPointerError, match=r"given back to the driver|free already"):
        recorder.record(step, N)


@pytest.mark.parametrize("kind", ["memset", "source", "target"])
def test_copies_and_memsets_of_freed_memory(device, recorder, xy, kind):
    x, y = xy
    made, _kept = tables(device)
    gone = made.pop().data_ptr()

    def step():
        stream = driver.CUstream(torch.cuda.current_stream().cuda_stream)
        if capturing():  # eagerly, it would write there
            source, target = (gone, y.data_ptr()) if kind == "source" else (x.data_ptr(), gone)
            if kind == "memset":
                (error,) = driver.cuMemsetD8Async(driver.CUdeviceptr(gone), 0, 4 * N, stream)
            else:
                (error,) = driver.cuMemcpyDtoDAsync(
                    driver.CUdeviceptr(target), driver.CUdeviceptr(source), 4 * N, stream
                )
            assert error == driver.CUresult.CUDA_SUCCESS
        return {"y": torch.add(x, 1, out=y)}

    recorder.warm_up(step)
    node = "memset" if kind == "memset" else "memcpy"
    role = "target" if kind == "memset" else kind
    with pytest.raises(
        DanglingPointerError, match=rf"node 0 \({node}\), {role}: .* 1 more like it"
    ):
        recorder.record(step, N)


# -- a manager ---------------------------------------------------------------------------------------


class Hiding:
    """Bucket 4 is recorded with a tensor that it then drops; no name leads to it."""

    def __init__(self, device):
        self.weight = torch.randn(N, device=device)
        made, self.kept = tables(device, 3)
        self.take = made.pop

    def __call__(self, inputs):
        x = inputs["x"]
        y = torch.empty_like(x)
        table = self.take() if capturing() and x.shape[0] == 4 else self.weight
        for row in range(x.shape[0]):
            add_table(x[row], table, y[row])
        return {"y": y}


def hiding(device, **settings):
    step = Hiding(device)
    inputs = StaticInputs(4, {"x": Slot((N,), torch.float32, PadPolicy.ZERO)}, device)
    made = CaptureManager(
        step, inputs, ladder=BucketLadder((1, 2), 4), settings=Settings(recorder="cuda", **settings)
    )
    return made, step


def test_a_fault_costs_its_bucket_and_the_others_serve(device):
    manager, step = hiding(device)
    with manager:
        report = manager.capture()
        assert list(report.failures) == [4]
        assert "kernel _add_table" in report.failures[4]
        assert "3 more like it" in report.failures[4]
        assert all(clean(bucket.pointers).owners["named"] for bucket in report.buckets)
        for rows in (1, 2, 3, 4):
            x = torch.randn(rows, N, device=device)
            assert torch.equal(manager.run({"x": x})["y"], x + step.weight)
        assert manager.stats().fallbacks == {"not_recorded": 2}


def test_strict_raises_and_verify_off_looks_at_nothing(device):
    manager, _ = hiding(device, strict=True)
    with pytest.raises(DanglingPointerError):
        manager.capture()
    manager.close()
    manager, _ = hiding(device, verify="off")
    with manager:
        report = manager.capture()
        assert not report.failures
        assert [bucket.pointers for bucket in report.buckets] == [None] * 3


def test_the_body_of_a_loop_is_the_graph_that_was_checked(device, monkeypatch):
    probe = probe_loops(device)
    if not probe.works:
        pytest.skip(probe.detail)
    bodies = []
    add_child = LoopDriver.add_child

    def noting(self, graph, child):
        node = add_child(self, graph, child)
        bodies.append((node, child))
        return node

    monkeypatch.setattr(LoopDriver, "add_child", noting)
    reader = PointerReader(driver)
    with walker(8, device=str(device), settings=Settings(recorder="cuda")) as manager:
        report = manager.capture()
        assert not report.failures
        assert len(bodies) == 3
        for node, child in bodies:
            error, inner = driver.cuGraphChildGraphNodeGetGraph(node)
            assert error == driver.CUresult.CUDA_SUCCESS
            copy, checked = reader.read(inner), reader.read(driver.CUgraph(child))
            assert not copy.unread
            assert copy.total == checked.total > 0
            held = [Counter(w.address for w in found.words) for found in (copy, checked)]
            assert held[0] == held[1]
        for bucket in report.buckets:
            clean(bucket.pointers)
            loop = manager._many.loops[bucket.size]
            outer = reader.read(loop._undo[0][1])
            assert dict(outer.unread) == {"nodes of kind conditional are not read": 1}
        given = batch_of(6)
        many = manager.run_many(8, {name: tensor.to(device) for name, tensor in given.items()})
        assert many.outputs["token"].t().tolist() == walks(given, 8)


def test_many_layers_take_little_time(device):
    """As many nodes as the step of a large model: what a bucket's check adds to a start."""
    shape = replace(preset("tiny"), num_layers=48)
    decoder = Decoder(
        random_weights(shape, device=device, dtype=torch.bfloat16, seed=3),
        decode_kernels(choose_backend("triton", device)),
        max_batch=8,
        max_context=64,
        settings=Settings(recorder="cuda", strict=True),
    )
    decoder.cache.fill_random(1)
    report = decoder.manager.capture()
    for bucket in report.buckets:
        print("\n", bucket.size, clean(bucket.pointers), f"of {bucket.capture_ms:.0f} ms")
    assert min(bucket.pointers.ms for bucket in report.buckets) < 50
    decoder.close()
