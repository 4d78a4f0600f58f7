"""What is tried with real engines on the CPU; run by test_cpu_engine.py.

    python cpu_scenarios.py

Each scenario is a process of its own, forked after vLLM was imported; see gather.py. On one thread each,
since several run at a time and operations this small are not shared among cores.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import tempfile
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cpu_engine
from checkpoints import write_checkpoint
from cpu_engine import C_NORMS, NATIVE_NORMS, Request, decode, requests, serve, start, start_plain
from environments import report
from gather import gather
from scenarios.common import from_graphcap, log_records

FOLDER_VARIABLE = "TEST_FOLDER_OF_CPU_SCENARIOS"
KINDS = {"moe": "qwen3_moe", "dense": "qwen3"}
LAYERS = {"num_hidden_layers": 2}
SMALL = [1, 2]

IMPORTED_ONCE = (
    "vllm.entrypoints.llm",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
    "vllm.model_executor.models.qwen3",
    "vllm.model_executor.models.qwen3_moe",
)


def folder() -> Path:
    return Path(os.environ[FOLDER_VARIABLE])


def model(name: str) -> Path:
    return folder() / name


def write_models() -> None:
    for name, kind in KINDS.items():
        write_checkpoint(model(name), kind, **LAYERS)
    for name, kind in KINDS.items():
        write_checkpoint(model(f"other {name}"), kind, seed=1, **LAYERS)
    _mix(model("moe"), model("other moe"), model("other norms"))


def _mix(base: Path, other: Path, target: Path) -> None:
    """`base` with the norms of `other`."""
    from safetensors.torch import load_file, save_file

    target.mkdir()
    weights, others = (load_file(path / "model.safetensors") for path in (base, other))
    weights.update({name: tensor for name, tensor in others.items() if "norm" in name})
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    (target / "config.json").write_text((base / "config.json").read_text())


def turn_on(**variables: str) -> None:
    """graphcap in this process; names without the prefix. Later changes reach later engines."""
    os.environ["GRAPHCAP"] = "1"
    os.environ.update({f"GRAPHCAP_{name.upper()}": value for name, value in variables.items()})


def offer_c_norms() -> None:
    """To an engine without graphcap, so that only capturing differs."""
    from graphcap.hosts.vllm import norms_cpu

    assert norms_cpu.register() == "RMS norms registered"


# -- tokens --------------------------------------------------------------------------------------


def vllm_alone(name: str, norms: dict[str, list[str]]) -> Callable[[], Any]:
    def scenario() -> Any:
        if norms is C_NORMS:
            offer_c_norms()
        llm = start_plain(model(name), norms=norms)
        return {"norms": _norms(), "served": serve(llm)}

    return scenario


def graphcap(name: str, norms: dict[str, list[str]] | None) -> Callable[[], Any]:
    def scenario() -> Any:
        path = folder() / f"{name}, {norms and 'native'}.json"
        turn_on(report=str(path))
        with log_records() as records:
            llm = start(model(name), norms=norms)
            steps = cpu_engine.count_steps(llm)
            served = serve(llm)
        return {
            "norms": _norms(),
            "served": served,
            "steps": {kind: cpu_engine.pairs(counts) for kind, counts in steps.items()},
            "statistics": cpu_engine.statistics(llm),
            "counters": cpu_engine.shared_counters(),
            "prometheus": cpu_engine.prometheus(),
            "log": from_graphcap(records),
            "report": json.loads(path.read_text()),
        }

    return scenario


def _norms() -> dict[str, list[str]]:
    from vllm import ir

    return {name: getattr(ir.ops, name).get_priority() for name in NATIVE_NORMS}


def norm_kernels() -> Any:
    """Largest differences of vLLM's C kernels to vLLM's own norms, in units of the last place."""
    import torch
    from vllm import ir

    offer_c_norms()
    found = []
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for shape in ((1, 64), (6, 64), (5, 4, 32), (5, 3, 96)):
            generator = torch.Generator().manual_seed(0)
            x, residual = (torch.randn(*shape, generator=generator).to(dtype) for _ in range(2))
            strided = torch.randn(*shape[:-1], 3 * shape[-1], generator=generator).to(dtype)
            strided = strided[..., shape[-1] : 2 * shape[-1]]
            weight = torch.randn(shape[-1], generator=generator).to(dtype)
            for op, inputs in (
                (ir.ops.rms_norm, (x,)),
                (ir.ops.rms_norm, (strided,)),
                (ir.ops.fused_add_rms_norm, (x, residual)),
                (ir.ops.fused_add_rms_norm, (strided, residual)),
            ):
                results = []
                for provider in ("native", "graphcap_cpu"):
                    with op.set_priority([provider, "native"]):
                        fresh = [tensor.clone() for tensor in inputs]
                        if inputs[0] is strided:
                            fresh[0] = strided.clone(memory_format=torch.preserve_format)
                            fresh[0] = torch.as_strided(
                                torch.empty(strided.numel() * 3, dtype=dtype),
                                strided.size(),
                                strided.stride(),
                            ).copy_(strided)
                        out = op(*fresh, weight, 1e-6)
                        results.append(out if isinstance(out, tuple) else (out,))
                step = torch.finfo(dtype).eps
                units = max(
                    ((a.float() - b.float()).abs() / (a.float().abs() * step + step)).max().item()
                    for a, b in zip(*results, strict=True)
                )
                found.append([op.name, str(dtype), list(shape), inputs[0] is strided, units])
    odd = torch.randn(3, 20)
    with ir.ops.rms_norm.set_priority(["graphcap_cpu", "native"]):
        found_odd = ir.ops.rms_norm.dispatch(odd, torch.ones(20), 1e-6).provider
    return {"differences": found, "a row of 20 goes to": found_odd}


# -- checks while serving ------------------------------------------------------------------------


def verified() -> Any:
    turn_on(verify="3")
    llm = start(model("moe"))
    tokens = decode(llm, requests())
    return {"tokens": tokens, "statistics": cpu_engine.statistics(llm)}


def verification_finds_a_difference() -> Any:
    """A recording that leaves out one operation is found at the third replay."""
    turn_on(verify="3")
    llm = start(model("moe"))
    recording = cpu_engine.capture(llm).managers["decode"].recording(1)
    recording._calls = recording._calls[:-1]
    try:
        tokens = decode(llm, [Request([1, 2, 3], 12)])
    except Exception as error:
        replays = cpu_engine.statistics(llm)["replays"]
        return {"error": f"{type(error).__name__}: {error}", "replays": replays}
    return {"error": None, "tokens": tokens}


def above_maximum() -> Any:
    """The user's sizes end below the largest batch: counted, and an error where that is asked for."""
    turn_on()
    sizes = {"compilation_config": {"cudagraph_capture_sizes": SMALL}}
    with log_records() as records:
        llm = start(model("moe"), **sizes)
        steps = cpu_engine.count_steps(llm)
        tokens = decode(llm, requests())
    statistics = cpu_engine.statistics(llm)
    counters = cpu_engine.shared_counters()
    samples = cpu_engine.prometheus()
    cpu_engine.shut_down(llm)
    turn_on(strict="1")
    llm = start(model("moe"), **sizes)
    small = decode(llm, requests()[:2])
    try:
        decode(llm, requests(), at_once=4)
    except Exception as error:
        strict = f"{type(error).__name__}: {error}"
    else:
        strict = ""
    return {
        "tokens": tokens,
        "steps": {kind: cpu_engine.pairs(counts) for kind, counts in steps.items()},
        "statistics": statistics,
        "counters": counters,
        "prometheus": samples,
        "log": from_graphcap(records),
        "strict": {"two tokens": small, "error": strict},
    }


