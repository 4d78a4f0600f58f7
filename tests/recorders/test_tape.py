"""The tape replays what a step did, without its Python, and refuses what it cannot."""

from __future__ import annotations

import gc
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from toy import custom_op, memory_events

from graphcap.errors import CaptureError, StateError
from graphcap.operations import operation
from graphcap.pool import BufferPool
from graphcap.recorders.guard import StepGuard
from graphcap.recorders.tape import TapeRecorder, TapeRecording, count_step

CPU = torch.device("cpu")
Function = Callable[[torch.Tensor], Any]

INDEX = torch.tensor([2, 0, 3, 1])
TABLE = torch.arange(15.0).view(5, 3)


@custom_op("graphcap_tests::square", mutates_args=())
def square(x: torch.Tensor) -> torch.Tensor:
    return x * x


@custom_op("graphcap_tests::double_", mutates_args=("x",))
def double_(x: torch.Tensor) -> None:
    x.mul_(2)


@custom_op("graphcap_tests::double_and_sum", mutates_args=("x",))
def double_and_sum(x: torch.Tensor) -> torch.Tensor:
    x.mul_(2)
    return x.sum(1)


@custom_op("graphcap_tests::halves", mutates_args=())
def halves(x: torch.Tensor) -> list[torch.Tensor]:
    return [x[:, :3] * 1, x[:, 3:] * 1]


@operation("scaled add")
def scaled_add(x: torch.Tensor, out: torch.Tensor, *, scale: float) -> None:
    torch.add(x, x, alpha=scale, out=out)


def record(function: Function, x: torch.Tensor) -> TapeRecording:
    return TapeRecorder(CPU).record(lambda: {"y": function(x)}, x.shape[0])


def batch(seed: int) -> torch.Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(seed))


def changed(change: Callable[[torch.Tensor], object]) -> Function:
    """`change` applied in place to a copy, which is returned."""

    def run(x: torch.Tensor) -> torch.Tensor:
        copy = x.clone()
        change(copy)
        return copy

    return run


def constant_that_is_changed(x: torch.Tensor) -> torch.Tensor:
    total = torch.tensor([1.0, 2.0, 3.0, 4.0])
    total.add_(x[:, 0])
    return total


