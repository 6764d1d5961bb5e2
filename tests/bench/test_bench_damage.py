"""Data that are damaged, too few or not as documented: told in one line, before any training."""

import gzip
import json

import numpy as np
import pytest
import torch
from PIL import Image

from mkor_bench.data.cifar10 import load_cifar10
from mkor_bench.data.cifar100 import load_cifar100
from mkor_bench.data.mnist import load_mnist
from mkor_bench.data.sentences import COLA, MNLI, POLARITY, STSB, load_sentences
from mkor_bench.data.squad import load_squad
from mkor_bench.data.text import load_shakespeare, load_wikitext2
from mkor_bench.errors import UserError
from mkor_bench.tasks.batches import passages, shuffled_batches
from small_data import write_small_data


@pytest.fixture
def folder(tmp_path):
    """A folder of its own without checksums, so that damage is found by reading alone."""
    made = write_small_data(tmp_path)
    (made / "SHA256SUMS").unlink()
    return made


def zeros(rows, *shape, dtype=np.uint8):
    return np.zeros((rows, *shape), dtype)


TOO_FEW = {
    "mnist-convnet": "10 rows to train on are fewer than the 64 of a batch: name data with more",
    "mnist-autoencoder": "10 rows to train on are fewer than the 128 of a batch: name data with m",
}


@pytest.mark.parametrize("task", TOO_FEW)
def test_fewer_images_than_a_batch_end_the_command_and_leave_nothing(mkor, folder, task):
    np.savez(folder / "mnist_t10k/train.npz", images=zeros(10, 28, 28), labels=np.arange(10))
    result = mkor("train", task, "--steps", "1", "--data", folder)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"Error: {TOO_FEW[task]}")
    assert len(result.stderr.splitlines()) == 1
    assert not (folder / "runs").exists()


def test_fewer_rows_than_a_batch_are_told_before_the_first():
    with pytest.raises(UserError, match="3 rows to train on are fewer than the 4 of a batch"):
        shuffled_batches((torch.arange(3),), 4, seed=0)
    assert len(next(shuffled_batches((torch.arange(4),), 4, seed=0))[0]) == 4


def test_passages_begin_anywhere_that_leaves_room():
    drawn = passages(torch.arange(5), 3, 200, torch.Generator().manual_seed(0))
    assert {tuple(row) for row in drawn.tolist()} == {(0, 1, 2), (1, 2, 3), (2, 3, 4)}


@pytest.mark.parametrize(
    ("task", "name", "content", "message"),
    [
        ("shakespeare", "tinyshakespeare/input", "to be or", "7 characters to train on are fewer"),
        ("shakespeare", "tinyshakespeare/input", "a" * 300, "30 characters to test on are fewer"),
        ("wikitext-masked", "wikitext2/train", "a word or two", "4 words to train on are fewer"),
        ("wikitext-masked", "wikitext2/valid", "a word or two", "4 words to test on are fewer"),
    ],
)
def test_a_text_shorter_than_a_passage_is_told(mkor, folder, task, name, content, message):
    (folder / f"{name}.txt.gz").write_bytes(gzip.compress(content.encode()))
    result = mkor("train", task, "--steps", "1", "--data", folder)
    assert result.exit_code == 2 and message in result.stderr
    assert len(result.stderr.splitlines()) == 1


LABELS = np.arange(10)
IMAGES = {
    "width": (zeros(10, 28, 27), LABELS, "images are uint8 [10, 28, 27]"),
    "pixels": (zeros(10, 28, 28, dtype=np.float32), LABELS, "images are float32 [10, 28, 28]"),
    "none": (zeros(0, 28, 28), LABELS[:0], "images are uint8 [0, 28, 28]"),
    "a single number": (np.uint8(3), LABELS, "images are uint8 []"),
    "length": (zeros(10, 28, 28), LABELS[:9], "labels are int64 [9] for 10 images"),
    "kind": (zeros(10, 28, 28), LABELS / 2, "labels are float64 [10] for 10 images"),
    "class": (zeros(10, 28, 28), LABELS + 1, "label 9 is 10"),
    "negative": (zeros(10, 28, 28), LABELS - 1, "label 0 is -1"),
}


@pytest.mark.parametrize("fault", IMAGES)
def test_images_that_are_not_as_documented_are_told(folder, fault):
    images, labels, problem = IMAGES[fault]
    path = folder / "mnist_t10k/train.npz"
    np.savez(path, images=images, labels=labels)
    with pytest.raises(UserError) as raised:
        load_mnist(folder)
    assert str(raised.value) == (
        f"{str(path)!r} is not as documented ({problem}): images must be uint8 [n, 28, 28] and "
        "labels n whole numbers from 0 to 9, with n at least 1; "
        "get it anew, or name other data with --data."
    )


GRIDS = {
    "width": (zeros(64, 1632, 3), "it is RGB, 1632 by 64"),
    "height": (zeros(65, 1600, 3), "it is RGB, 1600 by 65"),
    "grey": (zeros(64, 1600), "it is L, 1600 by 64"),
}


