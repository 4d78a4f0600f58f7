"""Shows the counters of the engine's workers at the /metrics endpoint of vLLM's API server.

Every metric has the labels ``engine`` (index of the engine core, as in vLLM's own metrics) and
``rank`` (of the worker within it). The ranks of one engine run the same steps: sums over engines are
totals, sums over ranks count a step once per rank, so take one rank, or ``max by (engine)``. Bytes are
of each rank's own device. Those with a series for each batch size or bucket (``graphcap_batches``,
``graphcap_bucket_bytes``, ``graphcap_bucket_replay_seconds``), which ``graphcap plan`` reads, are shown for
the lowest rank of each engine only.
"""

from __future__ import annotations

import functools
import importlib
import logging
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from itertools import accumulate, groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from graphcap.explain import warn
from graphcap.hosts.vllm.counter_directory import DIRECTORY_VARIABLE
from graphcap.hosts.vllm.worker_counts import WorkerCounts, read_workers

if TYPE_CHECKING:
    from prometheus_client import CollectorRegistry  # type: ignore[import-not-found]
    from prometheus_client.core import Metric  # type: ignore[import-not-found]

logger = logging.getLogger(__name__)

_VLLM_MODULE = "vllm.v1.metrics.prometheus"
_VLLM_FUNCTION = "get_prometheus_registry"
_WORKER = ("engine", "rank")
_BATCH_EDGES = tuple(2**power for power in range(11))  # 1 to 1024 rows


class _Family(NamedTuple):
    """A metric.

    Attributes:
        label: besides those of the worker; None: no other.
        values: label value -> value; without a label there is one key, ``""``.
        every_rank: False: of each engine only the lowest rank is shown.
    """

    kind: Literal["counter", "gauge"]
    name: str
    text: str
    label: str | None
    values: Callable[[WorkerCounts], Mapping[Any, float]]
    every_rank: bool = True


def _gauge(name: str, scale: float = 1) -> Callable[[WorkerCounts], Mapping[Any, float]]:
    return lambda worker: {"": worker.gauges[name] / scale} if name in worker.gauges else {}


_FAMILIES = (
    _Family(
        "counter",
        "graphcap_replays",
        "Decode steps served by a recording.",
        None,
        lambda worker: {"": worker.replays.total()},
    ),
    _Family(
        "counter",
        "graphcap_bucket_replays",
        "Decode steps served by the recording of a bucket.",
        "bucket",
        lambda worker: worker.bucket_replays,
    ),
    _Family(
        "counter",
        "graphcap_padding_rows",
        "Rows that replays computed and nobody asked for.",
        None,
        lambda worker: {"": worker.padding_rows},
    ),
    _Family(
        "counter",
        "graphcap_mixed_replays",
        "Mixed prefill-decode batches served by the recording of a number of tokens.",
        "bucket",
        lambda worker: worker.mixed,
    ),
    _Family(
        "counter",
        "graphcap_mixed_padding_tokens",
        "Tokens of mixed batches that replays computed and nobody asked for.",
        None,
        lambda worker: {"": worker.mixed_padding.total()} if worker.mixed else {},
    ),
    _Family(
        "counter",
        "graphcap_fallbacks",
        "Steps that ran eagerly because no recording served them.",
        "reason",
        lambda worker: worker.fallbacks,
    ),
    _Family(
        "counter",
        "graphcap_batches",
        "Decode steps by their exact number of real rows, replayed and eager.",
        "rows",
        lambda worker: worker.batches,
        # One series per batch size: for every rank they would make a scrape hold up the API server.
        every_rank=False,
    ),
    _Family(
        "gauge",
        "graphcap_capture_seconds",
        "Time that capture() took.",
        None,
        _gauge("capture_ns", 1e9),
    ),
    _Family(
        "gauge",
        "graphcap_graph_bytes",
        "Memory that the recordings took, as measured.",
        None,
        _gauge("graph_bytes"),
    ),
    _Family("gauge", "graphcap_pool_bytes", "Size of the buffer pool.", None, _gauge("pool_bytes")),
    _Family(
        "gauge",
        "graphcap_bucket_bytes",
        "Memory that the recording of a decode bucket took, as measured.",
        "bucket",
        lambda worker: worker.bucket_bytes,
        every_rank=False,
    ),
    _Family(
        "gauge",
        "graphcap_bucket_replay_seconds",
        "Least time of a replay of a full decode bucket, as measured at the end of the capture.",
        "bucket",
        lambda worker: {bucket: ns / 1e9 for bucket, ns in worker.bucket_ns.items()},
        every_rank=False,
    ),
)