def kernel_layer(x: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    scaled_add(x, out, scale=3.0)
    return out


def in_place_on_a_view(x: torch.Tensor) -> torch.Tensor:
    copy = x.clone()
    copy.view(8, 3)[2:5].t().mul_(copy[0, 0])
    copy[:, ::2].zero_()
    return copy


def custom_both(x: torch.Tensor) -> torch.Tensor:
    copy = x.clone()
    return double_and_sum(copy)[:, None] + copy


def fills(make: Callable[[torch.Tensor], torch.Tensor]) -> Function:
    """A factory whose result the step adds to: each replay has to find its first contents."""

    def run(x: torch.Tensor) -> torch.Tensor:
        made = make(x)
        made.add_(x)
        return made

    return run


def foreach_in_place(x: torch.Tensor) -> torch.Tensor:
    pair = [x.clone(), x + 1]
    torch._foreach_mul_(pair, 3.0)
    return pair[0] + pair[1]


def batch_norm(x: torch.Tensor) -> torch.Tensor:
    mean, var = torch.zeros(6), torch.ones(6)
    return F.batch_norm(x, mean, var, training=True) + mean + var


FUNCTIONS: dict[str, Function] = {
    "in-place": changed(lambda t: t.mul_(2).add_(1)),
    "in-place on a view": in_place_on_a_view,
    "in-place with a scalar tensor": changed(lambda t: t.fill_(t[0, 0])),
    "views only": lambda x: x.t().reshape(4, 6),
    "reshape that copies": lambda x: x.t().reshape(4, 6) + 0,
    "transposed result": lambda x: (x.t() + 1).t(),
    "contiguous": lambda x: x.view(6, 4).t().contiguous(),
    "expand": lambda x: x[:, :1].expand(4, 6),
    "out=": lambda x: torch.add(x, 1, out=torch.empty(4, 6)),
    "out= a view": lambda x: torch.mul(x, 2, out=torch.zeros(4, 8)[:, 1:7]),
    "arange": lambda x: torch.arange(4).add_(1)[:, None] * x,
    "full": fills(lambda x: torch.full((4, 6), 2.5)),
    "full_like": fills(lambda x: torch.full_like(x, 3.5)),
    "zeros": fills(lambda x: torch.zeros(4, 6)),
    "zeros_like": fills(torch.zeros_like),
    "ones_like": fills(torch.ones_like),
    "new_zeros": fills(lambda x: x.new_zeros(4, 6)),
    "new_ones": fills(lambda x: x.new_ones((4, 6))),
    "new_full": fills(lambda x: x.new_full((4, 6), 1.5)),
    "scalar_tensor": fills(lambda x: torch.scalar_tensor(2.0).expand(4, 6).clone()),
    "eye": lambda x: torch.eye(4) @ x,
    "constant that is changed": constant_that_is_changed,
    "scalar constant": lambda x: x * torch.tensor(2.0),
    "custom operator": square,
    "custom operator in place": changed(double_),
    "custom operator in place with a result": custom_both,
    "custom operator with a list": lambda x: halves(x)[0] - halves(x)[1],
    "topk": lambda x: x.topk(3, 1)[0] + x.topk(3, 1)[1],
    "sort": lambda x: torch.cat([x.sort(1)[0], x.sort(dim=1, stable=True)[1].float()], 1),
    "max with indices": lambda x: x.max(1).values + x.max(1).indices,
    "var_mean": lambda x: torch.var_mean(x, 1)[0] + torch.var_mean(x, 1)[1],
    "chunk": lambda x: torch.cat(x.chunk(2, 1)[::-1], 1),
    "split": lambda x: torch.stack(x.split(3, 1)).sum(0),
    "unbind": lambda x: torch.stack(x.unbind(1)[::-1], 1),
    "split_with_sizes_copy": lambda x: torch.split_with_sizes_copy(x, [2, 4], 1)[1] * 2,
    "foreach": lambda x: torch.stack(torch._foreach_add([x, x * 2], 1.0)).sum(0),
    "foreach in place": foreach_in_place,
    "index_put_": changed(lambda t: t.index_put_((INDEX[:2],), t[:2] * 5)),
    "index_put_ accumulating": changed(
        lambda t: t.index_put_((INDEX // 2,), t * 2, accumulate=True)
    ),
    "assignment": changed(lambda t: t.__setitem__((slice(None), 2), t[:, 0])),
    "assignment of one value under a mask": changed(lambda t: t.__setitem__(t > 0, 0.0)),
    "index with a tensor": lambda x: x[INDEX],
    "gather and scatter": lambda x: torch.zeros(4, 6).scatter_add_(1, x.argsort(1), x),
    "cumsum": lambda x: x.cumsum(1).exp().sum(1).to(torch.bfloat16),
    "where": lambda x: torch.where(x > 0, x, 0.0),
    "no out-variant: flip, roll": lambda x: x.flip(0) + x.roll(1, 1),
    "no out-variant: layer_norm": lambda x: F.layer_norm(x, (6,)),
    "reversed subtraction": lambda x: 1 - x,
    "add with alpha": lambda x: torch.add(x, x.flip(0), alpha=3),
    "dtype conversions": lambda x: x.bfloat16().float().half().double().float(),
    "to integers and back": lambda x: (x * 10).to(torch.int32).to(torch.float32),
    "reduction in another dtype": lambda x: x.sum(1, dtype=torch.float64),
    "softmax in another dtype": lambda x: F.softmax(x.bfloat16(), -1, dtype=torch.float32),
    "matmul": lambda x: x @ x.t(),
    "bfloat16 matmul": lambda x: x.bfloat16() @ x.t().bfloat16(),
    "linear": lambda x: F.linear(x, torch.ones(2, 6), torch.ones(2)),
    "embedding": lambda x: F.embedding((x[:, 0] > 0).long(), TABLE),
    "attention": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None])[0],
    "convolution": lambda x: F.conv1d(x[None], torch.ones(4, 4, 3), padding=1)[0],
    "running statistics": batch_norm,
    "repeat_interleave with output_size": lambda x: torch.repeat_interleave(
        x, torch.tensor([2, 0, 1, 1]), dim=0, output_size=4
    ),
    "complex view": lambda x: torch.view_as_real(torch.view_as_complex(x.view(4, 3, 2)) * 2j),
    "kernel layer": kernel_layer,
}


def test_step_in_inference_mode_meets_a_frozen_pool_for_the_first_time_while_recorded():
    pool = BufferPool(CPU)

    def step() -> dict[str, torch.Tensor]:
        with pool.step(), torch.inference_mode():
            buffer = pool.take("buffer", (4, 3), torch.float32)
            buffer.copy_(TABLE[:4])
            return {"y": buffer + 1}

    step()
    pool.freeze()
    recording = TapeRecorder(CPU).record(step, 4)
    with torch.inference_mode():
        recording.outputs["y"].fill_(float("nan"))
    recording.replay()
    assert torch.equal(recording.outputs["y"], TABLE[:4] + 1)


@pytest.mark.parametrize("inference", [False, True], ids=["no_grad", "inference_mode"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_replay_equals_eager_on_new_inputs(name: str, inference: bool):
    function = torch.inference_mode(inference)(FUNCTIONS[name])
    x = batch(0)
    recording = record(function, x)
    address = recording.outputs["y"].data_ptr()
    for seed in (1, 2):
        x.copy_(batch(seed))
        recording.replay()
        assert torch.equal(recording.outputs["y"], function(batch(seed)))
    assert recording.outputs["y"].data_ptr() == address
    assert torch.equal(x, batch(2))


@pytest.mark.parametrize(
    "name", ["in-place on a view", "matmul", "cumsum", "zeros", "kernel layer"]
)
def test_replay_of_operations_with_out_variants_allocates_nothing(name: str):
    recording = record(FUNCTIONS[name], batch(0))
    recording.replay()
    assert recording.census().allocations == 0
    assert memory_events(recording.replay) == 0


@pytest.mark.parametrize(
    ("name", "allocations"),
    [
        ("custom operator", 1),
        ("custom operator in place with a result", 1),
        ("reversed subtraction", 1),
        ("no out-variant: flip, roll", 2),
        ("split_with_sizes_copy", 1),
    ],
)
def test_operations_without_an_out_variant_are_counted_and_the_profiler_sees_them(
    name: str, allocations: int
):
    recording = record(FUNCTIONS[name], batch(0))
    recording.replay()
    assert recording.census().allocations == allocations
    assert memory_events(recording.replay) >= allocations


def test_counted_allocations_are_those_of_the_profiler():
    # One new tensor for each entry that the census counts, and none besides.
    recording = record(lambda x: square(x).flip(0) + x.roll(1, 0), batch(0))
    assert recording.census().allocations == 3
    assert memory_events(recording.replay) == 3


def test_memory_of_the_recording_is_what_its_operations_returned():
    recording = record(lambda x: torch.exp(x + 1)[:2].mul(2), batch(0))
    assert recording.nbytes == 96 + 96 + 48


def test_replay_runs_none_of_the_steps_python():
    runs = []
    recording = record(lambda x: (runs.append(1), x + 1)[1], batch(0))
    for _ in range(3):
        recording.replay()
    assert len(runs) == 1


def test_census_names_operations():
    recording = record(lambda x: (kernel_layer(x) + 1).clone().bfloat16(), batch(0))
    rows = {row.operation: (row.implementation, row.count) for row in recording.census().rows}
    assert rows == {
        "scaled add": ("torch", 1),
        "aten.add.Tensor": ("torch", 1),
        "copies": ("torch", 2),
    }
    assert recording.census().total == 4


def test_random_numbers_advance_and_a_seed_reproduces_them():
    def step(x: torch.Tensor) -> torch.Tensor:
        noise = torch.rand(4, 6) + torch.randn_like(x) + torch.bernoulli(torch.full((4, 6), 0.5))
        return F.dropout(x, 0.5) + noise + torch.empty(4, 6).exponential_()

    x = batch(0)
    recording = record(step, x)

    def draw() -> torch.Tensor:
        recording.replay()
        return recording.outputs["y"].clone()

    torch.manual_seed(5)
    first, second = draw(), draw()
    assert not torch.equal(first, second)
    torch.manual_seed(5)
    assert torch.equal(draw(), first)
    torch.manual_seed(5)
    assert torch.equal(step(x), first)


def test_sampling_advances():
    weights = torch.ones(4, 50)
    recording = record(lambda x: torch.multinomial(weights, 10), batch(0))
    drawn = set()
    for _ in range(4):
        recording.replay()
        drawn.add(tuple(recording.outputs["y"].flatten().tolist()))
    assert len(drawn) == 4


def test_state_advances_once_for_each_replay():
    counter = torch.zeros(1)
    recording = record(lambda x: x + counter.add_(1), torch.zeros(4, 6))
    for _ in range(3):
        recording.replay()
    assert counter.item() == 4  # the recorded run counts
    assert (recording.outputs["y"] == 4).all()


@pytest.mark.skipif(
    not hasattr(torch.UntypedStorage, "resizable"),
    reason="before torch 2.2 a storage does not tell whose memory it is",
)
def test_numpy_memory_is_read_as_it_is_now():
    scale = np.ones(6, dtype=np.float32)
    recording = record(lambda x: x * torch.from_numpy(scale), torch.ones(4, 6))
    scale[:] = 5
    recording.replay()
    assert (recording.outputs["y"] == 5).all()
    assert (scale == 5).all()


def test_recording_owns_its_memory():
    recording = record(lambda x: (x + 1) * (x + 2), torch.ones(4, 6))
    gc.collect()
    churn = [torch.full((4, 6), 1e9) for _ in range(50)]
    recording.replay()
    assert (recording.outputs["y"] == 6).all()
    assert len(churn) == 50


def test_a_timed_replay_does_the_same_and_says_when():
    x = batch(0)
    recording = record(lambda x: kernel_layer(x) * x, x)
    x.copy_(batch(1))
    times = recording.timed_replay()
    assert torch.equal(recording.outputs["y"], batch(1) * 4 * batch(1))
    assert [name for name, _, _ in times] == ["scaled add", "aten.mul.Tensor"]
    moments = [moment for _, start, end in times for moment in (start, end)]
    assert moments == sorted(moments)


def test_closed_recording_is_refused():
    recording = record(square, batch(0))
    kept = recording.outputs["y"]
    recording.close()
    recording.close()
    for replay in (recording.replay, recording.timed_replay):
        with pytest.raises(StateError, match="closed"):
            replay()
    assert torch.equal(kept, batch(0) ** 2)


def test_gradients_are_off():
    weight = torch.ones(6, requires_grad=True)
    recording = record(lambda x: x * weight, batch(0))
    recording.replay()
    assert not recording.outputs["y"].requires_grad


def test_recording_inside_recording_is_refused():
    def step(x: torch.Tensor) -> torch.Tensor:
        record(square, batch(1))
        return x + 1

    with pytest.raises(CaptureError, match=r"StateError.*test_tape\.py.*do not nest"):
        record(step, batch(0))


def test_error_of_the_step_names_type_and_line():
    def step(x: torch.Tensor) -> torch.Tensor:
        return x @ x

    with pytest.raises(
        CaptureError, match=r"bucket 4: .*RuntimeError at .*test_tape\.py:\d+ \(step\)"
    ):
        record(step, batch(0))


def test_interrupt_is_not_swallowed():
    def step(x: torch.Tensor) -> torch.Tensor:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        record(step, batch(0))
    record(square, batch(0)).replay()


# -- refusals ------------------------------------------------------------------------------------

SHRUNK = torch.empty(8, 6)
REFUSED: dict[str, tuple[Function, str]] = {
    "item": (lambda x: x[0, 0].item(), ".item()"),
    "bool": (lambda x: bool(x[0, 0] > 0), "bool()"),
    "if": (lambda x: 1 if x[0, 0] > 0 else 2, "bool()"),
    "int": (lambda x: int(x[0, 0]), "int()"),
    "float": (lambda x: float(x[0, 0]), "float()"),
    "index": (lambda x: [1, 2][(x[0, 0] > 9).long()], ".item()"),
    "range": (lambda x: range((x[0, 0] > 9).long()), ".item()"),
    "slice": (lambda x: x[: (x[0, 0] > 9).long()], ".item()"),
    "in": (lambda x: 1.0 in x, ".item()"),
    "one_hot": (lambda x: F.one_hot((x[:, 0] > 0).long()), ".item()"),
    "cpu": (lambda x: x.cpu(), ".cpu()"),
    "tolist": (lambda x: x.tolist(), ".tolist()"),
    "numpy": (lambda x: x.numpy(), ".numpy()"),
    "asarray": (lambda x: np.asarray(x), "numpy conversion"),
    "dlpack": (lambda x: np.from_dlpack(x), "DLPack"),
    "python callback": (lambda x: x.clone().apply_(lambda v: v + 1), ".apply_()"),
    "tensor of tensors": (lambda x: torch.tensor([x[0, 0], x[0, 1]]), "list of tensors"),
    "nested tensor of tensors": (lambda x: torch.as_tensor([[x[0, 0]]]), "list of tensors"),
    "nonzero": (lambda x: x.nonzero(), "nonzero"),
    "argwhere": (lambda x: torch.argwhere(x), "nonzero"),
    "where with one argument": (lambda x: torch.where(x > 0), "nonzero"),
    "mask": (lambda x: x[x > 0], "aten.index"),
    "mask of bytes": (lambda x: x[(x > 0).to(torch.uint8)], "aten.index"),
    "masked_select": (lambda x: x.masked_select(x > 0), "masked_select"),
    "unique": (lambda x: x.unique(), "unique"),
    "unique_consecutive": (lambda x: x.unique_consecutive(), "unique_consecutive"),
    "equal": (lambda x: torch.equal(x, x + 1), "equal"),
    "allclose": (lambda x: torch.allclose(x, x), "allclose"),
    "repeat_interleave": (
        lambda x: torch.repeat_interleave(x, torch.tensor([1, 2, 0, 1]), 0),
        "repeat_interleave",
    ),
    "bincount": (lambda x: torch.bincount((x[:, 0] > 0).long()), "bincount"),
    "t_": (lambda x: x.clone().t_(), "t_"),
    "squeeze_": (lambda x: x.clone().squeeze_(), "squeeze_"),
    "resize_": (lambda x: x.clone().resize_(8, 8), "resize_"),
    "set_": (lambda x: torch.empty(0).set_(x), "set_"),
    "out= that grows": (lambda x: torch.add(x, 1, out=torch.empty(2, 2)), "resized"),
    "out= that shrinks": (lambda x: torch.add(x, 1, out=SHRUNK.new_empty(8, 6)), "resized"),
    "print": (lambda x: print(x), "printing"),
    "str": (lambda x: str(x), "printing"),
    "format": (lambda x: f"{x[0, 0]:.2f}", "formatting"),
    "to another device": (lambda x: x.to("meta"), "host and the device"),
}


@pytest.mark.parametrize("inference", [False, True], ids=["no_grad", "inference_mode"])
@pytest.mark.parametrize("name", REFUSED)
def test_refusal_names_operation_line_and_cure(name: str, inference: bool):
    function, words = REFUSED[name]
    line = function.__code__.co_firstlineno

    def step(x: torch.Tensor) -> torch.Tensor:
        with torch.inference_mode(inference), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            function(x)
        return x + 1

    x = batch(0)
    with pytest.raises(CaptureError) as caught:
        record(step, x)
    message = str(caught.value)
    assert words in message
    assert f"{Path(__file__).name}:{line} " in message
    assert message.count("; ") >= 1  # the cure comes last
    assert torch.equal(x, batch(0))
    record(square, x).replay()  # the next recording works


def test_refused_operation_does_not_run():
    x = batch(0)
    with pytest.raises(CaptureError, match="resize_"):
        record(lambda t: t.resize_(100), x)
    assert x.shape == (4, 6)


def test_reading_is_allowed_outside_the_recording():
    recording = record(square, batch(0))
    recording.replay()
    assert recording.outputs["y"].sum().item() > 0
    assert str(recording.outputs["y"]).startswith("tensor(")


def test_masked_assignment_of_many_values_is_refused_where_work_is_captured():
    """On CUDA it counts the mask on the host; on the tape it is just run again."""

    def step(values: torch.Tensor) -> None:
        target = torch.zeros(4, 6)
        target[torch.ones(4, dtype=torch.bool)] = values

    with StepGuard(CPU, replays_live=False).watching():
        step(torch.ones(1))
    refused = StepGuard(CPU, replays_live=False).watching()
    with pytest.raises(CaptureError, match="index_put_"), refused:
        step(batch(0))
    with StepGuard(CPU, replays_live=True).watching():
        step(batch(0))


def test_triton_launch_is_refused_in_the_recorded_thread_only():
    """The tape could not see its arguments; other threads are none of its business."""
    knobs = pytest.importorskip("triton.knobs")
    guard = StepGuard(CPU, replays_live=True)

    class Launch:
        def get(self) -> dict[str, str]:
            return {"name": "my_kernel"}

    def launch() -> None:
        knobs.runtime.launch_enter_hook(Launch())

    elsewhere: list[BaseException] = []

    def in_another_thread() -> None:
        try:
            launch()
        except BaseException as error:
            elsewhere.append(error)

    with guard.watching():
        thread = threading.Thread(target=in_another_thread)
        thread.start()
        thread.join()
    assert elsewhere == []
    message = r"'my_kernel' was launched at .*test_tape\.py"
    with pytest.raises(CaptureError, match=message), guard.watching():
        launch()
    launch()


def test_count_step_on_meta_needs_no_memory():
    x = torch.empty(4, 6, device="meta")
    census = count_step(lambda: {"y": kernel_layer(x) + 1}, torch.device("meta"))
    assert {row.operation for row in census.rows} == {"scaled add", "aten.add.Tensor"}
    assert census.total == 2
