"""A real Prometheus on loopback, with the scrape config and the alerts of docs/."""

from __future__ import annotations

import json
import re
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "docs" / "prometheus" / "prometheus.yml"
ALERTS = ROOT / "docs" / "prometheus" / "alerts.yml"
EVERY = 0.2
"""Seconds between two scrapes, in place of the config's 15."""

MISSING = [name for name in ("prometheus", "promtool") if shutil.which(name) is None]
WHY_MISSING = f"needs {' and '.join(MISSING)} on the path (Debian package prometheus)"


def changed(text: str, pattern: str, replacement: str) -> str:
    """`text` with every match replaced; there must be one."""
    made, count = re.subn(pattern, replacement, text)
    assert count, f"{pattern} is not in the file"
    return made


class Prometheus:
    """Scrapes the servers at `targets` with the config of docs/, only more often.

    Args:
        window: seconds that stand for the minutes of the alerts.
    """

    def __init__(self, directory: Path, targets: list[str], window: int) -> None:
        config = changed(CONFIG.read_text(), "_interval: 15s", f"_interval: {EVERY * 1000:.0f}ms")
        config = changed(config, r'\["localhost:8000"\]', json.dumps(targets))
        (directory / "prometheus.yml").write_text(config)
        alerts = changed(ALERTS.read_text(), r"\[5m\]", f"[{window}s]")
        alerts = changed(alerts, "offset 5m", f"offset {window}s")
        alerts = changed(alerts, r"for: \d+m", "for: 1s")
        (directory / "alerts.yml").write_text(alerts)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self._log = (directory / "log").open("w+")
        self._process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={directory / 'prometheus.yml'}",
                f"--storage.tsdb.path={directory / 'data'}",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )
        try:
            self.wait_until(self._is_ready, "it is ready")
        except BaseException:
            self.stop()
            raise

    def _is_ready(self) -> bool:
        assert self._process.poll() is None, self.log()
        try:
            with urllib.request.urlopen(f"{self.url}/-/ready", timeout=5):
                return True
        except (urllib.error.URLError, OSError):
            return False

    def log(self) -> str:
        self._log.seek(0)
        return self._log.read()

    def wait_until(self, holds: Callable[[], Any], what: str, seconds: float = 60) -> Any:
        end = time.monotonic() + seconds
        while not (found := holds()):
            assert time.monotonic() < end, f"not within {seconds} s: {what}\n{self.log()}"
            time.sleep(EVERY / 2)
        return found

    def get(self, path: str, **arguments: Any) -> Any:
        address = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(arguments)}"
        try:
            with urllib.request.urlopen(address, timeout=10) as answer:
                return json.load(answer)["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(f"{arguments}: {error.read().decode()}") from error

    def query(self, expression: str, at: float | None = None) -> dict[tuple[str, ...], float]:
        """Values of an instant query by their label values, in the order of the label names."""
        arguments = {"query": expression} if at is None else {"query": expression, "time": at}
        found: dict[tuple[str, ...], float] = {}
        for result in self.get("query", **arguments)["result"]:
            labels = {k: v for k, v in result["metric"].items() if k != "__name__"}
            found[tuple(labels[name] for name in sorted(labels))] = float(result["value"][1])
        return found

    def firing(self) -> set[tuple[str, ...]]:
        """(alert, instance, engine, reason) of the alerts that fire, "" for labels that are not there."""
        return {
            (
                alert["labels"]["alertname"],
                *(alert["labels"].get(name, "") for name in ("instance", "engine", "reason")),
            )
            for alert in self.get("alerts")["alerts"]
            if alert["state"] == "firing"
        }

    def stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()
