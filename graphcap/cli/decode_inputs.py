"""What ``graphcap decode`` is run on: prompts, and the weights of a checkpoint or random ones."""

from __future__ import annotations

import argparse
import os
import random
from typing import TYPE_CHECKING

from graphcap.cli.options import chosen_dtype, chosen_shape, progress_bar
from graphcap.errors import InputError, SettingsError

if TYPE_CHECKING:
    import torch

    from graphcap.decode.weights import ModelWeights

_SMALL_BYTES = 64 * 2**20


def chosen_prompts(options: argparse.Namespace, vocab_size: int) -> list[list[int]]:
    """Those of ``--prompt-ids``, or drawn from the seed.

    Raises:
        SettingsError: options do not go together.
        InputError: what is no list of token ids, or outside the vocabulary.
    """
    if options.prompt_ids is None:
        draw = random.Random(options.seed)
        return [
            [draw.randrange(vocab_size) for _ in range(draw.randint(3, 8))]
            for _ in range(options.batch or 3)
        ]
    if options.batch not in (None, len(options.prompt_ids)):
        raise SettingsError(
            f"--batch {options.batch} and {len(options.prompt_ids)} --prompt-ids do not go together; "
            f"leave --batch out or give one --prompt-ids per sequence"
        )
    prompts = []
    for text in options.prompt_ids:
        words = [word.strip() for word in text.split(",")]
        if not all(word.isascii() and word.isdigit() for word in words):
            raise InputError(
                f"--prompt-ids {text!r}: expected token ids separated by commas, such as 1,2,3"
            )
        prompts.append([int(word) for word in words])
        if max(prompts[-1]) >= vocab_size:
            raise InputError(
                f"--prompt-ids {text!r}: token id {max(prompts[-1])} is outside the vocabulary "
                f"(0 to {vocab_size - 1})"
            )
    return prompts


def chosen_weights(options: argparse.Namespace, device: torch.device) -> ModelWeights:
    """Those of ``--checkpoint``, or random ones of the shape, with progress bars."""
    from graphcap.decode.checkpoint import load_checkpoint
    from graphcap.decode.random_weights import random_weights

    if options.checkpoint:
        dtype = None if options.dtype == "auto" else chosen_dtype(options.dtype, device)
        with progress_bar("loading weights") as progress:
            return load_checkpoint(
                options.checkpoint,
                device=device,
                dtype=dtype,
                layers=options.layers,
                progress=lambda done, total: progress(done, total, ""),
            )
    with progress_bar("drawing weights") as progress:
        return random_weights(
            chosen_shape(options),
            device=device,
            dtype=chosen_dtype(options.dtype, device),
            seed=options.seed,
            progress=lambda done, total: progress(done, total, ""),
        )


def share_cores(weights: ModelWeights) -> None:
    """One thread for a model whose operations are too small to be shared among cores: waiting for
    each other costs more than the work, many times more on a busy machine."""
    import torch

    small = weights.nbytes < _SMALL_BYTES
    if weights.device.type == "cpu" and small and "OMP_NUM_THREADS" not in os.environ:
        torch.set_num_threads(1)
