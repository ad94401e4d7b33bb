"""What a process that is ready for the command line has imported, and what it does when asked."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import typer

from offcore import cli

typer.main.get_command(cli.app)  # typer imports much of itself only now


def run(words: Sequence[str], env: dict[str, str], folder: str, streams: Sequence[Path]) -> None:
    """The command, with files as its standard streams."""
    os.environ.clear()
    os.environ.update(env)
    os.chdir(folder)
    for number, flags in enumerate((os.O_RDONLY, os.O_WRONLY, os.O_WRONLY)):
        os.dup2(os.open(streams[number], flags), number)
    sys.stdin = os.fdopen(0, encoding="utf-8")  # multiprocessing has put another one there
    sys.argv = ["offcore", *words]
    cli.main()
