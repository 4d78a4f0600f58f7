"""The ``graphcap`` command line. Errors are one line on stderr and exit code 2."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from graphcap import __version__
from graphcap.errors import GraphcapError


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit code: 0 done, 1 the check failed, 2 bad input or machine."""
    parser = _parser()
    options = parser.parse_args(arguments)
    try:
        return int(options.run(options))
    except GraphcapError as error:
        print(f"graphcap: error: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("graphcap: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of our output went away
        sys.stderr.close()
        return 1


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        self.exit(2, f"{self.prog}: error: {message}; see {self.prog} --help\n")


def _parser() -> argparse.ArgumentParser:
    from graphcap.cli import census, decode, doctor

    parser = _Parser(
        prog="graphcap",
        description="One CUDA graph launch per decode step of a mixture-of-experts language model.",
    )
    parser.add_argument("--version", action="version", version=f"graphcap {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for module in (decode, census, doctor):
        module.add_to(commands)
    return parser
