"""SQuAD: its files, windows over long paragraphs, spans, and the answers that come of them."""

import gzip
import json
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from mkor_bench.data.squad import Question, load_squad
from mkor_bench.data.store import HUB
from mkor_bench.errors import UserError
from mkor_bench.metrics import squad
from mkor_bench.tasks.squad import Squad
from mkor_bench.tasks.windows import batch_of, best_spans, windows
from small_data import WORDS, write_small_data

pytest.importorskip("transformers", reason="needs the package transformers")


@pytest.fixture
def tokenizer():
    from transformers import BertTokenizerFast

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    return BertTokenizerFast(vocab={word: number for number, word in enumerate(words)})


def asked(context, answer, question="the dog"):
    return Question("q", question, context, (answer,), context.index(answer))


LONG = " ".join(["a"] * 10 + ["quick", "fox"] + ["the"] * 10)


def test_windows_show_every_word_of_a_paragraph_with_the_question(tokenizer):
    cut = windows([asked(LONG, "quick fox")], tokenizer, 13, 3)
    seen = set()
    for window in cut:
        assert len(window.words) <= 13
        assert window.words[:4].tolist() == tokenizer("the dog")["input_ids"]
        seen |= {place for place in window.begins.tolist() if place >= 0}
    assert len(seen) == len(LONG.split())
    shared = {*cut[0].begins.tolist()} & {*cut[1].begins.tolist()}
    assert len(shared - {-1}) == 3


def test_a_span_is_that_of_the_answer_and_only_where_it_is_whole(tokenizer):
    question = asked(LONG, "quick fox")
    spans = [(window, window.span(question)) for window in windows([question], tokenizer, 13, 3)]
    whole = [(window, span) for window, span in spans if span is not None]
    assert 0 < len(whole) < len(spans)
    for window, (first, last) in whole:
        assert LONG[window.begins[first] : window.ends[last]] == "quick fox"
    # A window that ends in the middle of the answer is none of those.
    halves = windows([question], tokenizer, 4 + 11 + 1, 1)
    assert "quick" in LONG[: halves[0].ends.max()] and halves[0].span(question) is None


def test_a_question_longer_than_a_window_is_shortened(tokenizer):
    cut = windows([asked(LONG, "fox", "the dog " * 40)], tokenizer, 16, 2)
    assert all(len(window.words) <= 16 for window in cut)
    assert sum((window.begins >= 0).sum().item() for window in cut) >= len(LONG.split())


@pytest.mark.parametrize("seed", range(3))
def test_the_best_span_is_that_of_all_pairs(seed):
    torch.manual_seed(seed)
    logits, allowed = torch.randn(2, 5, 12), torch.rand(5, 12) < 0.7
    found = best_spans(logits, allowed, longest=4)
    for row, (score, first, last) in enumerate(zip(*(f.tolist() for f in found), strict=True)):
        pairs = {
            (begin, end): (logits[0, row, begin] + logits[1, row, end]).item()
            for begin in range(12)
            for end in range(begin, min(begin + 4, 12))
            if allowed[row, begin] and allowed[row, end]
        }
        assert (first, last) == max(pairs, key=pairs.get)
        assert score == pytest.approx(max(pairs.values()))


class Oracle(torch.nn.Module):
    """Sees the word after a fox, and is surer of it the nearer the fox is to the window's begin."""

    def __init__(self, fox):
        super().__init__()
        self.fox = fox

    def forward(self, words, mask, segments):
        after = torch.nn.functional.pad(words == self.fox, (1, -1)) & (segments == 1)
        return (after * torch.linspace(9, 1, words.shape[1])).expand(2, -1, -1)


def test_answers_are_the_best_over_all_windows_of_a_question(tokenizer):
    questions = [asked(LONG, "the"), Question("r", "the", "a fox runs", ("runs", "it runs"), 6)]
    test = windows(questions, tokenizer, 13, 3)
    parts = Squad(None, "", None, [], torch.empty(0), questions, test)
    model = Oracle(tokenizer.convert_tokens_to_ids("fox"))
    assert parts.answers(model) == {"q": "the", "r": "runs"}
    assert parts.evaluate(model) == 0.5  # "the" is an article, so nothing is left of it
    assert parts.score(model).exact_match == 1


def test_batches_are_padded(tokenizer):
    words, mask, segments = batch_of(
        windows([asked("a fox", "fox"), asked(LONG, "fox")], tokenizer, 64, 8)
    )
    assert words.shape == mask.shape == segments.shape
    assert mask[0].sum() == 4 + 2 + 1 and not words[0, 7:].any() and mask[1].all()


def test_a_line_that_is_not_as_documented_is_named(tmp_path):
    path = write_small_data(tmp_path) / "squad/dev.jsonl.gz"
    (tmp_path / "SHA256SUMS").unlink()
    good = {"id": "1", "context": "a fox", "question": "what", "answer": "fox", "answer_start": 2}
    for fault, message in (
        ({"answer_start": 1}, "'fox' does not begin at character 1 of its context"),
        ({"answer": ""}, "'' does not begin at character 2"),
    ):
        lines = [json.dumps(good), json.dumps({**good, **fault})]
        path.write_bytes(gzip.compress("\n".join(lines).encode()))
        load_squad.cache_clear()
        with pytest.raises(UserError, match=rf"line 2 of .*dev.jsonl.gz' is not .*{message}"):
            load_squad(tmp_path)
    path.write_bytes(gzip.compress(b"{}\n"))
    with pytest.raises(UserError, match=r"line 1 of .*: each must be a JSON object with id, co"):
        load_squad(tmp_path)


def test_the_hub_gives_several_answers(monkeypatch):
    def stored(path, name, split):
        assert path == "rajpurkar/squad"
        answers = {"text": ["fox", "a fox"], "answer_start": [2, 0]}
        return [{"id": split, "context": "a fox", "question": "what", "answers": answers}]

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=stored))
    load_squad.cache_clear()
    train, test = load_squad(HUB)
    load_squad.cache_clear()
    assert train == [Question("train", "what", "a fox", ("fox", "a fox"), 2)]
    assert test[0].name == "validation"


@pytest.mark.skipif("MKOR_DATA" not in os.environ, reason="needs MKOR_DATA, a folder with data")
def test_real_questions_have_their_answers_in_their_windows():
    from mkor_bench.models.bert import CHECKPOINTS, find_checkpoint, load_tokenizer

    folder = Path(os.environ["MKOR_DATA"])
    train, test = load_squad(folder)
    assert (len(train), len(test)) == (3_000, 1_190)
    tokenizer = load_tokenizer(find_checkpoint(CHECKPOINTS["minilm"], folder))
    cut = windows(test, tokenizer, 192, 64)
    answers = {}
    for window in cut:
        question = test[window.question]
        if span := window.span(question):
            first, last = span
            answers[question.name] = question.context[window.begins[first] : window.ends[last]]
    scores = squad(answers, {question.name: question.answers for question in test})
    # Word pieces end where words do, so that nearly every answer is a span of them.
    assert scores.exact_match > 0.98 and scores.f1 > 0.99
