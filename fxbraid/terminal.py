"""What the commands say when they can't: one sentence, as it is. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import NoReturn

import typer

from fxbraid.schedule import ScheduleError


def refuse(error: object) -> NoReturn:
    """Print ``error`` to stderr and end with 2. Never wrapped and never read as markup: a path stays one that can be
    copied, whatever brackets it has and however narrow the terminal is."""
    typer.secho(str(error), fg=typer.colors.RED, err=True)
    raise typer.Exit(2)


def given(ctx: typer.Context) -> frozenset[str]:
    """The parameters that the command line holds, by the names of the function's arguments."""
    found = []
    for name in ctx.params:
        source = ctx.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            found.append(name)
    return frozenset(found)


def check_outputs(paths: Iterable[Path | None]) -> None:
    """Can files be written there? Asked before the work, not behind it. Raises ScheduleError."""
    for path in paths:
        if path is None:
            continue
        if path.is_dir():
            raise ScheduleError(f"{path} is a folder; give the name of a file")
        if not path.parent.is_dir():
            raise ScheduleError(f"{path} can't be written: there is no folder {path.parent}")


def write(path: Path, text: str) -> None:
    """``text`` into the file ``path``. Raises ScheduleError where that can't be done."""
    try:
        path.write_text(text, "utf-8")
    except OSError as error:
        raise ScheduleError(f"{path} can't be written: {error.strerror or error}") from None
