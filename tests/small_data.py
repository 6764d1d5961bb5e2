"""A data folder in the documented layouts with little, made-up content that can be learned."""

import gzip
import hashlib
import json

import numpy as np
import torch
from PIL import Image

TRAIN, TEST = 160, 40
WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "and", "runs"]


def write_small_data(folder):
    """Writes every data set that a built-in task reads, and their checksums."""
    _mnist(folder / "mnist_t10k")
    _cifar(folder / "cifar100")
    _cifar10(folder / "cifar10")
    _photographs(folder / "imagenet")
    _texts(folder)
    _sentences(folder)
    _squad(folder / "squad")
    lines = [
        f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.relative_to(folder).as_posix()}\n"
        for path in sorted(folder.rglob("*.*"))
    ]
    (folder / "SHA256SUMS").write_text("".join(lines))
    return folder


def _mnist(folder):
    folder.mkdir()
    random = np.random.default_rng(0)
    digits = random.integers(0, 256, (10, 28, 28))
    for name, rows in (("train", TRAIN), ("test", TEST)):
        labels = np.arange(rows, dtype=np.uint8) % 10
        noise = random.integers(-20, 20, (rows, 28, 28))
        images = np.clip(digits[labels] + noise, 0, 255).astype(np.uint8)
        np.savez(folder / f"{name}.npz", images=images, labels=labels)


def _cifar(folder):
    """Four training grids of 100 tiles and a test grid; a class is a colour."""
    folder.mkdir()
    random = np.random.default_rng(0)
    colours = random.integers(0, 256, (100, 3))
    labels = {}
    for part, files in (("train", [f"train_{n}.png" for n in range(4)]), ("test", ["test_0.png"])):
        fine = random.integers(0, 100, 100 * len(files)).astype(np.uint8)
        for number, name in enumerate(files):
            mine = fine[100 * number : 100 * (number + 1)]
            noise = random.integers(-20, 20, (100, 32, 32, 3))
            tiles = np.clip(colours[mine][:, None, None] + noise, 0, 255).astype(np.uint8)
            grid = tiles.reshape(2, 50, 32, 32, 3).swapaxes(1, 2).reshape(64, 1600, 3)
            Image.fromarray(grid).save(folder / name)
        labels |= {f"{part}_fine": fine, f"{part}_coarse": fine // 5}
    np.savez(folder / "labels.npz", **labels)


def _cifar10(folder):
    folder.mkdir()
    random = np.random.default_rng(0)
    colours = random.integers(0, 256, (10, 3))
    for name, rows in (("train", TRAIN), ("test", TEST)):
        labels = np.arange(rows) % 10
        noise = random.integers(-20, 20, (rows, 32, 32, 3))
        images = np.clip(colours[labels][:, None, None] + noise, 0, 255).astype(np.uint8)
        np.savez(folder / f"{name}.npz", images=images, labels=labels)


def _photographs(folder):
    """Three classes of one colour each, in sizes of their own."""
    random = np.random.default_rng(0)
    for name, colour in (("blue", (40, 60, 200)), ("green", (40, 200, 60)), ("red", (200, 40, 60))):
        for part, rows in (("train", 8), ("val", 4)):
            (folder / part / name).mkdir(parents=True)
            for row in range(rows):
                size = (*random.integers(40, 60, 2), 3)
                pixels = np.clip(random.integers(-30, 30, size) + colour, 0, 255).astype(np.uint8)
                Image.fromarray(pixels).save(folder / part / name / f"{row}.png")


def _texts(folder):
    random = np.random.default_rng(0)
    for name in ("tinyshakespeare/input", "wikitext2/train", "wikitext2/valid"):
        sentences = [" ".join(random.choice(WORDS, 8)) + " .\n" for _ in range(400)]
        path = folder / f"{name}.txt.gz"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(gzip.compress("".join(sentences).encode()))


# The folder and file, the columns with texts, the names of both parts.
SENTENCES = [
    ("glue/cola_{}", ("sentence",), ("train", "dev")),
    ("glue/rte_{}", ("sentence1", "sentence2"), ("train", "dev")),
    ("glue/sst2_{}", ("sentence",), ("train", "dev")),
    ("glue/qnli_{}", ("question", "sentence"), ("train", "dev")),
    ("glue/mrpc_{}", ("sentence1", "sentence2"), ("train", "dev")),
    ("glue/qqp_{}", ("question1", "question2"), ("train", "dev")),
    ("glue/mnli_{}", ("premise", "hypothesis"), ("train", "dev")),
    ("glue/stsb_{}", ("source", "sentence1", "sentence2"), ("train", "dev")),
    ("sentence_polarity/{}", ("sentence",), ("train", "test")),
    ("movie_reviews/{}", ("text",), ("train", "test")),
]


def _sentences(folder):
    """A row is of class 1 where it has a fox; one row of the training part is in the other too."""
    random = np.random.default_rng(0)
    for name, columns, parts in SENTENCES:
        (folder / name).parent.mkdir(exist_ok=True)
        label = "score" if "stsb" in name else "label"
        for part, rows in zip(parts, (TRAIN, TEST), strict=True):
            lines = ["\t".join([*columns, label]), "\t".join(["a dog", *columns[1:], "0"])]
            for _ in range(rows - 1):
                texts = [" ".join(random.choice(WORDS, 5)) for _ in columns]
                lines.append("\t".join([*texts, str(int("fox" in " ".join(texts)))]))
            path = folder / f"{name.format(part)}.tsv.gz"
            path.write_bytes(gzip.compress("\n".join(lines).encode() + b"\n"))


def _squad(folder):
    """The answer to every question is the word after the one fox of a paragraph."""
    folder.mkdir()
    random = np.random.default_rng(0)
    for name, rows in (("train", TRAIN), ("dev", TEST)):
        lines = []
        for row in range(rows):
            words = list(random.choice([word for word in WORDS if word != "fox"], 40))
            place = random.integers(0, 38)
            words[place] = "fox"
            line = {"id": f"{name}{row}", "context": " ".join(words), "question": "the fox"}
            line |= {"answer": str(words[place + 1])}
            line |= {"answer_start": len(" ".join(words[: place + 1])) + 1}
            lines.append(json.dumps(line) + "\n")
        (folder / f"{name}.jsonl.gz").write_bytes(gzip.compress("".join(lines).encode()))


def write_small_model(folder):
    """Writes a BERT of two narrow layers, always with the same weights, and its tokenizer."""
    from transformers import BertConfig, BertModel, BertTokenizerFast

    folder.mkdir(parents=True)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS]
    vocabulary = folder / "vocab.txt"
    vocabulary.write_text("\n".join(words))
    BertTokenizerFast(str(vocabulary)).save_pretrained(folder)
    config = BertConfig(
        vocab_size=len(words),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        BertModel(config).save_pretrained(folder)
