"""``graphcap report``: a run as one HTML page that opens from disk."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from graphcap.errors import InputError


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "report",
        help="draw a run's report as one HTML page",
        description="Writes one self-contained HTML page (no network, no scripts) from the JSON of "
        "`graphcap decode --json`, of a capture report, or of GRAPHCAP_REPORT under vLLM.",
    )
    parser.add_argument("run_json", metavar="run.json", help="the report; - reads standard input")
    parser.add_argument(
        "--out", default="report.html", metavar="FILE", help="the page (default report.html)"
    )
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    from graphcap.page.charts import require_matplotlib
    from graphcap.page.document import page
    from graphcap.page.reading import read_run

    require_matplotlib()
    content, source = _content(options.run_json)
    out = Path(options.out)
    if options.run_json != "-" and out.exists() and out.samefile(options.run_json):
        raise InputError(f"--out {options.out} is the report itself; give the page another name")
    written = page(read_run(content, source)).encode()
    try:
        out.write_bytes(written)
    except OSError as error:
        raise InputError(
            f"--out {options.out}: expected a place where a file can be written, found: "
            f"{error.strerror}; give another"
        ) from None
    print(f"{out}: {len(written) / 1024:,.0f} KiB, opens in any browser")
    return 0


def _content(name: str) -> tuple[bytes, str]:
    """What is in the file, and what to call it."""
    if name == "-":
        return sys.stdin.buffer.read(), "standard input"
    try:
        return Path(name).read_bytes(), Path(name).name
    except OSError as error:
        raise InputError(
            f"{name}: expected a report that can be read, found: {error.strerror}; make one with "
            f"`graphcap decode --json > run.json`, or GRAPHCAP_REPORT=run.json under vLLM"
        ) from None
