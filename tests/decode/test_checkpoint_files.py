"""load_checkpoint: broken folders, files and indexes, refused by name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoint_files import assert_same, edit_config, load
from safetensors.torch import load_file, save_file

from graphcap.decode.safetensors_files import INDEX, SINGLE
from graphcap.errors import CheckpointError


def test_no_folder(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"nowhere: expected the folder.*found nothing"):
        load(tmp_path / "nowhere")


def test_a_file_is_no_folder(folder: Path) -> None:
    with pytest.raises(CheckpointError, match=r"config.json: expected the folder.*found a file"):
        load(folder / "config.json")


def test_no_config(folder: Path) -> None:
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config.json: expected the file, found none"):
        load(folder)


@pytest.mark.parametrize("text", [b'{"model_type": ', b"", b"\xff\xfe"])
def test_broken_config(folder: Path, text: bytes) -> None:
    (folder / "config.json").write_bytes(text)
    with pytest.raises(CheckpointError, match=r"config.json: expected readable JSON"):
        load(folder)


def test_config_that_is_a_list(folder: Path) -> None:
    (folder / "config.json").write_text("[1]")
    with pytest.raises(CheckpointError, match=r"config.json: expected a JSON object, found list"):
        load(folder)


def test_refused_config_names_the_folder(folder: Path) -> None:
    edit_config(folder, quantization_config={"quant_method": "awq"})
    with pytest.raises(CheckpointError, match="config of saved: 'quantization_config'"):
        load(folder)


@pytest.mark.parametrize(
    ("files", "found"),
    [
        ([], "no weights"),
        (["pytorch_model.bin"], "pytorch_model.bin"),
        (["a.gguf", "consolidated.pth"], "a.gguf, consolidated.pth"),
        (["model-00001-of-00002.safetensors"], "model-00001-of-00002.safetensors"),
        ([f"{i}.bin" for i in range(6)], r"0.bin, 1.bin, 2.bin, 3.bin and 2 more"),
    ],
)
def test_no_safetensors(folder: Path, files: list[str], found: str) -> None:
    (folder / SINGLE).unlink()
    for file in files:
        (folder / file).touch()
    with pytest.raises(CheckpointError, match=f"expected {SINGLE} or .*, found {found}. Only"):
        load(folder)


@pytest.mark.parametrize("keep", [0, 5, 100, -1])
def test_truncated_file(folder: Path, keep: int) -> None:
    data = (folder / SINGLE).read_bytes()
    (folder / SINGLE).write_bytes(data[:keep])
    size = len(data[:keep])
    with pytest.raises(
        CheckpointError, match=f"{SINGLE}: expected a whole.*found {size} bytes.*again"
    ):
        load(folder)


def test_lfs_pointer(folder: Path) -> None:
    (folder / SINGLE).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\n")
    with pytest.raises(CheckpointError, match=r"found a Git LFS pointer. Run `git lfs pull`"):
        load(folder)


def edit_map(folder: Path, edit: Callable[[dict[str, Any]], object]) -> None:
    index = json.loads((folder / INDEX).read_text())
    edit(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


def test_missing_shard(sharded: Path) -> None:
    shards = sorted(sharded.glob("model-*.safetensors"))
    shards[1].unlink()
    message = (
        f"{INDEX}: it names {len(shards)} files, but missing from .*{shards[1].name}. Download"
    )
    with pytest.raises(CheckpointError, match=message):
        load(sharded)


def test_truncated_shard_is_named(sharded: Path) -> None:
    shard = sorted(sharded.glob("model-*.safetensors"))[2]
    shard.write_bytes(shard.read_bytes()[:-2])
    with pytest.raises(CheckpointError, match=f"{shard.name}: expected a whole safetensors file"):
        load(sharded)


def test_tensor_that_is_not_in_the_shard_of_the_index(sharded: Path) -> None:
    shards = sorted(path.name for path in sharded.glob("model-*.safetensors"))
    edit_map(sharded, lambda m: m.update({"model.embed_tokens.weight": shards[-1]}))
    with pytest.raises(
        CheckpointError, match=f"{shards[-1]}: .*says it holds model.embed_tokens.we"
    ):
        load(sharded)


def test_tensor_that_the_index_forgets_is_loaded(sharded: Path) -> None:
    expected = load(sharded)
    edit_map(sharded, lambda m: m.pop("model.layers.0.mlp.gate.weight"))
    assert_same(load(sharded), expected)


def test_tensor_in_two_shards(sharded: Path) -> None:
    first, second = sorted(sharded.glob("model-*.safetensors"))[:2]
    save_file({**load_file(first), **load_file(second)}, second)
    message = f"{second.name}: it holds model.*, and {first.name} does too"
    with pytest.raises(CheckpointError, match=message):
        load(sharded)


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({}, "expected 'weight_map', an object"),
        ([1], "expected 'weight_map'.*found list"),
        ({"a": 3}, "tensor 'a': expected the name of a file.*found 3"),
        ({"a": "../model.safetensors"}, "tensor 'a': expected the name of a file in the folder"),
    ],
)
def test_index_that_makes_no_sense(sharded: Path, weight_map: object, message: str) -> None:
    (sharded / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    with pytest.raises(CheckpointError, match=message):
        load(sharded)
