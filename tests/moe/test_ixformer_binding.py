"""Which ixformer is found, how its operations are bound, and what is said where they cannot be."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest
import torch
from ixformer_standin import GENERATIONS, MOE_OPERATIONS, installed, module_of
from ixformer_standin.newer import paged_attention_of_ixformer

from graphcap.decode.kernels import DecodeKernels, decode_kernels
from graphcap.errors import BackendError
from graphcap.moe import kernels as kernel_choice
from graphcap.moe.kernels import Backend, choose_backend
from graphcap.moe.kernels.ixformer_library import Form, Found, Library, load_library

CUDA = torch.device("cuda")


class Builtin:
    """A callable that tells no signature, as pybind11's do."""

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call
        self.__signature__ = "none"  # inspect.signature raises TypeError

    def __call__(self, *args: Any) -> Any:
        return self._call(*args)


def bound(generation: str, **changes: Any) -> DecodeKernels:
    with installed(generation, **changes):
        return decode_kernels(Backend("ixformer", "tests"))


def notes(kernels: DecodeKernels) -> dict[str, str]:
    """Operation -> why it is not ixformer's, leaving out what no ixformer has."""
    return {
        choice.operation: choice.note
        for choice in kernels.choices()
        if choice.note and choice.note != "ixformer has no such operation"
    }


@pytest.mark.parametrize("generation", GENERATIONS)
@pytest.mark.parametrize("builtin", [False, True])
def test_everything_is_bound_with_signatures_and_without(generation: str, builtin: bool) -> None:
    replaced = {}
    if builtin:
        replaced = {
            name: Builtin(value)
            for name, value in vars(module_of(generation)).items()
            if callable(value)
        }
        assert replaced
    kernels = bound(generation, replaced=replaced)
    missing = {} if generation == "newer" else {"merge"}
    assert set(notes(kernels)) == set(missing)
    on_ixformer = {c.operation for c in kernels.choices() if c.kernel.startswith("ixformer: ")}
    assert on_ixformer | set(missing) == {
        "rms_norm",
        "fused_add_rms_norm",
        "rotary_embedding",
        "cache write",
        "attention",
        "topk_softmax",
        "moe_align_block_size",
        "fused_moe",
        "silu_and_mul",
        "merge",
    }
    slots = {"0.4": torch.int32, "newer": torch.int64}
    assert kernels.cache_format.slot_dtype == slots[generation]


@pytest.mark.parametrize("generation", GENERATIONS)
def test_the_order_of_rms_norm_is_taken_from_the_signature(generation: str) -> None:
    """Even where the rest of the module is of the other generation."""
    other = {"0.4": "newer", "newer": "0.4"}[generation]
    swapped = module_of(other).rms_norm
    kernels = bound(generation, replaced={"rms_norm": swapped})
    assert not {"rms_norm"} & set(notes(kernels))
    x, weight = torch.randn(3, 8), torch.randn(8)
    out = torch.full_like(x, float("nan"))
    kernels.rms_norm(x, weight, out, 1e-6)
    exact = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-6).sqrt()
    torch.testing.assert_close(out.double(), exact * weight.double(), rtol=1e-5, atol=1e-6)


def test_an_unknown_order_falls_back_and_is_told() -> None:
    def rms_norm(weight: Any, input: Any, output: Any, eps: float) -> None:
        raise AssertionError("called in an order that is not its own")

    kernels = bound("newer", replaced={"rms_norm": rms_norm})
    assert kernels.rms_norm.implementation == "torch"
    assert notes(kernels) == {
        "rms_norm": "in ixformer.inference.functions, rms_norm(weight, input, output, eps): expected "
        "input as parameter 1, weight as parameter 2, eps as parameter 3, output as parameter 4"
    }


def test_more_required_parameters_fall_back() -> None:
    def silu_and_mul(input: Any, output: Any, limit: float) -> None:
        raise AssertionError

    kernels = bound("0.4", replaced={"silu_and_mul": silu_and_mul})
    assert "no further required parameters than the first 2" in notes(kernels)["silu_and_mul"]


def test_a_wrapper_that_tells_nothing_counts_as_its_generation() -> None:
    def rms_norm(*args: Any, **kwargs: Any) -> Any:
        return module_of("newer").rms_norm(*args, **kwargs)

    kernels = bound("newer", replaced={"rms_norm": rms_norm})
    assert kernels.rms_norm.implementation == "ixformer: rms_norm"


