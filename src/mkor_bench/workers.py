"""Independent jobs side by side in worker processes, with progress as they go.

Each worker computes with a fixed number of torch threads: two runs with one thread
each finish sooner than one run with two, and do not slow each other down.
"""

from __future__ import annotations

import multiprocessing
import os
import queue
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import Any, TypeVar

import torch

from mkor_bench.errors import UserError

Job = TypeVar("Job")
Result = TypeVar("Result")
Report = Callable[[int], None]
"""A job calls it with the number of steps that it made since the last call."""

MAX_WORKERS = 8
_POLL_SECONDS = 0.1


def cores() -> int:
    """Returns how many cores this process may use."""
    try:
        return len(os.sched_getaffinity(0))
    except AttributeError:  # not on macOS and Windows
        return os.cpu_count() or 1


def default_workers(threads: int) -> int:
    """Returns how many workers of so many threads the machine has cores for."""
    return max(1, min(MAX_WORKERS, cores() // threads))


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
        self._executor = ProcessPoolExecutor(count, context, _initialise, (self._reports, threads))

    def __enter__(self) -> Workers:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._executor is None:
            return
        if kind is not None:
            # Their jobs may take long yet, and nobody waits for the results.
            for process in multiprocessing.active_children():
                process.terminate()
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

        Raises:
            UserError: A worker was ended from outside.
        """
        if self._executor is None:
            return [function(job, partial(on_progress, job)) for job in jobs]
        with _without_ctrl_c():
            futures = [
                self._executor.submit(_run_in_worker, function, number, job)
                for number, job in enumerate(jobs)
            ]
        try:
            self._follow(futures, jobs, on_progress)
            return [future.result() for future in futures]
        except BrokenProcessPool as error:
            raise UserError(
                "a worker process ended before its work did, as when memory runs out: "
                "free some, or make the task smaller."
            ) from error

    def _follow(
        self,
        futures: Sequence[Future[Any]],
        jobs: Sequence[Job],
        on_progress: Callable[[Job, int], None],
    ) -> None:
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


_worker: dict[str, Any] = {}


@contextmanager
def _without_ctrl_c() -> Iterator[None]:
    """Starts processes that Ctrl-C does not reach, even while they import torch.

    It goes to every process of the terminal, and the first one ends the others.
    """
    if not hasattr(signal, "pthread_sigmask"):  # on Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _initialise(reports: Any, threads: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # where it could not be masked
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(threads)
    _worker.update(reports=reports)


def _end_with_parent() -> None:
    """Ends this process when its parent ends, of whatever cause."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _run_in_worker(function: Callable[[Any, Report], Any], number: int, job: Any) -> Any:
    reports = _worker["reports"]
    result = function(job, lambda steps: reports.put((number, steps)))
    # The last report: nothing of this job can come after it.
    reports.put((number, None))
    return result
