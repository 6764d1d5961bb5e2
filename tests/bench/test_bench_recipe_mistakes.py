"""What ``mkor recipe`` says about mistakes: in a file, and on the command line."""

import pytest
import torch

from digits_recipe import TEXT
from mkor_bench.recipes.recipe import read_recipe


@pytest.fixture
def recipe(tmp_path):
    """The small recipe, in a file."""
    path = tmp_path / "digits.toml"
    path.write_text(TEXT)
    return path


MISTAKES = {
    "no TOML": ('title = "Digits"', "title = ", "is no TOML file"),
    "a key": ("seed = 3", "sead = 3", "unknown key 'sead': did you mean 'seed'?"),
    "no task": ('task = "digits-classifier"', "", "lacks 'task': add it, a text."),
    "a task": ("digits-classifier", "digits-clasifier", "unknown task 'digits-clasifier'"),
    "a batch": (
        "batch = 256",
        "batch = 300",
        "batch must be a multiple of 128, the task's 128 samples times 1 workers, got 300.",
    ),
    "workers": (
        "workers = 1",
        "workers = 0",
        "workers must be a whole number of at least 1, got 0.",
    ),
    "a truth as number": (
        "batch = 256",
        "batch = true",
        "batch must be a whole number of at least",
    ),
    "nodes": ("workers = 1", "workers = 6", "per_node must be a divisor of workers, 6, got 4."),
    "a dtype": ('"float32"', '"fp16"', "dtype must be one of float32, bfloat16, got 'fp16'."),
    "a method": ('"MKOR"', '"MKRO"', "optimizers.mkor: method must be one of MKOR, KFAC"),
    "a base": ('base = "lamb"', 'base = "adam"', "optimizers.lamb: base must be one of sgd, adamw"),
    "a rate": ("lr = 0.01", "lr = -1", "optimizers.lamb: lr must be a positive number, got -1"),
    "an option": (
        "factor_update_steps = 5",
        "factor_update_stops = 5",
        ", optimizers.mkor.options: unknown key 'factor_update_stops': "
        "did you mean 'factor_update_steps'",
    ),
    "an option of none": (
        "factor_update_steps = 5",
        "nonsense = 10",
        ", optimizers.mkor.options: unknown key 'nonsense': choose from statistic, vectors, ",
    ),
    "an option's value": (
        "factor_update_steps = 5",
        "factor_update_steps = -10",
        ", optimizers.mkor.options: factor_update_steps=-10 is out of range: "
        "factor_update_steps must be an integer of at least 1.",
    ),
    "an option's type": (
        "factor_update_steps = 5",
        'on_nonfinite = "skip", skip = [1]',
        ", optimizers.mkor.options: skip must be a list of texts, got [1].",
    ),
    "a data type": (
        "bfloat16",
        "bfloat99",
        ", optimizers.mkor.options: state_dtype must be one of float32, float64, bfloat16, "
        "float16, got 'bfloat99'.",
    ),
    "a data type of messages": (
        'state_dtype = "bfloat16"',
        'wire_dtype = "float8"',
        ", optimizers.mkor.options: wire_dtype must be one of float32, float64, bfloat16, "
        "float16, got 'float8'.",
    ),
    "an option of the base": (
        "momentum = 0.9 }",
        "momentun = 0.9 }",
        ", optimizers.mkor.base_options: unknown key 'momentun': did you mean 'momentum'?",
    ),
    "a text as momentum": (
        "momentum = 0.9 }",
        'momentum = "a" }',
        ", optimizers.mkor.base_options: momentum must be a finite number, got 'a'.",
    ),
    "no number": ("momentum = 0.9 }", "momentum = nan }", "momentum must be a finite number, got"),
    "what the base refuses": (
        "momentum = 0.9 }",
        "momentum = -1 }",
        ", optimizers.mkor.base_options: Invalid momentum value: -1.",
    ),
    "a number as truth": (
        "weight_decay = 0.1 }",
        "bias_correction = 1 }",
        ", optimizers.lamb.base_options: bias_correction must be true or false, got 1.",
    ),
    "one number of two": (
        "weight_decay = 0.1 }",
        "betas = [0.9] }",
        ", optimizers.lamb.base_options: betas must be a list of 2 numbers, got [0.9].",
    ),
    "a number as text": (
        "weight_decay = 0.1 }",
        "trust_ratio = 1 }",
        ", optimizers.lamb.base_options: trust_ratio must be a text, got 1.",
    ),
    "what the first step refuses": (
        'base = "lamb"\nbase_options = { weight_decay = 0.1 }',
        'base = "adamw"\nbase_options = { differentiable = true }',
        ", optimizers.lamb.base_options: a leaf Variable that requires grad",
    ),
    "a rate among the options": (
        "weight_decay = 0.1 }",
        "lr = 0.1 }",
        ", optimizers.lamb.base_options: 'lr' is none of the options: move it to the optimizer's",
    ),
    "a switch": (
        "hybrid = { window = 3 }",
        "hybrid = { foo = 1 }",
        ", optimizers.mkor.hybrid: unknown key 'foo': choose from window, threshold, ",
    ),
    "a switch's value": (
        "hybrid = { window = 3 }",
        "hybrid = { window = 0 }",
        ", optimizers.mkor.hybrid: window=0 is out of range: window must be an integer of at",
    ),
    "a switch of auto": (
        'method = "auto"',
        'method = "auto"\nhybrid = { window = 3 }',
        ", optimizers.auto: method 'auto' has no hybrid, since a base that took over would step "
        "along the bare gradient: leave it out.",
    ),
    "a base of auto": (
        'method = "auto"',
        'method = "auto"\nbase = "sgd"',
        ", optimizers.auto: method 'auto' takes no base: leave out what is not one of method, ",
    ),
    "a name that leads elsewhere": (
        "[optimizers.lamb]",
        '[optimizers."../../x"]',
        ", optimizers: the name of an optimizer must be of letters, digits, dots, dashes and "
        "underscores and not begin with a dot, got '../../x'.",
    ),
    "a hidden name": ("[optimizers.lamb]", '[optimizers.".x"]', "not begin with a dot, got '.x'."),
    "a table": (
        "seed = 3\n",
        "[comon]\nsteps = 8\n",
        "digits.toml': unknown key 'comon': did you mean 'common'?",
    ),
    "a key of all": (
        "[optimizers.mkor]",
        "[common]\nstep = 8\n[optimizers.mkor]",
        "digits.toml', common: unknown key 'step': did you mean 'steps'?",
    ),
    "a title": ("title", "tittle", "digits.toml': unknown key 'tittle': did you mean 'title'?"),
    "a rate of another name": (
        "lr = 3.0",
        "lrr = 3.0",
        ", optimizers.sgd: unknown key 'lrr': did you mean 'lr'?",
    ),
    "a large seed": ("seed = 3", "seed = 4294967296", "seed must be a whole number of at most"),
    "a rate beyond numbers": (
        "lr = 0.01",
        f"lr = 1{'0' * 400}",
        "optimizers.lamb: lr must be a positive number, got 1000",
    ),
    "a schedule": ('kind = "cosine"', 'kind = "cos"', "schedule: kind must be one of constant"),
    "a schedule's key": (
        ", factor = 0.5 }\n\n[optimizers.sgd]",
        " }\n\n[optimizers.sgd]",
        "lacks 'factor'",
    ),
    "another kind's keys": (
        'kind = "knee"',
        'kind = "cosine"',
        ", optimizers.lamb.schedule: kind 'cosine' takes no window, dwell, beta, factor: leave out "
        "what is not one of kind, unit, warmup.",
    ),
    "a schedule's misspelt key": (
        "window = 2",
        "wondow = 2",
        ", optimizers.lamb.schedule: unknown key 'wondow': did you mean 'window'?",
    ),
    "a knee that raises the rate": (
        "beta = 0.1, factor = 0.5",
        "beta = 0.1, factor = 7",
        ", optimizers.lamb.schedule: factor=7.0 is out of range: factor must be between 0 and 1",
    ),
    "milestones beyond numbers": (
        "[4, 6], factor = 0.5",
        "[4, 6], factor = 1e300",
        ", optimizers.mkor.schedule: factor must be less, for a finite rate after 2 of them",
    ),
    "milestones": ("[4, 6]", "[6, 4]", "milestones must be steps below 8 in ascending order"),
    "a milestone within the warm-up": (
        "[4, 6]",
        "[1, 6]",
        "milestones must be none within the warm-up, the first 2 steps, got [1, 6].",
    ),
    "a late milestone": ("[4, 6]", "[4, 8]", "milestones must be steps below 8"),
    "a long warm-up": ("warmup = 1", "warmup = 8", "warmup must be steps below 8, got 8."),
    "epochs of no length": (
        'steps = 8\nschedule = { kind = "constant" }',
        'epochs = 2\nschedule = { kind = "constant" }',
        ", optimizers.sgd: epochs needs to know how long one is: add epoch, its samples, to the "
        "recipe, or give steps in their place.",
    ),
    "steps and epochs": (
        'base = "sgd"\nlr = 3.0',
        'base = "sgd"\nepochs = 2\nlr = 3.0',
        ", optimizers.sgd has both steps and epochs: leave one of them out.",
    ),
    "no epoch at all": (
        "seed = 3",
        "seed = 3\nepoch = 0",
        "digits.toml': epoch must be a whole number of at least 1, got 0.",
    ),
    "epochs as text": (
        'base = "sgd"\nlr = 3.0',
        'base = "sgd"\nepochs = "2"\nlr = 3.0',
        ", optimizers.sgd: epochs must be a positive number, got '2'.",
    ),
    "a unit": (
        'kind = "cosine"',
        'kind = "cosine", unit = "days"',
        ", optimizers.auto.schedule: unit must be one of steps, epochs, shares, got 'days'.",
    ),
    "a unit without an epoch": (
        'kind = "cosine"',
        'kind = "cosine", unit = "epochs"',
        ", optimizers.auto.schedule: unit must be steps or shares where the recipe has no epoch, "
        "got 'epochs'.",
    ),
    "a share of more than all": (
        'kind = "cosine", warmup = 2',
        'kind = "cosine", unit = "shares", warmup = 1.5',
        ", optimizers.auto.schedule: warmup must be shares below 1, got 1.5.",
    ),
    "a share that is all but a little": (
        'kind = "cosine", warmup = 2',
        'kind = "cosine", unit = "shares", warmup = 0.99',
        ", optimizers.auto.schedule: warmup must be shares below 1, got 0.99.",
    ),
    "a share below nothing": (
        'kind = "cosine", warmup = 2',
        'kind = "cosine", unit = "shares", warmup = -0.5',
        ", optimizers.auto.schedule: warmup must be a number of shares of at least 0, got -0.5.",
    ),
    "half a step": (
        'kind = "cosine", warmup = 2',
        'kind = "cosine", warmup = 0.5',
        ", optimizers.auto.schedule: warmup must be a whole number of at least 0, got 0.5.",
    ),
    "milestones in the same step": (
        "warmup = 2, milestones = [4, 6]",
        'unit = "shares", milestones = [0.5, 0.51]',
        ", optimizers.mkor.schedule: milestones must be shares below 1 in ascending order, got [0.",
    ),
    "milestones as text": (
        "warmup = 2, milestones = [4, 6]",
        'unit = "shares", milestones = ["0.5"]',
        ", optimizers.mkor.schedule: milestones must be shares below 1 in ascending order, got ['",
    ),
    "a milestone of no number": (
        "warmup = 2, milestones = [4, 6]",
        'unit = "shares", milestones = [nan]',
        ", optimizers.mkor.schedule: milestones must be shares below 1 in ascending order, got [n",
    ),
    "a milestone at the beginning": (
        "warmup = 2, milestones = [4, 6]",
        'unit = "shares", milestones = [0.01]',
        ", optimizers.mkor.schedule: milestones must be shares below 1 in ascending order, got [0.",
    ),
    "a milestone beyond numbers": (
        "[4, 6]",
        f"[4, 1{'0' * 400}]",
        ", optimizers.mkor.schedule: milestones must be steps below 8 in ascending order, got [4",
    ),
    "options of no method": (
        'method = "auto"',
        'base = "sgd"\nhybrid = { window = 3 }',
        "has options and no method",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_a_recipe_is_told_in_one_line(mkor, recipe, mistake):
    old, new, message = MISTAKES[mistake]
    assert old in TEXT
    recipe.write_text(TEXT.replace(old, new, 1))
    result = mkor("recipe", recipe, "--check")
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("Error: recipe '")
    assert message in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_mistakes_of_the_command_are_told_before_anything_is_written(
    mkor, recipe, tmp_path, monkeypatch
):
    for arguments, message in {
        ("--optimizer", "kfac"): "unknown optimizer of digits.toml 'kfac'",
        ("--check", "--optimizer", "kfac"): "unknown optimizer of digits.toml 'kfac'",
        ("--check", "--data", "there"): "--check reads no data, but got --data 'there'",
        ("--steps", "9"): "--steps must be from 1 to 8, got 9",
        ("--resume", "--output", "none"): "recipe.pt' does not exist: leave out --resume",
    }.items():
        result = mkor("recipe", recipe, *arguments)
        assert result.exit_code == 2 and message in result.stderr
    assert "cannot be read" in mkor("recipe", "nothing.toml").stderr
    monkeypatch.setenv("MKOR_DATA", "there")
    assert mkor("recipe", recipe, "--check").exit_code == 0
    monkeypatch.delenv("MKOR_DATA")
    recipe.write_text(TEXT.replace("workers = 1", "workers = 8"))
    told = mkor("recipe", recipe).stderr
    assert "is for 8 workers: start it on each machine with torchrun --nnodes 2" in told
    assert not (tmp_path / "runs").exists()


def test_options_in_use_pass_the_dry_run(mkor, recipe):
    options = 'betas = [0.9, 0.99], trust_ratio = "all", bias_correction = false, eps = 1'
    auto = "adamw = ['8'], betas = [0.8, 0.9], wire_dtype = 'bfloat16', kl_clip = 0.5"
    text = TEXT.replace("weight_decay = 0.1 }", options + " }")
    text = text.replace('method = "auto"', f'method = "auto"\noptions = {{ {auto} }}')
    recipe.write_text(text)
    read = read_recipe(recipe)
    assert read.entrant("lamb").base_options["betas"] == (0.9, 0.99)
    assert read.entrant("auto").options["wire_dtype"] is torch.bfloat16
    result = mkor("recipe", recipe, "--check")
    assert result.exit_code == 0, result.output


def test_a_common_base_is_none_of_autos(recipe):
    common = '[common]\nbase = "sgd"\nbase_options = { momentum = 0.5 }\nlr = 0.2\nsteps = 7\n'
    recipe.write_text(TEXT.replace("[optimizers.mkor]", common + "[optimizers.mkor]"))
    auto = read_recipe(recipe).entrant("auto")
    assert (auto.base, auto.base_options, auto.lr, auto.steps) == (None, {}, 0.003, 8)


def test_the_training_names_the_table_of_a_mistake_as_well(mkor, recipe):
    recipe.write_text(TEXT.replace("beta = 0.1, factor = 0.5", "beta = 0.1, factor = 7"))
    result = mkor("recipe", recipe, "--optimizer", "lamb", "--output", "out")
    assert result.exit_code == 2
    assert "digits.toml', optimizers.lamb.schedule: factor=7.0 is out of range" in result.stderr


@pytest.mark.parametrize("epochs", ["1e-9", "1e300"])
def test_epochs_of_no_whole_step_or_of_too_many_are_told(mkor, recipe, epochs):
    text = TEXT.replace("seed = 3", "seed = 3\nepoch = 1024")
    recipe.write_text(text.replace("lr = 3.0\nsteps = 8", f"lr = 3.0\nepochs = {epochs}"))
    result = mkor("recipe", recipe, "--check")
    assert result.exit_code == 2
    told = f"epochs must be from 0.25, a step, to 2.2518e+15, got {float(epochs)!r}."
    assert f"digits.toml', optimizers.sgd: {told}" in result.stderr