def test_builds_without_moe_say_so() -> None:
    """BI-V100 images: the wrappers of their vLLM name three operations that are not there."""
    kernels = bound("0.4", without=MOE_OPERATIONS)
    told = notes(kernels)
    assert told["topk_softmax"] == "ixformer.functions has no vllm_moe_topk_softmax"
    assert told["moe_align_block_size"] == "ixformer.functions has no vllm_moe_align_block_size"
    assert told["fused_moe"] == "ixformer.functions has no vllm_invoke_fused_moe_kernel"
    assert kernels.experts.fused is None
    assert kernels.attention.implementation.startswith("ixformer: ")


@pytest.mark.parametrize("generation", GENERATIONS)
def test_a_renamed_operation_falls_back_alone(generation: str) -> None:
    name = {"0.4": "vllm_rotary_embedding_neox", "newer": "vllm_rotary_embedding"}[generation]
    kernels = bound(generation, renamed={name: name + "_v2"})
    told = {key: value for key, value in notes(kernels).items() if key != "merge"}
    path = {"0.4": "ixformer.functions", "newer": "ixformer.inference.functions"}[generation]
    assert told == {"rotary_embedding": f"{path} has no {name}"}


@pytest.mark.parametrize("missing", ["reshape_and_cache_flash", "vllm_paged_attention"])
def test_cache_write_and_attention_are_bound_together(missing: str) -> None:
    """What lies in a block stays between the two."""
    kernels = bound("newer", without=[missing])
    told = notes(kernels)
    assert set(told) == {"cache write", "attention"}
    assert all(missing in text for text in told.values())
    assert sum("bound only with its pair" in text for text in told.values()) == 1
    assert kernels.cache_format.layout == "tokens"
    assert kernels.bound is None


def test_attention_that_is_not_told_of_a_graph_is_bound_too() -> None:
    kernels = bound("newer", replaced={"vllm_paged_attention": paged_attention_of_ixformer})
    assert notes(kernels) == {}
    assert kernels.attention.implementation == "ixformer: vllm_paged_attention"


class LazyModule(ModuleType):
    """Loads its operations when they are asked for; some libraries are not on the card's image."""

    def __getattr__(self, name: str) -> Any:
        if name in ("vllm_moe_topk_softmax", "vllm_paged_attention"):
            raise OSError(f"libixformer_{name}.so: cannot open shared object file\nsecond line")
        raise AttributeError(name)


def test_an_operation_that_cannot_be_loaded_falls_back_alone() -> None:
    broken = ("vllm_moe_topk_softmax", "vllm_paged_attention")
    with installed("newer", without=broken) as module:
        lazy = LazyModule(module.__name__)
        vars(lazy).update(vars(module))
        sys.modules[module.__name__] = lazy
        assert load_library().generation == "newer"
        told = notes(decode_kernels(Backend("ixformer", "test")))
    name = "vllm_moe_topk_softmax"
    assert told.pop("topk_softmax") == (
        f"in ixformer.inference.functions, {name} cannot be loaded: libixformer_{name}.so: cannot open "
        f"shared object file"
    )
    assert set(told) == {"attention", "cache write"}
    assert "vllm_paged_attention cannot be loaded" in told["cache write"]


