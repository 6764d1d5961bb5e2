"""The frameworks under DDP, for `torchrun`: each worker's parameters and factors into a folder."""

import os
import sys
from functools import partial
from pathlib import Path

import accelerate
import lightning.pytorch
import torch
import transformers
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard

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


class Sharded(test_lightning.Module):
    """Its parameters are spread over the workers."""

    def configure_model(self):
        mesh = self.device_mesh["data_parallel"]
        for layer in self.model.bert.encoder.layer:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)


def by_lightning(rank, folder, automatic=True, kind=test_lightning.Module, strategy="ddp"):
    module = kind(STEPS, automatic)
    module.model.double()
    trainer = lightning.pytorch.Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
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


def sharded_by_lightning(rank, folder, automatic=True):
    strategy = ModelParallelStrategy(data_parallel_size=2, tensor_parallel_size=1)
    return by_lightning(rank, folder, automatic, Sharded, strategy)


FRAMEWORKS = {
    "accelerate": by_accelerate,
    "trainer": by_trainer,
    "lightning": by_lightning,
    "lightning by hand": partial(by_lightning, automatic=False),
    "lightning, sharded": sharded_by_lightning,
    "lightning by hand, sharded": partial(sharded_by_lightning, automatic=False),
}


def whole(parameter):
    return parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter


def main(folder):
    torch.set_num_threads(1)
    transformers.utils.logging.set_verbosity_error()
    rank = int(os.environ["RANK"])
    out = {}
    for name, run in FRAMEWORKS.items():
        model, optimizer = run(rank, folder)
        parameters = {key: whole(tensor.detach()) for key, tensor in model.named_parameters()}
        out[name] = parameters, optimizer.state_dict()["preconditioner"]["layers"]
        accelerate.state.AcceleratorState._reset_state()
    torch.save(out, Path(folder, f"{rank}.pt"))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
