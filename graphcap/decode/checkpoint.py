"""Loads a Hugging Face checkpoint, tensor by tensor, straight into the fused weights."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import torch

from graphcap.decode.config_reader import parse_dtype
from graphcap.decode.delta_weights import Grouped
from graphcap.decode.memory import as_device, ensure_fits
from graphcap.decode.safetensors_files import StoredTensor, catalogue, read_json, some
from graphcap.decode.shapes import DTYPES, ModelShape
from graphcap.decode.weights import ModelWeights, body_prefix, checkpoint_views, empty_weights
from graphcap.errors import CheckpointError

logger = logging.getLogger(__name__)

_STORED_DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
_LM_HEAD = "lm_head.weight"
# Buffers that transformers once saved and computes anew, and heads that guess further tokens: the
# next token depends on neither.
_HARMLESS = re.compile(r"(.*\.)?rotary_emb\.(inv_freq|cos_cached|sin_cached)$|mtp\.")
# What a multimodal checkpoint sees with; text is decoded without it.
_VISION = re.compile(r"model\.visual\.")
_LAYER = re.compile(r"model\.(?:language_model\.)?layers\.(\d+)\.")


def _first_layers(layers: int | None, shape: ModelShape) -> ModelShape:
    """`shape` with its first `layers` layers only; None keeps all.

    Raises:
        CheckpointError: `layers` is not an integer from 1 to the number of layers.
    """
    if layers is None:
        return shape
    if (
        isinstance(layers, bool)
        or not isinstance(layers, int)
        or not 1 <= layers <= shape.num_layers
    ):
        raise CheckpointError(
            f"layers: expected an integer from 1 to {shape.num_layers}, the layers of"
            f" '{shape.name}', found {layers!r}. Give a number in that range, or none for all."
        )
    return shape.with_layers(layers)


def _check_tensors(
    folder: Path, stored: Mapping[str, StoredTensor], expected: Mapping[str, torch.Tensor | Grouped]
) -> None:
    """Raise unless every expected tensor is there with its shape and a dtype that can be read."""
    missing = [name for name in expected if name not in stored]
    if missing == [_LM_HEAD]:
        raise CheckpointError(
            f"{folder}: expected tensor {_LM_HEAD}, found none. If the embedding serves as the lm"
            " head, set 'tie_word_embeddings' to true in config.json."
        )
    if missing:
        raise CheckpointError(
            f"{folder}: {len(missing)} of {len(expected)} tensors are missing: {some(missing)}."
            " The config describes another model, or a file is missing; download the folder again."
        )
    for name, destination in expected.items():
        tensor = stored[name]
        if tensor.shape != tuple(destination.shape):
            raise CheckpointError(
                f"{tensor.path}: tensor '{name}': expected shape {tuple(destination.shape)} by"
                f" config.json, found {tensor.shape}. Use the config.json of this checkpoint."
            )
        if tensor.dtype not in _STORED_DTYPES:
            raise CheckpointError(
                f"{tensor.path}: tensor '{name}': expected dtype {', '.join(_STORED_DTYPES)}, found"
                f" {tensor.dtype}. Quantised weights are not supported; use the bfloat16 or float16"
                " checkpoint."
            )


def _check_extras(
    stored: Mapping[str, StoredTensor],
    expected: Mapping[str, torch.Tensor | Grouped],
    whole: ModelShape,
    loaded: ModelShape,
) -> dict[str, int]:
    """Raise if there are tensors that the decode step would ignore and the model would not.

    Returns:
        How many tensors the next token does not depend on, by kind.
    """
    left_out: dict[str, int] = {}

    def is_ignored(name: str) -> bool:
        if name == _LM_HEAD and loaded.tie_word_embeddings:
            return True  # compared with the embedding when that is read
        layer = _LAYER.match(name)
        if layer and loaded.num_layers <= int(layer[1]) < whole.num_layers:
            return True
        sees = whole.model_type == "qwen3_5_moe_text" and _VISION.match(name)
        if sees or _HARMLESS.match(name):
            kind = "vision" if sees else "other"
            left_out[kind] = left_out.get(kind, 0) + 1
            return True
        return False

    extras = [name for name in stored if name not in expected and not is_ignored(name)]
    if extras:
        biases = [name for name in extras if name.endswith("_proj.bias")]
        cure = (
            "Set 'attention_bias' to true in config.json if the model has biases."
            if biases and not loaded.attention_bias
            else "It is not a plain checkpoint of that model, or config.json is another model's."
        )
        raise CheckpointError(
            f"{stored[extras[0]].path}: {len(extras)} tensors have no place in the model that"
            f" config.json describes, and leaving them out would change its answers: {some(extras)}."
            f" {cure}"
        )
    return left_out


def _checkpoint_dtype(
    folder: Path, shape: ModelShape, stored: Mapping[str, StoredTensor], names: Mapping[str, object]
) -> torch.dtype:
    """What config.json says, or else the one dtype that all tensors have."""
    if shape.dtype is not None:
        return shape.dtype
    found = sorted({stored[name].dtype for name in names})
    if len(found) > 1:
        raise CheckpointError(
            f"{folder}: config.json has no 'dtype' and the tensors have several: {', '.join(found)}."
            f" Say which to use: dtype (--dtype) {', '.join(DTYPES)}."
        )
    return _STORED_DTYPES[found[0]]


def _read_into(destination: torch.Tensor | Grouped, tensor: StoredTensor) -> None:
    values = tensor.read()
    if destination.dtype == torch.float16 != values.dtype:
        low, high = (bound.item() for bound in values.aminmax())
        largest = max(-low, high)
        if not largest <= torch.finfo(torch.float16).max:  # NaN is refused, too
            raise CheckpointError(
                f"{tensor.path}: tensor '{tensor.name}': expected values that float16 can hold, found"
                f" {largest:g}. Use dtype bfloat16 or float32."
            )
    destination.copy_(values)


def _check_tied(stored: Mapping[str, StoredTensor], embedding_name: str) -> None:
    """A tied checkpoint may hold its lm head all the same; then it must be the embedding."""
    if _LM_HEAD not in stored:
        return
    head, embedding = stored[_LM_HEAD], stored[embedding_name]
    # transformers 4 ties them regardless, transformers 5 does not: no reading is the right one.
    same_kind = (head.shape, head.dtype) == (embedding.shape, embedding.dtype)
    if not same_kind or not torch.equal(head.read(), embedding.read()):
        raise CheckpointError(
            f"{head.path}: 'tie_word_embeddings' is true, but {_LM_HEAD} is not {embedding_name}."
            " Set it to false in config.json, or remove the tensor."
        )


def checkpoint_shape(folder: Path) -> ModelShape:
    """What config.json in `folder` says; weights need not be there.

    Raises:
        CheckpointError: there is no such folder, or its config cannot be used.
    """
    if not folder.is_dir():
        raise CheckpointError(
            f"{folder}: expected the folder of a checkpoint, found"
            f" {'a file' if folder.exists() else 'nothing'}. Give the folder that holds config.json."
        )
    return ModelShape.from_config(read_json(folder / "config.json"), folder.resolve().name)


def load_checkpoint(
    folder: str | Path,
    *,
    device: torch.device | str,
    dtype: torch.dtype | None = None,
    layers: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> ModelWeights:
    """The weights of the Qwen3-MoE, Qwen3-Next or Qwen3.5-MoE checkpoint in `folder`, on `device`.

    Reads config.json and model.safetensors, or the shards of model.safetensors.index.json, with the
    experts one by one or stacked. Of a multimodal Qwen3.5 or 3.6 the text model is read; what it sees
    with is left out and counted (`ModelWeights.left_out`). All names, shapes and dtypes are checked,
    and the memory, before anything is allocated; each tensor is then copied to its place, so that
    beside the weights no more than one tensor is held. On device "meta" the checks are all that happens.

    Args:
        dtype: torch.bfloat16, float16 or float32, to which every tensor is converted. None: what
            config.json says, or else what the tensors have.
        layers: load the first so many layers only. None: all.
        progress: called after each tensor with the bytes written and the bytes in all.

    Raises:
        CheckpointError: the folder, its config, or a tensor cannot be used, or the weights do not
            fit on the device. Names the file, the tensor or key, and the cure.
        BackendError: this machine has no such device.
    """
    folder, target = Path(folder), as_device(device)
    whole = checkpoint_shape(folder)
    shape = _first_layers(layers, whole)
    stored = catalogue(folder)

    def views_of(weights: ModelWeights) -> dict[str, torch.Tensor | Grouped]:
        return dict(checkpoint_views(weights, present=stored))

    expected = views_of(empty_weights(shape, device="meta", dtype=torch.float32))
    _check_tensors(folder, stored, expected)
    left_out = _check_extras(stored, expected, whole, shape)
    if dtype is None:
        dtype = _checkpoint_dtype(folder, shape, stored, expected)
    dtype = parse_dtype("dtype of load_checkpoint", dtype)
    ensure_fits(shape, target, dtype)
    weights = empty_weights(shape, device=target, dtype=dtype)
    weights.left_out = left_out
    if left_out:
        counts = ", ".join(f"{count} of kind {kind}" for kind, count in left_out.items())
        logger.info(
            "%s: tensors that decoding text does not need were left out: %s", folder, counts
        )
    if target.type == "meta":
        return weights
    if shape.tie_word_embeddings:
        _check_tied(stored, body_prefix(shape, stored) + "embed_tokens.weight")
    done, total = 0, weights.nbytes
    for name, destination in views_of(weights).items():
        _read_into(destination, stored[name])
        done += destination.nbytes
        if progress is not None:
            progress(done, total)
    return weights
