"""``mkor estimate``: the model against formulas on paper, and the command as a user runs it."""

import pytest
import torch

import mkor
from mkor_bench.scale.bert import MODELS, bert_large, encoder
from mkor_bench.scale.command import NAMES, Plan
from mkor_bench.scale.model import Machine, predict

MACHINE = Machine(rate=1e12, bandwidth=1e9, latency=1e-5)


def test_collectives_follow_ring_algorithms():
    # An all-reduce passes each of 8 parts on 14 times, an all-gather 7 times.
    assert MACHINE.seconds("sum", 8, 8e6) == pytest.approx(14 * (1e-5 + 1e-3))
    assert MACHINE.seconds("gather", 8, 8e6) == pytest.approx(7 * (1e-5 + 1e-3))
    assert MACHINE.seconds("sum", 1, 8e6) == 0


def test_a_step_is_the_sum_of_its_parts():
    found = mkor.estimate(bert_large(), mkor.MKOR, rows=128, workers=4, grad_worker_fraction=0.25)
    step = predict(MACHINE, 4, 1e12, 1000, found)
    assert (step.model, step.method) == (1.0, found.mean_flops / 1e12)
    assert step.gradients == MACHINE.seconds("sum", 4, 1000)
    (update,) = found.updates
    expected = MACHINE.all_seconds(found.step_collectives)
    expected += update.share * MACHINE.all_seconds(update.collectives)
    assert step.wire == pytest.approx(expected) and found.step_collectives
    assert step.total == step.model + step.gradients + step.method + step.wire
    alone = predict(MACHINE, 4, 1e12, 1000, None)
    assert alone.total == step.model + step.gradients


def test_bert_large_has_its_size():
    numbers = sum(parameter.numel() for parameter in bert_large().parameters())
    assert numbers == 336_195_586  # of the pretrained model, but for the bias of its 30,522 words


@pytest.mark.parametrize("name", MODELS)
def test_models_have_the_sizes_of_transformers(name):
    transformers = pytest.importorskip("transformers")
    size = MODELS[name]
    config = transformers.BertConfig(
        hidden_size=size.width,
        num_hidden_layers=size.layers,
        num_attention_heads=size.width // 64,
        intermediate_size=size.inner,
    )
    with torch.device("meta"):
        whole = transformers.BertForPreTraining(config)
    whole.cls.predictions.decoder = torch.nn.Identity()  # the words again
    whole.cls.predictions.bias = None
    numbers = sum(parameter.numel() for parameter in whole.parameters())
    assert sum(parameter.numel() for parameter in encoder(size).parameters()) == numbers


def test_kbfgs_evaluates_a_batch_again_where_it_updates():
    plan, model = Plan(MACHINE, 8, 16), encoder(MODELS["minilm-l6"])
    step = plan.step(model, "K-BFGS", 2)
    found = mkor.estimate(model, mkor.KBFGS, rows=64, workers=2, factor_update_steps=10)
    assert step.method == pytest.approx(found.mean_flops / MACHINE.rate + step.model / 10)


def test_the_command_takes_other_models_and_every_method(mkor):
    names = ",".join(NAMES)
    asked = ("--model", "minilm-l6", "--methods", names, "--batch", "4", "--workers", "2")
    result = mkor("estimate", *asked)
    assert result.exit_code == 0, result.output
    rows = [line[9:24].strip() for line in result.output.splitlines()[1:]]
    assert rows == ["LAMB", *NAMES.values()]


def test_large_times_keep_to_their_columns(mkor):
    result = mkor("estimate", "--workers", "1", "--flops", "1e-9")
    assert max(map(len, result.output.splitlines())) < 70
    assert "e+" in result.output


def test_the_command_prints_a_table_and_draws(mkor, tmp_path):
    figure = tmp_path / "scaling.png"
    result = mkor("estimate", "--workers", "2,1", "--output", figure)
    assert result.exit_code == 0, result.output
    rows = [line.split() for line in result.output.splitlines()[1:-1]]
    assert [row[0] for row in rows] == ["1"] * 5 + ["2"] * 5
    assert rows[0][1] == "LAMB" and rows[0][-1] == "1.00"
    assert all(float(row[-1]) >= 1 for row in rows)
    assert figure.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--workers", "0,4"], "--workers '0,4' must be whole numbers above 0, such as 1,8,64."),
        (["--workers", ""], "--workers '' must be whole numbers"),
        (["--workers", "1,99999999999999999999"], "--workers must be at most 1048576, got 99999"),
        (["--model", "bert-lage"], "unknown model 'bert-lage': did you mean 'bert-large'"),
        (["--methods", "mkor,adam"], "unknown method 'adam': choose from eva, "),
        (["--methods", ""], "--methods '' names none: give names such as mkor,kfac."),
        (["--output", "scaling.xyz"], "--output 'scaling.xyz' names no format of figures: give"),
        (["--output", "."], "names no format of figures"),
        (["--bandwidth", "0"], "--bandwidth must be a positive number, got 0.0."),
        (["--latency", "nan"], "--latency must be a positive number, got nan."),
    ],
)
def test_mistakes_are_told_in_one_line(mkor, arguments, message):
    result = mkor("estimate", *arguments)
    assert result.exit_code == 2
    assert message in result.output
