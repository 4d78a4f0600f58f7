"""Colours that can be read: in light and in dark, by the measure of WCAG 2.2."""

from __future__ import annotations

import re

import pytest

from graphcap.page.charts import VARIABLES
from graphcap.page.style import CSS

LIGHT, DARK = (
    dict(re.findall(r"(--[\w-]+):(#[0-9a-f]{3,6})", block))
    for block in re.findall(r":root\{([^}]*)\}", CSS)
)


def luminance(colour: str) -> float:
    digits = colour[1:] if len(colour) == 7 else "".join(c * 2 for c in colour[1:])
    channels = [int(digits[i : i + 2], 16) / 255 for i in (0, 2, 4)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, two: str) -> float:
    high, low = sorted((luminance(one), luminance(two)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("scheme", [LIGHT, DARK], ids=["light", "dark"])
def test_contrast(scheme: dict[str, str]):
    for text in ("--ink", "--muted", "--warn"):
        assert contrast(scheme[text], scheme["--page"]) >= 4.5, text
        assert contrast(scheme[text], scheme["--box"]) >= 4.5, text
    for fill in ("--before", "--after", "--reference"):
        assert contrast(scheme[fill], scheme["--page"]) >= 3, fill
    for name in (name for name in scheme if name.startswith("--series")):
        assert contrast(scheme[name], scheme["--page"]) >= 3, name
        assert contrast(scheme[name], scheme["--on-fill"]) >= 4.5, name


def test_both_schemes_define_every_colour():
    assert LIGHT.keys() == DARK.keys() >= set(VARIABLES.values())
    assert set(re.findall(r"var\((--[\w-]+)\)", CSS)) <= LIGHT.keys()