@pytest.mark.parametrize("fault", GRIDS)
def test_a_grid_that_cannot_be_cut_is_told(folder, fault):
    grid, problem = GRIDS[fault]
    Image.fromarray(grid).save(folder / "cifar100/train_1.png")
    with pytest.raises(UserError, match=r"train_1.png' is not as documented") as raised:
        load_cifar100(folder)
    assert f"({problem}): it must be an RGB image of 32 by 32 tiles" in str(raised.value)


@pytest.mark.parametrize(
    ("name", "change", "problem"),
    [
        ("train_fine", lambda fine: fine[:-1], r"labels are uint8 \[399\] for 400 images"),
        ("test_fine", lambda fine: np.full_like(fine, 100), "label 0 is 100"),
    ],
)
def test_classes_that_do_not_fit_their_grids_are_told(folder, name, change, problem):
    path = folder / "cifar100/labels.npz"
    with np.load(path) as stored:
        arrays = dict(stored)
    np.savez(path, **{**arrays, name: change(arrays[name])})
    with pytest.raises(UserError, match=rf"{name} of .*labels.npz' is not .*\({problem}\): images"):
        load_cifar100(folder)


def cut(content):
    return content[: len(content) // 2]


def overwritten(content):
    return b"something else" + content[14:]


def altered(content):
    middle = len(content) // 2
    return content[:middle] + bytes(byte ^ 255 for byte in content[middle : middle + 40])


READERS = {
    "mnist_t10k/train.npz": load_mnist,
    "cifar10/train.npz": load_cifar10,
    "cifar100/labels.npz": load_cifar100,
    "cifar100/test_0.png": load_cifar100,
    "glue/stsb_train.tsv.gz": lambda folder: load_sentences(STSB, folder),
    "squad/train.jsonl.gz": load_squad,
    "tinyshakespeare/input.txt.gz": load_shakespeare,
    "wikitext2/valid.txt.gz": load_wikitext2,
}


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("damage", [cut, overwritten, altered, lambda content: b""])
def test_a_damaged_file_is_told_without_a_checksum(folder, name, damage):
    path = folder / name
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(UserError) as raised:
        READERS[name](folder)
    message = str(raised.value)
    # Python's gzip reads a file of no bytes as an empty text.
    known = ("' cannot be read (", "' is not as documented (it is empty)")
    assert name.partition("/")[2] in message and any(part in message for part in known)
    assert message.endswith("; get it anew, or name other data with --data.")
    assert "\n" not in message


def test_a_file_that_is_cut_short_does_not_look_like_an_interrupted_command(mkor, folder):
    path = folder / "wikitext2/train.txt.gz"
    path.write_bytes(cut(path.read_bytes()))
    result = mkor("train", "wikitext-masked", "--steps", "1", "--data", folder)
    assert result.exit_code == 2
    assert result.stderr == (
        f"Error: {str(path)!r} cannot be read (EOFError: Compressed file ended before the "
        "end-of-stream marker was reached): it must be gzipped UTF-8 text; "
        "get it anew, or name other data with --data.\n"
    )


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"\xff\xfe\x00", r"cannot be read \(UnicodeDecodeError: "),
        (b"", r"is not as documented \(it is empty\)"),
        (b" \n\n", r"is not as documented \(it is empty\)"),
    ],
)
@pytest.mark.parametrize("name", [name for name in READERS if name.endswith(".gz")])
def test_a_text_that_is_empty_or_not_utf_8_is_told(folder, name, content, problem):
    (folder / name).write_bytes(gzip.compress(content))
    with pytest.raises(UserError, match=rf"{name}' {problem}.*: it must be gzipped UTF-8 text; "):
        READERS[name](folder)


def test_an_archive_without_its_arrays_is_told(folder):
    np.savez(folder / "mnist_t10k/test.npz", images=zeros(10, 28, 28))
    with pytest.raises(
        UserError, match=r"test.npz' cannot be read \(KeyError: .*labels.*with imag"
    ):
        load_mnist(folder)


PAIR, ONE = "sentence1\tsentence2\tscore\n", "sentence\tlabel\n"
NLI = "premise\thypothesis\tlabel\n"
TABLE = "it must have a header line with sentence1, sentence2 and score, and its columns in every"
SCORE = "each score must be a number from 0 to 5; get it anew"
TABLES = {
    "no row": (STSB, "glue/stsb_train", PAIR, "", "no line after the header", TABLE),
    "no column": (STSB, "glue/stsb_train", f"{ONE}a\t1\n", "", "no column 'sentence1'", TABLE),
    "a column less": (
        STSB,
        "glue/stsb_dev",
        f"{PAIR}a\tb\t1\na\tb\n",
        "line 3 of ",
        "2 columns where the header has 3",
        TABLE,
    ),
    "nan": (STSB, "glue/stsb_train", f"{PAIR}a\tb\tnan\n", "line 2 of ", "score 'nan'", SCORE),
    "high": (STSB, "glue/stsb_train", f"{PAIR}a\tb\t5.01\n", "line 2 of ", "score '5.01'", SCORE),
    "low": (STSB, "glue/stsb_dev", f"{PAIR}a\tb\t-0.1\n", "line 2 of ", "score '-0.1'", SCORE),
    "a third class": (
        COLA,
        "glue/cola_train",
        f"{ONE}a\t1\nb\t2\n",
        "line 3 of ",
        "label '2'",
        "each label must be a whole number from 0 to 1; get it anew",
    ),
    "hidden": (
        COLA,
        "glue/cola_dev",
        f"{ONE}a\t-1\n",
        "line 2 of ",
        "label '-1'",
        "each label must",
    ),
    "a fourth class": (
        MNLI,
        "glue/mnli_dev",
        f"{NLI}a\tb\t2\na\tb\t3\n",
        "line 3 of ",
        "label '3'",
        "each label must be a whole number from 0 to 2; get it anew",
    ),
    "half a class": (
        POLARITY,
        "sentence_polarity/test",
        f"{ONE}a\t0.5\n",
        "line 2 of ",
        "label '0.5'",
        "each label must be a whole number",
    ),
}


