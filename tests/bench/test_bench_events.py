"""What TensorBoard reads of a training and of a comparison."""

import json

import pytest
import torch

from mkor_bench.report.events import FOLDER_NAME
from mkor_bench.report.watch import due, watched


def scalars(folder):
    """Steps and values by name, as TensorBoard reads them."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return {
        name: {event.step: event.value for event in events.Scalars(name)}
        for name in events.Tags()["scalars"]
    }


LAYERS = {
    f"{event}/{layer}"
    for event in ("skipped", "resets", "rejected", "blends")
    for layer in ("0", "3")
}
NORMS = {f"factor norm/{layer}/{side}" for layer in ("0", "3") for side in ("inputs", "outputs")}
ALWAYS = {"training loss", "learning rate", "test error"}


def test_a_training_shows_losses_rates_and_factors(mkor, tiny, tmp_path):
    mkor("train", f"{tiny}:task", "--optimizer", "mkor", "--output", "run", "--lr", 0.1)
    shown = scalars(tmp_path / "run" / FOLDER_NAME)
    assert shown.keys() == ALWAYS | LAYERS | NORMS | {"layers preconditioned"}
    (run,) = json.loads((tmp_path / "run/results.json").read_text())["tasks"]["tiny"]["optimizers"][
        "mkor"
    ]["runs"]
    assert list(shown["training loss"].values()) == pytest.approx(run["loss"])
    rates = shown["learning rate"]
    assert list(rates) == list(range(1, 21)) and max(rates.values()) == pytest.approx(0.1)
    assert rates[20] == pytest.approx(0.0, abs=1e-6)
    saved = torch.load(tmp_path / "run/checkpoint.pt", weights_only=True)["optimizer"]
    state = saved["preconditioner"]["layers"]["0"]["state"]
    assert shown["factor norm/0/inputs"][20] == pytest.approx(float(state["inputs"].norm()))


def test_the_hand_over_is_seen(mkor, tiny, tmp_path):
    mkor("train", f"{tiny}:flat", "--optimizer", "mkor-h", "--output", "run", "--steps", 80)
    shown = scalars(tmp_path / "run" / FOLDER_NAME)
    count = shown["layers preconditioned"]
    # Windows of 15 steps: two that do not fall, after one to compare with.
    assert {step: value for step, value in count.items() if step in (1, 44, 45, 80)} == {
        1: 2.0,
        44: 2.0,
        45: 0.0,
        80: 0.0,
    }
    assert max(shown["factor norm/0/inputs"]) == 44


def test_a_first_order_optimizer_shows_its_rate(mkor, tiny, tmp_path):
    mkor("train", f"{tiny}:task", "--optimizer", "adamw", "--output", "run")
    assert scalars(tmp_path / "run" / FOLDER_NAME).keys() == ALWAYS


def test_a_resumed_training_goes_on_in_the_same_events(mkor, tiny, tmp_path, monkeypatch):
    monkeypatch.setenv("INTERRUPTED_AT", "7")
    mkor("train", f"{tiny}:interrupted", "--optimizer", "mkor", "--output", "run")
    mkor("train", f"{tiny}:task", "--optimizer", "mkor", "--output", "run", "--resume")
    shown = scalars(tmp_path / "run" / FOLDER_NAME)
    assert list(shown["learning rate"]) == list(range(1, 21))


def test_a_comparison_shows_the_same(mkor, tiny, tmp_path):
    mkor(
        *("compare", f"{tiny}:task", "--optimizers", "sgd,mkor", "--seeds", 1, "--lrs", "0.1"),
        *("--output", "runs"),
    )
    root = tmp_path / "runs" / FOLDER_NAME / "tiny"
    assert scalars(root / "sgd/seed-0").keys() == ALWAYS
    shown = scalars(root / "mkor/seed-0")
    assert shown.keys() == ALWAYS | LAYERS | NORMS | {"layers preconditioned"}
    assert list(shown["learning rate"]) == list(range(1, 21))


def test_runs_are_looked_at_about_fifty_times():
    assert [step for step in range(1, 31) if due(step, 30)] == list(range(1, 31))
    seen = [step for step in range(1, 1001) if due(step, 1000)]
    assert seen == [1, *range(20, 1001, 20)]


def test_looking_changes_nothing():
    import mkor

    model = torch.nn.Linear(3, 2)
    optimizer = mkor.MKOR(model, torch.optim.SGD(model.parameters(), lr=0.5))
    model(torch.ones(2, 3)).sum().backward()
    pending = optimizer.state_dict()["preconditioner"]["pending"]
    assert watched(optimizer) == watched(optimizer)
    assert watched(optimizer)["learning rate"] == 0.5
    assert (
        optimizer.state_dict()["preconditioner"]["pending"].keys() == pending.keys() == {"Linear"}
    )
