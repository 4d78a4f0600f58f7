"""The table of footguns is what the tests say, and no case is without its test."""

from __future__ import annotations

import footguns_page
import pytest

ON_A_DEVICE = {8, 10, 11, 12, 14, 15, 16, 17, 18, 19, 22}
"""Cases that a CPU alone does not show."""


def test_the_page_is_up_to_date():
    text = footguns_page.PAGE.read_text()
    assert footguns_page.filled(text) == text, "run python tests/footguns/footguns_page.py"


def test_every_case_is_stated_once_and_has_kin():
    for number, case in footguns_page.cases().items():
        assert len(case.faults) == len(case.answers) == 1, number
        assert case.kin, number
        assert case.on_a_device or number not in ON_A_DEVICE, number


def test_no_cell_breaks_the_table():
    rows = [row for row in footguns_page.table().splitlines() if not row.startswith("|--")]
    assert len(rows) == 1 + 5 + 25
    assert {row.count("|") for row in rows} == {5}


def test_a_test_without_the_plain_form_is_named(monkeypatch: pytest.MonkeyPatch):
    bad = (footguns_page.HERE / "test_footgun_x.py", "test_03_something", "Says what it likes.")
    monkeypatch.setattr(footguns_page, "documented_tests", lambda: iter([bad]))
    with pytest.raises(ValueError, match=r"test_footgun_x\.py: test_03_something.*Says what"):
        footguns_page.cases()
