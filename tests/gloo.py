"""Runs a function in several gloo processes on the CPU; workers that hang are ended."""

import datetime
import os
import sys
import time
import traceback

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def spawn(function, folder, *arguments, workers=2, timeout=180):
    """Call `function(rank, *arguments)` in `workers` processes; their results by rank.

    Args:
        function: At the top of a module, so that a new process can import it.
        folder: An empty folder for the rendezvous and the results.
        arguments: Anything that pickles.
        workers: Number of processes.
        timeout: Seconds until workers that have not returned are ended.
    """
    context = mp.get_context("spawn")
    processes = [
        context.Process(target=work, args=(rank, workers, str(folder), function, arguments))
        for rank in range(workers)
    ]
    try:
        for process in processes:
            process.start()
        end = time.monotonic() + timeout
        while any(process.is_alive() for process in processes) and time.monotonic() < end:
            if any(process.exitcode for process in processes):
                break  # the others may wait for it
            time.sleep(0.05)
        failed = any(process.exitcode for process in processes)
        hung = [rank for rank, process in enumerate(processes) if process.is_alive()]
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
                process.join()
    errors = [p.read_text() for p in sorted(folder.glob("error-*"))]
    if errors:
        raise AssertionError("\n".join(errors))
    codes = [process.exitcode for process in processes]
    assert not failed, f"exit codes {codes}"
    assert not hung, f"workers {hung} hung for {timeout} s and were ended"
    return [torch.load(folder / f"result-{rank}.pt") for rank in range(workers)]


def work(rank, workers, folder, function, arguments):
    """One process: rendezvous, call, leave a result or an error."""
    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            init_method=f"file://{folder}/rendezvous",
            rank=rank,
            world_size=workers,
            timeout=datetime.timedelta(seconds=60),
        )
        torch.save(function(rank, *arguments), os.path.join(folder, f"result-{rank}.pt"))
        dist.barrier()
    except BaseException:
        with open(os.path.join(folder, f"error-{rank}"), "w", encoding="utf-8") as file:
            file.write(f"worker {rank}: {traceback.format_exc()}")
        os._exit(1)
    # Neither by the group's end, for which a model may keep it waiting, nor by the interpreter's,
    # where its threads abort now and then (pytorch/pytorch#75097, #179291).
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
