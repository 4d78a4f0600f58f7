"""``graphcap top`` against a server whose counters are the plugin's own."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from graphcap.cli import main

pytest.importorskip("prometheus_client", reason="needs the extra `metrics`")

from toy_client import ToyServer, totals

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def server() -> Iterator[ToyServer]:
    started = ToyServer()
    yield started
    started.stop()


@pytest.fixture
def page() -> Iterator[Callable[..., str]]:
    """Serves a text at every path; its address."""
    servers = []

    def serve(text: str, status: int = 200) -> str:
        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(status)
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *_: object) -> None: ...

        made = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=made.serve_forever, daemon=True).start()
        servers.append(made)
        return f"http://127.0.0.1:{made.server_port}"

    yield serve
    for made in servers:
        made.shutdown()
        made.server_close()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def top(*arguments: str) -> subprocess.Popen[str]:
    code = "import sys; from graphcap.cli import main; sys.exit(main())"
    return subprocess.Popen(
        [sys.executable, "-c", code, "top", *arguments],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def interrupt(process: subprocess.Popen[str]) -> str:
    """End it as Ctrl-C does; what it said on stderr."""
    import signal

    process.send_signal(signal.SIGINT)
    try:
        _, said = process.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    assert process.returncode == 0, said
    return said


def frames_until(process: subprocess.Popen[str], accept: Callable[[Any], bool]) -> Any:
    assert process.stdout is not None
    for line in process.stdout:
        frame = json.loads(line)
        if accept(frame):
            return frame
    raise AssertionError("it ended before that")


def test_totals_and_rates_are_what_the_managers_counted(server: ToyServer):
    for rows, times in ((3, 40), (4, 5), (6, 10), (9, 5)):
        server.run(0, "decode", rows, times)
    server.run(0, "mixed", 9, 6)
    first = server.run(0, "mixed", 20, 2)
    process = top(server.url + "/metrics", "--json", "--interval", "0.3")
    try:
        frame = frames_until(process, lambda f: f["engines"]["0"]["span"] is not None)
        engine = frame["engines"]["0"]
        assert list(frame["engines"]) == ["0", "1"]
        assert (engine["rank"], engine["ranks"]) == (0, 2)
        check(engine["total"], first["0,0"])
        assert engine["span"]["replays"] == 0
        assert engine["span"]["hit_rate"] is None
        server.run(0, "decode", 1, 7)
        second = server.run(0, "decode", 9, 3)
        # The orders may fall between two readings on either side of one.
        spans = []
        while sum(span["steps"] for span in spans) < 10:
            frame = frames_until(process, lambda f: f["engines"]["0"]["span"]["steps"] > 0)
            spans.append(frame["engines"]["0"]["span"])
        check(frame["engines"]["0"]["total"], second["0,0"])
        assert sum(span["replays"] for span in spans) == 7
        assert sum(span["fallbacks"].get("above_max_batch", 0) for span in spans) == 3
        assert sum(span["buckets"].get("1", 0) for span in spans) == 7
        for span in spans:
            assert span["replays_per_second"] == pytest.approx(span["replays"] / span["seconds"])
            assert 0.3 <= span["seconds"] < 5
            assert not span["restarted"]
    finally:
        assert interrupt(process) == ""


def check(shown: dict[str, Any], worker: dict[str, Any]) -> None:
    want = totals(worker)
    assert shown["steps"] == want["steps"]
    assert shown["replays"] == want["replays"]
    assert shown["fallbacks"] == worker["decode"]["fallbacks"]
    assert shown["buckets"] == worker["decode"]["buckets"]
    assert shown["mixed"] == worker["mixed"]["buckets"]
    assert shown["hit_rate"] == want["replays"] / want["steps"]
    assert shown["bucket_hit_rates"] == {
        size: count / want["steps"] for size, count in worker["decode"]["buckets"].items()
    }
    assert shown["padding_share"] == want["padding_rows"] / want["computed"]
    served = want["mixed"] / (want["mixed"] + want["eager_mixed"])
    assert shown["mixed_hit_rate"] == served
    assert shown["mixed_padding_share"] == want["mixed_padding"] / want["mixed_computed"]


def test_memory_is_shown(server: ToyServer, capsys: pytest.CaptureFixture[str]):
    worker = server.counted()["0,0"]
    assert main(["top", server.url, "--once", "--json", "--interval", "0.1"]) == 0
    engine = json.loads(capsys.readouterr().out)["engines"]["0"]
    kinds = (worker["decode"], worker["mixed"])
    assert engine["graph_bytes"] == sum(kind["graph_bytes"] for kind in kinds)
    assert engine["pool_bytes"] == worker["pool_bytes"] > 0
    assert engine["capture_seconds"] > 0


def test_a_server_that_goes_away_and_comes_back():
    port = free_port()
    process = top(f"127.0.0.1:{port}", "--json", "--interval", "0.2")
    server = None
    try:
        frame = frames_until(process, lambda _: True)
        assert "is not reachable" in frame["error"]
        assert frame["engines"] == {}
        server = ToyServer(port)
        server.run(0, "decode", 2, 50)
        frame = frames_until(process, lambda f: f["engines"] and f["engines"]["0"]["span"])
        assert frame["engines"]["0"]["total"]["replays"] == 50
        server.stop()
        frames_until(process, lambda f: f["error"])
        server = ToyServer(port)
        server.run(0, "decode", 2, 60)
        frame = frames_until(process, lambda f: f["engines"])
        assert frame["engines"]["0"]["span"] is None  # nothing is known of the time away
        frame = frames_until(
            process,
            lambda f: f["engines"]["0"]["span"] and f["engines"]["0"]["total"]["replays"] == 60,
        )
        assert frame["engines"]["0"]["span"]["replays"] in (0, 60)
    finally:
        interrupt(process)
        if server is not None:
            server.stop()


def test_the_table(server: ToyServer, capsys: pytest.CaptureFixture[str]):
    server.run(0, "decode", 3, 40)
    server.run(0, "decode", 9, 10)
    worker = server.run(0, "mixed", 12, 4)["0,0"]
    assert main(["top", server.url, "--once", "--interval", "0.1"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    want = totals(worker)
    for text in (
        "engine 0, rank 0, of 2 that count alike",
        f"│ replays │ 0.0/s │ {want['replays']} │",
        f"│ hit rate │ - │ {100 * want['replays'] / want['steps']:.1f} % │",
        f"│ padding │ - │ {100 * want['padding_rows'] / want['computed']:.1f} % │",
        f"│ fallback above_max_batch │ 0.0/s │ {want['fallback above_max_batch']} │",
        f"│ mixed batches replayed │ 0.0/s │ {want['mixed']} │",
        "engine 1, rank 0 ",
        "│ fallbacks │ none │ none │",
    ):
        assert text in printed, text


def test_the_live_view_on_a_terminal(server: ToyServer):
    """In a pseudo-terminal: it redraws, and Ctrl-C ends it quietly."""
    import fcntl
    import os
    import pty
    import select
    import signal
    import struct
    import termios

    server.run(0, "decode", 3, 40)
    pid, terminal = pty.fork()
    if pid == 0:
        os.environ.update(TERM="xterm-256color", PYTHONPATH=str(ROOT))
        command = [sys.executable, "-m", "graphcap", "top", server.url, "--interval", "0.2"]
        os.execv(sys.executable, command)
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 40, 100, 0, 0))
    shown = b""
    end = time.monotonic() + 60
    try:
        while shown.count(b"engine 0") < 3 and time.monotonic() < end:
            shown += os.read(terminal, 65536)
        os.write(terminal, b"\x03")
        while True:
            if not select.select([terminal], [], [], 60)[0]:
                os.kill(pid, signal.SIGKILL)  # the assertion on its status tells
                break
            try:
                shown += os.read(terminal, 65536)
            except OSError:  # it has ended
                break
    finally:
        _, status = os.waitpid(pid, 0)
        os.close(terminal)
    assert os.waitstatus_to_exitcode(status) == 0
    text = shown.decode(errors="replace")
    worker = totals(server.counted()["0,0"])
    assert f"{100 * worker['replays'] / worker['steps']:.1f} %" in text
    assert "Traceback" not in text
    assert text.count("\x1b[?1049h") == text.count("\x1b[?1049l") == 1  # the screen is given back


# -- what it says when it cannot ------------------------------------------------------------------


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["top", *arguments, "--once", "--interval", "0.1"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    (line,) = captured.err.splitlines()
    return line


def test_not_reachable(capsys: pytest.CaptureFixture[str]):
    said = refusal(capsys, f"http://127.0.0.1:{free_port()}")
    assert "/metrics is not reachable ([Errno 111] Connection refused)" in said
    assert "is the server running" in said


def test_no_graphcap_series(capsys: pytest.CaptureFixture[str], page: Callable[..., str]):
    said = refusal(capsys, page("vllm:num_requests_running 1\nup 1\n"))
    assert "answers with 2 series, none of graphcap: is GRAPHCAP=1 set" in said


def test_no_metrics_page(capsys: pytest.CaptureFixture[str], page: Callable[..., str]):
    assert "not with Prometheus metrics" in refusal(capsys, page("<html>\n<p>a page</p>"))
    assert "answers 404 Not Found; expected 200" in refusal(capsys, page("", 404))


@pytest.mark.parametrize(
    "url", ["ftp://host", "http://", "http://u:p@host", "http://host:port", ""]
)
def test_no_address(capsys: pytest.CaptureFixture[str], url: str):
    said = refusal(capsys, url)
    assert f"expected the address of a server such as http://localhost:8000, found {url!r}" in said


@pytest.mark.parametrize("interval", ["0", "-1", "nan", "fast", "1e9"])
def test_no_interval(capsys: pytest.CaptureFixture[str], interval: str):
    with pytest.raises(SystemExit) as raised:
        main(["top", "localhost", "--interval", interval])
    assert raised.value.code == 2
    assert "expected 0.1 to 3600 seconds" in capsys.readouterr().err


def test_without_the_library(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, page: Callable[..., str]
):
    for name in [name for name in sys.modules if name.split(".")[0] == "prometheus_client"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    assert "pip install 'vllm-graphcap[metrics]'" in refusal(capsys, page("up 1\n"))


def test_torch_is_not_imported():
    code = "import sys\nfrom graphcap.cli import top, top_view\nassert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
