"""Starts toy_server.py, tells it what to run, and hears what its managers counted."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parent


class ToyServer:
    """A running toy_server.py.

    Args:
        port: where it serves; 0: a free one.
    """

    def __init__(self, port: int = 0) -> None:
        paths = [str(TESTS.parent), os.environ.get("PYTHONPATH", "")]
        environ = {k: v for k, v in os.environ.items() if not k.startswith(("GRAPHCAP", "_GRAPH"))}
        self._process = subprocess.Popen(
            [sys.executable, str(TESTS / "toy_server.py"), str(port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"},
        )
        self.port = self._answer()["port"]
        self.url = f"http://127.0.0.1:{self.port}"

    def run(self, engine: int, kind: str, rows: int, times: int) -> dict[str, Any]:
        """Steps on every rank of an engine. "engine,rank" -> what its managers counted so far."""
        return self._order(engine=engine, kind=kind, rows=rows, times=times)

    def assign_weight(self, engine: int) -> dict[str, Any]:
        """Make the recordings of an engine stale."""
        return self._order(assign=engine)

    def counted(self) -> dict[str, Any]:
        return self._order()

    def stop(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def _order(self, **order: Any) -> dict[str, Any]:
        assert self._process.stdin is not None
        print(json.dumps(order), file=self._process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"toy_server.py ended with {self._process.wait()}"
        return json.loads(line)


def totals(worker: dict[str, Any]) -> Counter[str]:
    """What a worker's managers counted, in the words of the metrics: name or name{label value}."""
    decode, mixed = worker["decode"], worker["mixed"]
    # The plugin counts the eager steps of both kinds at the manager of decode steps.
    fallbacks = Counter(decode["fallbacks"])
    eager_mixed = fallbacks["mixed_above_max_tokens"]
    found = Counter(
        {
            "replays": decode["replays"],
            "eager": fallbacks.total() - eager_mixed,
            "padding_rows": decode["padding_rows"],
            "mixed": mixed["replays"],
            "eager_mixed": eager_mixed,
            "mixed_padding": mixed["padding_rows"],
            "mixed_computed": mixed["padding_rows"] + mixed["rows"],
            "computed": sum(int(size) * count for size, count in decode["buckets"].items()),
            "fallbacks": fallbacks.total(),
        }
    )
    found.update({f"bucket {size}": count for size, count in decode["buckets"].items()})
    found.update({f"mixed {size}": count for size, count in mixed["buckets"].items()})
    found.update({f"fallback {reason}": count for reason, count in fallbacks.items()})
    found["steps"] = found["replays"] + found["eager"]
    return found
