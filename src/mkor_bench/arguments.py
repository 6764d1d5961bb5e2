"""How the commands' options are read: each mistake is told in one line."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import typer

from mkor_bench.errors import UserError
from mkor_bench.interrupt import INTERRUPTED
from mkor_bench.options import check_lr, parse_whole


@contextmanager
def mistakes_in_one_line() -> Iterator[None]:
    """Ends the command with one line for a mistake, and with one word for Ctrl-C."""
    try:
        yield
    except UserError as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        typer.echo("Interrupted.", err=True)
        raise typer.Exit(INTERRUPTED) from None


def whole(option: str) -> Callable[[Any], int]:
    """Makes the reader of an option's number, for errors that name what was typed."""

    def read(value: Any) -> int:
        with mistakes_in_one_line():
            return parse_whole(str(value), option)

    return read


def learning_rate(value: Any) -> float:
    """Reads ``--lr``."""
    with mistakes_in_one_line():
        return check_lr(value, "--lr")


def names(what: str) -> Any:
    """Makes the option of a study that takes names."""
    return typer.Option(
        metavar="NAMES", help=f"{what}, separated by commas.", show_default="the study's own"
    )


def count(option: str, told: str, default: str) -> Any:
    """Makes an option that takes a whole number and has a default in words."""
    return typer.Option(metavar="N", parser=whole(option), help=told, show_default=default)


DATA = typer.Option(
    metavar="FOLDER",
    envvar="MKOR_DATA",
    help="Folder with data sets, or hub, for tasks that read any.",
)
THREADS = typer.Option(
    metavar="N", parser=whole("--threads"), help="torch threads of a run, at most the cores."
)
LR = typer.Option(
    metavar="NUMBER",
    parser=learning_rate,
    help="Peak learning rate.",
    show_default="the task's own, or 0.01, auto 0.003",
)
SEED = typer.Option(
    metavar="N",
    parser=whole("--seed"),
    help="Seed of the model and the data.",
    show_default="0",
)
EVERY = typer.Option(
    metavar="N",
    parser=whole("--checkpoint-every"),
    help="Steps between checkpoints; 0: only at the end.",
)
RESUME = typer.Option("--resume", help="Continue the checkpoint in the output folder.")
GRID = typer.Option(
    metavar="LIST",
    help="Learning rates that tuning begins with, 1 and 3 times powers of ten.",
    show_default="0.001 to 0.1",
)
AUTOCAST = typer.Option("--autocast", help="Train under bfloat16 autocast.")
