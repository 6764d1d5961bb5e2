"""A tiny BERT on padded sentences, and the plain loop that frameworks must agree with."""

import torch
from torch import nn

import mkor

VOCABULARY, BATCH, LENGTH = 40, 4, 6


def tiny():
    """BERT with two layers of width 8 and a head of two classes, without dropout."""
    transformers = __import__("transformers")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=16,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        num_labels=2,
    )
    return transformers.BertForSequenceClassification(config)


def sentences(count):
    """Examples of unequal length, padded, as a list of dicts."""
    source = torch.Generator().manual_seed(3)
    tokens = torch.randint(1, VOCABULARY, (count, LENGTH), generator=source)
    lengths = torch.randint(2, LENGTH + 1, (count, 1), generator=source)
    mask = (torch.arange(LENGTH) < lengths).long()
    labels = tokens.sum(dim=1) % 2
    return [
        {"input_ids": row, "attention_mask": own, "labels": label}
        for row, own, label in zip(tokens * mask, mask, labels, strict=True)
    ]


def batches(count):
    """Those sentences in batches, in their order."""
    rows = sentences(count * BATCH)
    parts = [rows[at : at + BATCH] for at in range(0, len(rows), BATCH)]
    return [{key: torch.stack([row[key] for row in part]) for key in part[0]} for part in parts]


def adamw(groups):
    return torch.optim.AdamW(groups, lr=0.01)


def build(model, **options):
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    own = {"warmup_steps": 2, "factor_update_steps": 2, **options}
    return mkor.MKOR(model, adamw(trained), **own)


def linear(optimizer, steps):
    """The rate falls to zero along a line."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)


def plain_loop(
    model, optimizer, data, *, accumulate=1, divide=None, clip=None, autocast=None, masks=True
):
    """What a loop without a framework makes of the batches; the scheduler steps with it."""
    scheduler = linear(optimizer, len(data) // accumulate)
    losses = []
    for number, batch in enumerate(data, start=1):
        if masks:
            optimizer.set_mask(batch["attention_mask"])
        with torch.autocast("cpu", torch.bfloat16, enabled=bool(autocast)):
            loss = model(**batch).loss
        losses.append(loss.item())
        (loss / (divide or accumulate)).backward()
        if number % accumulate == 0:
            if clip is not None:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    return losses


def assert_agree(model, optimizer, other_model, other_optimizer, tolerance=0.0):
    """Parameters and factors are the same, bit for bit unless told."""
    ours, theirs = (
        {name: p.detach() for name, p in one.named_parameters()} for one in (model, other_model)
    )
    assert ours.keys() == theirs.keys()
    torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
    states = [o.state_dict()["preconditioner"]["layers"] for o in (optimizer, other_optimizer)]
    assert states[0].keys() == states[1].keys() and states[0]
    for name, layer in states[0].items():
        assert layer["updates"] == states[1][name]["updates"] > 0, name
        for key, tensor in layer["state"].items():
            there = states[1][name]["state"][key]
            torch.testing.assert_close(tensor, there, rtol=tolerance, atol=tolerance)
