"""Runs a function in several gloo processes on this machine, as a study's piece does."""

from __future__ import annotations

import datetime
import multiprocessing
import tempfile
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

Function = Callable[[int, Mapping[str, Any]], dict[str, Any]]
_PATIENCE = datetime.timedelta(seconds=120)
_LONGEST = 1800.0
"""Seconds after which processes that have not answered are ended."""


def in_processes(function: Function, workers: int, spec: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Calls a function in each of several processes that see each other.

    Args:
        function: Of a module, called with the number of workers and the spec.
        workers: How many; one is this process itself, without a group.
        spec: What pickles.

    Returns:
        The results by rank.

    Raises:
        RuntimeError: A process failed; the message is its traceback.
        TimeoutError: They did not come to an end.
    """
    if workers == 1:
        return [function(1, spec)]
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory() as folder, context.Pool(workers) as pool:
        place = f"file://{Path(folder) / 'rendezvous'}"
        jobs = [(function, rank, workers, place, spec) for rank in range(workers)]
        # One job a process: each waits for the others in the rendezvous.
        answers = pool.starmap_async(_work, jobs, chunksize=1).get(_LONGEST)
    errors = [error for _, error in answers if error]
    if errors:
        raise RuntimeError(errors[0])
    return [result for result, _ in answers]


def _work(
    function: Function, rank: int, workers: int, place: str, spec: Mapping[str, Any]
) -> tuple[dict[str, Any], str]:
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo", init_method=place, rank=rank, world_size=workers, timeout=_PATIENCE
        )
        result = function(workers, spec)
        dist.barrier()
        dist.destroy_process_group()
    except Exception:
        return {}, f"worker {rank}: {traceback.format_exc()}"
    return result, ""
