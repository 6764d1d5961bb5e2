"""Does a study's pieces in worker processes, round after round, until none is missing."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mkor_bench.studies.kept import Kept
from mkor_bench.studies.piece import Piece
from mkor_bench.studies.study import Request, Study
from mkor_bench.workers import Workers

_POLL_SECONDS = 5.0

OnRound = Callable[[Sequence[Piece]], Callable[[Piece, int], None]]
"""Called with the missing pieces of a round; returns what is told about their progress."""


@dataclass(frozen=True)
class Job:
    """A piece for a worker.

    Attributes:
        piece: What to do.
        folder: The study's output folder.
        data: What --data named.
    """

    piece: Piece
    folder: Path
    data: str | None


def drive(
    study: Study,
    request: Request,
    folder: Path,
    workers: Workers,
    on_round: OnRound,
    on_wait: Callable[[Sequence[Piece]], None],
) -> None:
    """Does all pieces that a study wants and that are not done yet.

    Args:
        study: The study.
        request: What is asked of it.
        folder: The output folder.
        workers: Where pieces are done.
        on_round: Told what a round has to do; what it returns is told about progress.
        on_wait: Told the missing pieces where other processes are at all of them.
    """
    kept = Kept(folder)
    while missing := missing_pieces(study, request, kept):
        # What measures time comes when all else is done, one piece after the other.
        together = [piece for piece in missing if not piece.alone]
        turns = [together] if together else [[piece] for piece in missing]
        on_progress = on_round(together or missing)
        done = [_turn(turn, folder, request.data, workers, on_progress) for turn in turns]
        if not any(done):
            on_wait(missing)
            time.sleep(_POLL_SECONDS)


def _turn(
    pieces: Sequence[Piece],
    folder: Path,
    data: str | None,
    workers: Workers,
    on_progress: Callable[[Piece, int], None],
) -> bool:
    """Does the pieces that no other process is at; returns whether any result is there now."""
    jobs = [Job(piece, folder, data) for piece in pieces]
    return any(workers.map(do, jobs, lambda job, steps: on_progress(job.piece, steps)))


def missing_pieces(study: Study, request: Request, kept: Kept) -> list[Piece]:
    """Returns the pieces that a study wants by now and that are not done, each once."""
    wanted = {piece.key: piece for piece in study.pieces(request, kept)}
    return [piece for piece in wanted.values() if kept.get(piece) is None]


def do(job: Job, report: Callable[[int], None]) -> bool:
    """Does a piece and keeps its result, unless another process is at it or has done it.

    Args:
        job: The piece.
        report: Called with the number of steps made since the last call.

    Returns:
        Whether its result is there.
    """
    kept, piece = Kept(job.folder), job.piece
    reported = 0

    def count(steps: int) -> None:
        nonlocal reported
        reported += steps
        report(steps)

    with kept.claim(piece) as mine:
        if mine and kept.get(piece) is None:
            kept.put(piece, _timed(piece, job.data, count))
    report(piece.steps - reported)
    return kept.get(piece) is not None


def _timed(piece: Piece, data: str | None, report: Callable[[int], None]) -> dict[str, Any]:
    module, _, name = piece.function.partition(":")
    function = getattr(importlib.import_module(module), name)
    wall, processor = time.perf_counter(), time.process_time()
    result: dict[str, Any] = function(piece.spec, data, report)
    return {
        **result,
        "wall_seconds": round(time.perf_counter() - wall, 3),
        "processor_seconds": round(time.process_time() - processor, 3),
    }
