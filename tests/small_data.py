"""A data folder in the documented layouts with little, made-up content that can be learned."""

import gzip
import hashlib

import numpy as np
from PIL import Image

TRAIN, TEST = 160, 40


def write_small_data(folder):
    """Writes every data set that a built-in task reads, and their checksums."""
    _mnist(folder / "mnist_t10k")
    _cifar(folder / "cifar100")
    _texts(folder)
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


def _texts(folder):
    words = ["the", "quick", "brown", "fox", "jumps", "over", "a", "lazy", "dog", "and", "runs"]
    random = np.random.default_rng(0)
    for name in ("tinyshakespeare/input", "wikitext2/train", "wikitext2/valid"):
        sentences = [" ".join(random.choice(words, 8)) + " .\n" for _ in range(400)]
        path = folder / f"{name}.txt.gz"
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(gzip.compress("".join(sentences).encode()))
