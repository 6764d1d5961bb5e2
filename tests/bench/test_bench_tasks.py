"""Built-in tasks, and tasks in a user's file."""

import math
from importlib.util import find_spec
from itertools import islice

import pytest
import torch
from torch import nn

from mkor_bench.errors import UserError
from mkor_bench.models.bert import CHECKPOINTS
from mkor_bench.tasks import TASKS
from mkor_bench.tasks.batches import shuffled_batches
from mkor_bench.tasks.check import check_task
from mkor_bench.tasks.digits import load_digits
from mkor_bench.tasks.digits_classifier import shifted
from mkor_bench.tasks.fields import check_fields
from mkor_bench.tasks.source import TaskSource, resolve_tasks
from mkor_bench.tasks.task import Task
from mkor_bench.train import Settings, Training, train
from small_data import write_small_data, write_small_model


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = write_small_data(tmp_path_factory.mktemp("data"))
    if find_spec("transformers"):
        for checkpoint in CHECKPOINTS.values():
            write_small_model(folder / checkpoint.folder)
    return str(folder)


@pytest.fixture(scope="module")
def quick(data):
    """Makes a built-in task at its quick size, on little made-up data."""

    def make(name):
        if name.split("-")[0] in {"minilm", "bert"} or name.endswith("resnet50"):
            pytest.importorskip("transformers", reason="needs the package transformers")
        return TaskSource(name, data, quick=True).load()

    return make


@pytest.mark.parametrize("name", TASKS)
def test_a_built_in_task_keeps_the_contract(name, quick):
    task = quick(name)
    assert task.name == name
    check_fields(task)
    model = task.build(0)
    losses = [task.loss(model, batch) for batch in islice(task.batches(0), 2)]
    assert all(loss.ndim == 0 and loss.requires_grad for loss in losses)
    with torch.no_grad():
        assert isinstance(task.evaluate(model.eval()), float)


@pytest.mark.parametrize("name", ["digits-autoencoder", "cifar100-convnet", "minilm-stsb"])
def test_autocast_lowers_products_alone(name, quick, data):
    full, half = quick(name), TaskSource(name, data, quick=True, autocast=True).load()
    torch.manual_seed(0)
    model = full.build(0)
    layer = next(m for m in model.modules() if isinstance(m, (nn.Linear, nn.Conv2d)))
    seen = []
    layer.register_forward_hook(lambda module, inputs, output: seen.append(output.dtype))
    batch = next(full.batches(0))
    losses = [task.loss(model, batch) for task in (full, half)]
    losses[1].backward()
    assert {loss.dtype for loss in losses} == {layer.weight.grad.dtype} == {torch.float32}
    assert seen == [torch.float32, torch.bfloat16]
    assert losses[0] != losses[1]
    torch.testing.assert_close(*losses, rtol=0.03, atol=0.03)
    with torch.no_grad():
        half.evaluate(model.eval())
    assert seen[-1] == torch.bfloat16


@pytest.mark.parametrize("name", TASKS)
def test_training_a_built_in_task_lowers_its_loss(name, quick):
    task = quick(name)
    # The made-up models are narrow and not pretrained, and want larger rates than real ones.
    lr = max(task.default_lrs["adamw"], 1e-3)
    run = train(Training(task, Settings("adamw", lr, seed=0, steps=task.steps)))
    assert sum(run.losses[-5:]) < sum(run.losses[:5])
    assert math.isfinite(run.metric)


@pytest.mark.parametrize("name", TASKS)
def test_batches_follow_from_the_seed_alone(name, quick):
    task = quick(name)

    def first(seed):
        torch.rand(1)  # the global generator must not matter
        return [part for batch in islice(task.batches(seed), 3) for part in batch]

    assert all(map(torch.equal, first(1), first(1)))
    assert not all(map(torch.equal, first(1), first(2)))


