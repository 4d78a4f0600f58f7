"""A planned ladder as a figure: batches and buckets above, what each batch size costs below."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from graphcap.errors import BackendError, SettingsError


def draw(path: Path, result: Mapping[str, Any], counts: Mapping[int, int]) -> Path:
    """Draw `result` of ``graphcap plan`` into `path`; its suffix is the format, .png where it has none.

    Returns:
        The file.

    Raises:
        BackendError: matplotlib is not installed.
        SettingsError: matplotlib does not know the format, or the file cannot be written.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise BackendError(
            f"--plot needs matplotlib, which cannot be imported ({error}); "
            f"pip install 'vllm-graphcap[plot]'"
        ) from error
    figure = Figure(figsize=(9, 6), layout="constrained")
    above, below = figure.subplots(2, 1, sharex=True)
    _batches(above, result, counts)
    _padding(below, result)
    path = path if path.suffix else path.with_name(f"{path.name}.png")
    try:
        figure.savefig(path, dpi=150)
    except ValueError as error:
        raise SettingsError(f"--plot {path}: {error}; end the name in .png or .svg") from error
    except OSError as error:
        raise SettingsError(
            f"--plot {path}: cannot be written: {error.strerror or error}"
        ) from error
    return path


def _batches(axes: Any, result: Mapping[str, Any], counts: Mapping[int, int]) -> None:
    sizes = sorted(size for size, n in counts.items() if n and size <= result["max_batch"])
    share = [100 * counts[size] / result["steps"] for size in sizes]
    axes.bar(sizes, share, width=1.0, color="tab:gray", label="steps")
    for number, bucket in enumerate(result["buckets"]):
        label = "planned bucket" if number == 0 else None
        axes.axvline(bucket + 0.5, color="tab:orange", linewidth=0.8, label=label)
    axes.set_ylabel("% of steps")
    axes.set_title(f"{len(result['buckets'])} buckets for {result['steps']:,} decode steps")
    axes.legend()


def _padding(axes: Any, result: Mapping[str, Any]) -> None:
    rows = np.arange(1, result["max_batch"] + 1)
    ladders = (
        ("planned", "tab:orange", result["buckets"]),
        ("vLLM's default", "tab:blue", result["default_buckets"]["vllm"]),
    )
    for name, colour, buckets in ladders:
        index = np.searchsorted(buckets, rows)
        served = index < len(buckets)
        ran = np.asarray(buckets)[np.minimum(index, len(buckets) - 1)]
        label = f"{name} ({len(buckets)})"
        axes.step(
            rows[served], (ran - rows)[served], where="mid", linewidth=1, color=colour, label=label
        )
    axes.set_xlabel("batch, rows")
    axes.set_ylabel("rows of padding")
    axes.legend()
