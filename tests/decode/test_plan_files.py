"""Files of tuned plans: what is written reads back the same, whole or not at all, and anything else is
refused by name."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from plan_samples import H200, SEED, bucket, file_of

from graphcap.decode import plan_key
from graphcap.decode.kernel_code import code_of
from graphcap.decode.plan_files import FORMAT, PlanFile, cache_folder, read_plans
from graphcap.decode.plan_key import (
    DIMENSIONS,
    SOURCES,
    PlanKey,
    differences,
    digest_of,
    kernels_digest,
    versions_here,
)
from graphcap.errors import InputError


def test_what_is_written_reads_back_the_same(tmp_path: Path) -> None:
    file = file_of(bucket(8), bucket(1, 4096), bucket(1))
    path = tmp_path / "new" / "folder" / file.key.file_name
    file.write(path)
    assert read_plans(path) == file
    assert [(each.rows, each.context) for each in file.buckets] == [(1, 256), (1, 4096), (8, 256)]
    assert json.loads(path.read_text())["format"] == FORMAT


def test_a_load_that_is_tuned_again_takes_the_place_of_the_old() -> None:
    again = replace(bucket(8), ms=1.25)
    file = file_of(bucket(1), bucket(8)).with_buckets([again, bucket(2)])
    assert file.buckets == (bucket(1), bucket(2), again)


def test_writing_that_fails_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "plans.json"
    file_of(bucket(1)).write(path)
    written = Path.write_text

    def half(self: Path, text: str, *how: object, **more: object) -> int:
        written(self, text[:40])
        raise OSError("no space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(Path, "write_text", half)
        with pytest.raises(OSError, match="no space left"):
            file_of(bucket(2)).write(path)
    assert read_plans(path) == file_of(bucket(1))
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"format": "graphcap plans 9"}, "expected format 'graphcap plans 1', found"),
        ({"buckets": 3}, "expected what graphcap tune writes: TypeError"),
        ({"sizes": {}}, "KeyError: 'hidden_size'"),
        ({"buckets": [{"rows": 1, "plan": {}}]}, "missing 2 required positional arguments"),
        ({"buckets": [{"rows": 1, "context": 1, "ms": 1, "plan": {"layers": "x"}}]}, "found 'x'"),
        ({"buckets": [{"rows": 0, "context": 1, "ms": 1, "plan": {}}]}, "a bucket of 0 rows"),
        ({"buckets": [{"rows": "8", "context": 1, "ms": 1, "plan": {}}]}, "a bucket of '8' rows"),
        ({"buckets": [{"rows": True, "context": 1, "ms": 1, "plan": {}}]}, "of True rows"),
        ({"buckets": [{"rows": 1, "context": 1, "ms": "1", "plan": {}}]}, "takes '1' ms"),
        ({"buckets": [{"rows": 1, "context": 1, "ms": 1, "plan": {"block": 7}}]}, "found 7"),
        ({"buckets": [{"rows": 1, "context": 1, "ms": 1, "plan": {}, "new": 1}]}, "'new'"),
        ({"machine": 5}, "TypeError"),
        ({"sizes": dict.fromkeys(DIMENSIONS, float("inf"))}, "OverflowError"),
        ({"buckets": [{"rows": 1, "context": 1, "ms": 1, "plan": []}]}, "a mapping, found list"),
        ({"buckets": [{"rows": 1, "context": 10**400, "ms": 1, "plan": {}}]}, "at context 1000"),
        ({"buckets": [{"rows": 1, "context": 1, "ms": 10**400, "plan": {}}]}, "takes 1000"),
        ({"buckets": [{"rows": 1, "context": 1, "ms": None, "plan": {}}]}, "takes None ms"),
    ],
)
def test_what_is_no_file_of_plans_is_refused(changes: dict[str, object], told: str) -> None:
    with pytest.raises(InputError) as caught:
        PlanFile.from_json({**file_of(bucket(1)).to_json(), **changes})
    assert told in str(caught.value)


@pytest.mark.parametrize("text", ["", "[]", "null", "{", '"plans"', "\x00", "[" * 100_000])
def test_any_text_is_read_or_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "file").write_text(text)
    with pytest.raises(InputError, match="file of plans: "):
        read_plans(tmp_path / "file")
    (tmp_path / "file").write_bytes(b"\xff\xfe{}")
    with pytest.raises(InputError, match="UnicodeDecodeError"):
        read_plans(tmp_path / "file")


def test_every_size_that_a_plan_depends_on_makes_another_file() -> None:
    names = {PlanKey.of(SEED, torch.bfloat16, H200).file_name}
    names.add(PlanKey.of(SEED, torch.float16, H200).file_name)
    names.add(PlanKey.of(SEED, torch.bfloat16, "NVIDIA H100").file_name)
    for name in DIMENSIONS:
        other = replace(SEED, **{name: 2 * getattr(SEED, name)})
        names.add(PlanKey.of(other, torch.bfloat16, H200).file_name)
    assert len(names) == 3 + len(DIMENSIONS)
    assert all(name.startswith("nvidia-h") and name.endswith(".json") for name in names)
    # What no kernel of a plan sees makes none: a model's plans serve it cut to fewer layers.
    same = replace(SEED, num_layers=3, vocab_size=7, name="other")
    assert PlanKey.of(same, torch.bfloat16, H200) == PlanKey.of(SEED, torch.bfloat16, H200)


def test_any_change_to_a_kernel_makes_another_digest() -> None:
    package = Path(plan_key.__file__).parents[1]
    seen = {kernels_digest()}
    for changed in SOURCES:
        read = lambda name, c=changed: (package / name).read_bytes() + b"x;" * (name == c)  # noqa: E731
        seen.add(digest_of(read))
    assert len(seen) == 1 + len(SOURCES)


def test_what_only_people_read_makes_no_other_digest() -> None:
    package = Path(plan_key.__file__).parents[1]

    def read(name: str) -> bytes:
        comment = b"\n\n# x; 'y\n" if name.endswith(".py") else b'\n\n// x; "y\n/* z\n */\n'
        return (package / name).read_bytes() + comment

    assert digest_of(read) == kernels_digest()


PYTHON = b'''"""About it."""  # and more

import os

@decorator  # why
def f(x: int = 3) -> str:  # noqa
    """Two
    lines."""
    # only people
    text = "# no comment" + f"{x!r} # {'neither'}"
    """A string that nobody keeps."""
    return (
        "kept" # at the end
        "too"
    )

class C:
    "Short."
    value = """kept # all
    of it"""
'''
PYTHON_CODE = b"""
import os
@decorator
def f(x: int = 3) -> str:
    text = "# no comment" + f"{x!r} # {'neither'}"
    return (
        "kept"
        "too"
    )
