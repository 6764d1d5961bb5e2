"""The frameworks under DDP, for `torchrun`: each worker's parameters and factors into a folder."""

import os
import sys
from pathlib import Path

import accelerate
import lightning.pytorch
import torch
import transformers

sys.path.insert(0, str(Path(__file__).parents[1]))

from integrations import test_huggingface, test_lightning
from integrations.common import BATCH, batches, build, linear, sentences, tiny

STEPS = 6


def by_accelerate(rank, _):
    accelerator = accelerate.Accelerator(cpu=True)
    model = tiny().double()
    optimizer = build(model)
    # Accelerate steps a schedule once a worker.
    parts = accelerator.prepare(model, optimizer, linear(optimizer, 2 * STEPS))
    for batch in batches(2 * STEPS)[rank::2]:
        optimizer.set_mask(batch["attention_mask"])
        accelerator.backward(parts[0](**batch).loss)
        for part in parts[1:]:
            part.step()
        optimizer.zero_grad()
    return model, optimizer


def by_trainer(_, folder):
    model = tiny().double()
    optimizer = build(model)
    trainer = test_huggingface.trainer(folder, model, optimizer)
    trainer.train_dataset = sentences(2 * STEPS * BATCH)
    trainer.train()
    return model, optimizer


def by_lightning(rank, folder):
    module = test_lightning.Module(STEPS)
    module.model.double()
    trainer = lightning.pytorch.Trainer(
        accelerator="cpu",
        devices=2,
        strategy="ddp",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        use_distributed_sampler=False,
        max_epochs=1,
        default_root_dir=folder,
        callbacks=[test_lightning.PreconditionerCallback()],
    )
    rows = sentences(2 * STEPS * BATCH)
    own = [row for at, row in enumerate(rows) if at // BATCH % 2 == rank]
    trainer.fit(module, torch.utils.data.DataLoader(own, batch_size=BATCH))
    return module.model, trainer.optimizers[0]


FRAMEWORKS = {"accelerate": by_accelerate, "trainer": by_trainer, "lightning": by_lightning}


def main(name, folder):
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    rank = int(os.environ["RANK"])
    model, optimizer = FRAMEWORKS[name](rank, folder)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(state, Path(folder, f"{rank}.pt"))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