@pytest.mark.parametrize("name", TASKS)
def test_the_metric_changes_nothing(name, quick):
    task = quick(name)
    model = task.build(0).eval()
    before = [value.clone() for value in model.state_dict().values()]
    with torch.no_grad():
        assert task.evaluate(model) == task.evaluate(model)
    assert all(map(torch.equal, before, model.state_dict().values()))


@pytest.mark.parametrize("name", TASKS)
def test_a_quick_task_is_short(name, quick):
    assert quick(name).steps < 100


def test_a_task_that_needs_data_says_so(mkor):
    result = mkor("train", "mnist-autoencoder")
    assert result.exit_code == 2
    assert "MNIST is needed: name the folder that holds it with --data" in result.stderr


def test_an_epoch_has_each_row_once_and_full_batches_only():
    rows = torch.arange(10)
    batches = list(islice(shuffled_batches((rows, 2 * rows), 3, seed=0), 6))
    for epoch in (batches[:3], batches[3:]):
        seen = torch.cat([batch[0] for batch in epoch])
        assert len(set(seen.tolist())) == 9
    assert all(torch.equal(2 * one, two) for one, two in batches)


def test_digits_are_split_once():
    digits = load_digits()
    assert (len(digits.train_images), len(digits.test_images)) == (1437, 360)
    assert digits.train_images.min() == 0 and digits.train_images.max() == 1
    assert set(digits.test_labels.tolist()) == set(range(10))


def test_shifts_move_an_image_by_at_most_a_pixel():
    image = torch.zeros(200, 8, 8)
    image[:, 4, 4] = 1
    moved = shifted(image.view(200, 64), torch.Generator().manual_seed(0)).view(200, 8, 8)
    places = {tuple(place) for place in moved.nonzero()[:, 1:].tolist()}
    assert places == {(row, column) for row in (3, 4, 5) for column in (3, 4, 5)}


def test_a_users_task_loads_and_passes_its_trial(tiny, tmp_path):
    (source,) = resolve_tasks(f"{tiny}:task", None)
    assert isinstance(source.load(), Task)
    check_task(source)
    (source,) = resolve_tasks(f"{tiny}:with_data", str(tmp_path))
    assert str(tmp_path) in source.load().description


FILES = {
    "no such file": (None, "make", "task file '{path}' does not exist"),
    "syntax": ("def make(:", "make", "does not load: SyntaxError: "),
    "import": ("import no_such_module", "make", "does not load: line 1: ModuleNotFoundError: "),
    "no such function": ("def make(): pass", "mkae", "unknown function of {path} 'mkae': did you"),
    "no function at all": ("", "make", "unknown function of {path} 'make': choose from (it def"),
    "not a task": (
        "def make(): return 3",
        "make",
        "{path}:make returned 3, which is not a task: return a mkor_bench.tasks.task.Task, "
        "which has name, description, build, batches, loss, evaluate, metric",
    ),
    "raises": ("\ndef make(): 1 / 0", "make", "{path}:make failed: line 2: ZeroDivisionError: div"),
}


@pytest.mark.parametrize("fault", FILES)
def test_a_fault_of_the_file_is_told(mkor, tmp_path, fault):
    content, function, message = FILES[fault]
    path = tmp_path / "my_task.py"
    if content is not None:
        path.write_text(content)
    result = mkor("compare", f"{path}:{function}")
    assert result.exit_code == 2
    assert message.format(path=path) in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_a_file_without_a_function_is_told(mkor):
    assert "task 'my.py' names no function: write my.py:FUNCTION." in (
        mkor("compare", "my.py").stderr
    )


