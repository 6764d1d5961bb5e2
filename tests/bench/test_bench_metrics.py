"""The official metrics, against values worked out by hand and against their formulas."""

import math

import pytest
import torch
from scipy.stats import pearsonr, spearmanr
from sklearn.metrics import f1_score, matthews_corrcoef

from mkor_bench.errors import UserError
from mkor_bench.metrics import (
    accuracy,
    correlation,
    exact_match,
    f1,
    matthews,
    normalise,
    squad,
    token_f1,
)

# Two true positives, one false positive, one false negative, two true negatives.
GUESSES = torch.tensor([1, 1, 1, 0, 0, 0])
LABELS = torch.tensor([1, 1, 0, 1, 0, 0])


def test_metrics_of_classes_have_the_values_worked_out_by_hand():
    assert accuracy(GUESSES, LABELS) == pytest.approx(4 / 6)
    # (TP·TN − FP·FN) / sqrt((TP+FP)(TP+FN)(TN+FP)(TN+FN)) = (4 − 1) / 9
    assert matthews(GUESSES, LABELS) == pytest.approx(1 / 3)
    assert f1(GUESSES, LABELS) == pytest.approx(4 / 6)  # 2·TP / (2·TP + FP + FN)


def test_correlations_have_the_values_worked_out_by_hand():
    guesses, labels = torch.tensor([1.0, 2.0, 3.0, 10.0]), torch.tensor([1.0, 3.0, 2.0, 4.0])
    # Spearman's: 1 − 6·(0 + 1 + 1 + 0) / (4·15); Pearson's: 13 / sqrt(50 · 5)
    expected = (0.8 + 13 / math.sqrt(250)) / 2
    assert correlation(guesses, labels) == pytest.approx(expected)


@pytest.mark.parametrize("seed", range(4))
def test_metrics_are_those_of_the_libraries(seed):
    torch.manual_seed(seed)
    guesses, labels = torch.randint(2, (2, 50))
    assert matthews(guesses, labels) == pytest.approx(matthews_corrcoef(labels, guesses), abs=1e-12)
    assert f1(guesses, labels) == pytest.approx(f1_score(labels, guesses), abs=1e-12)
    scores, similar = torch.randn(2, 50)
    pair = scores.double().numpy(), similar.double().numpy()
    expected = (pearsonr(*pair).statistic + spearmanr(*pair).statistic) / 2
    assert correlation(scores, similar) == pytest.approx(expected, abs=1e-12)


def test_guesses_that_are_all_the_same_earn_nothing():
    assert matthews(torch.ones(6), LABELS) == 0
    assert f1(torch.zeros(6), LABELS) == 0
    assert correlation(torch.ones(6), LABELS.double()) == 0


NORMALISED = {
    "The  Beatles": "beatles",
    "a cat, an owl": "cat owl",
    "theatre": "theatre",
    "U.S.A.": "usa",
    "the-end": "theend",  # punctuation goes first, so this is no article
    "Saint-Étienne\tand\nthe “Loire”": "saintétienne and “loire”",  # ASCII punctuation alone
    "The": "",
}


@pytest.mark.parametrize("answer", NORMALISED)
def test_answers_are_normalised_by_the_official_rules(answer):
    assert normalise(answer) == NORMALISED[answer]


def test_the_best_reference_counts():
    assert exact_match("Denver Broncos", ["Broncos", "The Denver Broncos!"]) == 1
    assert exact_match("Denver", ["Denver Broncos"]) == 0
    # 2 words in common of 3 guessed and 4 true: 2·2 / (3 + 4); with the other reference 1 of 1.
    assert token_f1("in Santa Clara", ["Santa Clara California USA"]) == pytest.approx(4 / 7)
    assert token_f1("in Santa Clara", ["Santa", "Santa Clara California USA"]) == pytest.approx(
        4 / 7
    )
    assert token_f1("in Santa Clara", ["Santa Clara", "Rome"]) == pytest.approx(4 / 5)
    assert token_f1("Rome", ["Santa Clara"]) == 0


def test_a_word_counts_as_often_as_both_have_it():
    assert token_f1("new new york", ["new york york"]) == pytest.approx(4 / 6)


def test_scores_are_means_over_questions():
    references = {"q1": ["the Nile"], "q2": ["Paris France", "Lyon"], "q3": ["1990"]}
    answered = squad({"q1": "Nile.", "q2": "in Paris", "q3": "2000", "other": "x"}, references)
    assert answered.exact_match == pytest.approx(1 / 3)
    assert answered.f1 == pytest.approx((1 + 0.5 + 0) / 3)


def test_questions_that_cannot_be_scored_are_named():
    with pytest.raises(UserError, match="question 'q2' lacks a guess: each question needs one"):
        squad({"q1": "a"}, {"q1": ["a"], "q2": ["b"]})
    with pytest.raises(UserError, match="question 'q1' lacks an accepted answer"):
        squad({"q1": "a"}, {"q1": []})
    with pytest.raises(UserError, match="at least one question"):
        squad({}, {})
