"""Where a task comes from: a name of the registry, or a function in the user's file.

A worker process gets the source, which is two strings, and loads the task itself:
functions of a user's file could not be sent to it.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any

from mkor_bench.data.store import BLANK, HUB, Store
from mkor_bench.errors import UserError, unknown_name, where
from mkor_bench.tasks import GROUPS, TASKS
from mkor_bench.tasks.autocast import autocast
from mkor_bench.tasks.guard import guarded
from mkor_bench.tasks.task import Task

A_TASK_IS = (
    "a mkor_bench.tasks.task.Task, which has name, description, build, batches, loss, "
    "evaluate, metric and higher_is_better"
)


@dataclass(frozen=True)
class TaskSource:
    """Where to load a task from.

    Attributes:
        text: A built-in task's name, or ``path/to/file.py:function``.
        data: The folder with data sets, "hub", or :data:`~mkor_bench.data.store.BLANK` for
            data made up, for tasks that read any.
        quick: Whether a built-in task is made at its small size.
        autocast: Whether it is trained under bfloat16 autocast.
    """

    text: str
    data: str | None = None
    quick: bool = False
    autocast: bool = False

    @property
    def is_users(self) -> bool:
        """Whether the task is in a file of the user's."""
        return ":" in self.text

    @property
    def store(self) -> Store:
        """Where built-in tasks find their data."""
        named: dict[str | None, Store] = {None: None, HUB: HUB, BLANK: BLANK}
        return named[self.data] if self.data in named else Path(str(self.data))

    @property
    def path(self) -> Path:
        """The user's file."""
        return Path(self.text.rpartition(":")[0])

    def load(self) -> Task:
        """Makes the task, once in each process.

        Returns:
            The task.

        Raises:
            UserError: It is unknown, or does not load, or is not a task.
        """
        return load_once(self)


def resolve_tasks(text: str, data: str | None) -> list[TaskSource]:
    """Turns the command's TASK into tasks, each of which loads.

    Args:
        text: A task, a group of tasks, or ``path/to/file.py:function``.
        data: The folder with data sets, or None.

    Returns:
        The sources of one or more tasks.

    Raises:
        UserError: Nothing of that name, or its file does not give a task.
    """
    check_data(data)
    if ":" not in text and text not in TASKS and text not in GROUPS:
        if text.endswith(".py"):
            raise UserError(f"task {text!r} names no function: write {text}:FUNCTION.")
        raise unknown_name("task", text, [*TASKS, *GROUPS])
    sources = [TaskSource(name, data) for name in GROUPS.get(text, (text,))]
    for source in sources:
        source.load()
    return sources


def check_data(data: str | None) -> None:
    """Checks what --data named.

    Args:
        data: A folder, "hub" or None.

    Raises:
        UserError: The folder does not exist.
    """
    if data is not None and data != HUB and not Path(data).is_dir():
        wrong = "is no folder" if Path(data).exists() else "does not exist"
        raise UserError(
            f"data folder {data!r} {wrong}: give an existing folder with --data "
            "or in the environment variable MKOR_DATA, or fetch what is needed with --data hub."
        )


@cache
def load_once(source: TaskSource) -> Task:
    """Makes a source's task; a process makes it once, and keeps it."""
    if source.autocast:
        return autocast(load_once(replace(source, autocast=False)))
    if not source.is_users:
        entry = TASKS[source.text]
        module = importlib.import_module(f"mkor_bench.tasks.{entry.module}")
        task: Task = module.task(source.store, quick=source.quick, **entry.options)
        # Data that are too few for a batch are told here, before anything is written.
        next(task.batches(0))
        return task
    data = source.store if isinstance(source.store, Path) else None
    name = source.text.rpartition(":")[2]
    function = _find_function(_import_file(source.path), str(source.path), name)
    made = _call(source, function, data)
    if not isinstance(made, Task):
        raise UserError(
            f"{source.text} returned {_shorten(made)}, which is not a task: return {A_TASK_IS}."
        )
    return guarded(made, source.path)


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise UserError(f"task file {str(path)!r} does not exist: write path/to/file.py:function.")
    # As for a script, modules beside the file can be imported.
    folder = str(path.resolve().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    name = f"mkor_task_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UserError(f"task file {str(path)!r} is not a Python file: its name must end in .py.")
    module = importlib.util.module_from_spec(spec)
    # Dataclasses look their module up by its name.
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        raise UserError(f"task file {str(path)!r} does not load: {where(error, path)}.") from error
    return module


def _find_function(module: ModuleType, path: str, name: str) -> Callable[..., Any]:
    function: Any = getattr(module, name, None)
    if callable(function):
        found: Callable[..., Any] = function
        return found
    known = [
        key
        for key, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__
    ]
    raise unknown_name(f"function of {path}", name, known or ["(it defines no functions)"])


def _call(source: TaskSource, function: Callable[..., Any], data: Path | None) -> Any:
    # A task that reads no files may leave the argument out.
    arguments = (data,) if inspect.signature(function).parameters else ()
    try:
        return function(*arguments)
    except (Exception, SystemExit) as error:
        raise UserError(f"{source.text} failed: {where(error, source.path)}.") from error


def _shorten(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