class GraphcapCollector:
    """A prometheus_client collector that reads the files of a directory at each scrape.

    Args:
        directory: None: the one that `share_directory` made, looked up at each scrape.
    """

    def __init__(self, directory: Path | None = None) -> None:
        self._directory = directory

    def describe(self) -> Iterator[Metric]:
        """Metrics without values. A registry refuses a second collector of the same names."""
        return _metrics({})

    def collect(self) -> Iterator[Metric]:
        directory = self._directory or os.environ.get(DIRECTORY_VARIABLE)
        return _metrics(read_workers(Path(directory)) if directory else {})


def _metrics(workers: Mapping[tuple[int, int], WorkerCounts]) -> Iterator[Metric]:
    from prometheus_client.core import (
        CounterMetricFamily,
        GaugeMetricFamily,
        HistogramMetricFamily,
    )

    labelled = [([str(number) for number in key], workers[key]) for key in sorted(workers)]
    leading = [next(group) for _, group in groupby(labelled, key=lambda pair: pair[0][0])]
    for family in _FAMILIES:
        made = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
        extra = () if family.label is None else (family.label,)
        metric = made(family.name, family.text, labels=(*_WORKER, *extra))
        for labels, worker in labelled if family.every_rank else leading:
            for key, value in sorted(family.values(worker).items()):
                metric.add_metric([*labels, *(str(key) for _ in extra)], value)
        yield metric
    histogram = HistogramMetricFamily(
        "graphcap_batch_rows", "Real rows of decode steps, replayed and eager.", labels=_WORKER
    )
    for labels, worker in labelled:
        histogram.add_metric(labels, *_histogram(worker.batches))
    yield histogram


def _histogram(batches: Mapping[int, int]) -> tuple[list[tuple[str, int]], int]:
    """(cumulative counts by upper edge, sum of rows) as prometheus_client wants them."""
    inside = [0] * (len(_BATCH_EDGES) + 1)
    for rows, count in batches.items():
        inside[sum(edge < rows for edge in _BATCH_EDGES)] += count
    edges = [*(f"{edge}.0" for edge in _BATCH_EDGES), "+Inf"]
    cumulative = list(zip(edges, accumulate(inside), strict=True))
    return cumulative, sum(rows * count for rows, count in batches.items())


# -- vLLM's endpoint -----------------------------------------------------------------------------

_COLLECTOR = GraphcapCollector()


def join_vllm_endpoint() -> str:
    """Make this process's /metrics endpoint show graphcap's metrics, if vLLM serves one here.

    Idempotent; does no harm in processes without an endpoint; never raises. To be called before vLLM
    builds its web application, as plugins are.

    Returns:
        One line: what was done, or why nothing is shown.
    """
    try:
        return _join()
    except Exception as error:  # a metric must not cost the server
        return f"graphcap metrics are not shown: {type(error).__name__}: {error}"


def _join() -> str:
    try:
        module = importlib.import_module(_VLLM_MODULE)
    except ImportError as error:
        # An older vLLM sets PROMETHEUS_MULTIPROC_DIR later and needs prometheus_client to be
        # imported after that, so it is not imported here.
        return f"graphcap metrics are not shown: this vLLM has no {_VLLM_MODULE} ({error})"
    from prometheus_client import REGISTRY

    _register(REGISTRY)
    shown = "graphcap metrics are shown at vLLM's /metrics endpoint"
    if not hasattr(module, _VLLM_FUNCTION):
        shown += f", but not with several API servers: {_VLLM_MODULE} has no {_VLLM_FUNCTION}"
    else:
        _patch_get_prometheus_registry(module)
    if not os.environ.get(DIRECTORY_VARIABLE):
        shown += "; there is nothing to show: no directory is shared with the engine"
    return shown


def _register(registry: CollectorRegistry) -> None:
    try:
        registry.register(_COLLECTOR)
    except ValueError:
        logger.debug("graphcap metrics are in the registry already")


def _patch_get_prometheus_registry(module: Any) -> None:
    """Patch `vllm.v1.metrics.prometheus.get_prometheus_registry`.

    Why: with several API servers it returns a new registry at every call, which shows nothing but
    prometheus_client's own multi-process files; there is no other way into it. With one API server it
    returns the default registry, which has the collector already.
    """
    original = getattr(module, _VLLM_FUNCTION)
    if not hasattr(original, "_graphcap"):

        @functools.wraps(original)
        def get_prometheus_registry() -> CollectorRegistry:
            registry = original()
            try:
                _register(registry)
            except Exception as error:  # a metric must not cost the server
                warn(logger, "metrics", "graphcap metrics are not shown: %s", error)
            return registry

        get_prometheus_registry._graphcap = original  # type: ignore[attr-defined]
        setattr(module, _VLLM_FUNCTION, get_prometheus_registry)
    patched = getattr(module, _VLLM_FUNCTION)
    for name, importer in list(sys.modules.items()):
        # `from ... import get_prometheus_registry` has made copies.
        held = getattr(importer, "__dict__", {}).get(_VLLM_FUNCTION)
        if name.startswith("vllm.") and held is patched._graphcap:
            setattr(importer, _VLLM_FUNCTION, patched)
