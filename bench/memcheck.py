"""Replays of a 2-layer decode step under compute-sanitizer's memcheck.

    python bench/memcheck.py --logs bench/results/memcheck

Twice: by CUDA graphs as they are in use, where one access outside what torch took from the driver is seen;
and by the tape with every tensor in an allocation of its own (PYTORCH_NO_CUDA_MEMORY_CACHING=1, under which
torch captures no graphs), where each access outside a weight, slot, cache or pool is. Exit code 1 at any
invalid access, 2 where that could not be told. Logs are kept.

Left out are reports of failed API calls (--report-api-errors no): cuda-bindings asks the driver for
functions that an older one does not have, each of which would be reported and none of which is an access.
The first line of a log says which shape, how many layers and replays, and which commit it is of.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from graphcap import __version__

SOAK = Path(__file__).with_name("soak.py")
_SUMMARY = re.compile(r"ERROR SUMMARY: (\d+) errors?")


@dataclass(frozen=True)
class Way:
    """One way to run the loop: the recorder, and whether torch's allocator is left out."""

    name: str
    recorder: str
    uncached: bool


WAYS = (Way("graphs", "cuda", False), Way("tape-uncached", "tape", True))


def find_sanitizer() -> str | None:
    """compute-sanitizer on PATH, of an installed toolkit, or of NVIDIA's wheels."""
    found = shutil.which("compute-sanitizer")
    if found:
        return found
    homes = [Path(os.environ.get("CUDA_HOME", "/usr/local/cuda")), Path("/usr/local/cuda")]
    places = [home / part for home in homes for part in ("bin", "compute-sanitizer")]
    wheels = Path(sysconfig.get_paths()["purelib"]) / "nvidia"
    places += sorted({path.parent for path in wheels.rglob("compute-sanitizer") if path.is_file()})
    for place in places:
        path = place / "compute-sanitizer"
        if path.is_file() and os.access(path, os.X_OK):
            return str(path)
    return None


def errors_in(log: str) -> int | None:
    """How many errors a log ends with; None: it has no end."""
    counts = [int(count) for count in _SUMMARY.findall(log)]
    return sum(counts) if counts else None


def kinds_in(log: str) -> dict[str, int]:
    """The first line of each report -> how often, such as ``Invalid __global__ read of size 4 bytes``."""
    kinds: dict[str, int] = {}
    for line in re.findall(r"^=+ ((?:Invalid|Misaligned|Program hit|Fatal|Error:).*)$", log, re.M):
        kinds[line.strip()] = kinds.get(line.strip(), 0) + 1
    return kinds


def check(sanitizer: str, way: Way, logs: Path, loop: Sequence[str], of: str) -> int:
    """Run the loop one way. Returns the exit code that it stands for.

    Args:
        of: what was run, for people: the first line of the log.
    """
    log, output = logs / f"{way.name}.log", logs / f"{way.name}.out"
    log.unlink(missing_ok=True)
    command = [
        *(sanitizer, "--tool", "memcheck", "--report-api-errors", "no"),
        *("--log-file", str(log), sys.executable, str(SOAK), "--recorder", way.recorder, *loop),
    ]
    environment = dict(os.environ)
    environment.pop("PYTORCH_NO_CUDA_MEMORY_CACHING", None)
    if way.uncached:
        environment["PYTORCH_NO_CUDA_MEMORY_CACHING"] = "1"
    print(f"{way.name}: {' '.join(command)}", flush=True)
    with output.open("w") as stream:
        ended = subprocess.run(
            command, stdout=stream, stderr=subprocess.STDOUT, env=environment, check=False
        ).returncode
    text = log.read_text(errors="replace") if log.exists() else ""
    if text:
        log.write_text(f"{of}, {way.name}\n{text}")
    errors = errors_in(text)
    if errors is None:
        print(f"{way.name}: no summary in {log}, exit code {ended}; see {output}")
        return 2
    if errors:
        print(f"{way.name}: {errors} errors, see {log}: {kinds_in(text)}")
        return 1
    if ended:
        print(f"{way.name}: no invalid access, but the loop ended with {ended}; see {output}")
        return 2
    print(f"{way.name}: no invalid access; log in {log}")
    return 0


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--logs", type=Path, default=Path("memcheck"), metavar="DIR")
    parser.add_argument("--replays", type=int, default=200)
    parser.add_argument("--shape", default="tiny")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--only", choices=[way.name for way in WAYS])
    parser.add_argument("--commit", default="unknown", help="of the sources, noted in the logs")
    options = parser.parse_args(arguments)
    sanitizer = find_sanitizer()
    if sanitizer is None:
        print(
            "compute-sanitizer was not found: expected it on PATH, in CUDA_HOME/bin, /usr/local/cuda/bin, "
            "or in NVIDIA's wheels; install the CUDA toolkit, or: pip install nvidia-cuda-sanitizer-api",
            file=sys.stderr,
        )
        return 2
    options.logs.mkdir(parents=True, exist_ok=True)
    # Results are held against eager ones; growth is the soak's question, at a length that answers it.
    loop = ["--replays", str(options.replays), "--legs", "2", "--sample", "0.02"]
    loop += ["--growth", "tell"]
    loop += ["--shape", options.shape, "--layers", str(options.layers)]
    of = (
        f"shape {options.shape}, {options.layers} layers, {options.replays} replays, graphcap "
        f"{__version__}, commit {options.commit}"
    )
    codes = [
        check(sanitizer, way, options.logs, loop, of)
        for way in WAYS
        if options.only in (None, way.name)
    ]
    return 1 if 1 in codes else max(codes)


if __name__ == "__main__":
    sys.exit(main())
