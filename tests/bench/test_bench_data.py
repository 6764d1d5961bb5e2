"""Data sets: their layouts, their checksums, and what is said where they can't be had."""

import gzip
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from mkor_bench.data import store
from mkor_bench.data.cifar100 import MEAN, STD, load_cifar100, normalised
from mkor_bench.data.mnist import load_mnist
from mkor_bench.data.sentences import (
    COLA,
    MNLI,
    POLARITY,
    QNLI,
    REVIEWS,
    RTE,
    SST2,
    STSB,
    load_sentences,
)
from mkor_bench.data.text import load_shakespeare, load_wikitext2
from mkor_bench.errors import UserError
from mkor_bench.tasks.shakespeare import encode
from small_data import TEST, TRAIN, write_small_data


@pytest.fixture
def folder(tmp_path):
    """A folder of its own, which a test may damage."""
    return write_small_data(tmp_path)


def test_mnist_is_read_as_it_lies_there(folder):
    mnist = load_mnist(folder)
    stored = np.load(folder / "mnist_t10k/train.npz")
    assert mnist.train.images.shape == (TRAIN, 1, 28, 28)
    assert len(mnist.test.labels) == TEST
    pixels = torch.from_numpy(stored["images"][7]).float() / 255
    assert torch.equal(mnist.train.images[7, 0], pixels)
    assert mnist.train.labels.tolist() == stored["labels"].tolist()


def test_cifar_grids_are_cut_row_by_row(folder):
    fine, coarse = load_cifar100(folder), load_cifar100(folder, "coarse")
    assert fine.train.images.shape == (400, 3, 32, 32)
    grid = np.asarray(Image.open(folder / "cifar100/train_2.png"))
    tile = torch.from_numpy(grid[32:64, 32 * 3 : 32 * 4].copy()).permute(2, 0, 1).float() / 255
    assert torch.equal(fine.train.images[200 + 50 + 3], tile)
    assert torch.equal(fine.test.labels // 5, coarse.test.labels)


def test_normalised_images_have_the_stated_mean_and_deviation():
    flat = torch.tensor(MEAN).view(1, 3, 1, 1).expand(2, 3, 32, 32)
    assert torch.equal(normalised(flat), torch.zeros(2, 3, 32, 32))
    shifted = flat + torch.tensor(STD).view(3, 1, 1)
    torch.testing.assert_close(normalised(shifted), torch.ones(2, 3, 32, 32))


def test_texts_are_split_by_position(folder):
    text = load_shakespeare(folder)
    assert len(text.train) == 9 * len(text.train + text.test) // 10
    train, test, vocabulary = encode(text)
    characters = sorted(set(text.train + text.test))
    assert vocabulary == len(characters)
    assert "".join(characters[number] for number in test) == text.test
    assert len(train) == len(text.train)
    wiki = load_wikitext2(folder)
    assert wiki.train != wiki.test


def test_sentences_are_read_by_column_and_never_tested_on_what_is_trained_on(folder):
    train, test = load_sentences(RTE, folder)
    assert (len(train.labels), len(test.labels)) == (TRAIN - 1, TEST)  # one row was in both
    assert all(len(texts) == 2 for texts in train.texts)
    assert not set(train.texts) & set(test.texts)
    assert test.texts[0] == ("a dog", "sentence2") and test.labels[0] == 0
    assert [int("fox" in " ".join(t)) for t in train.texts] == train.labels


def test_sentences_without_their_columns_are_told(folder):
    path = folder / "sentence_polarity/test.tsv.gz"
    (folder / "SHA256SUMS").unlink()
    path.write_bytes(gzip.compress(b"text\tlabel\na\t1\n"))
    with pytest.raises(
        UserError, match=r"test.tsv.gz' is not as documented .*with sentence and lab"
    ):
        load_sentences(POLARITY, folder)


def test_scores_are_numbers_and_the_column_before_them_is_left_out(folder):
    train, test = load_sentences(STSB, folder)
    assert all(len(texts) == 2 for texts in train.texts) and test.texts[0] == (
        "sentence1",
        "sentence2",
    )
    assert {type(score) for score in train.labels} == {float}


def test_mnli_comes_from_the_hub_with_its_own_columns(monkeypatch):
    asked = []

    def stored(path, name, split, **options):
        asked.append((path, name, split, options))
        return {"premise": [split, "p"], "hypothesis": ["h", "i"], "label": [2, 0], "idx": [0, 1]}

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=stored))
    train, test = load_sentences(MNLI, store.HUB)
    load_sentences.cache_clear()
    parts = ("train", "validation_matched")
    assert asked == [("nyu-mll/glue", "mnli", split, {}) for split in parts]
    assert train.texts == [("train", "h")] and train.labels == [2]  # the other is in both
    assert test.texts == [("validation_matched", "h"), ("p", "i")]