@pytest.mark.parametrize("fault", TABLES)
def test_rows_that_are_not_as_documented_are_told(folder, fault):
    source, name, content, line, problem, rule = TABLES[fault]
    path = folder / f"{name}.tsv.gz"
    path.write_bytes(gzip.compress(content.encode()))
    with pytest.raises(UserError) as raised:
        load_sentences(source, folder)
    told = f"{line}{str(path)!r} is not as documented ({problem}): {rule}"
    assert str(raised.value).startswith(told)


def test_scores_at_both_ends_of_their_range_are_taken(folder):
    path = folder / "glue/stsb_dev.tsv.gz"
    path.write_bytes(gzip.compress(f"{PAIR}a\tb\t0\nb\tc\t5.000\n".encode()))
    assert load_sentences(STSB, folder)[1].labels == [0.0, 5.0]


def test_a_training_part_that_is_all_tested_on_is_told(folder):
    for part in ("train", "dev"):
        (folder / f"glue/cola_{part}.tsv.gz").write_bytes(gzip.compress(b"sentence\tlabel\na\t1\n"))
    with pytest.raises(UserError, match=r"training part of CoLA is .*each of its 1 rows is in the"):
        load_sentences(COLA, folder)


def test_labels_of_the_hub_keep_the_same_rule(monkeypatch):
    stored = {"sentence": ["a", "b"], "label": [0, -1]}
    monkeypatch.setattr("mkor_bench.data.sentences.from_hub", lambda *_: stored)
    load_sentences.cache_clear()
    with pytest.raises(
        UserError, match=r"the train part of 'nyu-mll/glue' .*\(label -1\): each la"
    ):
        load_sentences(COLA, "hub")


QUESTION = {"id": "1", "context": "a fox", "question": "what", "answer": "fox", "answer_start": 2}


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("", "Expecting value"),
        ("[]", "list indices must be"),
        (json.dumps({"id": "1"}), "no 'question'"),
        (json.dumps({**QUESTION, "answer": "a", "answer_start": -5}), "'a' does not begin at char"),
        (json.dumps({**QUESTION, "question": None}), "id, question and answer must be texts"),
        (json.dumps({**QUESTION, "context": 3}), "'int' object has no attribute"),
    ],
)
def test_a_question_that_is_not_as_documented_is_told(folder, line, problem):
    good = json.dumps(QUESTION)
    content = f"{good}\n{line}\n{good}\n".encode()
    (folder / "squad/dev.jsonl.gz").write_bytes(gzip.compress(content))
    with pytest.raises(UserError, match=rf"line 2 of .*dev.jsonl.gz' is not .*\({problem}.*: each"):
        load_squad(folder)


def test_a_paragraph_may_have_the_line_separators_of_unicode(folder):
    context = "a\u2028b\x85 fox"
    line = json.dumps({**QUESTION, "context": context, "answer_start": 5}, ensure_ascii=False)
    (folder / "squad/dev.jsonl.gz").write_bytes(gzip.compress(line.encode()))
    (read,) = load_squad(folder)[1]
    assert read.context == context


DIGEST = "ab" * 32


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("", r"it has no checksum"),
        ("# nothing yet\n\n", r"it has no checksum"),
        ("what is this\n", r"line 1 is 'what is this'"),
        (f"{DIGEST}  a/b\n{DIGEST[:-1]}  mnist_t10k/train.npz\n", r"line 2 is 'abab"),
    ],
)
def test_a_file_of_checksums_that_has_none_is_told(folder, content, problem):
    (folder / "SHA256SUMS").write_text(content)
    with pytest.raises(UserError, match=rf"SHA256SUMS' cannot check the files \({problem}") as told:
        load_mnist(folder)
    assert "64 hexadecimal digits, two spaces and a path, as sha256sum writes it" in str(told.value)
    assert str(told.value).endswith("write it anew, or remove it to use the files unchecked.")


def test_checksums_of_paths_from_here_and_in_capitals_are_checked(folder):
    (folder / "SHA256SUMS").write_text(f"{DIGEST.upper()} *./mnist_t10k/test.npz\n")
    with pytest.raises(UserError, match=r"test.npz' is damaged: its checksum is not the one"):
        load_mnist(folder)