def large_prefills() -> Any:
    """Prefills above the largest recording, where fallbacks are errors."""
    turn_on(strict="1")
    wanted = [Request([7 * index + 1] * 200, 8) for index in range(4)]
    llm = start(model("moe"), max_num_batched_tokens=512)
    steps = cpu_engine.count_steps(llm)
    tokens = decode(llm, wanted)
    found = {
        "tokens": tokens,
        "steps": {kind: cpu_engine.pairs(counts) for kind, counts in steps.items()},
        "statistics": cpu_engine.statistics(llm),
    }
    cpu_engine.shut_down(llm)
    return {**found, "alone": decode(start_plain(model("moe"), norms=C_NORMS), wanted)}


def decode_only() -> Any:
    """The user wants no mixed batches recorded."""
    turn_on()
    llm = start(model("moe"), compilation_config={"cudagraph_mode": "FULL_DECODE_ONLY"})
    steps = cpu_engine.count_steps(llm)
    tokens = decode(llm, requests())
    return {
        "tokens": tokens,
        "steps": {kind: cpu_engine.pairs(counts) for kind, counts in steps.items()},
        "managers": sorted(cpu_engine.capture(llm).managers),
        "counters": cpu_engine.shared_counters(),
    }


def one_bucket_fails() -> Any:
    """An exception inside the model while the bucket of two is recorded."""
    from graphcap.operations import current_observer

    turn_on()
    module = importlib.import_module("vllm.model_executor.models.qwen3_moe")
    original = module.Qwen3MoeDecoderLayer.forward

    def forward(self: Any, positions: Any, hidden_states: Any, residual: Any) -> Any:
        if current_observer() is not None and hidden_states.shape[0] == 2:
            raise ValueError("injected into bucket 2")
        return original(self, positions, hidden_states, residual)

    module.Qwen3MoeDecoderLayer.forward = forward
    with log_records() as records:
        llm = start(model("moe"))
        steps = cpu_engine.count_steps(llm)
        tokens = decode(llm, requests())
    return {
        "tokens": tokens,
        "steps": {kind: cpu_engine.pairs(counts) for kind, counts in steps.items()},
        "statistics": cpu_engine.statistics(llm),
        "log": from_graphcap(records),
    }


