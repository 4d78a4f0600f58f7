"""Reports and plans are on disk whole or not at all, whoever writes them at once."""

from __future__ import annotations

import json
import sys
import threading
from pathlib import Path

from graphcap.report import write_json


def test_two_threads_that_write_one_file_leave_it_whole(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    faults: list[Exception] = []
    interval = sys.getswitchinterval()

    def write(number: int) -> None:
        try:
            for _ in range(100):
                write_json(path, {"numbers": [number] * (1000 + 500 * number)})
                held = json.loads(path.read_text())["numbers"]
                assert len(held) == 1000 + 500 * held[0]
        except Exception as error:
            faults.append(error)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(3)]
    try:
        sys.setswitchinterval(1e-5)
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not faults
    assert [found.name for found in tmp_path.iterdir()] == ["report.json"]
