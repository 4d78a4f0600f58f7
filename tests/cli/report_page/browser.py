"""Headless Chromium through chromedriver's own HTTP interface (WebDriver), without a client library."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

SECONDS = 60


class BrowserUnavailable(Exception):
    """There is no browser here; the text says why and is fit for a skip."""


class Browser:
    """One window. Sizes are in CSS pixels."""

    def __init__(self, address: str, session: str) -> None:
        self._session = f"{address}/session/{session}"

    def show(self, page: Path, *, width: int, height: int = 800, dark: bool = False) -> None:
        """Open a file as a phone or a desktop of this width would."""
        self.chrome(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=2 if width < 600 else 1,
            mobile=width < 600,
        )
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.chrome("Emulation.setEmulatedMedia", features=[scheme])
        self.log("browser"), self.log("performance")  # what was before is not this page's
        _post(f"{self._session}/url", {"url": page.resolve().as_uri()})

    def evaluate(self, expression: str) -> Any:
        script = {"script": f"return ({expression})", "args": []}
        return _post(f"{self._session}/execute/sync", script)

    def log(self, kind: str) -> list[dict[str, Any]]:
        """Entries since the last call: ``browser`` is the console, ``performance`` the network."""
        return _post(f"{self._session}/se/log", {"type": kind})

    def requests(self) -> list[str]:
        """Addresses that were asked for since the page was opened, itself among them."""
        messages = [json.loads(entry["message"])["message"] for entry in self.log("performance")]
        return [
            message["params"]["request"]["url"]
            for message in messages
            if message["method"] == "Network.requestWillBeSent"
        ]

    def screenshot(self, file: Path) -> None:
        """The whole page, as long as it is."""
        shot = self.chrome("Page.captureScreenshot", captureBeyondViewport=True, format="png")
        file.write_bytes(base64.b64decode(shot["data"]))

    def chrome(self, command: str, **params: Any) -> Any:
        """A command of Chrome's DevTools protocol."""
        return _post(f"{self._session}/goog/cdp/execute", {"cmd": command, "params": params})


@contextmanager
def browser() -> Iterator[Browser]:
    """A browser of its own profile, ended afterwards.

    Raises BrowserUnavailable where Chromium or chromedriver is not installed or does not start.
    """
    driver, chromium = shutil.which("chromedriver"), shutil.which("chromium")
    if driver is None or chromium is None:
        raise BrowserUnavailable(
            "chromium and chromedriver are not both installed: apt-get install chromium chromium-driver"
        )
    with tempfile.TemporaryDirectory() as folder, open(Path(folder) / "log", "w+") as log:
        process = subprocess.Popen([driver, "--port=0"], stdout=log, stderr=subprocess.STDOUT)
        try:
            address = f"http://127.0.0.1:{_port(process, Path(log.name))}"
            session = _start(address, chromium, folder)
            try:
                yield Browser(address, session)
            finally:
                _send("DELETE", f"{address}/session/{session}", None)
        finally:
            process.terminate()
            process.wait()


def _start(address: str, chromium: str, folder: str) -> str:
    arguments = [
        "--headless=new",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--no-first-run",
        f"--user-data-dir={folder}/profile",
        *(["--no-sandbox"] if os.geteuid() == 0 else []),  # Chromium refuses root otherwise
    ]
    wanted = {
        "browserName": "chrome",
        "goog:chromeOptions": {"binary": chromium, "args": arguments},
        "goog:loggingPrefs": {"browser": "ALL", "performance": "ALL"},
    }
    try:
        made = _post(f"{address}/session", {"capabilities": {"alwaysMatch": wanted}})
    except RuntimeError as error:
        raise BrowserUnavailable(f"chromium does not start here: {error}") from None
    return str(made["sessionId"])


def _port(process: subprocess.Popen[bytes], log: Path) -> int:
    for _ in range(SECONDS * 10):
        text = log.read_text()
        if "on port " in text and "success" in text:
            return int(text.rsplit("on port ", 1)[1].split(".")[0])
        if process.poll() is not None:
            break
        time.sleep(0.1)
    raise BrowserUnavailable(f"chromedriver does not start here: {log.read_text()[-300:]}")


def _post(address: str, value: Any) -> Any:
    return _send("POST", address, value)


def _send(method: str, address: str, value: Any) -> Any:
    data = None if value is None else json.dumps(value).encode()
    request = Request(address, data, {"Content-Type": "application/json"}, method=method)
    try:
        with urlopen(request, timeout=SECONDS) as answer:
            return json.load(answer)["value"]
    except HTTPError as error:
        raise RuntimeError(json.load(error)["value"]["message"].splitlines()[0]) from None