# -- weights -------------------------------------------------------------------------------------


def tokens_of(name: str) -> Callable[[], Any]:
    """What vLLM alone decodes with these weights."""

    def scenario() -> Any:
        offer_c_norms()
        return decode(start_plain(model(name), norms=C_NORMS), requests())

    return scenario


def weights_change(name: str, change: Callable[[Any], None]) -> Callable[[], Any]:
    """Tokens before and after `change` of the running engine."""

    def scenario() -> Any:
        turn_on()
        with log_records() as records:
            llm = start(model(name), enable_prefix_caching=False)
            before = decode(llm, requests())
            first = cpu_engine.statistics(llm)
            change(llm)
            after = decode(llm, requests())
        return {
            "before": before,
            "after": after,
            "statistics before": first,
            "statistics": cpu_engine.statistics(llm),
            "counters": cpu_engine.shared_counters(),
            "log": from_graphcap(records),
        }

    return scenario


def _other_norms(worker: Any) -> dict[Any, Any]:
    """Module with a norm's weight -> the weight in the other checkpoint."""
    from safetensors.torch import load_file

    others = load_file(model("other norms") / "model.safetensors")
    modules = dict(worker.model_runner.get_model().named_modules())
    return {
        modules[name.removesuffix(".weight")]: tensor
        for name, tensor in others.items()
        if "norm" in name
    }


def copied(llm: Any) -> None:
    def change(worker: Any) -> None:
        for module, weight in _other_norms(worker).items():
            module.weight.data.copy_(weight)

    llm.collective_rpc(change)


def rebound(llm: Any) -> None:
    import torch

    def change(worker: Any) -> None:
        for module, weight in _other_norms(worker).items():
            module.weight = torch.nn.Parameter(weight.clone(), requires_grad=False)

    llm.collective_rpc(change)


def moved(llm: Any) -> None:
    def change(worker: Any) -> None:
        for module, weight in _other_norms(worker).items():
            module.weight.data = weight.clone()  # torch announces nothing

    llm.collective_rpc(change)


def moved_inside(llm: Any) -> None:
    """By a function that passes the wrapper's look-up by."""

    def change(wrapper: Any) -> None:
        for module, weight in _other_norms(wrapper.worker).items():
            module.weight.data = weight.clone()

    llm.collective_rpc(change)


