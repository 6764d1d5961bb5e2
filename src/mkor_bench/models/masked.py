"""A pretrained BERT that tells masked words, at the places that it is asked about alone."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from mkor_bench.models.bert import Checkpoint, load_network


class WordTeller(nn.Module):
    """An encoder, and BERT's own head over its vocabulary.

    Args:
        network: A ``BertForMaskedLM`` of Hugging Face.
    """

    def __init__(self, network: Any) -> None:
        super().__init__()
        self.network = network

    def forward(self, words: Tensor, places: Tensor) -> Tensor:
        """Returns logits [rows, places, vocabulary].

        Args:
            words: Numbers of word pieces, [rows, length], without padding.
            places: Where to tell a word, [rows, places].
        """
        output = self.network.bert(input_ids=words).last_hidden_state
        asked = output.take_along_dim(places[:, :, None], dim=1)
        logits: Tensor = self.network.cls(asked)
        return logits


def load_word_teller(checkpoint: Checkpoint, path: str, layers: int | None = None) -> WordTeller:
    """Loads the pretrained model. MiniLM's files have no such head: its own is a new one.

    Args:
        checkpoint: The model.
        path: What :func:`~mkor_bench.models.bert.find_checkpoint` returned.
        layers: To keep, from the first; all, if None.

    Returns:
        The model.

    Raises:
        UserError: Its files do not load, or the hub cannot be reached.
    """
    from transformers import BertForMaskedLM

    network = load_network(BertForMaskedLM, checkpoint, path)
    network.bert.encoder.layer = network.bert.encoder.layer[:layers]
    return WordTeller(network)
