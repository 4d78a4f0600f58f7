"""What is said of shapes: alignment by width, configurations by file name, tiles by schedule."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from graphcap.errors import InputError
from graphcap.moe.grouped import fused_block_size
from graphcap.moe.slow_shapes import (
    ALIGNED,
    MLX_ALIGNMENT,
    NOT_INSTALLED,
    NOT_KNOWN,
    TUNED,
    UNALIGNED,
    UNTUNED,
    ExpertShape,
    ixformer_findings,
    mlx_findings,
    vllm_config_name,
    vllm_findings,
)
from graphcap.moe.slow_shapes_triton import triton_findings

WIDTHS = (2, 3, 4, 5, 6, 8)


def shape_of(hidden: int = 2048, inner: int = 512, experts: int = 256, top_k: int = 8, tp: int = 1):
    return ExpertShape("model", experts, top_k, hidden, inner, tp)


# -- mlx -------------------------------------------------------------------------------------------


def fast_widths(k: int) -> set[int]:
    """Widths at which a down projection of `k` inputs is on the fast kernel."""
    return {bits for bits in WIDTHS if mlx_findings(shape_of(inner=k), bits)[1].verdict == ALIGNED}


@pytest.mark.parametrize(
    ("k", "widths"),
    [
        (1408, set()),
        (768, {6, 8}),
        (256, {6, 8}),
        (512, set(WIDTHS)),
        (1536, set(WIDTHS)),
        (128, set()),
    ],
)
def test_which_widths_are_fast(k: int, widths: set[int]):
    assert fast_widths(k) == widths


def test_the_widths_are_those_of_mlx():
    assert tuple(MLX_ALIGNMENT) == WIDTHS


def test_both_products_are_checked():
    gate_up, down = mlx_findings(shape_of(hidden=1408, inner=512), 4)
    assert (gate_up.verdict, down.verdict) == (UNALIGNED, ALIGNED)
    assert "gate and up, K 1408, N 512, 4 bits" in gate_up.what
    assert "down, K 512, N 1408, 4 bits" in down.what


def test_all_widths_at_once_say_the_same_as_one_by_one():
    for inner in (512, 768, 1408):
        together = mlx_findings(shape_of(inner=inner))
        assert len(together) == 4
        for finding in together:
            widths = [
                int(bits) for bits in finding.what.split("N ")[1].split(", ", 1)[1][:-5].split(", ")
            ]
            index = 0 if finding.what.startswith("gate") else 1
            for bits in widths:
                assert mlx_findings(shape_of(inner=inner), bits)[index].verdict == finding.verdict


def test_the_cure_is_a_width_that_is_fast():
    assert "6 or 8 bits have the fast one" in mlx_findings(shape_of(inner=768), 4)[1].detail
    assert "no width of weights" in mlx_findings(shape_of(inner=1408), 8)[1].detail


def test_outputs_count_too():
    gate_up, _ = mlx_findings(shape_of(hidden=2048, inner=12), 4)
    assert gate_up.verdict == UNALIGNED
    assert "N is no multiple of 8" in gate_up.detail


@pytest.mark.parametrize("bits", [1, 7, 16])
def test_a_width_that_mlx_has_not_is_refused(bits: int):
    with pytest.raises(InputError, match=rf"--bits {bits}: expected one of 2, 3, 4, 5, 6, 8"):
        mlx_findings(shape_of(), bits)


# -- shapes ----------------------------------------------------------------------------------------


def test_ranks_share_the_intermediate_size():
    shape = shape_of(inner=1536, tp=2)
    assert shape.inner == 768
    assert mlx_findings(shape, 4)[1].verdict == UNALIGNED
    assert mlx_findings(shape_of(inner=1536), 4)[1].verdict == ALIGNED


def test_ranks_that_do_not_divide_are_refused():
    with pytest.raises(InputError, match=r"--tp 3: expected a divisor of model's .* 512"):
        shape_of(inner=512, tp=3)


def test_a_model_without_experts_is_refused():
    with pytest.raises(InputError, match="has no experts"):
        shape_of(experts=0)


# -- vllm ------------------------------------------------------------------------------------------


def package(folder: Path, *names: str, content: object = None) -> Path:
    """A vllm package with configuration files and nothing else."""
    configs = folder / "vllm" / "model_executor" / "layers" / "fused_moe" / "configs"
    configs.mkdir(parents=True)
    for name in names:
        body = {"triton_version": "3.5.1", "1": {}, "16": {}, "4096": {}}
        (configs / name).write_text(json.dumps(body if content is None else content))
    return folder / "vllm"


@pytest.mark.parametrize(
    ("device", "suffix", "name"),
    [
        ("NVIDIA H100 80GB HBM3", None, "E=256,N=512,device_name=NVIDIA_H100_80GB_HBM3.json"),
        ("NVIDIA H200", None, "E=256,N=512,device_name=NVIDIA_H200.json"),
        ("NVIDIA H200 NVL", None, "E=256,N=512,device_name=NVIDIA_H200.json"),
        ("AMD Instinct/MI300X", None, "E=256,N=512,device_name=AMD_Instinct_MI300X.json"),
        (
            "NVIDIA L40S",
            "dtype=fp8_w8a8,block_shape=[128,128]",
            "E=256,N=512,device_name=NVIDIA_L40S,dtype=fp8_w8a8,block_shape=[128,128].json",
        ),
    ],
)
def test_the_name_of_a_configuration(device: str, suffix: str | None, name: str):
    assert vllm_config_name(256, 512, device, suffix) == name


def test_a_configuration_that_is_there(tmp_path: Path):
    vllm = package(tmp_path, "E=256,N=512,device_name=NVIDIA_H200.json")
    (finding,) = vllm_findings(shape_of(), vllm, "NVIDIA H200")
    assert finding.verdict == TUNED
    assert "3 batch sizes from 1 to 4096" in finding.detail


def test_one_for_another_size_card_or_dtype_is_none(tmp_path: Path):
    vllm = package(
        tmp_path,
        "E=256,N=512,device_name=NVIDIA_H100_80GB_HBM3.json",
        "E=256,N=256,device_name=NVIDIA_H200.json",
        "E=25,N=512,device_name=NVIDIA_H200.json",
        "E=256,N=512,device_name=NVIDIA_H200,dtype=fp8_w8a8,block_shape=[128,128].json",
        "E=256,N=512,device_name=NVIDIA_H20,dtype=fp8_w8a8.json",
        "README",
    )
    plain, fp8 = vllm_findings(shape_of(), vllm, "NVIDIA H200")
    assert plain.verdict == UNTUNED
    assert "there is no E=256,N=512,device_name=NVIDIA_H200.json" in plain.detail
    assert "tuned for these sizes: NVIDIA_H100_80GB_HBM3)" in plain.detail
    assert "VLLM_TUNED_CONFIG_FOLDER" in plain.detail
    assert fp8.verdict == TUNED
    assert fp8.what.endswith("dtype=fp8_w8a8,block_shape=[128,128]")


def test_n_is_that_of_one_rank(tmp_path: Path):
    vllm = package(tmp_path, "E=256,N=256,device_name=NVIDIA_H200.json")
    assert vllm_findings(shape_of(tp=2), vllm, "NVIDIA H200")[0].verdict == TUNED
    assert vllm_findings(shape_of(), vllm, "NVIDIA H200")[0].verdict == UNTUNED


def test_a_folder_of_the_users_own_comes_first(tmp_path: Path):
    vllm = package(tmp_path, "E=256,N=512,device_name=NVIDIA_H200.json")
    own = tmp_path / "own"
    own.mkdir()
    (own / "E=256,N=512,device_name=NVIDIA_H200.json").write_text('{"8": {}}')
    (finding,) = vllm_findings(shape_of(), vllm, "NVIDIA H200", own)
    assert "one batch size from 8 to 8" in finding.detail
    (finding,) = vllm_findings(shape_of(), vllm, "NVIDIA H200", tmp_path / "not there")
    assert "3 batch sizes" in finding.detail


@pytest.mark.parametrize("content", [[1, 2], {"large": {}}, {"triton_version": "3.5.1"}, "text"])
def test_a_configuration_that_is_none_counts_as_untuned(tmp_path: Path, content: object):
    vllm = package(tmp_path, "E=256,N=512,device_name=NVIDIA_H200.json", content=content)
    (finding,) = vllm_findings(shape_of(), vllm, "NVIDIA H200")
    assert finding.verdict == UNTUNED
    assert "cannot be read" in finding.detail or "no batch size" in finding.detail


def test_what_cannot_be_asked_is_said(tmp_path: Path):
    (absent,) = vllm_findings(shape_of(), None, "NVIDIA H200")
    assert (absent.verdict, absent.detail) == (
        NOT_INSTALLED, "vLLM is not installed for this Python",
    )  # fmt: skip
    (moved,) = vllm_findings(shape_of(), tmp_path, "NVIDIA H200")
    assert moved.verdict == NOT_KNOWN
    vllm = package(tmp_path, "E=256,N=512,device_name=NVIDIA_H20.json")
    (no_card,) = vllm_findings(shape_of(), vllm, None)
    assert no_card.verdict == NOT_KNOWN
    assert "--device-name" in no_card.detail
    assert "NVIDIA_H20" in no_card.detail


# -- ixformer --------------------------------------------------------------------------------------


def test_block_sizes_of_ixformer_are_those_that_graphcap_gives():
    shape = shape_of()
    (found,) = ixformer_findings(shape, "0.4.0")
    told = (
        "gives 32 up to 64 pairs of a token and an expert (8 tokens here), 64 up to 1024 (128 tokens), "
        "256 above"
    )
    assert shape.top_k == 8
    assert told in found.detail
    blocks = [fused_block_size(tokens * shape.top_k) for tokens in (1, 8, 9, 128, 129)]
    assert blocks == [32, 32, 64, 64, 256]


def test_ixformer_says_what_is_not_known():
    (absent,) = ixformer_findings(shape_of(), None)
    (there,) = ixformer_findings(shape_of(), "0.4.0")
    assert absent.verdict == there.verdict == NOT_KNOWN
    assert "not installed here" in absent.detail
    assert "not installed" not in there.detail
    assert "not published" in there.detail


# -- triton ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def triton():
    return pytest.importorskip("triton", minversion="3.0")


@pytest.mark.usefixtures("triton")
def test_schedules_and_their_batches():
    findings = triton_findings(shape_of())
    by_pair = [f.what for f in findings if f.what.startswith("by pair")]
    by_expert = [f.what for f in findings if f.what.startswith("by expert")]
    assert by_pair == [
        "by pair, gate and up, K 2048, N 512, 1 to 16 tokens",
        "by pair, down, K 512, N 2048, 1 token",
        "by pair, down, K 512, N 2048, 2 to 16 tokens",
    ]
    assert [what.split(", N")[0] for what in by_expert] == [
        "by expert, gate and up, K 2048",
        "by expert, down, K 512",
    ]
    assert all("24 to 64 tokens" in what for what in by_expert)
    assert {f.verdict for f in findings} == {ALIGNED}


@pytest.mark.usefixtures("triton")
def test_a_tile_that_does_not_divide_k_is_named():
    # 60 experts, top-4: one pair for every two experts at 7 tokens, so buckets 1, 2 and 4 go by pair.
    findings = {f.what: f for f in triton_findings(shape_of(2048, 1408, 60, 4))}
    (down,) = (f for what, f in findings.items() if what.startswith("by pair, down, K 1408"))
    assert down.what.endswith("1 to 4 tokens")
    assert down.verdict == UNALIGNED
    # 1408 is 5.5 tiles of 256: half a tile of 6 is empty.
    assert "tile of 256 along K" in down.detail
    assert "8% load nothing" in down.detail
    for what, finding in findings.items():
        if what.startswith("by expert"):
            assert finding.verdict == ALIGNED, "2048 and 1408 are multiples of 128"


@pytest.mark.usefixtures("triton")
def test_rows_that_do_not_start_at_16_bytes_are_named():
    findings = triton_findings(shape_of(hidden=2048, inner=500))
    down = [f for f in findings if "down" in f.what]
    assert down
    assert all("rows of 1000 bytes" in f.detail for f in down)
    assert all("rows of" not in f.detail for f in findings if "gate and up" in f.what)


@pytest.mark.usefixtures("triton")
@pytest.mark.parametrize("inner", [64, 96, 512, 768, 1408])
def test_the_tiles_are_those_of_the_kernels(inner: int):
    from graphcap.moe.experts import block_size_m, few_pairs, sorted_length
    from graphcap.moe.kernels.triton_gemm import expert_tile
    from graphcap.moe.kernels.triton_pairs import down_tile

    shape = shape_of(inner=inner, experts=128)
    downs = [f for f in triton_findings(shape) if ", down, " in f.what]
    for tokens in (1, 2, 8, 16, 32, 64):
        if few_pairs(tokens, 8, 128):
            depth = down_tile(tokens, 8, inner, 2).depth
        else:
            block = block_size_m(tokens)
            blocks = -(-sorted_length(tokens * 8, 128, block) // block)
            depth = expert_tile(tokens * 8, blocks, 2048, inner, 2, block).k
        (mine,) = (f for f in downs if covers(f.what, tokens))
        assert mine.detail.startswith(f"tile of {depth} along K")
        assert (mine.verdict == ALIGNED) == (inner % depth == 0)


def covers(what: str, tokens: int) -> bool:
    batches = what.rsplit(f"N {2048}, ", 1)[1].removesuffix("s").removesuffix(" token")
    if " to " in batches:
        first, last = map(int, batches.split(" to "))
        return first <= tokens <= last
    return tokens in map(int, batches.split(", "))


def test_without_triton_the_tiles_are_not_known():
    code = (
        "import sys; sys.modules['triton'] = None\n"
        "from graphcap.moe.slow_shapes import ExpertShape\n"
        "from graphcap.moe.slow_shapes_triton import triton_findings\n"
        "(f,) = triton_findings(ExpertShape('m', 256, 8, 2048, 512))\n"
        "assert (f.verdict, f.backend) == ('not installed', 'triton'), f\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr


def test_the_rules_import_neither_torch_nor_an_engine():
    code = (
        "import sys, graphcap.moe.slow_shapes\n"
        "assert not {'torch', 'vllm', 'triton'} & set(sys.modules)\n"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
