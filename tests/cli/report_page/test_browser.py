"""The page in headless Chromium: it renders, says nothing on the console, asks for nothing, fits a phone."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from altered import hostile, large
from browser import Browser, BrowserUnavailable, browser

from graphcap.cli import main

pytest.importorskip("matplotlib", reason="the page's charts need matplotlib: the extra `plot`")

PHONE, DESKTOP = 320, 1200

CHARTS = """
[...document.querySelectorAll('.chart svg')].map(svg => ({
  box: svg.getBoundingClientRect().toJSON(),
  texts: [...svg.querySelectorAll('text')].map(t => [t.textContent, t.getBoundingClientRect().toJSON()]),
})).filter(chart => chart.box.width > 0)
"""
TABLES = """
[...document.querySelectorAll('.scroll')].map(
  box => [box.scrollWidth, box.clientWidth, getComputedStyle(box).overflowX])
"""


@pytest.fixture(scope="module")
def window() -> Iterator[Browser]:
    try:
        with browser() as opened:
            yield opened
    except BrowserUnavailable as reason:
        pytest.skip(str(reason))


@pytest.fixture(scope="module")
def pages(
    decoded: dict[str, Any],
    captured: dict[str, Any],
    plugged: dict[str, Any],
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    reports = {
        "decode": decoded,
        "capture": captured,
        "plugin": plugged,
        "large": large(decoded),
        "hostile": hostile(decoded, "</style><script>alert(1)</script>" + "lorem-ipsum_" * 40),
    }
    for name, report in reports.items():
        (folder / f"{name}.json").write_text(json.dumps(report))
        arguments = ["report", str(folder / f"{name}.json"), "--out", str(folder / f"{name}.html")]
        assert main(arguments) == 0
    return {name: folder / f"{name}.html" for name in reports}


NAMES = ["decode", "capture", "plugin", "large", "hostile"]


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [PHONE, DESKTOP])
@pytest.mark.parametrize("name", NAMES)
def test_it_renders(
    window: Browser, pages: dict[str, Path], tmp_path: Path, name: str, width: int, dark: bool
):
    window.show(pages[name], width=width, dark=dark)
    assert window.log("browser") == []
    assert window.requests() == [pages[name].as_uri()]
    page_width = window.evaluate("document.documentElement.scrollWidth")
    assert page_width <= width
    red, green, blue = window.evaluate(
        "getComputedStyle(document.body).backgroundColor.match(/[0-9]+/g).map(Number)"
    )[:3]
    assert (max(red, green, blue) < 60) == dark
    charts = window.evaluate(CHARTS)
    assert len(charts) >= 1
    for chart in charts:
        box = chart["box"]
        assert box["left"] >= 0
        assert box["right"] <= page_width
        assert box["height"] > 80
        letters = [(text, place) for text, place in chart["texts"] if text.strip()]
        assert letters
        for index, (text, place) in enumerate(letters):
            assert not outside(place, box), f"{text!r} leaves its chart"
            for other, beside in letters[:index]:
                assert not overlap(place, beside), f"{text!r} lies over {other!r}"
    for scrolled, shown, overflow in window.evaluate(TABLES):
        assert scrolled <= shown or overflow == "auto"
    shot = tmp_path / "page.png"
    window.screenshot(shot)
    assert shot.stat().st_size > 20_000


def outside(place: dict[str, float], box: dict[str, float], slack: float = 3) -> bool:
    return (
        place["left"] < box["left"] - slack
        or place["right"] > box["right"] + slack
        or place["top"] < box["top"] - slack
        or place["bottom"] > box["bottom"] + slack
    )


def overlap(one: dict[str, float], two: dict[str, float], slack: float = 2) -> bool:
    """Boxes of text are higher than its letters, hence the slack."""
    across = min(one["right"], two["right"]) - max(one["left"], two["left"])
    down = min(one["bottom"], two["bottom"]) - max(one["top"], two["top"])
    return across > slack and down > slack * 2


def test_the_usual_tables_need_no_scrolling_on_a_phone(window: Browser, pages: dict[str, Path]):
    window.show(pages["decode"], width=390)
    for scrolled, shown, _ in window.evaluate(TABLES):
        assert scrolled <= shown


def test_what_this_test_sees(window: Browser, tmp_path: Path):
    """An error on the console, a request and a wide page do not pass unseen."""
    bad = tmp_path / "bad.html"
    bad.write_text(
        "<!doctype html><meta name=viewport content='width=device-width'><div style='width:2000px'>a"
        "</div><img src='missing.png'><script>undefined_name()</script>"
    )
    window.show(bad, width=PHONE)
    assert any("undefined_name" in entry["message"] for entry in window.log("browser"))
    assert (tmp_path / "missing.png").as_uri() in window.requests()
    assert window.evaluate("document.documentElement.scrollWidth") > PHONE