def test_a_wrapper_that_tells_no_order_is_bound_in_its_own_generation_only() -> None:
    def untold(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("called in an order that nobody knows")

    strange = {"vllm_rotary_embedding": untold}
    with installed("0.4", without=["vllm_rotary_embedding_neox"], replaced=strange):
        assert load_library().generation == "0.4"
        told = notes(decode_kernels(Backend("ixformer", "test")))
    assert told["rotary_embedding"] == "ixformer.functions has no vllm_rotary_embedding_neox"


def test_the_newer_place_comes_first() -> None:
    with installed("newer"):
        sys.modules["ixformer.functions"] = module_of("0.4")
        library = load_library()
    assert (library.path, library.generation) == ("ixformer.inference.functions", "newer")


def test_a_place_without_known_names_is_passed_over() -> None:
    with installed("newer"):
        sys.modules["ixformer.inference.functions"] = ModuleType("ixformer.inference.functions")
        sys.modules["ixformer.functions"] = module_of("0.4")
        library = load_library()
    assert (library.path, library.generation) == ("ixformer.functions", "0.4")


def test_a_mixed_module_is_of_the_generation_with_the_larger_share() -> None:
    newer = module_of("newer").reshape_and_cache_flash
    with installed("0.4", replaced={"reshape_and_cache_flash": newer}):
        assert load_library().generation == "0.4"


def test_neither_generation_is_refused_by_name() -> None:
    with installed("newer"):
        module = sys.modules["ixformer.inference.functions"] = ModuleType("empty")
        module.matmul = torch.mm  # type: ignore[attr-defined]
        with pytest.raises(BackendError) as refused:
            load_library()
    text = str(refused.value)
    assert "neither generation" in text
    for name in ("vllm_paged_attention", "residual_rms_norm", "fused_add_rms_norm"):
        assert name in text
    assert "; use GRAPHCAP_KERNELS=triton or reference (graphcap explain backend)" in text


def test_an_import_that_fails_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    from graphcap.moe.kernels import ixformer_library

    def broken(path: str) -> ModuleType:
        raise OSError("libmpi.so.40: cannot open shared object file\nsecond line")

    monkeypatch.setattr(ixformer_library, "import_module", broken)
    with pytest.raises(
        BackendError, match=r"ixformer\.functions: libmpi\.so\.40: cannot open shared"
    ):
        load_library()


def test_a_form_that_only_the_other_generation_has_needs_a_signature() -> None:
    module = ModuleType("m")
    module.op = Builtin(lambda a: a)  # type: ignore[attr-defined]
    library = Library(module, "m", "newer", None)
    first, newer = Form("op", 1, {"a": 0}, "0.4"), Form("op2", 1, {}, "newer")
    assert library.find(first, newer) == "m has no op2"
    module.op = lambda a: a  # type: ignore[attr-defined]
    found = library.find(first, newer)
    assert isinstance(found, Found)
    assert found.form is first


# -- the choice of the backend -----------------------------------------------------------------------


@pytest.fixture
def without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel_choice, "_triton_version", lambda: None)


@pytest.mark.parametrize("generation", GENERATIONS)
def test_auto_takes_ixformer_where_it_is(generation: str, without_triton: None) -> None:
    with installed(generation):
        backend = choose_backend("auto", CUDA)
        asked = choose_backend("ixformer", CUDA)
        assert choose_backend("auto", torch.device("cpu")).name == "reference"
        assert choose_backend("reference", CUDA).name == "reference"
    assert (backend.name, backend.stand_in) == ("ixformer", "reference")
    assert f"generation {generation} is there" in backend.why
    assert asked.name == "ixformer"
    assert asked.why.startswith("asked for (ixformer")


def test_what_is_missing_runs_on_triton_where_that_is() -> None:
    try:
        import graphcap.decode.kernels.triton  # noqa: F401
    except Exception as error:
        pytest.skip(f"no Triton that takes graphcap's kernels: {error}")
    with installed("0.4", without=MOE_OPERATIONS):
        backend = choose_backend("ixformer", CUDA)
        assert backend.stand_in == "triton"
        kernels = decode_kernels(backend)
    assert kernels.experts.topk_softmax.implementation == "triton: topk_softmax"
    assert kernels.experts.pairs is not None
    assert kernels.attention.implementation.startswith("ixformer: ")


def test_a_triton_that_cannot_take_the_kernels_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(kernel_choice, "_triton_version", lambda: "2.3.1")
    own = kernel_choice.import_module

    def old(name: str) -> ModuleType:
        if name == "graphcap.decode.kernels.triton":
            raise AttributeError("module 'triton.language' has no attribute 'static_range'")
        return own(name)

    monkeypatch.setattr(kernel_choice, "import_module", old)
    with installed("0.4"), caplog.at_level(logging.WARNING, logger="graphcap"):
        assert choose_backend("ixformer", CUDA).stand_in == "reference"
    assert "static_range" in caplog.text


def test_auto_says_why_an_ixformer_is_not_used(
    without_triton: None, caplog: pytest.LogCaptureFixture
) -> None:
    with installed("newer"), caplog.at_level(logging.WARNING, logger="graphcap"):
        sys.modules["ixformer.inference.functions"] = ModuleType("empty")
        assert choose_backend("auto", CUDA).name == "reference"
        with pytest.raises(BackendError, match="neither generation"):
            choose_backend("ixformer", CUDA)
    assert "ixformer is not used" in caplog.text


def test_a_corex_torch_without_ixformer_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, without_triton: None, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch, "__version__", "2.1.0+corex.3.2.3")
    with caplog.at_level(logging.WARNING, logger="graphcap"):
        assert choose_backend("auto", CUDA).name == "reference"
    assert "ixformer cannot be imported" in caplog.text
