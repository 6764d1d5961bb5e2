"""Fine-tune MiniLM by Hugging Face's Trainer, with MKOR around AdamW.

Needs `pip install 'mkor[frameworks]'`, and MKOR_DATA (see polarity.py).
"""

import tempfile

import torch
from polarity import encoded, minilm
from transformers import Trainer, TrainingArguments

import mkor
from mkor.integrations.huggingface import PreconditionerCallback, optimizer_factory


def accuracy(predicted):
    """The part of the sentences that are told right."""
    return {"accuracy": float((predicted.predictions.argmax(1) == predicted.label_ids).mean())}


torch.set_num_threads(1)
model, tokenizer = minilm()

with tempfile.TemporaryDirectory() as folder:
    args = TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=16,
        max_steps=24,
        learning_rate=3e-4,
        lr_scheduler_type="linear",
        warmup_steps=4,
        logging_steps=8,
        save_strategy="no",
        dataloader_pin_memory=torch.cuda.is_available(),
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Trainer(
        model=model,
        args=args,
        train_dataset=encoded("train", 384, tokenizer),
        eval_dataset=encoded("test", 200, tokenizer),
        processing_class=tokenizer,  # pads each batch
        compute_metrics=accuracy,
        optimizer_cls_and_kwargs=optimizer_factory(
            mkor.MKOR,
            lambda groups: torch.optim.AdamW(groups, lr=args.learning_rate),
            weight_decay=0.01,
        ),
        callbacks=[PreconditionerCallback()],
    )
    trainer.train()
    print(f"accuracy {trainer.evaluate()['eval_accuracy']:.3f}")
