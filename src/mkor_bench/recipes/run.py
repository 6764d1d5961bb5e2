"""The training of a recipe, on one worker or, under ``torchrun``, on as many as the recipe says."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_map

from mkor_bench.errors import UserError
from mkor_bench.files import write_atomically
from mkor_bench.launch import launched
from mkor_bench.recipes.build import Rates, build_optimizer
from mkor_bench.recipes.check import batches_a_step
from mkor_bench.recipes.checkpoint import CHECKPOINT_NAME, read_checkpoint, unfit
from mkor_bench.recipes.recipe import Entrant, Recipe
from mkor_bench.seeding import seed_generators
from mkor_bench.tasks.task import Task


@dataclass(frozen=True)
class Worker:
    """This process among the others.

    Attributes:
        rank: Its number, from 0.
        count: How many there are.
        device: Where it computes.
    """

    rank: int
    count: int
    device: torch.device

    def mean(self, value: Tensor) -> Tensor:
        """Averages a tensor over all workers."""
        if self.count > 1:
            dist.all_reduce(value)
            value /= self.count
        return value


@dataclass
class Progress:
    """What a training has come to.

    Attributes:
        losses: The loss of each step, the mean over all workers.
        seconds: Wall time of the steps so far.
        metric: The test metric at the end.
    """

    losses: list[float] = field(default_factory=list)
    seconds: float = 0.0
    metric: float | None = None


@contextmanager
def joined(recipe: Recipe) -> Iterator[Worker]:
    """Joins the other workers for as long as the training takes.

    The model must be gone when it ends: a group whose last reference is DistributedDataParallel's
    may never end (pytorch/pytorch#75097). After an error, which keeps the model, the process ends
    without it (see `launch`).

    Args:
        recipe: The recipe.

    Yields:
        This worker.

    Raises:
        UserError: There are not as many workers as the recipe says.
    """
    count = int(os.environ["WORLD_SIZE"]) if launched() else 1
    if count != recipe.workers:
        raise UserError(
            f"recipe {str(recipe.path)!r} is for {recipe.workers} workers, and torchrun started "
            f"{count}: use the command that --check prints."
        )
    local = int(os.environ.get("LOCAL_RANK", "0"))
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", local) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)
    if not launched():
        yield Worker(0, 1, device)
        return
    dist.init_process_group("nccl" if gpu else "gloo")
    yield Worker(dist.get_rank(), count, device)
    dist.barrier()
    dist.destroy_process_group()


class Training:
    """A recipe's training by one of its optimizers.

    Args:
        recipe: The recipe.
        entrant: The optimizer.
        task: The recipe's task.
        worker: This worker.
    """

    def __init__(self, recipe: Recipe, entrant: Entrant, task: Task, worker: Worker) -> None:
        seed_generators(recipe.seed)
        self.recipe, self.entrant, self.task, self.worker = recipe, entrant, task, worker
        self.progress = Progress()
        self.model = task.build(recipe.seed).to(worker.device)
        self.seen: nn.Module = self.model
        if worker.count > 1:
            ids = [worker.device.index] if worker.device.type == "cuda" else None
            self.seen = DistributedDataParallel(self.model, device_ids=ids)
        self.optimizer: Any = build_optimizer(self.seen, entrant)
        self.rates = Rates(self.optimizer, entrant)
        # Each worker shuffles by a seed of its own.
        self.batches = task.batches(recipe.seed * worker.count + worker.rank)
        first = next(self.batches)
        self._ahead = [first]
        self.accumulated = batches_a_step(recipe, len(_first_tensor(first)))

    def step(self) -> None:
        """Makes a step with the batches of all workers together."""
        begin = time.perf_counter()
        self._seed()
        total = torch.zeros((), device=self.worker.device)
        for number in range(self.accumulated):
            last = number == self.accumulated - 1
            alone = nullcontext() if last or self.seen is self.model else self.seen.no_sync()
            with alone:
                loss = self._loss() / self.accumulated
                loss.backward()
            total += loss.detach()
        if self.entrant.hybrid is not None:
            self.optimizer.observe_loss(total)
        self.optimizer.step()
        self.optimizer.zero_grad()
        mean = self.worker.mean(total)
        self.rates.step(mean)
        self.progress.losses.append(float(mean))
        self.progress.seconds += time.perf_counter() - begin

    def evaluate(self) -> float:
        """Returns the test metric; every worker computes all of it."""
        self.model.eval()
        with torch.no_grad():
            metric = float(self.task.evaluate(_OnDevice(self.model, self.worker.device)))
        self.model.train()
        return metric

    def save(self, folder: Path) -> None:
        """Writes a checkpoint; all workers must call it."""
        state = {
            "recipe": self.recipe.path.name,
            "optimizer_name": self.entrant.name,
            "workers": self.worker.count,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "rates": self.rates.state_dict(),
            "losses": self.progress.losses,
            "seconds": self.progress.seconds,
        }
        if self.worker.rank == 0:
            write_atomically(folder / CHECKPOINT_NAME, lambda path: torch.save(state, path))

    def resume(self, folder: Path) -> None:
        """Continues a checkpoint.

        Args:
            folder: Where it is.

        Raises:
            UserError: There is none, it is damaged, or it is of another training.
        """
        path = folder / CHECKPOINT_NAME
        state = read_checkpoint(path)
        asked = (self.recipe.path.name, self.entrant.name, self.worker.count)
        found = tuple(state.get(key) for key in ("recipe", "optimizer_name", "workers"))
        if found != asked:
            raise UserError(
                f"{str(path)!r} is of recipe, optimizer and workers {found}, "
                f"not {asked}: choose another --output, or leave out --resume."
            )
        try:
            self._load(state)
        except (KeyError, TypeError, ValueError, RuntimeError, AttributeError) as error:
            raise unfit(path, "does not fit the recipe", error) from error
        for _ in range(len(self.progress.losses) * self.accumulated):
            self._next_batch()  # the position in the data is the number of batches taken

    def _load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.rates.load_state_dict(state["rates"])
        self.progress.losses = [float(loss) for loss in state["losses"]]
        self.progress.seconds = float(state["seconds"])

    def _seed(self) -> None:
        """Makes a step's dropout depend on the step alone, so that a resumed run has the same."""
        step, worker = len(self.progress.losses) + 1, self.worker
        seed_generators((self.recipe.seed + step * worker.count + worker.rank) % 2**32)

    def _loss(self) -> Tensor:
        device = self.worker.device
        batch = _moved(self._next_batch(), device)
        half = self.recipe.dtype == "bfloat16"
        with torch.autocast(device.type, torch.bfloat16, enabled=half):
            return self.task.loss(self.seen, batch)

    def _next_batch(self) -> Any:
        return self._ahead.pop() if self._ahead else next(self.batches)


def train(
    training: Training, steps: int, every: int, folder: Path, tell: Callable[[], None]
) -> None:
    """Trains to a step, with a checkpoint every so many, and evaluates at the recipe's end.

    Args:
        training: The training.
        steps: How many steps in all.
        every: Steps between checkpoints; 0 for one at the end only.
        folder: Where they are written.
        tell: Called after each step.
    """
    progress = training.progress
    while len(progress.losses) < steps:
        training.step()
        tell()
        done = len(progress.losses)
        if done == steps or (every and done % every == 0):
            training.save(folder)
    if steps == training.entrant.steps:
        progress.metric = training.evaluate()


class _OnDevice(nn.Module):
    """A model for callers whose tensors are on the CPU."""

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        super().__init__()
        self._model, self._device = model, device

    def forward(self, *inputs: Any, **named: Any) -> Any:
        outputs = self._model(*_moved(inputs, self._device), **_moved(named, self._device))
        return _moved(outputs, torch.device("cpu"))


def _moved(tree: Any, device: torch.device) -> Any:
    return tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, tree)


def _first_tensor(tree: Any) -> Tensor:
    found: list[Tensor] = []
    tree_map(lambda leaf: found.append(leaf) if isinstance(leaf, Tensor) else None, tree)
    return found[0]
