"""What ``mkor recipe --resume`` says about a checkpoint that it cannot continue."""

from zipfile import ZipFile

import pytest
import torch

from digits_recipe import TEXT


@pytest.fixture
def recipe(tmp_path):
    """The small recipe, in a file."""
    path = tmp_path / "digits.toml"
    path.write_text(TEXT)
    return path


def test_a_checkpoint_of_another_training_is_refused(mkor, recipe):
    ours = ("recipe", recipe, "--output", "out", "--steps", "1")
    assert mkor(*ours, "--optimizer", "sgd").exit_code == 0
    result = mkor(*ours, "--optimizer", "lamb", "--resume")
    assert "('digits.toml', 'sgd', 1), not ('digits.toml', 'lamb', 1)" in result.stderr


def changed(path, **values):
    torch.save({**torch.load(path, weights_only=True), **values}, path)


JUNK = {
    "nothing": (lambda path: path.write_bytes(b""), "is empty"),
    "words": (lambda path: path.write_bytes(b"half"), "was cut short, or is no checkpoint at all"),
    "a half": (
        lambda path: path.write_bytes(path.read_bytes()[: path.stat().st_size // 2]),
        "was cut short, or is no checkpoint at all",
    ),
    "an archive": (
        lambda path: ZipFile(path, "w").close(),
        "is damaged, or holds more than data (",
    ),
    "a program": (
        lambda path: torch.save({"model": print}, path),
        "is damaged, or holds more than data (UnpicklingError: Weights only load failed.",
    ),
    "a list": (lambda path: torch.save([1], path), "holds no checkpoint but a list"),
    "weights": (
        lambda path: torch.save({"model": {}, "losses": []}, path),
        "is no checkpoint of a recipe: it lacks recipe, optimizer_name, workers, optimizer, rates",
    ),
    "another model": (
        lambda path: changed(path, model={"weight": torch.zeros(2)}),
        "does not fit the recipe (RuntimeError: Error(s) in loading state_dict for Sequential:",
    ),
    "another optimizer": (
        lambda path: changed(path, optimizer={}),
        "does not fit the recipe (KeyError: 'param_groups')",
    ),
    "other losses": (
        lambda path: changed(path, losses=["much"]),
        "does not fit the recipe (ValueError: could not convert string to float: 'much')",
    ),
}


@pytest.mark.parametrize("junk", JUNK)
def test_what_is_wrong_with_a_checkpoint_is_told(mkor, recipe, tmp_path, junk):
    ours = ("recipe", recipe, "--output", "out", "--optimizer", "sgd", "--steps")
    assert mkor(*ours, 1).exit_code == 0
    spoil, message = JUNK[junk]
    spoil(tmp_path / "out/recipe.pt")
    result = mkor(*ours, 2, "--resume")
    assert result.exit_code == 2, result.output
    assert f"checkpoint 'out/recipe.pt' {message}" in result.stderr
    assert result.stderr.endswith("; remove it, or choose another --output.\n")
    assert len(result.stderr.splitlines()) == 1
