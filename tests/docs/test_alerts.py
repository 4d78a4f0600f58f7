"""The scrape config and the alerts of docs/ as they are, with their own minutes, under promtool."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from prometheus_server import ALERTS, CONFIG, MISSING, WHY_MISSING

if MISSING:
    pytest.skip(WHY_MISSING, allow_module_level=True)


def promtool(*arguments: str) -> str:
    done = subprocess.run(
        ["promtool", *arguments], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_files_as_they_are_pass_promtool():
    assert "SUCCESS" in promtool("check", "config", str(CONFIG))


def rule_test(series: dict[str, str], alerts: dict[str, list[str]], at: str) -> Any:
    """For promtool: which alerts fire at a time, given by the labels of theirs in PromQL."""
    return {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "promql_expr_test": [
            {
                "expr": f'ALERTS{{alertname="{name}", alertstate="firing"}}',
                "eval_time": at,
                "exp_samples": [
                    {
                        "labels": f'ALERTS{{alertname="{name}", alertstate="firing", {labels}}}',
                        "value": 1,
                    }
                    for labels in firing
                ],
            }
            for name, firing in alerts.items()
        ],
    }


def test_alerts_with_their_own_minutes(tmp_path: Path):
    """The file as it is, over an hour: promtool counts the minutes."""
    worker = 'job="vllm", instance="host:8000", engine="0", rank="0"'
    up = {'up{job="vllm", instance="host:8000"}': "1x60"}

    def counters(replays: int, eager: int) -> dict[str, str]:
        """A minute."""
        return {
            f"graphcap_replays_total{{{worker}}}": f"0+{replays}x60",
            f"graphcap_batch_rows_count{{{worker}}}": f"0+{replays + eager}x60",
        }

    where = 'job="vllm", instance="host:8000"'
    warning = [f'{where}, engine="0", severity="warning"']
    critical = [f'{where}, engine="0", reason="stale_recording", severity="critical"']
    missing = [f'{where}, severity="info"']
    stale = f'graphcap_fallbacks_total{{{worker}, reason="stale_recording"}}'
    long = f'graphcap_fallbacks_total{{{worker}, reason="mixed_above_max_tokens"}}'
    fall_back, lost, off = (
        "GraphcapDecodeStepsFallBack",
        "GraphcapRecordingsLost",
        "GraphcapCountersMissing",
    )
    born = "_x30 1x30"  # at minute 30, with 1, and stays there
    cases = [
        rule_test({**up, **counters(995, 5)}, {fall_back: [], lost: [], off: []}, "30m"),
        rule_test({**up, **counters(980, 20)}, {fall_back: warning, lost: [], off: []}, "30m"),
        rule_test({**up, **counters(980, 20)}, {fall_back: []}, "4m"),
        rule_test({**up, **counters(0, 0)}, {fall_back: [], off: []}, "30m"),
        rule_test({**up, **counters(100, 0), stale: born}, {lost: []}, "29m"),
        rule_test({**up, **counters(100, 0), stale: born}, {lost: critical, fall_back: []}, "31m"),
        rule_test({**up, **counters(100, 0), stale: born}, {lost: []}, "40m"),
        rule_test({**up, **counters(100, 0), stale: "3x39 4x20"}, {lost: []}, "39m"),
        rule_test({**up, **counters(100, 0), stale: "3x39 4x20"}, {lost: critical}, "42m"),
        rule_test({**up, **counters(100, 0), long: "0+50x60"}, {lost: [], fall_back: []}, "30m"),
        rule_test(up, {off: missing, fall_back: [], lost: []}, "11m"),
        rule_test(up, {off: []}, "9m"),
    ]
    path = tmp_path / "test.yml"
    path.write_text(json.dumps({"rule_files": [str(ALERTS)], "tests": cases}))  # JSON is YAML
    assert "SUCCESS" in promtool("test", "rules", str(path))