TRIALS = {
    "build=lambda seed: 3": "build must return a torch.nn.Module; got 3",
    "build=lambda seed: torch.nn.Tanh()": "a model with parameters to train; got Tanh()",
    "build=3": "build must be a function; got 3",
    "batches=lambda seed: [1]": "batches must return an endless iterator, such as a generator; ",
    "batches=lambda seed: iter([])": "its batches ended before the first: make them endless.",
    "loss_function=lambda model, rows: 3.0": "loss must return a scalar tensor; got 3.0",
    "loss_function=lambda model, rows: model(rows)": "got a tensor of shape [16, 1]",
    "loss_function=lambda model, rows: rows.sum()": "loss must depend on the model's parameters",
    "loss_function=lambda model, rows: model(rows).sum() / 0": "loss must be finite on a new",
    "evaluate=lambda model: 'good'": "evaluate must return a number; got 'good'",
    "evaluate=lambda model: torch.ones(2)": "must return a number; got a tensor of shape [2]",
    "evaluate=lambda model: sys.exit('no')": "failed in its evaluate: line 3: SystemExit: no",
    "steps=0": "steps must be a whole number of at least 1; got 0",
    "steps=2.5": "steps must be a whole number of at least 1; got 2.5",
    "lrs=(-1,)": "lrs must be positive numbers, at least one, such as (0.01, 0.1); got (-1,)",
    "lrs=()": "lrs must be positive numbers, at least one, such as (0.01, 0.1); got ()",
    "lrs=0.1": "lrs must be positive numbers, at least one, such as (0.01, 0.1); got 0.1",
    "lrs=(0.1, 'fast')": "lrs must be positive numbers, at least one, such as (0.01, 0.1); got",
    "default_lrs={'sdg': 0.1}": "default_lrs must give positive numbers for optimizers, such as",
    "default_lrs={'sgd': 0}": "default_lrs must give positive numbers for optimizers, such as",
    "higher_is_better='yes'": "higher_is_better must be True or False; got 'yes'",
    "name='a/b'": "name must be of letters, digits, spaces and . + - _, since it names a folder; ",
    "name='..'": "name must be of letters, digits, spaces and . + - _, since it names a folder; ",
    "evaluate=lambda model: 1 / 0": "failed in its evaluate: line 3: ZeroDivisionError",
}


@pytest.mark.parametrize("command", ["compare", "train"])
@pytest.mark.parametrize("change", TRIALS)
def test_a_fault_of_the_task_is_told_before_work_begins(mkor, tmp_path, tiny, change, command):
    path = tmp_path / "my_task.py"
    path.write_text(
        "import sys, torch; sys.path.insert(0, r'{}')\nfrom tiny_task import make\n"
        "task = lambda: make({})".format(tiny.removesuffix("tiny_task.py"), change)
    )
    result = mkor(command, f"{path}:task")
    assert result.exit_code == 2
    assert len(result.stderr.splitlines()) == 1
    assert result.stderr.startswith("Error: task '")
    assert TRIALS[change] in result.stderr
    assert [p.name for p in tmp_path.iterdir() if p.suffix != ".py"] in ([], ["__pycache__"])


def test_batches_that_end_too_soon_are_told(mkor, tmp_path, tiny):
    path = tmp_path / "my_task.py"
    path.write_text(
        "import sys; sys.path.insert(0, r'{}')\nfrom tiny_task import batches, make\n"
        "from itertools import islice\n"
        "task = lambda: make(batches=lambda seed: islice(batches(seed), 5))".format(
            tiny.removesuffix("tiny_task.py")
        )
    )
    result = mkor("train", f"{path}:task", "--optimizer", "sgd")
    assert result.exit_code == 2
    assert "its batches ended after 5 of 20 steps: make them endless" in result.stderr


def test_a_metric_may_be_a_tensor_of_one_number(tmp_path, tiny):
    path = tmp_path / "my_task.py"
    path.write_text(
        "import sys, torch; sys.path.insert(0, r'{}')\nfrom tiny_task import make\n"
        "task = lambda: make(evaluate=lambda model: torch.tensor(3))".format(
            tiny.removesuffix("tiny_task.py")
        )
    )
    source = TaskSource(f"{path}:task")
    check_task(source)
    assert source.load().evaluate(source.load().build(0)) == 3


def test_a_missing_data_folder_is_told():
    with pytest.raises(UserError, match="data folder 'nowhere' does not exist"):
        resolve_tasks("digits", "nowhere")
    with pytest.raises(UserError, match="py' is no folder: give an existing"):
        resolve_tasks("digits", __file__)
