"""BERT's own pre-training: which words are chosen and hidden, passages, Wikipedia, the loss."""

import gzip
import sys
from itertools import islice
from types import SimpleNamespace

import pytest
import torch
from torch.nn.functional import cross_entropy, one_hot

from mkor_bench.data.store import BLANK, HUB
from mkor_bench.data.wikipedia import Wikipedia
from mkor_bench.errors import UserError
from mkor_bench.models.bert import CHECKPOINTS
from mkor_bench.tasks.bert_masked import QUICK, BertMasked, find_passages, packed, pieces
from mkor_bench.tasks.masking import drawn_places
from mkor_bench.tasks.source import TaskSource
from small_data import WORDS, write_small_data, write_small_model
from streams import Stream

pytest.importorskip("transformers", reason="needs the package transformers")

MINILM = CHECKPOINTS["minilm"]
SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
UNK, CLS, SEP, MASK = 1, 2, 3, 4


@pytest.fixture
def tokenizer():
    from transformers import BertTokenizerFast

    return BertTokenizerFast(vocab={w: number for number, w in enumerate([*SPECIAL, *WORDS])})


@pytest.fixture
def folder(tmp_path):
    write_small_data(tmp_path)
    (tmp_path / "SHA256SUMS").unlink()
    write_small_model(tmp_path / MINILM.folder)
    return tmp_path


@pytest.fixture
def parts(folder, tokenizer):
    passages = find_passages(folder, tokenizer, QUICK.length - 2)
    return BertMasked(MINILM, str(folder / MINILM.folder), tokenizer, QUICK, passages)


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def test_as_many_words_are_drawn_in_each_row_anywhere_in_it():
    places = drawn_places(torch.ones(4_000, 20, dtype=torch.bool), generator())
    assert places.shape == (4_000, 3)
    assert (places[:, 1:] > places[:, :-1]).all()  # ascending, so none twice
    share = places.flatten().bincount(minlength=20) / 4_000
    torch.testing.assert_close(share, torch.full((20,), 0.15), atol=0.03, rtol=0)


def test_unknown_words_are_drawn_only_where_others_are_too_few():
    known = torch.zeros(200, 20, dtype=torch.bool)
    known[:, :2] = True
    known[100:, 10:] = True
    places = drawn_places(known, generator())
    assert places[:100, :2].tolist() == [[0, 1]] * 100
    assert known.gather(1, places)[100:].all()
    assert drawn_places(known[:, :3], generator()).shape == (200, 1)


def test_a_batch_hides_the_words_that_are_to_be_told_and_no_other(parts):
    batches = list(islice(parts.batches(0), 40))
    assert {tuple(part.shape for part in batch) for batch in batches} == {((8, 16), (8, 2), (8, 2))}
    shown, places, words = (torch.cat(part) for part in zip(*batches, strict=True))
    assert (shown[:, 0] == CLS).all() and (shown[:, -1] == SEP).all()
    assert places.min() >= 1 and places.max() <= 14
    others = torch.ones_like(shown).scatter(1, places, 0).bool()
    assert (shown[others] != MASK).all()
    hidden, same = shown.gather(1, places) == MASK, shown.gather(1, places) == words
    assert hidden.double().mean().item() == pytest.approx(0.8, abs=0.06)
    assert same.double().mean().item() == pytest.approx(0.1 + 0.1 / 16, abs=0.05)


def test_what_is_shown_elsewhere_is_the_text(parts):
    text = torch.arange(5, 5 + 14).repeat(3, 1)
    shown, places, words = parts.masked(text, generator())
    whole = shown[:, 1:-1].scatter(1, places - 1, words)
    assert torch.equal(whole, text)


def test_the_loss_is_that_of_the_chosen_words_by_the_whole_network(parts):
    model = parts.build(0).eval()
    shown, places, words = next(parts.batches(0))
    labels = torch.full_like(shown, -100).scatter(1, places, words)
    whole = model.network(input_ids=shown, labels=labels)
    torch.testing.assert_close(parts.loss(model, (shown, places, words)), whole.loss)
    logits = whole.logits.gather(1, places[:, :, None].expand(-1, -1, whole.logits.shape[2]))
    torch.testing.assert_close(model(shown, places), logits)
    torch.testing.assert_close(
        whole.loss, cross_entropy(logits.double().flatten(0, 1), words.flatten()).float()
    )


def test_the_head_is_tied_to_the_embeddings(parts):
    network = parts.build(0).network
    decoder, embeddings = network.cls.predictions.decoder, network.bert.embeddings
    assert decoder.weight is embeddings.word_embeddings.weight
    assert len(network.bert.encoder.layer) == QUICK.layers


def test_the_metric_is_the_share_of_chosen_words_that_are_told_right(parts):
    answer = len(SPECIAL) + WORDS.index("fox")

    def always(shown, places):
        return one_hot(torch.full_like(places, answer), 16).float()

    rows, drawn = list(islice(parts.source.test(), QUICK.test_rows)), generator()
    told = [parts.masked(torch.stack(rows[at : at + 8]), drawn)[2] for at in (0, 8)]
    expected = (torch.cat(told) == answer).double().mean().item()
    assert 0 < expected < 1
    assert parts.evaluate(always) == pytest.approx(expected)


def test_blank_lines_have_no_word_pieces(tokenizer):
    assert pieces([" the fox\n\n  \n a dog\n", "", "\n"], tokenizer) == [
        tokenizer.convert_tokens_to_ids(word) for word in ("the", "fox", "a", "dog")
    ]
    assert pieces(["", " \n"], tokenizer) == []


