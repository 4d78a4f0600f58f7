"""The README's table of footguns is what the tests say, and no case is without its test."""

from __future__ import annotations

import pytest
import readme_section

ON_A_DEVICE = {8, 10, 11, 12, 14, 15, 16, 17, 18, 19, 22}
"""Cases that a CPU alone does not show."""


def test_the_readme_is_up_to_date():
    text = readme_section.README.read_text()
    assert readme_section.filled(text) == text, "run python tests/footguns/readme_section.py"


def test_every_case_is_stated_once_and_has_kin():
    for number, case in readme_section.cases().items():
        assert len(case.faults) == len(case.answers) == 1, number
        assert case.kin, number
        assert case.on_a_device or number not in ON_A_DEVICE, number


def test_no_cell_breaks_the_table():
    rows = [row for row in readme_section.section().splitlines() if not row.startswith("|--")]
    assert len(rows) == 1 + 5 + 25
    assert {row.count("|") for row in rows} == {5}


def test_a_test_without_the_plain_form_is_named(monkeypatch: pytest.MonkeyPatch):
    bad = (readme_section.HERE / "test_footgun_x.py", "test_03_something", "Says what it likes.")
    monkeypatch.setattr(readme_section, "documented_tests", lambda: iter([bad]))
    with pytest.raises(ValueError, match=r"test_footgun_x\.py: test_03_something.*Says what"):
        readme_section.cases()