class C:
    value = \"\"\"kept # all
    of it\"\"\"
""".strip()
CUDA = b"""// what it is
__global__ void f() {  // one
  asm("a // no comment" : /* why */ "=r"(x));
  /* several
     lines */
}
"""
CUDA_CODE = b"""
__global__ void f() {
  asm("a // no comment" :   "=r"(x));
}
""".strip()


@pytest.mark.parametrize(
    ("name", "source", "code"), [("a.py", PYTHON, PYTHON_CODE), ("a.cu", CUDA, CUDA_CODE)]
)
def test_code_is_what_is_left_of_a_source(name: str, source: bytes, code: bytes) -> None:
    assert code_of(name, source) == code


def test_other_versions_and_kernels_are_named() -> None:
    here = versions_here()
    assert differences(here, kernels_digest()) == []
    assert differences({**here, "torch": "1.0"}, "00") == [
        f"torch 1.0, here {torch.__version__}",
        f"kernels 00, here {kernels_digest()}",
    ]
    assert differences({}, kernels_digest())[0].startswith("triton None, here ")


def test_the_folder_is_that_of_the_variable_or_the_users_cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("GRAPHCAP_TUNE_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_folder() == tmp_path / ".cache" / "graphcap" / "tune"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")  # to be ignored, says the specification
    assert cache_folder() == tmp_path / ".cache" / "graphcap" / "tune"
    monkeypatch.setenv("XDG_CACHE_HOME", "/xdg")
    assert cache_folder() == Path("/xdg/graphcap/tune")
    monkeypatch.setenv("GRAPHCAP_TUNE_CACHE", "~/plans")
    assert cache_folder() == tmp_path / "plans"
    assert cache_folder(Path("/given")) == Path("/given")
    monkeypatch.setenv("GRAPHCAP_TUNE_CACHE", "~nobody-of-this-name/plans")
    assert cache_folder() == Path("~nobody-of-this-name/plans")
