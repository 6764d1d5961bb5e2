"""``mkor recipe``: what a file says, the dry run, and the training against a plain loop."""

import json
import re
from itertools import islice
from pathlib import Path

import pytest
import torch
from torch import nn

import mkor as library
from digits_recipe import TEXT
from mkor.texts import bytes_text
from mkor_bench.recipes.build import build_optimizer, method_options
from mkor_bench.recipes.check import check_recipe
from mkor_bench.recipes.recipe import read_recipe
from mkor_bench.recipes.schedules import Schedule, factor_of
from mkor_bench.seeding import seed_generators
from mkor_bench.tasks.source import TaskSource
from torchrun import torchrun

ROOT = Path(__file__).parents[2]
RECIPES = sorted((ROOT / "recipes").glob("*.toml"))


@pytest.fixture
def recipe(tmp_path):
    """The recipe above, in a file."""
    path = tmp_path / "digits.toml"
    path.write_text(TEXT)
    return path


def losses(folder):
    return json.loads((folder / "recipe.json").read_text())["losses"]


def plain_losses(streams, steps, accumulated, lr):
    """SGD on the union of what all workers see, with nothing of the package but the task."""
    task = TaskSource("digits-classifier").load()
    seed_generators(3)
    model = task.build(3)
    batches = [task.batches(seed) for seed in streams]
    found = []
    for _ in range(steps):
        taken = [batch for stream in batches for batch in islice(stream, accumulated)]
        loss = torch.stack([task.loss(model, batch) for batch in taken]).mean()
        grads = torch.autograd.grad(loss, list(model.parameters()))
        with torch.no_grad():
            for parameter, grad in zip(model.parameters(), grads, strict=True):
                parameter -= lr * grad
        found.append(float(loss.detach()))
    return found


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_passes_its_dry_run(path):
    recipe = read_recipe(path)
    found = check_recipe(recipe)
    assert found.micro_batch * found.accumulated * recipe.workers == recipe.batch
    assert found.memory.keys() == recipe.entrants.keys()
    assert found.parameters > 1e7 and found.activations > 0


def test_every_training_has_a_recipe_for_one_worker_and_names_tell_the_number():
    workers = {path.stem: read_recipe(path).workers for path in RECIPES}
    assert workers == {name: int(name.rpartition("-")[2]) for name in workers}
    kinds = {name.rpartition("-")[0] for name in workers}
    assert kinds and {f"{kind}-1" for kind in kinds} <= set(workers)


def test_recipes_of_a_training_differ_in_the_number_of_workers_alone():
    for path in RECIPES:
        lines = path.read_text(encoding="utf-8").splitlines()
        one = path.with_name(f"{path.stem.rpartition('-')[0]}-1.toml").read_text(encoding="utf-8")
        differing = [a for a, b in zip(lines, one.splitlines(), strict=True) if a != b]
        assert {line.partition(" ")[0] for line in differing} <= {"title", "workers"}


def test_bert_is_pretrained_as_the_paper_and_its_reference_have_it():
    recipe = read_recipe(ROOT / "recipes/bert-large-masked-64.toml")
    assert (recipe.workers, recipe.batch, recipe.per_node) == (64, 32_768, 4)
    steps = {name: entrant.steps for name, entrant in recipe.entrants.items()}
    assert steps == {"mkor": 1500, "mkor-h": 600, "lamb": 1563, "kaisa": 1563, "eva": 1000}
    warmups = {name: entrant.schedule.warmup for name, entrant in recipe.entrants.items()}
    assert warmups == {"mkor": 192, "mkor-h": 77, "lamb": 200, "kaisa": 200, "eva": 128}
    lamb = recipe.entrant("lamb")
    assert (lamb.lr, lamb.decays, lamb.base_options["weight_decay"]) == (4e-3, "matrices", 0.01)
    factor = factor_of(lamb.schedule, lamb.steps)
    assert [factor(99), factor(199), factor(1172)] == pytest.approx([0.5, 1, 0.5], abs=1e-3)
    every = {n: e.options.get("factor_update_steps") for n, e in recipe.entrants.items()}
    assert every == {"mkor": 10, "mkor-h": 10, "lamb": None, "kaisa": 50, "eva": None}
    assert recipe.entrant("mkor-h").hybrid and not recipe.entrant("mkor").hybrid


def test_resnet_50_lowers_its_rate_after_the_epochs_of_the_paper():
    recipe = read_recipe(ROOT / "recipes/imagenet-resnet50-64.toml")
    mkor, kaisa = recipe.entrant("mkor"), recipe.entrant("kaisa")
    epoch = 1_281_167 / 2_048
    for entrant, epochs, factor in (
        (mkor, [25, 35, 40, 45, 50, 55, 56], 0.5),
        (kaisa, [25, 35, 40, 45, 50], 0.1),
    ):
        at = factor_of(entrant.schedule, entrant.steps)
        for number, milestone in enumerate(epochs):
            step = round(milestone * epoch)
            lowered = [factor**number, factor ** (number + 1)]
            assert [at(step - 1), at(step)] == pytest.approx(lowered)
        assert at(round(2.5 * epoch) - 1) == pytest.approx(0.5, abs=1e-3)
    assert (mkor.steps, kaisa.steps) == (round(57 * epoch), round(55 * epoch))
    assert (kaisa.options["factor_update_steps"], kaisa.options["inverse_update_steps"]) == (
        10,
        100,
    )


