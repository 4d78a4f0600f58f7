"""Kernels compiled beside the start: what a thread may do, and when it has to be gone."""

from __future__ import annotations

import logging
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from graphcap.cuda import source
from graphcap.errors import BackendError
from graphcap.hosts.vllm import ahead
from graphcap.hosts.vllm.choice import KEY, Choice
from graphcap.moe.kernels import Backend, expert_kernels
from graphcap.operations import Operation

CPU = torch.device("cpu")
LONG = 20.0


class PooledMoEMethod:
    unquantized_backend = SimpleNamespace(name="TRITON")


class FusedTopKRouter: ...


def a_layer(**routed: Any) -> SimpleNamespace:
    """A MoE layer that graphcap's kernels take, as `obstacle` looks at it."""
    experts, width, inner = 8, 16, 8
    return SimpleNamespace(
        routed_experts=SimpleNamespace(
            **{
                "quant_method": PooledMoEMethod(),
                "activation": SimpleNamespace(name="SILU"),
                "w13_weight": torch.zeros(experts, 2 * inner, width, dtype=torch.bfloat16),
                "w2_weight": torch.zeros(experts, width, inner, dtype=torch.bfloat16),
                "top_k": 2,
                "renormalize": True,
                **routed,
            }
        ),
        gate=SimpleNamespace(weight=torch.zeros(experts, width, dtype=torch.bfloat16)),
        moe_config=SimpleNamespace(),
        router=FusedTopKRouter(),
    )


def a_config(**choice: Any) -> SimpleNamespace:
    made = Choice(**{"taken": True, "decode": (1, 2, 64), "mixed_tokens": (128,), **choice})
    return SimpleNamespace(additional_config={KEY: made.to_plain()})


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, list[int]]]:
    """Sizes that were asked for, by whose kernels; nothing is compiled."""
    found: dict[str, list[int]] = {}
    for name in ("our_experts", "vllm_experts"):

        def work(*args: Any, name: str = name) -> None:
            sizes = args[1] if name == "our_experts" else args[0]
            found.setdefault(name, []).extend(sizes)

        monkeypatch.setattr(ahead, name, work)
    monkeypatch.setattr(ahead, "sample", lambda config, device: None)
    yield found
    ahead.end()


def backend(monkeypatch: pytest.MonkeyPatch, found: Backend | Exception) -> list[str]:
    asked: list[str] = []

    def choose(wanted: str, device: torch.device) -> Backend:
        asked.append(wanted)
        if isinstance(found, Exception):
            raise found
        return found

    monkeypatch.setattr(ahead, "choose_backend", choose)
    plans = SimpleNamespace(of=lambda routed: None)
    monkeypatch.setattr(ahead, "PlansOfLayers", lambda *given: plans)
    return asked


