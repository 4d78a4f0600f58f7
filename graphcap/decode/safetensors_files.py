"""Finds the safetensors files of a checkpoint folder and catalogues what is in them, unread."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from graphcap.errors import CheckpointError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
_OTHER_FORMATS = (".bin", ".pth", ".pt", ".gguf", ".safetensors")
_SHOWN = 4


def some(names: list[str]) -> str:
    """The first few of `names`, and how many more there are."""
    more = len(names) - _SHOWN
    return ", ".join(names[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


def read_json(path: Path) -> Mapping[str, Any]:
    """The JSON object in `path`; CheckpointError if there is none, or it is not one object."""
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise CheckpointError(
            f"{path}: expected the file, found none. Give the folder that a checkpoint was saved or"
            " downloaded to."
        ) from None
    except (OSError, ValueError) as error:
        raise CheckpointError(
            f"{path}: expected readable JSON, found: {error}. Restore or download the file again."
        ) from error
    if not isinstance(found, dict):
        raise CheckpointError(
            f"{path}: expected a JSON object, found {type(found).__name__}. Download it again."
        )
    return found


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a safetensors file: known by its header, read on request.

    Attributes:
        shape: as stored.
        dtype: safetensors' name of it, such as ``BF16`` or ``F8_E4M3``.
    """

    path: Path
    name: str
    shape: tuple[int, ...]
    dtype: str
    _handle: Any

    def read(self) -> torch.Tensor:
        """The tensor in host memory."""
        try:
            return self._handle.get_tensor(self.name)
        except (SafetensorError, OSError) as error:
            raise CheckpointError(
                f"{self.path}: tensor '{self.name}' cannot be read: {error}. Download the file again."
            ) from error


def _open(path: Path) -> Iterator[StoredTensor]:
    try:
        with path.open("rb") as file:
            start = file.read(64)
        if start.startswith(b"version https://git-lfs"):
            raise CheckpointError(
                f"{path}: expected safetensors, found a Git LFS pointer. Run `git lfs pull` in the"
                " folder to fetch the file itself."
            )
        # Checks that the tensors of the header cover the file exactly: a cut file fails here.
        handle = safe_open(path, framework="pt")
        for name in handle.keys():  # noqa: SIM118 (not a mapping)
            part = handle.get_slice(name)
            yield StoredTensor(path, name, tuple(part.get_shape()), str(part.get_dtype()), handle)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path}: expected a whole safetensors file, found {path.stat().st_size} bytes that are"
            f" cut off or not safetensors ({error}). Download the file again."
        ) from error


def _shards(folder: Path) -> dict[str, list[str]]:
    """File name -> names of the tensors that the index says it holds."""
    index = folder / INDEX
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(
            f"{index}: expected 'weight_map', an object of tensor names and file names, found"
            f" {type(weight_map).__name__}. Download the file again."
        )
    shards: dict[str, list[str]] = {}
    for name, file in weight_map.items():
        if not isinstance(file, str) or Path(file).name != file:
            raise CheckpointError(
                f"{index}: tensor '{name}': expected the name of a file in the folder, found"
                f" {file!r}. Download the file again."
            )
        shards.setdefault(file, []).append(name)
    missing = sorted(file for file in shards if not (folder / file).is_file())
    if missing:
        raise CheckpointError(
            f"{index}: it names {len(shards)} files, but missing from {folder}: {some(missing)}."
            " Download the missing files."
        )
    return shards


def catalogue(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor in the checkpoint of `folder` by name.

    That is `model.safetensors`, or else the shards of `model.safetensors.index.json`: the order in
    which transformers looks. Tensors that the index forgets are listed too.

    Raises:
        CheckpointError: no such files, an index that does not fit the shards, a tensor that two
            shards hold, a file that is cut off or no safetensors.
    """
    if (folder / SINGLE).is_file():
        return {tensor.name: tensor for tensor in _open(folder / SINGLE)}
    if not (folder / INDEX).is_file():
        others = sorted(p.name for p in folder.iterdir() if p.suffix in _OTHER_FORMATS)
        raise CheckpointError(
            f"{folder}: expected {SINGLE} or {INDEX}, found {some(others) or 'no weights'}."
            " Only Hugging Face safetensors are read; download or convert the weights to them,"
            " with their index."
        )
    tensors: dict[str, StoredTensor] = {}
    for file, promised in _shards(folder).items():
        found = {tensor.name: tensor for tensor in _open(folder / file)}
        lacking = [name for name in promised if name not in found]
        if lacking:
            raise CheckpointError(
                f"{folder / file}: {INDEX} says it holds {some(lacking)}, which it does not. The"
                " files are of different checkpoints; download all of them again."
            )
        twice = sorted(found.keys() & tensors.keys())
        if twice:
            raise CheckpointError(
                f"{folder / file}: it holds {some(twice)}, and {tensors[twice[0]].path.name} does"
                " too. Remove the file that does not belong to the checkpoint."
            )
        tensors.update(found)
    return tensors
