"""Importing graphcap is cheap, and its public names are there."""

from __future__ import annotations

import subprocess
import sys

import pytest

import graphcap

# The processor's time, not the clock's: other processes run beside it.
_TIMED = """
import time
started = time.process_time()
import graphcap
print(time.process_time() - started)
"""


def _python(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_import_takes_less_than_50_ms():
    assert min(float(_python(_TIMED)) for _ in range(5)) < 0.05


def test_import_loads_no_heavy_module():
    code = (
        "import sys, graphcap; print([m for m in ('torch', 'triton', 'numpy') if m in sys.modules])"
    )
    assert _python(code) == "[]"


def test_public_names_resolve():
    for name in graphcap.__all__:
        assert getattr(graphcap, name) is not None
    assert set(graphcap.__all__) <= set(dir(graphcap))


def test_unknown_name_is_named():
    with pytest.raises(AttributeError, match="NoSuchName"):
        _ = graphcap.NoSuchName


def test_every_error_is_a_graphcap_error():
    from graphcap import errors

    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    assert len(kinds) > 10
    assert all(issubclass(kind, errors.GraphcapError) for kind in kinds)
