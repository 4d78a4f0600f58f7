"""bench/memcheck.py over a compute-sanitizer that writes what the test says."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from test_soak import soak, soak_run

from graphcap import __version__
from graphcap.errors import VerificationError

CLEAN = "========= COMPUTE-SANITIZER\n========= ERROR SUMMARY: 0 errors\n"
INVALID = """========= COMPUTE-SANITIZER
========= Invalid __global__ read of size 4 bytes
=========     at grouped_gemm+0x210 in pairs.py:40
=========     Address 0x7f3c2a200000 is out of bounds
=========
========= Invalid __global__ read of size 4 bytes
=========     at grouped_gemm+0x210 in pairs.py:40
=========
========= ERROR SUMMARY: 2 errors
"""
FAKE = """#!{python}
import os, sys
from pathlib import Path
arguments = sys.argv[1:]
Path({seen!r}).open("a").write(repr((arguments, os.environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING"))) + "\\n")
print("the loop's own words")
text = {text!r}
if text is not None:
    Path(arguments[arguments.index("--log-file") + 1]).write_text(text)
sys.exit({code})
"""


def _load() -> ModuleType:
    path = Path(__file__).resolve().parent.parent / "bench" / "memcheck.py"
    spec = importlib.util.spec_from_file_location("memcheck", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["memcheck"] = module
    spec.loader.exec_module(module)
    return module


memcheck = _load()


@pytest.fixture
def sanitizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def install(text: str | None, code: int = 0) -> Path:
        seen, path = tmp_path / "seen", tmp_path / "bin" / "compute-sanitizer"
        path.parent.mkdir(exist_ok=True)
        path.write_text(FAKE.format(python=sys.executable, seen=str(seen), text=text, code=code))
        path.chmod(0o755)
        monkeypatch.setenv("PATH", str(path.parent))
        return seen

    return install


@pytest.mark.parametrize(
    ("text", "code", "expected", "said"),
    [
        (CLEAN, 0, 0, "no invalid access; log in"),
        (INVALID, 0, 1, "2 errors, see"),
        (INVALID, 1, 1, "{'Invalid __global__ read of size 4 bytes': 2}"),
        (CLEAN, 1, 2, "no invalid access, but the loop ended with 1"),
        (None, 0, 2, "no summary in"),
        ("========= COMPUTE-SANITIZER\n", 0, 2, "no summary in"),
    ],
    ids=["clean", "invalid", "invalid and failed", "failed", "no log", "cut off"],
)
def test_the_exit_code_tells_what_the_log_says(
    sanitizer, tmp_path, capsys, text, code, expected, said
):
    sanitizer(text, code)
    assert memcheck.main(["--logs", str(tmp_path / "logs")]) == expected
    assert said in capsys.readouterr().out
    for name in ("graphs", "tape-uncached"):
        assert (tmp_path / "logs" / f"{name}.out").read_text() == "the loop's own words\n"


def test_a_log_says_what_it_is_of(sanitizer, tmp_path):
    sanitizer(CLEAN)
    given = ["--shape", "tiny-hybrid", "--layers", "4", "--replays", "9", "--commit", "abc1234"]
    assert memcheck.main(["--logs", str(tmp_path), *given]) == 0
    of = f"shape tiny-hybrid, 4 layers, 9 replays, graphcap {__version__}, commit abc1234"
    for name in ("graphs", "tape-uncached"):
        first, _, rest = (tmp_path / f"{name}.log").read_text().partition("\n")
        assert first == f"{of}, {name}"
        assert rest == CLEAN
        assert memcheck.errors_in((tmp_path / f"{name}.log").read_text()) == 0


def test_an_older_log_is_not_taken_for_this_one(sanitizer, tmp_path):
    sanitizer(CLEAN)
    assert memcheck.main(["--logs", str(tmp_path)]) == 0
    sanitizer(None)
    assert memcheck.main(["--logs", str(tmp_path)]) == 2


def test_it_runs_both_ways_and_leaves_api_errors_out(sanitizer, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")
    seen = sanitizer(CLEAN)
    assert memcheck.main(["--logs", str(tmp_path), "--replays", "7"]) == 0
    calls = [eval(line) for line in seen.read_text().splitlines()]
    assert [uncached for _, uncached in calls] == [None, "1"]
    for (arguments, _), recorder in zip(calls, ("cuda", "tape"), strict=True):
        assert arguments[:4] == ["--tool", "memcheck", "--report-api-errors", "no"]
        assert str(memcheck.SOAK) in arguments
        assert memcheck.SOAK.is_file()
        text = " ".join(arguments)
        assert f"--recorder {recorder}" in text
        assert "--replays 7" in text
        assert "--layers 2" in text


def grows(monkeypatch: pytest.MonkeyPatch, wrong: bool = False) -> None:
    """The loop's steps keep a tensor each, as kernels do that are loaded late."""
    original, kept = soak.Soak._step, []

    def step(self) -> None:
        kept.append(torch.ones(1))
        original(self)

    monkeypatch.setattr(soak.Soak, "_step", step)
    if wrong:

        def differs(*_):
            raise VerificationError("by design")

        monkeypatch.setattr(soak_run, "compare", differs)


def loop_of(seen: Path) -> list[str]:
    """What the loop under memcheck is given, shorter."""
    arguments, _ = eval(seen.read_text().splitlines()[1])
    given = arguments[arguments.index(str(memcheck.SOAK)) + 1 :]
    return [*given, "--max-batch", "2", "--sample", "0.5"]


def test_memory_that_grows_in_so_short_a_loop_is_told_and_not_judged(
    sanitizer, tmp_path, monkeypatch, capsys
):
    seen = sanitizer(CLEAN)
    assert memcheck.main(["--logs", str(tmp_path), "--replays", "10"]) == 0
    given = loop_of(seen)
    grows(monkeypatch)
    assert soak.main(given) == 0
    said = capsys.readouterr().out
    assert "more than after the first leg: {'tensors': " in said
    assert "'tensors': 0" not in said
    assert soak.main([*given, "--growth", "judge"]) == 1


def test_a_result_that_differs_ends_the_loop_under_memcheck_too(
    sanitizer, tmp_path, monkeypatch, capsys
):
    seen = sanitizer(CLEAN)
    assert memcheck.main(["--logs", str(tmp_path), "--replays", "10"]) == 0
    grows(monkeypatch, wrong=True)
    assert soak.main(loop_of(seen)) == 2
    assert "by design" in capsys.readouterr().err


def test_without_compute_sanitizer_it_says_where_it_looked(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(memcheck, "find_sanitizer", lambda: None)
    assert memcheck.main(["--logs", str(tmp_path / "logs")]) == 2
    said = capsys.readouterr().err
    assert "not found" in said
    assert "/usr/local/cuda/bin" in said
    assert "pip install" in said


def test_it_is_found_in_a_toolkit_and_in_wheels(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    monkeypatch.setattr(memcheck.sysconfig, "get_paths", lambda: {"purelib": str(tmp_path)})
    wheel = tmp_path / "nvidia" / "cuda_sanitizer_api" / "bin" / "compute-sanitizer"
    toolkit = tmp_path / "cuda" / "bin" / "compute-sanitizer"
    for path in (wheel, toolkit):  # the toolkit's comes first
        path.parent.mkdir(parents=True)
        path.touch()
        assert memcheck.find_sanitizer() != str(path), "it cannot be executed"
        path.chmod(0o755)
        assert memcheck.find_sanitizer() == str(path)
