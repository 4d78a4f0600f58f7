"""``graphcap top``: what a running server's recordings serve, read from its metrics."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from graphcap.errors import ScrapeError
from graphcap.readings import Counts, Engine, Reading, Span, read, spans
from graphcap.scrape import fetch, metrics_url, parse


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "top",
        help="watch the graphcap counters of a running server",
        description="Shows replays, hit rates, padding and fallbacks of a running server: since it "
        "started, and between the last two readings. Ctrl-C ends it.",
    )
    parser.add_argument(
        "url", metavar="URL", help="the server, or its /metrics: http://localhost:8000"
    )
    parser.add_argument(
        "--interval",
        type=_seconds,
        default=2.0,
        metavar="S",
        help="seconds between two readings (default 2)",
    )
    parser.add_argument("--once", action="store_true", help="print the first two readings and end")
    parser.add_argument("--json", action="store_true", help="print one JSON object a line instead")
    parser.set_defaults(run=run)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0
    if not 0.1 <= seconds <= 3600:
        raise argparse.ArgumentTypeError(f"expected 0.1 to 3600 seconds, found {text!r}")
    return seconds


def run(options: argparse.Namespace) -> int:
    url = metrics_url(options.url)
    if options.once:
        _show_once(url, options.interval, options.json)
        return 0
    try:
        frames = watch(url, options.interval)
        if options.json:
            for frame in frames:
                print(json.dumps(plain(frame)), flush=True)
        else:
            _show_live(frames)
    except KeyboardInterrupt:  # how one ends it
        pass
    return 0


class Frame:
    """What is shown of one moment.

    Attributes:
        reading: None: the server could not be read; `trouble` says why.
        spans: engine -> what it did since the moment before.
    """

    def __init__(
        self,
        url: str,
        reading: Reading | None,
        before: Reading | None = None,
        trouble: str | None = None,
    ) -> None:
        self.url = url
        self.time = time.time()
        self.reading = reading
        self.spans = {} if reading is None else spans(before, reading)
        self.trouble = trouble


def take(url: str) -> Reading:
    """Read the server once.

    Raises:
        ScrapeError: it does not answer, or has no graphcap counters.
    """
    page = fetch(url)
    at = time.monotonic()  # parsing takes its time too
    samples = parse(page, url)
    reading = read(samples, at)
    if not reading.engines:
        raise ScrapeError(
            f"{url} answers with {len(samples)} series, none of graphcap: is GRAPHCAP=1 set in the "
            f"server's environment? If it is, its log says whether graphcap takes the engine"
        )
    return reading


def watch(url: str, interval: float) -> Iterator[Frame]:
    """Read the server, `interval` seconds after each answer, for ever. One that is away is tried again."""
    before: Reading | None = None
    while True:
        try:
            reading = take(url)
        except ScrapeError as error:
            before = None  # rates over the time away would say nothing of either side of it
            yield Frame(url, None, trouble=str(error))
        else:
            yield Frame(url, reading, before)
            before = reading
        time.sleep(interval)


def _show_once(url: str, interval: float, as_json: bool) -> None:
    before = take(url)
    time.sleep(interval)
    frame = Frame(url, take(url), before)
    if as_json:
        print(json.dumps(plain(frame)))
    else:
        from graphcap.cli.tables import console_of_terminal
        from graphcap.cli.top_view import view

        console_of_terminal().print(view(frame))


def _show_live(frames: Iterator[Frame]) -> None:
    from rich.live import Live

    from graphcap.cli.tables import console_of_terminal
    from graphcap.cli.top_view import view

    console = console_of_terminal()
    if not sys.stdout.isatty():
        for frame in frames:
            console.print(view(frame))
            sys.stdout.flush()
        return
    with Live(console=console, screen=True, auto_refresh=False) as live:
        for frame in frames:
            # A terminal that is too low for all buckets shows those that serve most.
            live.update(view(frame, height=console.height), refresh=True)


def plain(frame: Frame) -> dict[str, Any]:
    """A frame as JSON has it. Rates are null where two readings are wanted and one is there."""
    reading = frame.reading
    return {
        "url": frame.url,
        "time": round(frame.time, 3),
        "error": frame.trouble,
        "engines": {}
        if reading is None
        else {
            name: _plain_engine(engine, frame.spans.get(name))
            for name, engine in reading.engines.items()
        },
    }


def _plain_engine(engine: Engine, span: Span | None) -> dict[str, Any]:
    return {
        "rank": engine.rank,
        "ranks": engine.ranks,
        "capture_seconds": engine.capture_seconds,
        "graph_bytes": engine.graph_bytes,
        "pool_bytes": engine.pool_bytes,
        "total": _plain_counts(engine.counts),
        "span": None
        if span is None
        else {
            "seconds": span.seconds,
            "restarted": span.restarted,
            "replays_per_second": span.counts.replays / span.seconds,
            **_plain_counts(span.counts),
        },
    }


def _plain_counts(counts: Counts) -> dict[str, Any]:
    return {
        **asdict(counts),
        "hit_rate": counts.hit_rate,
        "bucket_hit_rates": counts.bucket_hit_rates,
        "mean_rows": counts.mean_rows,
        "padding_share": counts.padding_share,
        "mixed_hit_rate": counts.mixed_hit_rate,
        "mixed_padding_share": counts.mixed_padding_share,
    }
