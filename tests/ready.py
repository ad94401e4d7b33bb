"""Processes that have imported the package when they start: copies of one that has, since to start
Python anew takes longer than most of what they are asked."""

import contextlib
import ctypes
import functools
import gc
import io
import multiprocessing
import os
import sys
import traceback
import types
import warnings
from collections.abc import Callable, Sequence
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import pytest

from offcore.tools.cli import main as cli

with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
    cli.app(["bench", "--help"])  # typer imports much of itself only now
# No copy looks through all this for garbage when it ends, which takes most of a short one's time.
gc.collect()
gc.freeze()


@functools.cache
def _context() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["matplotlib.pyplot", "ready"])
    with pytest.MonkeyPatch.context() as patch:  # it looks only there before Python 3.12
        patch.setenv("PYTHONPATH", str(Path(__file__).parent), prepend=os.pathsep)
        forkserver.ensure_running()
    return context


def run(timeout_s: float, what: Callable[..., None], *told: object) -> int | None:
    """How it ended; None: it had not by then, and was killed."""
    process: BaseProcess = _context().Process(target=what, args=told)
    process.start()
    try:
        process.join(timeout_s)
        return process.exitcode
    finally:
        process.kill()


def _become(env: dict[str, str], streams: Sequence[Path]) -> None:
    """Takes the environment, and files as the standard streams."""
    os.environ.clear()
    os.environ.update(env)
    adds = os.O_WRONLY | os.O_APPEND  # both may be one file
    for number, flags in enumerate((os.O_RDONLY, adds, adds)):
        os.dup2(os.open(streams[number], flags), number)
    sys.stdin = os.fdopen(0, encoding="utf-8")  # multiprocessing has put another one there


def command(
    words: Sequence[str], env: dict[str, str], folder: str, streams: Sequence[Path]
) -> None:
    """Runs the command line."""
    _become(env, streams)
    os.chdir(folder)
    sys.argv = ["offcore", *words]
    cli.main()


def script(code: str, words: Sequence[str], env: dict[str, str], streams: Sequence[Path]) -> None:
    """Runs the code as `python -c` does, to the end of the interpreter and of the process."""
    _become(env, streams)
    sys.argv = ["-c", *words]
    warnings.filterwarnings("ignore", category=DeprecationWarning, module="__main__")
    main = sys.modules["__main__"] = types.ModuleType("__main__")
    status = 0
    try:
        exec(compile(code, "<string>", "exec"), main.__dict__)
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        status = 1
    ctypes.pythonapi.Py_Exit(status)
