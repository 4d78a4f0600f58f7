"""Calls of a tape: torch's own bindings where they are the same operation, and only there."""

from functools import partial

import pytest
import torch

from graphcap.recorders import bindings
from graphcap.recorders.bindings import implemented_by, repeatable
from graphcap.recorders.tape import TapeRecorder

aten = torch.ops.aten
CPU = torch.device("cpu")
needs_scoped_library = pytest.mark.skipif(
    not hasattr(torch.library, "_scoped_library"),
    reason="needs torch.library._scoped_library (torch 2.3)",
)


def _x(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


# (overload, arguments, keywords without out, shapes and dtypes of its out arguments)
WITH_BINDING = {
    "mul": (aten.mul.out, (_x(3, 4), _x(3, 1)), {}, [((3, 4), torch.float32)]),
    "mul by a number": (aten.mul.out, (_x(3, 4), 2.5), {}, [((3, 4), torch.float32)]),
    "add with alpha": (aten.add.out, (_x(3, 4), _x(4)), {"alpha": 3}, [((3, 4), torch.float32)]),
    "sub": (aten.sub.out, (_x(3, 4), _x(4)), {}, [((3, 4), torch.float32)]),
    "pow": (aten.pow.Tensor_Scalar_out, (_x(3, 4), 2), {}, [((3, 4), torch.float32)]),
    "mean": (aten.mean.out, (_x(3, 4), [-1], True), {}, [((3, 1), torch.float32)]),
    "mean in float64": (
        aten.mean.out,
        (_x(3, 4), [-1]),
        {"dtype": torch.float64},
        [((3,), torch.float64)],
    ),
    "rsqrt": (aten.rsqrt.out, (_x(3, 4).abs(),), {}, [((3, 4), torch.float32)]),
    "mm": (aten.mm.out, (_x(3, 4), _x(4, 5)), {}, [((3, 5), torch.float32)]),
    "topk": (
        aten.topk.values,
        (_x(3, 8), 2),
        {},
        [((3, 2), torch.float32), ((3, 2), torch.int64)],
    ),
    "into another type": (aten.mul.out, (_x(3, 4), _x(4)), {}, [((3, 4), torch.bfloat16)]),
}


def _outs(overload, kinds):
    names = [argument.name for argument in overload._schema.arguments if argument.is_out]
    tensors = [torch.full(shape, 7, dtype=dtype) for shape, dtype in kinds]
    return dict(zip(names, tensors, strict=True))


@pytest.mark.parametrize("name", WITH_BINDING)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_binding_is_taken_and_computes_the_same(name, mode):
    overload, args, kwargs, kinds = WITH_BINDING[name]
    expected, got = _outs(overload, kinds), _outs(overload, kinds)
    with mode():
        overload(*args, **kwargs, **expected)
        call = repeatable(overload, args, {**kwargs, **got})
        assert all(torch.all(out == 7) for out in got.values()), "it ran while it was built"
        call()
    assert call.func is getattr(torch, overload.overloadpacket.__name__)
    for out in got:
        assert torch.equal(expected[out], got[out])


def test_method_of_an_in_place_operation():
    target, source = torch.zeros(3), _x(3)
    call = repeatable(aten.copy_.default, (target, source), {})
    assert call.func == target.copy_
    assert torch.all(target == 0)
    call()
    assert torch.equal(target, source)


def test_each_call_reads_the_values_of_now():
    source, out = torch.ones(3), torch.empty(3)
    call = repeatable(aten.mul.out, (source, 2), {"out": out})
    call()
    source.fill_(5)
    call()
    assert out.tolist() == [10, 10, 10]


def _wrong(monkeypatch, binding):
    monkeypatch.setattr(torch, "mul", binding)
    monkeypatch.setattr(bindings, "_BUILTIN", (type(binding), type(torch.add)))
    a, b, out = _x(3), _x(3), torch.empty(3)
    call = repeatable(aten.mul.out, (a, b), {"out": out})
    call()
    assert torch.equal(out, a * b)
    return call


def test_binding_of_another_operation_is_not_taken(monkeypatch):
    assert _wrong(monkeypatch, torch.add).func is not torch.add


def test_binding_that_does_more_is_not_taken(monkeypatch):
    def twice(a, b, out):
        torch.add(a, b, out=out)
        return torch.add(a, b, out=out)

    assert _wrong(monkeypatch, twice).func is not twice


def test_binding_that_changes_an_argument_is_not_taken(monkeypatch):
    real = torch.mul

    def swapped(a, b, out):
        return real(b, a, out=out)

    assert _wrong(monkeypatch, swapped).func is not swapped


def test_binding_that_refuses_the_arguments_is_not_taken(monkeypatch):
    def refuses(a, b, out):
        raise TypeError("no")

    assert _wrong(monkeypatch, refuses).func is not refuses


def test_python_function_of_the_same_name_is_not_taken():
    # torch.split is a Python function that means something else by its arguments.
    assert bindings._binding(aten.split_with_sizes.default, (_x(4), [1, 3]), {}) is None
    assert bindings._binding(aten.norm.out, (_x(4), 2, [0]), {"out": torch.empty(())}) is None


def test_other_operators_lose_one_python_frame_only():
    out, x = torch.empty(1, 4), _x(2, 4)
    index = torch.tensor([1])
    call = repeatable(aten.embedding.out, (x, index), {"out": out})
    call()
    assert torch.equal(out[0], x[1])


@needs_scoped_library
def test_operator_whose_kernel_is_a_python_function():
    seen = []

    def kernel(x, n):
        seen.append(n)
        x.add_(n)

    with torch.library._scoped_library("graphcap_test_bindings", "FRAGMENT") as library:
        library.define("advance(Tensor(a!) x, int n) -> ()")
        library.impl("advance", kernel, "CPU")
        overload = torch.ops.graphcap_test_bindings.advance.default
        implemented_by(overload, kernel)
        try:
            x = torch.zeros(2)
            call = repeatable(overload, (x, 3), {})
            assert isinstance(call, partial)
            assert call.func is kernel
            call()
        finally:
            del bindings._PYTHON[overload]
    assert seen == [3]
    assert x.tolist() == [3, 3]


@needs_scoped_library
def test_operator_called_for_its_effect_is_no_allocation():
    """Its empty result is a token that orders it before others."""
    cache, runs = torch.zeros(2), []

    def update(x):
        runs.append(None)
        cache.copy_(x)
        return x.new_empty(0)

    with torch.library._scoped_library("graphcap_test_effects", "FRAGMENT") as library:
        library.define("update(Tensor x) -> Tensor")
        library.impl("update", update, "CPU")
        overload = torch.ops.graphcap_test_effects.update.default
        x, out = torch.ones(2), torch.empty(2)

        def step():
            overload(x)
            torch.mul(x, 2, out=out)
            return {"out": out}

        recording = TapeRecorder(CPU).record(step, 2)
        assert recording.census().allocations == 0
        x.fill_(4)
        recording.replay()
    assert len(runs) == 2
    assert cache.tolist() == [4, 4]
    assert out.tolist() == [8, 8]


@pytest.mark.parametrize(("strided", "allocations"), [(False, 0), (True, 1)])
def test_embedding_is_a_selection_of_rows(strided, allocations):
    table = _x(10, 4)
    ids = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])

    def step():
        return {"out": torch.nn.functional.embedding(ids[:, ::2] if strided else ids, table)}

    recording = TapeRecorder(CPU).record(step, 2)
    assert recording.census().allocations == allocations
    ids.copy_(9 - ids)
    recording.replay()
    assert torch.equal(recording.outputs["out"], step()["out"])