def test_the_dry_run_tells_shapes_memory_and_commands(mkor, recipe):
    result = mkor("recipe", recipe, "--check")
    assert result.exit_code == 0, result.output
    for text in (
        "Digits (nowhere)",
        "task: digits-classifier, 18,346 parameters",
        "128 samples × 2 accumulated × 1 workers = 256; tensors of 128×64, 128",
        "mkor recipe digits.toml --optimizer lamb --data FOLDER",
    ):
        assert text in re.sub(re.escape(str(recipe.parent)) + "/", "", result.output)


def test_the_page_shows_what_the_dry_run_prints():
    recipe = read_recipe(ROOT / "recipes/bert-large-reviews-4.toml")
    found = check_recipe(recipe)
    page = (ROOT / "docs/recipes.md").read_text(encoding="utf-8")
    shown = re.search(r"in all   sent a step\n(.*?)```", page, re.DOTALL)[1]
    rows = [re.split(r"\s{2,}", line.strip()) for line in shown.splitlines()]
    fixed = 8 * found.parameters + found.activations
    expected = [
        [name, *map(bytes_text, (m.base, m.method, fixed + m.base + m.method, round(m.wire)))]
        for name, m in found.memory.items()
    ]
    assert rows == expected


def test_memory_is_that_of_the_real_optimizers(recipe):
    read = read_recipe(recipe)
    found = check_recipe(read)
    task = TaskSource("digits-classifier").load()
    batch = next(task.batches(0))
    for name, entrant in read.entrants.items():
        model = task.build(0)
        optimizer = build_optimizer(model, entrant)
        for _ in range(2):
            task.loss(model, batch).backward()
            optimizer.step()
        state = [t for s in optimizer.state.values() for t in s.values() if torch.is_tensor(t)]
        assert found.memory[name].base == sum(t.numel() * t.element_size() for t in state)
        if entrant.method is not None:
            factors = sum(layer.bytes for layer in optimizer.layers())
            matrices = sum(p.numel() for p in model.parameters() if p.dim() > 1)
            momentum = 4 * matrices if name == "auto" else 0
            assert found.memory[name].method == pytest.approx(factors + momentum, rel=0.01)


def test_what_the_backward_pass_keeps_is_counted(recipe):
    found = check_recipe(read_recipe(recipe))
    # The image, what follows each rectifier, the log-probabilities; the labels; a sum of weights.
    numbers = 128 * (64 + 8 * 64 + 16 * 16 + 64 + 10)
    assert found.activations == 4 * numbers + 8 * 128 + 4


def test_a_training_is_a_plain_loop_over_accumulated_batches(mkor, recipe, tmp_path):
    result = mkor("recipe", recipe, "--optimizer", "sgd", "--output", "out")
    assert result.exit_code == 0, result.output
    assert "after 8 of 8 steps, test accuracy" in result.stdout
    expected = plain_losses([3], 8, accumulated=2, lr=3.0)
    assert losses(tmp_path / "out") == pytest.approx(expected, rel=1e-6)
    assert len({round(loss, 4) for loss in expected}) == 8  # other batches would show


@pytest.mark.timeout(250)
def test_two_workers_train_on_the_union_of_their_batches(recipe, tmp_path, environment):
    recipe.write_text(TEXT.replace("workers = 1", "workers = 2"))
    ours = ("-m", "mkor_bench", "recipe", recipe, "--optimizer", "sgd", "--output", "out")
    torchrun(*ours, timeout=180, cwd=tmp_path, env=environment)
    expected = plain_losses([6, 7], 8, accumulated=1, lr=3.0)
    assert losses(tmp_path / "out") == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("name", ["mkor", "lamb", "auto"])
def test_a_training_that_was_stopped_goes_on_to_the_bit(mkor, recipe, tmp_path, name):
    ours = ("recipe", recipe, "--optimizer", name, "--output")
    assert mkor(*ours, "whole").exit_code == 0
    part = mkor(*ours, "parts", "--steps", 3, "--checkpoint-every", 2)
    assert "after 3 of 8 steps" in part.stdout and "--resume continues it" in part.stdout
    again = mkor(*ours, "parts")
    assert again.exit_code == 2 and "continue it with --resume" in again.stderr
    assert mkor(*ours, "parts", "--resume").exit_code == 0
    assert losses(tmp_path / "parts") == losses(tmp_path / "whole")
    whole, parts = (
        torch.load(tmp_path / folder / "recipe.pt", weights_only=True)["model"]
        for folder in ("whole", "parts")
    )
    assert all(torch.equal(whole[key], parts[key]) for key in whole)