def test_data_that_no_folder_has_may_come_from_the_hub(tmp_path):
    with pytest.raises(UserError, match=r"lacks glue/mnli_train.tsv.gz .* or fetch the original w"):
        load_sentences(MNLI, tmp_path)


def test_a_missing_file_is_named(folder):
    (folder / "cifar100/labels.npz").unlink()
    (folder / "cifar100/test_0.png").unlink()
    with pytest.raises(UserError, match=r"lacks cifar100/test_0.png and 1 more: name a folder"):
        load_cifar100(folder)


def test_a_damaged_file_is_named(folder):
    path = folder / "tinyshakespeare/input.txt.gz"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(UserError, match=r"input.txt.gz' is damaged: its checksum is not the one"):
        load_shakespeare(folder)


def test_files_without_a_checksum_are_taken_as_they_are(folder):
    (folder / "SHA256SUMS").unlink()
    assert len(load_mnist(folder).test.labels) == TEST


def test_no_folder_is_told():
    with pytest.raises(UserError, match="MNIST is needed: name the folder that holds it with --d"):
        load_mnist(None)


def test_a_hub_that_is_out_of_reach_is_told(monkeypatch):
    def unreachable(*_, **__):
        raise ConnectionError("no route\nat all")

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=unreachable))
    with pytest.raises(UserError, match=r"'ylecun/mnist' could not be fetched .*\(no route\): con"):
        load_mnist(store.HUB)


def test_the_hub_gives_the_same_kind_of_data(monkeypatch, folder):
    local = load_mnist(folder)

    def stored(path, name, split):
        assert (path, name) == ("ylecun/mnist", None)
        part = getattr(local, split)
        images = (part.images[:, 0] * 255).round().to(torch.uint8).numpy()
        return {"image": [Image.fromarray(i) for i in images], "label": part.labels.tolist()}

    monkeypatch.setattr("mkor_bench.data.images.from_hub", stored)
    load_mnist.cache_clear()
    fetched = load_mnist(store.HUB)
    load_mnist.cache_clear()
    for part in ("train", "test"):
        assert torch.equal(getattr(fetched, part).labels, getattr(local, part).labels)
        torch.testing.assert_close(getattr(fetched, part).images, getattr(local, part).images)


@pytest.mark.skipif("MKOR_DATA" not in os.environ, reason="needs MKOR_DATA, a folder with data")
def test_the_folder_of_data_is_whole():
    folder = Path(os.environ["MKOR_DATA"])
    assert load_mnist(folder).train.images.shape == (8000, 1, 28, 28)
    cifar = load_cifar100(folder, "coarse")
    assert len(cifar.train.labels) == 10_000 and len(cifar.test.labels) == 2_000
    assert cifar.train.labels.bincount().tolist() == [500] * 20
    assert len(load_shakespeare(folder).train) == 1_003_854
    assert len(load_wikitext2(folder).test) > 1_000_000
    assert [len(part.labels) for part in load_sentences(COLA, folder)] == [8_551 - 16, 1_043]
    assert [len(part.labels) for part in load_sentences(RTE, folder)] == [2_490, 277]
    assert [len(part.labels) for part in load_sentences(POLARITY, folder)] == [9_662, 1_000]
    assert [len(part.labels) for part in load_sentences(SST2, folder)] == [12_000, 872]
    assert [len(part.labels) for part in load_sentences(QNLI, folder)] == [4_463, 1_000]
    assert [len(part.labels) for part in load_sentences(REVIEWS, folder)] == [1_600, 400]
    train, test = load_sentences(STSB, folder)
    assert (len(train.labels), len(test.labels)) == (2_999 - 1, 625)
    assert all(0 <= score <= 5 for score in train.labels) and 4.4 in train.labels
