"""Independent jobs side by side in worker processes, with progress as they go.

Each worker computes with a fixed number of torch threads: two runs with one thread
each finish sooner than one run with two, and do not slow each other down.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

import torch

Job = TypeVar("Job")
Result = TypeVar("Result")
Report = Callable[[int], None]
"""A job calls it with the number of steps that it made since the last call."""

MAX_WORKERS = 8
_POLL_SECONDS = 0.1


class InterruptedRunError(Exception):
    """The command ends, so the job does too."""


def default_workers(threads: int) -> int:
    """Returns how many workers of so many threads the machine has cores for."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS and Windows
        cores = os.cpu_count() or 1
    return max(1, min(MAX_WORKERS, cores // threads))


class Workers:
    """A pool of worker processes; a single worker is this process itself.

    Args:
        count: How many jobs run at a time.
        threads: torch threads of each.
    """

    def __init__(self, count: int, threads: int) -> None:
        self._executor: ProcessPoolExecutor | None = None
        if count == 1:
            torch.set_num_threads(threads)
            return
        context = multiprocessing.get_context("spawn")
        self._reports = context.Queue()
        self._stop = context.Event()
        self._executor = ProcessPoolExecutor(
            count, context, _initialise, (self._reports, self._stop, threads)
        )

    def __enter__(self) -> Workers:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._executor is not None:
            self._stop.set()
            self._executor.shutdown(cancel_futures=True)

    def map(
        self,
        function: Callable[[Job, Report], Result],
        jobs: Sequence[Job],
        on_progress: Callable[[Job, int], None],
    ) -> list[Result]:
        """Runs a function on every job.

        Args:
            function: A function of a module, called with a job and a report of progress.
            jobs: What to run it on; they are sent to the workers, as are the results.
            on_progress: Called in this process with a job and the steps that it made.

        Returns:
            The results in the order of the jobs.
        """
        if self._executor is None:
            return [function(job, partial(on_progress, job)) for job in jobs]
        futures = [
            self._executor.submit(_run_in_worker, function, number, job)
            for number, job in enumerate(jobs)
        ]
        running = set(range(len(jobs)))
        while running:
            for future in futures:
                if future.done():
                    future.result()  # a failure ends the whole command at once
            try:
                number, steps = self._reports.get(timeout=_POLL_SECONDS)
            except queue.Empty:
                continue
            if steps is None:
                running.remove(number)
            else:
                on_progress(jobs[number], steps)
        return [future.result() for future in futures]


_worker: dict[str, Any] = {}


def _initialise(reports: Any, stop: Any, threads: int) -> None:
    # Ctrl-C goes to every process of the terminal; the first one ends the others.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(threads)
    _worker.update(reports=reports, stop=stop)


def _run_in_worker(function: Callable[[Any, Report], Any], number: int, job: Any) -> Any:
    def report(steps: int) -> None:
        if _worker["stop"].is_set():
            raise InterruptedRunError
        _worker["reports"].put((number, steps))

    result = function(job, report)
    # The last report: nothing of this job can come after it.
    _worker["reports"].put((number, None))
    return result
