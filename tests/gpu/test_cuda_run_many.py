"""run_many on a real device: as a graph with a WHILE node, and as replays where that cannot be had."""

import pytest
import torch
from walks import TOKENS, Walk, batch_of, counted, walker, walks

from graphcap import BucketLadder, Settings, Stop
from graphcap.decode.decoder import Decoder
from graphcap.decode.kernels import decode_kernels
from graphcap.decode.measure import activity
from graphcap.decode.random_weights import random_weights
from graphcap.decode.shapes import preset
from graphcap.errors import BackendError, StaleRecordingError
from graphcap.moe.kernels import choose_backend
from graphcap.recorders.cuda import CudaRecording
from graphcap.recorders.loop_probe import keeps_graphs, probe_loops

LENGTH = 8
both = pytest.mark.parametrize("looped", [True, False], ids=["loop", "replays"])


@pytest.fixture(autouse=True)
def as_asked(request, monkeypatch, device):
    """`looped` False: no recording has a loop. True: skipped where the device has none, with the reason."""
    looped = (
        request.node.callspec.params.get("looped") if hasattr(request.node, "callspec") else None
    )
    if looped is False:

        def none(*_):
            raise BackendError("none here")

        monkeypatch.setattr(CudaRecording, "repeated", none)
    elif looped and not probe_loops(device).works:
        pytest.skip(f"no loops: {probe_loops(device).detail}")


def captured(device, looped=None, **options):
    options.setdefault("settings", Settings(recorder="cuda"))
    manager = walker(LENGTH, device=str(device), **options)
    report = manager.capture()
    assert not report.failures
    if looped is not None:
        assert [manager.loops(size) for size in (2, 4, 6)] == [looped] * 3, report.notes
        assert bool(report.notes) == (not looped)
    return manager


def on(device, batch):
    return {name: tensor.to(device) for name, tensor in batch.items()}


def test_loops_work_where_driver_torch_and_bindings_have_them(device):
    probe = probe_loops(device)
    print("\nloops:", probe.detail)
    driver = pytest.importorskip("cuda.bindings.driver")
    _, version = driver.cuDriverGetVersion()
    able = version >= 12040 and hasattr(driver, "cuGraphConditionalHandleCreate")
    assert probe.works == (able and keeps_graphs()), probe.detail


@both
@pytest.mark.parametrize("ends", [(), (3,), (3, 17, 20)])
def test_the_same_as_plain_python_and_no_step_too_many(device, looped, ends):
    stop = Stop("token", ends) if ends else None
    with captured(device, looped, stop=stop) as manager:
        for turn in range(12):
            rows, lengths = turn % 6 + 1, (LENGTH, 1 + turn % LENGTH, 2)
            given = batch_of(rows, turn)
            manager.inputs.poison_pads(0)
            at = 0
            for index, steps in enumerate(lengths):
                many = manager.run_many(steps, on(device, given) if index == 0 else None)
                tokens = walks(given, at + steps)
                belonging = [counted(t, ends) for t in tokens]
                ran = min(steps, max(1, max(belonging) - at)) if looped else steps
                for row, count in enumerate(belonging):
                    expected = tokens[row][at : min(count, at + steps)]
                    assert many.outputs["token"][: len(expected), row].tolist() == expected
                    if ends:
                        assert int(many.counts[row]) == len(expected)
                        assert bool(many.live[row]) == (
                            not any(t in ends for t in tokens[row][: at + ran])
                        )
                at += ran
                positions = [p + at for p in given["position"].tolist()]
                assert manager.inputs["position"][:rows].tolist() == positions


@both
def test_outputs_of_any_shape_and_single_steps_between(device, looped):
    outputs = {**TOKENS, "pair": ((2,), torch.float32), "even": ((), torch.bool)}
    with captured(device, looped, outputs=outputs, stop=Stop("even")) as manager:
        given = batch_of(3, 1)
        at = 0
        for index in range(30):
            steps = index % 5 + 1
            many = manager.run_many(steps, on(device, given) if index == 0 else None)
            tokens = walks(given, at + steps)
            for row, count in enumerate(many.counts.tolist()):
                assert many.outputs["token"][:count, row].tolist() == tokens[row][at : at + count]
                assert many.outputs["pair"][:count, row, 0].tolist() == tokens[row][at : at + count]
            at = int(manager.inputs["position"][0]) - int(given["position"][0])
            for _ in range(index % 11):
                out = manager.run()["token"].tolist()
                at += 1
                assert out == [t[at - 1] for t in walks(given, at)]


