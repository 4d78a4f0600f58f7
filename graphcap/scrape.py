"""Reads a Prometheus endpoint once."""

from __future__ import annotations

import http.client
import ipaddress
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import NamedTuple
from urllib.parse import SplitResult, urlsplit

from graphcap import __version__
from graphcap.errors import BackendError, ScrapeError, SettingsError

TIMEOUT = 5.0
_MOST_BYTES = 2**26  # a page of vLLM and graphcap has some hundred KiB
_PATH = "/metrics"


class Sample(NamedTuple):
    """One line of a scrape."""

    name: str
    labels: Mapping[str, str]
    value: float


def metrics_url(text: str) -> str:
    """The address of the endpoint, where `text` is that, the base of the server, or ``host:port``.

    Raises:
        SettingsError: `text` is no address of a server.
    """
    address = text if "://" in text else f"http://{text}"
    try:
        parts = urlsplit(address)
        usable = parts.scheme in ("http", "https") and parts.hostname and parts.port != 0
    except ValueError:
        usable = False
    if not usable or "@" in parts.netloc or not address.isascii() or len(address.split()) != 1:
        raise SettingsError(
            f"expected the address of a server such as http://localhost:8000, found {text!r}"
        )
    path = parts.path.rstrip("/")
    path = path if path.endswith(_PATH) else path + _PATH
    return parts._replace(path=path, fragment="").geturl()


def scrape(url: str, *, timeout: float = TIMEOUT) -> list[Sample]:
    """All samples that an endpoint shows now: `parse` of what `fetch` gets.

    Args:
        url: as `metrics_url` takes it.
        timeout: seconds to wait for a connection, and for each part of the answer.

    Raises:
        SettingsError: `url` is no address.
        ScrapeError: nobody answers there, or not with Prometheus text.
        BackendError: prometheus_client is not installed.
    """
    url = metrics_url(url)
    return parse(fetch(url, timeout=timeout), url)


def parse(text: str, source: str) -> list[Sample]:
    """The samples of a page in Prometheus' text format; `source` is named where it is none.

    Raises:
        ScrapeError: it is other text.
        BackendError: prometheus_client is not installed.
    """
    try:
        from prometheus_client.parser import (  # type: ignore[import-not-found]
            text_string_to_metric_families,
        )
    except ImportError as error:
        raise BackendError(
            f"reading metrics needs prometheus-client ({error}): "
            f"pip install 'vllm-graphcap[metrics]'"
        ) from error
    try:
        return [
            Sample(sample.name, sample.labels, float(sample.value))
            for family in text_string_to_metric_families(text)
            for sample in family.samples
        ]
    except (ValueError, KeyError, IndexError) as error:  # what the parser raises for other text
        raise ScrapeError(
            f"{source} answers, but not with Prometheus metrics (it begins {text[:40]!r}); "
            f"give the address of the server's /metrics"
        ) from error


def fetch(url: str, *, timeout: float = TIMEOUT) -> str:
    """What an address answers. See `scrape`."""
    headers = {
        "Accept": "text/plain; version=0.0.4",
        "User-Agent": f"graphcap/{__version__}",
    }
    try:
        request = urllib.request.Request(url, headers=headers)
        with _opener(urlsplit(url)).open(request, timeout=timeout) as answer:
            content: bytes = answer.read(_MOST_BYTES + 1)
    except urllib.error.HTTPError as error:
        error.close()
        raise ScrapeError(
            f"{url} answers {error.code} {error.reason}; expected 200: "
            f"is it the server's own address, without /v1?"
        ) from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        reason = getattr(error, "reason", None) or error
        raise ScrapeError(
            f"{url} is not reachable ({str(reason) or type(error).__name__}): "
            f"is the server running, and is this its address?"
        ) from error
    if len(content) > _MOST_BYTES:
        raise ScrapeError(
            f"{url} answers with more than {_MOST_BYTES >> 20} MiB: not a metrics page"
        )
    return content.decode(errors="replace")


def _opener(url: SplitResult) -> urllib.request.OpenerDirector:
    """Goes through the proxy of the environment, but never to this machine itself."""
    host = url.hostname or ""
    try:
        is_here = ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_here = host == "localhost"
    proxies: tuple[urllib.request.BaseHandler, ...] = (
        (urllib.request.ProxyHandler({}),) if is_here else ()
    )
    return urllib.request.build_opener(*proxies)