def reloaded(llm: Any) -> None:
    # Of a dense model: vLLM 0.32 packs experts that it reloads on a CPU otherwise than it loads them.
    llm.collective_rpc("reload_weights", kwargs={"weights_path": str(model("other dense"))})


def repacked(llm: Any) -> None:
    """As a reload does inside, in a function of the user's. Nothing announces it but the call."""

    def change(worker: Any) -> None:
        modules = dict(worker.model_runner.get_model().named_modules())
        for module in modules.values():
            if hasattr(module, "cpu_linear"):
                original = module.cpu_linear
                module.cpu_linear = lambda *args, _original=original: _original(*args)

    llm.collective_rpc(change)


# -- engines come and go -------------------------------------------------------------------------


def one_after_the_other() -> Any:
    """Three engines; the first has a report that cannot be written."""
    turn_on(report="/dev/full")
    found: list[Any] = []
    for name in ("moe", "dense", "moe"):
        with log_records() as records:
            llm = start(model(name))
            tokens = decode(llm, requests())
        kept = cpu_engine.capture(llm)
        watched = {
            "model": weakref.ref(cpu_engine.runner(llm).get_model()),
            "recording": weakref.ref(kept.managers["decode"].recording(1)),
            "kv cache": weakref.ref(cpu_engine.runner(llm).kv_caches[0]),
        }
        statistics = cpu_engine.statistics(llm)
        cpu_engine.shut_down(llm)
        states = [manager.stats().state for manager in kept.managers.values()]
        del llm, kept
        gc.collect()
        found.append(
            {
                "tokens": tokens,
                "statistics": statistics,
                "states": states,
                "alive": [what for what, reference in watched.items() if reference() is not None],
                "log": from_graphcap(records),
            }
        )
        os.environ.pop("GRAPHCAP_REPORT", None)
    return found


def alive_without_graphcap() -> Any:
    """What vLLM alone keeps of an engine that was shut down."""
    llm = start_plain(model("moe"))
    decode(llm, requests(2))
    watched = {
        "model": weakref.ref(cpu_engine.runner(llm).get_model()),
        "kv cache": weakref.ref(cpu_engine.runner(llm).kv_caches[0]),
    }
    cpu_engine.shut_down(llm)
    del llm
    gc.collect()
    return [what for what, reference in watched.items() if reference() is not None]


SCENARIOS: dict[str, Callable[[], Any]] = {
    **{f"vllm {name}, native": vllm_alone(name, NATIVE_NORMS) for name in KINDS},
    **{f"vllm {name}": vllm_alone(name, C_NORMS) for name in KINDS},
    **{f"graphcap {name}, native": graphcap(name, NATIVE_NORMS) for name in KINDS},
    **{f"graphcap {name}": graphcap(name, None) for name in KINDS},
    "norm kernels": norm_kernels,
    "verified": verified,
    "verification finds a difference": verification_finds_a_difference,
    "above maximum": above_maximum,
    "large prefills": large_prefills,
    "decode only": decode_only,
    "one bucket fails": one_bucket_fails,
    **{f"tokens of {name}": tokens_of(name) for name in ("other dense", "other norms")},
    "weights copied": weights_change("moe", copied),
    "weights rebound": weights_change("moe", rebound),
    "weights moved": weights_change("moe", moved),
    "weights moved inside": weights_change("moe", moved_inside),
    "weights reloaded": weights_change("dense", reloaded),
    "weights repacked": weights_change("dense", repacked),
    "one after the other": one_after_the_other,
    "alive without graphcap": alive_without_graphcap,
}


def main() -> None:
    import torch

    torch.set_num_threads(1)
    for name in IMPORTED_ONCE:
        importlib.import_module(name)
    with tempfile.TemporaryDirectory() as scratch:
        os.environ[FOLDER_VARIABLE] = os.environ["TMPDIR"] = scratch
        tempfile.tempdir = None
        write_models()
        report({"scenarios": gather(["cpu_scenarios"])["cpu_scenarios"]})


if __name__ == "__main__":
    main()