def test_passages_of_a_stream_follow_each_other_over_the_ends_of_texts(tokenizer):
    texts = ["the quick", "", "brown fox jumps over a lazy", "dog", "and runs"]
    rows = torch.stack(list(packed(texts, tokenizer, 3)))
    whole = torch.tensor(pieces(texts, tokenizer))
    assert rows.shape == (3, 3) and torch.equal(rows.flatten(), whole[:9])


def test_rare_words_of_wikitext_are_unknown_ones(folder, tokenizer):
    text = "the <unk> fox " * 40
    for part in ("train", "valid"):
        (folder / f"wikitext2/{part}.txt.gz").write_bytes(gzip.compress(text.encode()))
    (row,) = islice(find_passages(folder, tokenizer, 3).test(), 1)
    assert row.tolist() == pieces(["the [UNK] fox"], tokenizer) and row[1] == UNK


@pytest.mark.parametrize(
    ("part", "content", "message"),
    [
        ("train", "\n \n\n", r"train.txt.gz' is not as documented (it is empty)"),
        ("train", "the fox\n\n", "2 word pieces to train on are fewer than the 14 of a passage"),
        ("valid", "the fox\n\n", "2 word pieces to test on are fewer than the 14 of a passage"),
    ],
)
def test_a_text_without_words_is_told_before_training(mkor, folder, part, content, message):
    from mkor_bench.tasks import bert_masked

    (folder / f"wikitext2/{part}.txt.gz").write_bytes(gzip.compress(content.encode()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(bert_masked.SIZES, "minilm", QUICK)
        result = mkor("train", "minilm-masked", "--steps", "1", "--data", folder)
    assert result.exit_code == 2 and message in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert not (folder / "runs").exists()


def on_the_hub(monkeypatch, rows):
    stream, asked = Stream(rows), []

    def stored(path, name, **options):
        asked.append((path, name, options))
        return stream

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=stored))
    return stream, asked


def test_wikipedia_streams_and_is_never_tested_on_what_is_trained_on(monkeypatch):
    rows = [{"id": str(number), "text": f"article {number}"} for number in (7, 100, 8, 300)]
    stream, asked = on_the_hub(monkeypatch, [*rows, {"id": "9", "text": " \n"}])
    articles = Wikipedia()
    options = {"split": "train", "streaming": True}
    assert asked == [("wikimedia/wikipedia", "20231101.en", options)]
    assert list(islice(articles.train(5), 3)) == ["article 7", "article 8", "article 7"]
    assert stream.seed == 5 and stream.epochs == [0, 1]
    assert list(articles.test()) == ["article 100", "article 300"]


def test_each_epoch_of_a_stream_has_every_article_in_another_order(monkeypatch):
    datasets = pytest.importorskip("datasets", reason="needs the package datasets")

    def articles(files):
        for file in files:
            for number in range(6 * file, 6 * file + 6):
                yield {"id": str(number + 1), "text": f"article {number + 1}"}

    stored = datasets.IterableDataset.from_generator(articles, gen_kwargs={"files": [0, 1, 2]})
    monkeypatch.setattr("mkor_bench.data.wikipedia.from_hub", lambda *_, **__: stored)
    first, second = (list(islice(Wikipedia().train(seed), 36)) for seed in (0, 1))
    assert sorted(first[:18]) == sorted(first[18:]) == sorted(f"article {n}" for n in range(1, 19))
    assert first[:18] != first[18:] and first != second
    assert list(islice(Wikipedia().train(0), 36)) == first


def test_the_hub_gives_passages_of_wikipedia(monkeypatch, tokenizer):
    rows = [{"id": str(number), "text": "the quick fox\n\njumps"} for number in range(1, 101)]
    on_the_hub(monkeypatch, rows)
    passages = find_passages(HUB, tokenizer, 3)
    trained = torch.stack(list(islice(passages.train(0), 4)))
    assert torch.equal(
        trained.flatten(), torch.tensor(pieces(["the quick fox jumps"] * 3, tokenizer))
    )
    assert [row.tolist() for row in passages.test()] == [trained[0].tolist()]


def test_a_wikipedia_without_text_or_network_is_told(monkeypatch):
    on_the_hub(monkeypatch, [{"id": "1", "text": ""}, {"id": "100", "text": "for testing"}])
    with pytest.raises(UserError, match=r"'wikimedia/wikipedia' is .*\(no article has a text\)"):
        next(Wikipedia().train(0))

    class Broken(Stream):
        def __iter__(self):
            yield {"id": "1", "text": "the fox"}
            raise ConnectionError("reset by peer")

    monkeypatch.setitem(
        sys.modules, "datasets", SimpleNamespace(load_dataset=lambda *_, **__: Broken())
    )
    texts = Wikipedia().train(0)
    assert next(texts) == "the fox"
    with pytest.raises(UserError, match=r"could not be fetched from the hub \(reset by peer\): "):
        next(texts)


@pytest.mark.parametrize(
    ("name", "rows", "length", "chosen"),
    [("minilm", 8, 128, 19), ("bert-base", 8, 512, 76), ("bert-large", 8, 512, 76)],
)
def test_sizes_are_as_documented(name, rows, length, chosen):
    task = TaskSource(f"{name}-masked", BLANK).load()
    shapes = [tuple(part.shape) for part in next(task.batches(0))]
    assert shapes == [(rows, length), (rows, chosen), (rows, chosen)]
