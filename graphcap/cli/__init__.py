"""The ``graphcap`` command line. Errors are one line on stderr and exit code 2."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence

from graphcap import __version__
from graphcap.errors import GraphcapError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit code: 0 done, 1 a check failed (tokens differ, something
    asked for is missing), 2 bad input or a machine that cannot do it, 130 interrupted."""
    try:
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, io.TextIOWrapper):
                stream.reconfigure(errors="replace")  # a terminal that has no µ still gets the rest
        options = _parser().parse_args(arguments)
        code = int(options.run(options))
        if sys.stdout is not None:
            sys.stdout.flush()
        return code
    except GraphcapError as error:
        return _fail(str(error))
    except KeyboardInterrupt:
        _fail("interrupted")
        return 130
    except BrokenPipeError:  # the reader of our output went away, which is its right
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        return 0
    except (MemoryError, OSError) as error:
        return _fail(f"{type(error).__name__}: {error}")
    except RuntimeError as error:
        if "allocate" not in str(error) and "out of memory" not in str(error):
            raise
        return _fail(f"out of memory: {str(error).splitlines()[0]}")


def _fail(text: str) -> int:
    if sys.stderr is not None:
        print(f"graphcap: error: {text}", file=sys.stderr)
    return 2


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        self.exit(2, f"{self.prog}: error: {message}; see {self.prog} --help\n")


def _parser() -> argparse.ArgumentParser:
    from graphcap.cli import census, decode, doctor, explain, lint, plan, report, top, tune

    parser = _Parser(
        prog="graphcap",
        description="One CUDA graph launch per decode step of a mixture-of-experts language model.",
    )
    parser.add_argument("--version", action="version", version=f"graphcap {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for module in (decode, census, doctor, lint, plan, tune, report, top, explain):
        module.add_to(commands)
    return parser
