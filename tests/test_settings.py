"""Environment variables become one Settings; bad values are refused by name and value."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphcap.errors import SettingsError
from graphcap.settings import VARIABLES, Settings

GOOD = {
    "GRAPHCAP": "1",
    "GRAPHCAP_BUCKETS": "1,2,64",
    "GRAPHCAP_RECORDER": "tape",
    "GRAPHCAP_KERNELS": "reference",
    "GRAPHCAP_VERIFY": "100",
    "GRAPHCAP_STRICT": "1",
    "GRAPHCAP_POOL_MIB": "2.5",
    "GRAPHCAP_NVTX": "1",
    "GRAPHCAP_SCHEDULE": "plain",
}


def test_defaults_are_those_of_an_empty_environment():
    assert Settings.from_env({}) == Settings()
    assert not Settings().enabled


def test_every_variable_is_read(tmp_path: Path):
    report, tuned = tmp_path / "report.json", tmp_path / "not" / "there"
    paths = {"GRAPHCAP_REPORT": str(report), "GRAPHCAP_TUNE_CACHE": str(tuned)}
    settings = Settings.from_env({**GOOD, **paths})
    assert settings == Settings(
        True, "1,2,64", "tape", "reference", "capture", 100, True, 2.5, report, True, tuned, "plain"
    )
    assert set(settings.origins.values()) == {"environment"}


def test_written_values_read_back_the_same(tmp_path: Path):
    settings = Settings.from_env(
        {
            **GOOD,
            "GRAPHCAP_REPORT": str(tmp_path / "r.json"),
            "GRAPHCAP_TUNE_CACHE": str(tmp_path),
        }
    )
    written = {variable.name: settings.value_of(variable.name) for variable in VARIABLES}
    assert Settings.from_env(written) == settings


def test_values_of_defaults_can_be_written_unless_unset():
    written = {v.name: Settings().value_of(v.name) for v in VARIABLES}
    readable = {name: text for name, text in written.items() if text != "unset"}
    assert Settings.from_env(readable) == Settings()
    assert sorted(set(written) - set(readable)) == [
        "GRAPHCAP_POOL_MIB",
        "GRAPHCAP_REPORT",
        "GRAPHCAP_TUNE_CACHE",
    ]


def test_origin_tells_default_from_environment():
    origins = Settings.from_env({"GRAPHCAP": "0"}).origins
    assert origins["GRAPHCAP"] == "environment"
    assert origins["GRAPHCAP_STRICT"] == "default"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("GRAPHCAP", "yes"),
        ("GRAPHCAP", ""),
        ("GRAPHCAP_BUCKETS", "1,x"),
        ("GRAPHCAP_BUCKETS", "0"),
        ("GRAPHCAP_BUCKETS", "-4"),
        ("GRAPHCAP_BUCKETS", "9" * 5000),
        ("GRAPHCAP_RECORDER", "cud"),
        ("GRAPHCAP_KERNELS", "cutlass"),
        ("GRAPHCAP_SCHEDULE", "fused"),
        ("GRAPHCAP_VERIFY", "0"),
        ("GRAPHCAP_VERIFY", "-3"),
        ("GRAPHCAP_VERIFY", "sometimes"),
        ("GRAPHCAP_VERIFY", "9" * 5000),
        ("GRAPHCAP_STRICT", "true"),
        ("GRAPHCAP_POOL_MIB", "0"),
        ("GRAPHCAP_POOL_MIB", "nan"),
        ("GRAPHCAP_POOL_MIB", "1e999"),
        ("GRAPHCAP_POOL_MIB", "12MB"),
        ("GRAPHCAP_REPORT", ""),
        ("GRAPHCAP_NVTX", "on"),
        ("GRAPHCAP_REPORT", "/no-such-folder/report.json"),
        ("GRAPHCAP_REPORT", "~no-such-user/report.json"),
        ("GRAPHCAP_REPORT", "a" * 5000),
        ("GRAPHCAP_TUNE_CACHE", ""),
        ("GRAPHCAP_TUNE_CACHE", "~no-such-user/plans"),
        ("GRAPHCAP_TUNE_CACHE", "a" * 5000),
    ],
)
def test_bad_value_is_refused_with_name_and_value(name: str, value: str):
    with pytest.raises(SettingsError) as caught:
        Settings.from_env({name: value})
    message = str(caught.value)
    assert name in message
    assert repr(value) in message
    assert "expected" in message


def test_a_folder_is_no_report_file(tmp_path: Path):
    with pytest.raises(SettingsError, match="GRAPHCAP_REPORT"):
        Settings.from_env({"GRAPHCAP_REPORT": str(tmp_path)})


def test_a_file_is_no_folder_of_plans(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingsError, match="GRAPHCAP_TUNE_CACHE: expected the path of a folder"):
        Settings.from_env({"GRAPHCAP_TUNE_CACHE": str(tmp_path / "file")})


@given(
    st.sampled_from([variable.name for variable in VARIABLES]),
    st.text(alphabet=st.characters(blacklist_characters="\0", blacklist_categories=["Cs"])),
)
def test_any_text_gives_settings_or_a_settings_error(name: str, text: str):
    try:
        settings = Settings.from_env({name: text})
    except SettingsError as error:
        assert name in str(error)  # noqa: PT017 (both outcomes are right)
    else:
        assert settings.origins[name] == "environment"


def test_misspelt_name_is_warned_about_with_the_nearest(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING, "graphcap"):
        Settings.from_env({"GRAPHCAP_BUKETS": "1", "GRAPHCAP_STRICT": "0", "OTHER": "x"})
    assert len(caplog.records) == 1
    message = caplog.records[0].getMessage()
    assert "GRAPHCAP_BUKETS" in message
    assert "GRAPHCAP_BUCKETS?" in message