@pytest.mark.parametrize("looped", [True])
def test_one_graph_launch_and_no_allocation(device, looped):
    with captured(device, looped) as manager:
        manager.run_many(LENGTH, on(device, batch_of(4)))
        loop = manager._many.loops[4]
        launches, launch = [], loop.launch
        loop.launch = lambda: (launches.append(1), launch())
        seen = activity(lambda: manager.run_many(LENGTH), device)
        print("\n", seen)
        assert len(launches) == 1
        assert seen.allocations == 0
        # The ring is set back by the loop itself: no copy, no kernel and no replay besides.
        others = {name for name in seen.calls if not name.startswith("cuGraphLaunch")}
        assert not others, seen.calls
        assert sum(seen.calls.values()) <= 1
        assert manager.stats().replays == 2 * LENGTH


@both
@pytest.mark.parametrize("every", [1, 5])
def test_sampled_verification(device, looped, every):
    settings = Settings(recorder="cuda", verify_every=every)
    with captured(device, looped, settings=settings, stop=Stop("token", (3,))) as manager:
        given = batch_of(3, 2)
        for index, steps in enumerate((4, 1, 8, 2, 7)):
            manager.run_many(steps, on(device, given) if index == 0 else None)
            stats = manager.stats()
            assert stats.verified == stats.replays // every


class Drawing(Walk):
    def __call__(self, inputs):
        outputs = super().__call__(inputs)
        return {**outputs, "noise": torch.rand_like(outputs["pair"][:, 0])}


def test_a_step_that_draws_random_numbers_is_not_looped(device):
    outputs = {**TOKENS, "noise": ((), torch.float32)}
    with captured(device, False, step=Drawing(), outputs=outputs) as manager:
        if probe_loops(device).works:
            assert "draws random numbers" in manager.report.notes[0]
        noise = manager.run_many(6, on(device, batch_of(4))).outputs["noise"]
        assert len(set(noise.flatten().tolist())) == 24


class Offset(Walk):
    def __init__(self, device):
        super().__init__()
        self.offset = torch.zeros((), dtype=torch.int32, device=device)

    def __call__(self, inputs):
        outputs = super().__call__(inputs)
        return {**outputs, "token": outputs["token"] + self.offset}


@both
def test_a_rebound_tensor_is_found(device, looped):
    step = Offset(device)
    with captured(device, looped, step=step) as manager:
        manager.run_many(2, on(device, batch_of(2)))
        step.offset = step.offset + 1
        with pytest.raises(StaleRecordingError, match="offset"):
            manager.run_many(2)


@both
def test_managers_come_and_go(device, looped):
    """Graphs, executables and their memory are given back."""
    free = []
    for turn in range(6):
        manager = captured(device, looped)
        given = batch_of(6, turn)
        many = manager.run_many(LENGTH, on(device, given))
        assert many.outputs["token"].t().tolist() == walks(given, LENGTH)
        manager.close()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        free.append(torch.cuda.mem_get_info(device)[0])
    assert free[1] - free[-1] <= 8 * 2**20


@both
@pytest.mark.parametrize("at_once", [8, 19])
def test_decoding_gives_the_same_tokens(device, looped, at_once):
    """With the kernels that this device gets, programmatic launches included if they use them."""
    weights = random_weights(preset("tiny"), device=device, dtype=torch.bfloat16, seed=3)
    kernels = decode_kernels(choose_backend("auto", device))
    prompts = [[5], [9, 8, 7, 6, 5, 4], [1, 2, 3]]

    def decoder(tokens, eos=()):
        made = Decoder(
            weights,
            kernels,
            max_batch=4,
            max_context=64,
            ladder=BucketLadder((1, 2), 4),
            settings=Settings(recorder="cuda", strict=True),
            tokens_per_launch=tokens,
            eos=eos,
        )
        made.cache.fill_random(1)
        assert not made.manager.capture().failures
        made.cache.clear()
        return made

    single = decoder(1)
    expected = single.decode(prompts, 40).token_ids
    assert expected == single.decode(prompts, 40).token_ids
    single.close()
    many = decoder(at_once)
    print("\n", many.manager.report.notes, [many.manager.loops(size) for size in (1, 2, 4)])
    assert many.manager.loops(4) == looped, many.manager.report.notes
    assert many.decode(prompts, 40).token_ids == expected
    many.close()
    eos = (expected[0][6], expected[1][11], expected[2][20])
    ending = decoder(at_once, eos)
    cut = [ids[: next(i + 1 for i, t in enumerate(ids) if t in eos)] for ids in expected]
    assert ending.decode(prompts, 40).token_ids == cut
    ending.close()
