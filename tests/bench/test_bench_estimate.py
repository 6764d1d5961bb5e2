"""``mkor estimate``: the model against formulas on paper, and the command as a user runs it."""

import pytest

import mkor
from mkor_bench.scale.bert import bert_large
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
        (["--workers", "0,4"], "--workers '0,4' must be whole numbers such as 1,8,64."),
        (["--workers", ""], "--workers '' must be whole numbers"),
        (["--bandwidth", "0"], "--bandwidth must be a positive number, got 0.0."),
        (["--latency", "nan"], "--latency must be a positive number, got nan."),
    ],
)
def test_mistakes_are_told_in_one_line(mkor, arguments, message):
    result = mkor("estimate", *arguments)
    assert result.exit_code == 2
    assert message in result.output
