"""What `mkor.KFAC` makes of its options, and what it says of those out of range."""

import pytest
import torch
from torch import nn

import mkor
from mkor.optimizer import Preconditioner


@pytest.fixture
def built(monkeypatch):
    """Builds a KFAC up to the face that all methods share: the method and the common options."""

    def take(self, model, base, method, **common):
        del model, base
        found.update(method=method, common=common)

    found = {}
    monkeypatch.setattr(Preconditioner, "__init__", take)

    def build(**options):
        model = nn.Linear(2, 2)
        mkor.KFAC(model, torch.optim.SGD(model.parameters(), lr=0.1), **options)
        return found["method"], found["common"]

    return build


def test_defaults(built):
    method, common = built()
    assert (method.solver, method.damping_split) == ("eigen", "factored")
    assert (method.damping, method.decay) == (0.001, 0.95)
    assert (method.inverse_update_steps, method.warmup_steps) == (100, 10)
    assert (common["factor_update_steps"], common["warmup_steps"]) == (10, 10)
    assert (common["kl_clip"], common["rescale"]) == (0.001, None)


def test_options_reach_the_method(built):
    options = {
        "solver": "inverse",
        "damping": 0.5,
        "damping_split": "plain",
        "weight_sharing": "reduce",
        "inverse_update_steps": 30,
        "warmup_steps": 3,
        "max_dim": 7,
        "state_dtype": torch.bfloat16,
        "inverse_dtype": torch.float64,
        "on_nonfinite": "reset",
    }
    method, _ = built(factor_decay=0.8, **options)
    assert {name: getattr(method, name) for name in options} == options
    assert method.decay == 0.8


def test_schedules_are_resolved_by_the_step(built):
    method, _ = built(
        damping=lambda step: 1 / (1 + step),
        factor_decay=lambda step: 0.5,
        inverse_update_steps=lambda step: 4,
        warmup_steps=0,
    )
    now = method.at(3)
    assert (now.damping, now.decay, now.inverse_update_steps) == (0.25, 0.5, 4)
    assert now.refresh and method.at(4).refresh  # step 3 is the update for what fell on step 0


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("solver", "eigh", "did you mean 'eigen'"),
        ("damping_split", "pi", "choose from 'factored', 'plain'"),
        ("weight_sharing", "expanded", "did you mean 'expand'"),
        ("damping", 0.0, "must be positive"),
        ("damping", lambda step: -1.0, r"damping\(0\)=-1.0"),
        ("damping", None, "must be positive"),
        ("factor_decay", 1.0, "between 0 and 1"),
        ("inverse_update_steps", 0, "an integer of at least 1"),
        ("inverse_update_steps", 10.0, "an integer of at least 1"),
        ("inverse_update_steps", lambda step: 0, r"inverse_update_steps\(0\)=0"),
        ("max_dim", 0, "at least 1"),
        ("state_dtype", torch.float16, "state_dtype=torch.float16 is unknown"),
        ("inverse_dtype", torch.bfloat16, "inverse_dtype=torch.bfloat16 is unknown"),
    ],
)
def test_an_option_out_of_range_says_what_to_do(built, name, value, message):
    with pytest.raises(ValueError, match=message):
        built(**{name: value})


def test_cadences_that_are_functions_are_taken_as_they_are(built):
    built(inverse_update_steps=lambda step: 15)
    built(factor_update_steps=lambda step: 7)
    built(factor_update_steps=7, inverse_update_steps=21, grad_worker_fraction=0.5)
