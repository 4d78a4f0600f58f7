"""A server whose counters are real: the plugin's own captures of a small model, on the tape.

Run as a script. It serves /metrics with the plugin's collector, prints where as one JSON line, and then
obeys JSON lines on stdin, {"engine", "kind", "rows", "times"}, which every rank of that engine runs.
Each is answered with what the managers of every worker have counted so far. {"assign": engine} assigns
its weight anew, which makes its recordings stale.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from prometheus_client import CollectorRegistry, start_http_server

from graphcap.hosts.vllm import ranks
from graphcap.hosts.vllm.choice import Choice
from graphcap.hosts.vllm.counter_directory import share_directory
from graphcap.hosts.vllm.engine import DECODE, HIDDEN, MIXED, EngineCapture
from graphcap.hosts.vllm.metrics import GraphcapCollector
from graphcap.pool import BufferPool
from graphcap.settings import Settings

ranks._group = lambda: None  # here is no vLLM to ask, and each worker is alone

VOCABULARY, WIDTH = 32, 8
LADDERS = {DECODE: (1, 2, 4, 6), MIXED: (8, 16)}
WORKERS = ((0, 0), (0, 1), (1, 0))
"""(engine, rank): two ranks that count alike, and a second engine."""


class ToyModel(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.head = torch.nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, token_ids: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return torch.mm(self.embedding(token_ids), self.head.weight, out=out)


class Worker:
    """What a model runner does with its `EngineCapture`."""

    def __init__(self, engine: int, rank: int) -> None:
        torch.manual_seed(engine)
        self.model = ToyModel().requires_grad_(False)
        self._buffer = torch.zeros(max(LADDERS[MIXED]), dtype=torch.int32)
        self.capture = self._captured(engine, rank)

    def _captured(self, engine: int, rank: int) -> EngineCapture:
        config = SimpleNamespace(
            parallel_config=SimpleNamespace(rank=rank, data_parallel_rank=engine),
            compilation_config=SimpleNamespace(static_forward_context={}),
            model_config=SimpleNamespace(
                hf_text_config=SimpleNamespace(vocab_size=VOCABULARY), max_model_len=64
            ),
        )
        choice = Choice(taken=True, mixed="full", recorder="tape")
        settings = Settings(recorder="tape", kernels="vllm")
        device = self._buffer.device
        buckets = [(kind, size) for kind, sizes in LADDERS.items() for size in sizes]
        capture = EngineCapture(choice, settings, config, self.model, device, buckets)
        buckets.reverse()  # largest first
        for kind, size in buckets:
            capture.show(kind, None, input_ids=self._buffer)
            capture.warm_up(kind, size, self._forward(size, capture.pool))
        capture.freeze()
        # Not capture.record and verify: they ask the other ranks through vLLM, which is not needed here.
        for kind, size in buckets:
            assert capture.managers[kind].record(size, self._step(size, capture.pool))
        for kind, size in buckets:
            capture.managers[kind].verify(size, self._step(size, capture.pool))
        capture.finish()
        return capture

    def _step(self, size: int, pool: BufferPool) -> Callable[[], dict[str, torch.Tensor]]:
        return lambda: {HIDDEN: self._forward(size, pool)()}

    def _forward(self, size: int, pool: BufferPool) -> Callable[[], torch.Tensor]:
        def forward() -> torch.Tensor:
            with pool.step():
                out = pool.take("hidden", (size, WIDTH), torch.float32)
                return self.model(self._buffer[:size], out)

        return forward

    def step(self, kind: str, rows: int) -> None:
        ids = torch.randint(0, VOCABULARY, (rows,), dtype=torch.int32)
        size = next((size for size in LADDERS[kind] if size >= rows), None)
        if size is None:
            reason = "above_max_batch" if kind == DECODE else "mixed_above_max_tokens"
            self.capture.fall_back(rows, reason, "give smaller batches", kind)
            self.model(ids)
            return
        self._buffer.zero_()[:rows].copy_(ids)
        forward = self._forward(size, self.capture.pool)
        hidden = self.capture.replay(kind, size, rows, forward)
        assert hidden is None or torch.equal(hidden[:rows], self.model(ids))

    def counted(self) -> dict[str, Any]:
        """In words of ManagerStats and BucketStats."""
        counted: dict[str, Any] = {}
        for kind, manager in self.capture.managers.items():
            stats = manager.stats()
            counted[kind] = {
                "steps": stats.steps,
                "rows": stats.rows,
                "replays": stats.replays,
                "padding_rows": stats.padding_rows,
                "fallbacks": dict(stats.fallbacks),
                "buckets": {str(b.size): b.replays for b in stats.buckets if b.replays},
                "graph_bytes": stats.graph_bytes,
                "capture_seconds": stats.capture_seconds,
            }
        return {**counted, "pool_bytes": self.capture.pool.nbytes}


def main() -> None:
    torch.set_num_threads(1)
    share_directory()
    workers = {(engine, rank): Worker(engine, rank) for engine, rank in WORKERS}
    registry = CollectorRegistry()
    registry.register(GraphcapCollector())
    port = int(sys.argv[1]) if len(sys.argv) > 1 else 0
    server, _ = start_http_server(port, "127.0.0.1", registry)
    _say({"port": server.server_port})
    for line in sys.stdin:
        order = json.loads(line)
        for (engine, _), worker in workers.items():
            if order.get("assign") == engine:
                weight = worker.model.head.weight
                worker.model.head.weight = torch.nn.Parameter(weight.clone(), requires_grad=False)
                worker.capture.expect_change()
            if order.get("engine") == engine:
                for _ in range(order["times"]):
                    worker.step(order["kind"], order["rows"])
        _say({f"{engine},{rank}": worker.counted() for (engine, rank), worker in workers.items()})


def _say(value: Any) -> None:
    print(json.dumps(value), flush=True)


if __name__ == "__main__":
    main()
