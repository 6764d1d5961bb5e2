"""Fine-tune MiniLM by Lightning, automatic optimization, with MKOR around AdamW.

Needs `pip install 'mkor[frameworks]'`, and MKOR_DATA (see polarity.py). A script that was called
lightning.py would hide the package of that name.
"""

import logging

import lightning.pytorch as lightning
import torch
from polarity import encoded, minilm
from torch.utils.data import DataLoader
from transformers import get_linear_schedule_with_warmup

import mkor
from mkor.integrations.lightning import PreconditionerCallback

torch.set_num_threads(1)
logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)


class Polarity(lightning.LightningModule):
    """The classifier with its optimizer and schedule."""

    def __init__(self, classifier):
        super().__init__()
        self.classifier = classifier
        self.recent, self.hits = [], []

    def configure_optimizers(self):
        """MKOR around AdamW, the rate stepped after each step."""
        optimizer = mkor.MKOR(self, torch.optim.AdamW(self.parameters(), lr=3e-4))
        schedule = get_linear_schedule_with_warmup(optimizer, 4, 24)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    def training_step(self, batch, number):
        """The loss of a batch."""
        loss = self.classifier(**batch)["loss"]
        self.recent.append(loss.item())
        if len(self.recent) == 6:
            print(f"batch {number + 1:3d}  loss {sum(self.recent) / 6:.4f}")
            self.recent.clear()
        return loss

    def test_step(self, batch, number):
        """Which sentences are told right."""
        self.hits.append(self.classifier(**batch)["logits"].argmax(dim=1) == batch["labels"])


classifier, tokenizer = minilm()


def loader(split, count, size):
    """Batches padded to their longest sentence."""
    rows = encoded(split, count, tokenizer)
    collate = lambda rows: dict(tokenizer.pad(rows, return_tensors="pt"))  # noqa: E731
    return DataLoader(rows, batch_size=size, collate_fn=collate)


module = Polarity(classifier)
trainer = lightning.Trainer(
    max_epochs=1,
    accelerator="auto",
    gradient_clip_val=1.0,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    callbacks=[PreconditionerCallback()],
)
trainer.fit(module, loader("train", 384, 16))
trainer.test(module, loader("test", 200, 50), verbose=False)
print(f"accuracy {torch.cat(module.hits).float().mean().item():.3f}")
