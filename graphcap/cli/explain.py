"""``graphcap explain``: what a message means and what to do about it."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from graphcap.cli.options import print_json
from graphcap.explain import first_sentence, section, sections


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "explain",
        help="say what a message means and what to do",
        description="Messages end with a pointer such as (graphcap explain pool-frozen). Prints that "
        "section of docs/troubleshooting.md; without a name, all names.",
    )
    parser.add_argument("anchor", nargs="?", metavar="NAME", help="the name that a message gives")
    parser.add_argument("--json", action="store_true", help="print JSON instead")
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    if options.anchor is None:
        found = {anchor: first_sentence(text) for anchor, text in sections().items()}
        if options.json:
            print_json(found)
        else:
            width = max(map(len, found))
            for anchor, sentence in found.items():
                print(f"{anchor:{width}}  {sentence}")
        return 0
    text = section(options.anchor)
    if options.json:
        print_json({"anchor": options.anchor, "text": text})
    elif sys.stdout.isatty():
        from rich.console import Console
        from rich.markdown import Markdown

        Console().print(Markdown(text, hyperlinks=False))
    else:
        print(text)
    return 0