def test_sizes_go_to_the_kernels_that_serve_them(
    calls: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    backend(monkeypatch, Backend("triton", "test"))
    ahead.start(a_config(), CPU)
    ahead.experts_made(a_layer())
    ahead.wait()
    assert sorted(calls["our_experts"]) == [1, 2, 64]
    assert calls["vllm_experts"] == [64, 128]


def test_kernels_of_vllm_get_every_size(
    calls: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    backend(monkeypatch, BackendError("GRAPHCAP_KERNELS=vllm"))
    ahead.start(a_config(kernels="vllm"), CPU)
    ahead.experts_made(a_layer())
    ahead.wait()
    assert calls == {"vllm_experts": [1, 2, 64, 128]}


@pytest.mark.parametrize("name", ["ixformer", "reference"])
def test_only_triton_kernels_get_weights_in_the_memory_of_one_expert(
    name: str, calls: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    backend(monkeypatch, Backend(name, "test"))
    ahead.start(a_config(), CPU)
    ahead.experts_made(a_layer())
    ahead.wait()
    assert "our_experts" not in calls
    assert calls["vllm_experts"] == [64, 128]


@pytest.mark.parametrize(
    "layer",
    [SimpleNamespace(), a_layer(top_k="two"), a_layer(w13_weight=None)],
    ids=["no layer", "odd top-k", "no weight"],
)
def test_an_odd_layer_does_not_end_the_load(layer: Any, calls: dict[str, list[int]]) -> None:
    ahead.start(a_config(), CPU)
    ahead.experts_made(layer)
    ahead.wait()


def test_a_backend_that_is_not_there_is_asked_for_once_and_does_not_end_the_load(
    calls: dict[str, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = backend(monkeypatch, BackendError("GRAPHCAP_KERNELS=triton: Triton is missing"))
    ahead.start(a_config(kernels="triton"), CPU)
    for _ in range(3):  # it logs why at each
        ahead.experts_made(a_layer())
    ahead.wait()
    assert asked == ["triton"]


def test_what_raises_in_a_thread_is_left_to_the_start(
    calls: dict[str, list[int]], caplog: pytest.LogCaptureFixture
) -> None:
    def work() -> None:
        raise RuntimeError("no memory")

    now = ahead.Ahead(None, Choice(True), CPU)
    with caplog.at_level(logging.DEBUG, "graphcap"):
        now.begin("odd", work)
        now.wait()
    assert "odd not compiled ahead: RuntimeError('no memory')" in caplog.text


def _an_engine_that_compiles() -> tuple[ahead.Ahead, threading.Event, list[int]]:
    """The engine of this process, which compiles the first of many kernels."""
    ahead.start(a_config(), CPU)
    now = ahead._now
    assert now is not None
    compiling, sizes = threading.Event(), list[int]()

    def work() -> None:
        for size in now.each(range(10**9)):
            sizes.append(size)
            compiling.set()
            threading.Event().wait(0.01)

    now.begin("slow", work)
    assert compiling.wait(LONG)
    return now, compiling, sizes


def test_threads_of_a_load_that_raised_are_gone_when_the_next_engine_starts(
    calls: dict[str, list[int]],
) -> None:
    first, _, sizes = _an_engine_that_compiles()
    ahead.start(a_config(), CPU)
    done = len(sizes)
    assert ahead._now is not first
    assert not any(thread.is_alive() for thread in first._threads.values())
    threading.Event().wait(0.05)
    assert len(sizes) == done < 10**9


def test_an_engine_that_is_not_taken_ends_them_as_well(calls: dict[str, list[int]]) -> None:
    first, _, _ = _an_engine_that_compiles()
    ahead.start(a_config(taken=False), CPU)
    assert ahead._now is None
    assert not any(thread.is_alive() for thread in first._threads.values())


def test_a_wait_for_everything_ends_with_nothing_left(calls: dict[str, list[int]]) -> None:
    ahead.start(a_config(), CPU)
    ahead.wait("sampler")
    ahead.wait("never begun")
    assert ahead._now is not None
    ahead.wait()
    ahead.wait()
    assert ahead._now is None


@pytest.mark.parametrize("ending", ["pass", "raise ValueError('load failed')", "sys.exit(3)"])
def test_the_interpreter_does_not_go_away_under_a_thread(ending: str, tmp_path: Path) -> None:
    script = f"""
        import sys, threading, time, torch
        from types import SimpleNamespace
        from graphcap.hosts.vllm import ahead
        from graphcap.hosts.vllm.choice import KEY, Choice
        ahead.sample = lambda config, device: None
        choice = Choice(True, decode=(1,)).to_plain()
        ahead.start(SimpleNamespace(additional_config={{KEY: choice}}), torch.device("cpu"))
        begun = threading.Event()
        def work():
            for size in ahead._now.each(range(10**9)):
                begun.set()
                time.sleep(0.5)
                open({str(tmp_path / "kernels")!r}, "a").write("done ")
        ahead._now.begin("slow", work)
        begun.wait()
        {ending}
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == {"p": 0, "r": 1, "s": 3}[ending[0]], done.stderr
    assert (tmp_path / "kernels").read_text() == "done "


def test_kernels_are_compiled_by_the_plans_that_will_serve(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each batch by its own; nothing in CUDA C++ is launched, which would read weights that are not there."""
    asked: list[int] = []
    launched: list[bool] = []
    reference = expert_kernels(Backend("reference", "test"))
    align = reference.align

    def kernels(rows: int) -> Any:
        asked.append(rows)
        return replace(reference, align=Operation("align", "test", noted))

    def noted(*given: Any) -> None:
        launched.append(not source._state.held)
        align.function(*given)

    plans: Any = SimpleNamespace(kernels=kernels)
    shapes = ((8, 16, 16), (8, 16, 8))
    ahead.our_experts(plans, [1, 3], True, CPU, shapes, torch.bfloat16, 2)
    assert asked == [1, 3]
    assert launched == [False, False]
    assert not source._state.held
