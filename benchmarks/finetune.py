"""MiniLM fine-tuned by Hugging Face's Trainer: AdamW alone, MKOR around it, and mkor.auto.

    MKOR_DATA=... python benchmarks/finetune.py             # tune on one seed, then three seeds
    MKOR_DATA=... python benchmarks/finetune.py --steps 300

Each optimizer takes the learning rate of one grid that is best for it with a seed of its own; the
schedule (linear, after a warm-up over a tenth of the steps), batches and all else are the same. A
loss is the mean over the last quarter of the steps, the accuracy that on sentences held out. A run
that is in the results file is not run again, so that an interrupted command goes on.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from record import save, stored

import mkor
from mkor.integrations.huggingface import PreconditionerCallback, optimizer_factory

sys.path.append(str(Path(__file__).parents[1] / "examples"))

TUNING_SEED = 1000
LRS = (3e-5, 1e-4, 3e-4, 1e-3)
SKETCH = {"representation": "lowrank", "statistic": "sketch", "vectors": 16}
ROWS: dict[str, dict[str, Any]] = {"adamw": {}, "mkor": {}, "mkor sketch": SKETCH, "auto": {}}
BATCH, TEST = 16, 400


def optimizer_of(row: str, lr: float) -> dict[str, Any]:
    """The Trainer's arguments on the optimizer."""

    def base(groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        return torch.optim.AdamW(groups, lr=lr)

    if row == "auto":
        factory = optimizer_factory(mkor.auto, lr=lr)
        return {"optimizer_cls_and_kwargs": factory, "callbacks": [PreconditionerCallback()]}
    if row == "adamw":
        factory = optimizer_factory(lambda model, base: base, base, weight_decay=0.01)
        return {"optimizer_cls_and_kwargs": factory}
    factory = optimizer_factory(mkor.MKOR, base, weight_decay=0.01, **ROWS[row])
    return {"optimizer_cls_and_kwargs": factory, "callbacks": [PreconditionerCallback()]}


def told_right(predicted: Any) -> dict[str, float]:
    """The part of the sentences that are told right."""
    return {"accuracy": float((predicted.predictions.argmax(1) == predicted.label_ids).mean())}


def run(row: str, lr: float, seed: int, steps: int) -> dict[str, Any]:
    """One training; losses every tenth of it, accuracy, and seconds of the thread."""
    from polarity import encoded, minilm
    from transformers import Trainer, TrainingArguments

    model, tokenizer = minilm()
    with tempfile.TemporaryDirectory() as folder:
        args = TrainingArguments(
            output_dir=folder,
            per_device_train_batch_size=BATCH,
            per_device_eval_batch_size=50,
            max_steps=steps,
            learning_rate=lr,
            lr_scheduler_type="linear",
            warmup_steps=steps // 10,
            logging_steps=max(steps // 20, 1),
            seed=seed,
            save_strategy="no",
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
        )
        trainer = Trainer(
            model=model,
            args=args,
            train_dataset=encoded("train", BATCH * steps, tokenizer),
            eval_dataset=encoded("test", TEST, tokenizer),
            processing_class=tokenizer,
            compute_metrics=told_right,
            **optimizer_of(row, lr),
        )
        start = time.thread_time()
        trainer.train()
        seconds = time.thread_time() - start
        losses = [float(line["loss"]) for line in trainer.state.log_history if "loss" in line]
        accuracy = float(trainer.evaluate()["eval_accuracy"])
    tail = losses[-max(len(losses) // 4, 1) :]
    return {
        "losses": [round(loss, 4) for loss in losses],
        "loss": statistics.mean(tail),
        "accuracy": accuracy,
        "seconds": seconds,
    }


def summary(runs: dict[str, Any], steps: int, seeds: int) -> dict[str, Any]:
    """Means and spreads over the seeds of the rows that are complete."""
    out: dict[str, Any] = {}
    for row in ROWS:
        tried = {lr: runs.get(f"{row} lr={lr} seed={TUNING_SEED} steps={steps}") for lr in LRS}
        if not all(tried.values()):
            continue
        lr = min(LRS, key=lambda lr: tried[lr]["loss"])
        done = [runs.get(f"{row} lr={lr} seed={seed} steps={steps}") for seed in range(seeds)]
        out[row] = {"lr": lr, "seeds": sum(run is not None for run in done)}
        for key in ("loss", "accuracy", "seconds"):
            values = [run[key] for run in done if run is not None]
            if values:
                out[row][key] = [statistics.mean(values), statistics.pstdev(values)]
    return out


def main() -> None:
    """Tune, run the seeds, and save after every run."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rows", nargs="+", default=list(ROWS), choices=list(ROWS))
    results = Path(__file__).parent / "results" / "finetune.json"
    parser.add_argument("--output", type=Path, default=results)
    options = parser.parse_args()
    torch.set_num_threads(1)
    runs = stored(options.output).get("runs", {})

    def need(row: str, lr: float, seed: int) -> None:
        key = f"{row} lr={lr} seed={seed} steps={options.steps}"
        if key not in runs:
            runs[key] = run(row, lr, seed, options.steps)
            print(key, {k: v for k, v in runs[key].items() if k != "losses"}, flush=True)
            table = summary(runs, options.steps, options.seeds)
            save(options.output, {"steps": options.steps, "rows": table, "runs": runs})

    for row in options.rows:
        for lr in LRS:
            need(row, lr, TUNING_SEED)
    best = summary(runs, options.steps, options.seeds)
    for seed in range(options.seeds):
        for row in options.rows:
            need(row, best[row]["lr"], seed)


if __name__ == "__main__":
    main()