def test_passes_in_bfloat16_train_too(mkor, recipe, tmp_path):
    recipe.write_text(TEXT.replace('"float32"', '"bfloat16"'))
    assert mkor("recipe", recipe, "--optimizer", "sgd", "--output", "out").exit_code == 0
    found, expected = losses(tmp_path / "out"), plain_losses([3], 8, accumulated=2, lr=3.0)
    assert found != pytest.approx(expected, rel=1e-6)
    assert found == pytest.approx(expected, rel=2e-3)


def test_only_matrices_decay_where_the_recipe_says_so(recipe):
    model = nn.Sequential(nn.Linear(3, 2), nn.LayerNorm(2))
    optimizer = build_optimizer(model, read_recipe(recipe).entrant("lamb"))
    decayed, others = (
        {id(p): group["weight_decay"] for p in group["params"]} for group in optimizer.param_groups
    )
    assert decayed == {id(model[0].weight): 0.1}
    assert set(others.values()) == {0.0} and len(others) == 3


def test_options_reach_the_optimizer_as_it_takes_them(recipe):
    model = nn.Linear(3, 2)
    optimizer = build_optimizer(model, read_recipe(recipe).entrant("mkor"))
    assert type(optimizer) is library.MKOR and optimizer.base.defaults["momentum"] == 0.9
    options = method_options(read_recipe(recipe).entrant("mkor"))
    assert options["state_dtype"] is torch.bfloat16 and options["hybrid"].window == 3


@pytest.mark.parametrize(
    ("kind", "options", "steps", "expected"),
    [
        ("constant", {}, 6, [0.5, 1, 1, 1, 1, 1]),
        ("cosine", {}, 6, [0.5, 1, 1, 0.853553, 0.5, 0.146447]),
        ("polynomial", {"power": 0.5}, 4, [0.5, 1, 0.5**0.5, 0.5]),
        ("milestones", {"milestones": [3, 5], "factor": 0.5}, 7, [0.5, 1, 1, 0.5, 0.5, 0.25, 0.25]),
        ("knee", {"window": 1, "dwell": 1, "beta": 0.1, "factor": 0.5}, 3, [0.5, 1, 1]),
    ],
)
def test_schedules(kind, options, steps, expected):
    factor = factor_of(Schedule(kind, 2, options), steps)
    assert [factor(step) for step in range(steps)] == pytest.approx(expected, abs=1e-6)


def test_epochs_and_shares_are_turned_into_steps(recipe):
    text = TEXT.replace("seed = 3", "seed = 3\nepoch = 1437").replace("steps = 8", "epochs = 3")
    old = "warmup = 2, milestones = [4, 6]"
    text = text.replace(old, 'unit = "epochs", warmup = 0.5, milestones = [1, 2.2]')
    recipe.write_text(
        text.replace('"cosine", warmup = 2', '"cosine", unit = "shares", warmup = 0.3')
    )
    read = read_recipe(recipe)
    # An epoch is 1437 / 256 = 5.61 steps, so three of them are 16.8.
    assert {entrant.steps for entrant in read.entrants.values()} == {17}
    milestones = read.entrant("mkor").schedule
    assert (milestones.warmup, milestones.options["milestones"]) == (3, [6, 12])
    assert read.entrant("auto").schedule.warmup == 5
    assert read.entrant("lamb").schedule.warmup == 1  # steps, unless a unit is named


@pytest.mark.parametrize(
    ("common", "own", "steps"),
    [("epochs = 3", "steps = 7", 7), ("steps = 7", "epochs = 2", 11), ("epochs = 1", "", 6)],
)
def test_an_optimizers_own_length_replaces_that_of_all(recipe, common, own, steps):
    text = TEXT.replace("seed = 3", f"seed = 3\nepoch = 1437\n[common]\n{common}")
    old = "lr = 3.0\nsteps = 8\nschedule"
    assert old in text
    recipe.write_text(text.replace(old, f"lr = 3.0\n{own}\nschedule"))
    assert read_recipe(recipe).entrant("sgd").steps == steps


def test_a_fused_base_is_tried_without_memory_and_trains(mkor, recipe):
    plain = TEXT.replace('base = "sgd"\nbase_options = { momentum = 0.9 }', 'base = "adamw"')
    fused = plain.replace('base = "adamw"', 'base = "adamw"\nbase_options = { fused = true }')
    states = []
    for text in (plain, fused):
        recipe.write_text(text)
        result = mkor("recipe", recipe, "--check")
        assert result.exit_code == 0, result.output
        states.append([line for line in result.output.splitlines() if "mkor" in line])
    assert states[0] and states[0] == states[1]
    result = mkor("recipe", recipe, "--optimizer", "mkor", "--steps", 1)
    assert result.exit_code == 0, result.output
