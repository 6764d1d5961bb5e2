"""What ``--help`` of each command teaches."""

from __future__ import annotations

from mkor_bench.optimizers import OPTIMIZERS
from mkor_bench.studies import STUDIES
from mkor_bench.tasks import GROUPS, TASKS

_TASK_NAMES = ", ".join(TASKS)

COMPARE_HELP = f"""
Compare optimizers on a task, under equal conditions.

Every optimizer runs at each learning rate of one common grid. The two rates with the
lowest final training loss then run with several seeds, and the better one is reported.
All of them see the same first models, the same batches and the same schedule (warm-up and
cosine). Independent runs go side by side on the machine's cores. The time of a step is
measured at the end, with the optimizers taking turns.

**Tasks:** {_TASK_NAMES}. **Groups:** {", ".join(GROUPS)} (both of its tasks). All but the
digits read data: `--data FOLDER`, or `--data hub` to fetch the original.

**Optimizers:** {", ".join(OPTIMIZERS)}. A name may carry options, as in
`kfac:damping=0.01:inverse_update_steps=50`; soap needs the package pytorch_optimizer, and muon
torch 2.9.

**Your own task:** path/to/file.py:function, where the function returns a Task, such as:

    import torch
    from mkor_bench.tasks.task import Task

    def batches(seed):  # endless, the same for the same seed
        generator = torch.Generator().manual_seed(seed)
        while True:
            x = torch.randn(64, 8, generator=generator)
            yield x, x.prod(dim=1, keepdim=True)

    def loss(model, batch):
        return (model(batch[0]) - batch[1]).square().mean()

    def task():
        return Task(
            name="product",
            description="learns to multiply",
            build=lambda seed: torch.nn.Sequential(
                torch.nn.Linear(8, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1)
            ),
            batches=batches,
            loss=loss,
            evaluate=lambda model: loss(model, next(batches(12345))),
            metric="test error",
            higher_is_better=False,
        )

A function with an argument, as in `def task(data):`, gets the folder that --data names, or
None. More fields of a Task: steps, lrs (the grid of compare) and default_lrs (for train).

**Examples:**

* mkor compare digits

* mkor compare digits-classifier --optimizers sgd,mkor --lrs 0.01,0.03,0.1 --seeds 5

* mkor compare my_task.py:task --steps 1000 --output runs/mine

**Written to the output folder:** results.json (each run's curve, the chosen learning rates,
the whole grid, the machine and the versions), curves.png (the loss by step and by second)
and tensorboard/ (the same curves, rates and factors as events).
"""

TRAIN_HELP = f"""
Train one model with one optimizer; stop and continue it at will.

A checkpoint is written every so many steps, at Ctrl-C and at the end. The same command
with --resume continues it, and ends with the same bits as if it had never stopped: model,
optimizer, schedule, position in the data and random numbers are restored. Without --resume,
a folder that holds a checkpoint is refused, whether its run is finished or not: choose
another --output, or remove checkpoint.pt.

**Tasks:** {_TASK_NAMES}, or path/to/file.py:function as for mkor compare.
All but the digits read data: `--data FOLDER`, or `--data hub` to fetch the original.

**Optimizers:** {", ".join(OPTIMIZERS)}.

**Examples:**

* mkor train digits-classifier --optimizer mkor

* mkor train digits-classifier --optimizer mkor --resume

* mkor train digits-autoencoder --optimizer adamw --lr 0.003 --output runs/low

**Written to the output folder:** checkpoint.pt (torch.load reads it with weights_only=True),
results.json, curves.png and tensorboard/ (losses, rates and factors while it trains).
"""

STUDY_HELP = f"""
Do a study: many runs, each done once and kept, and a report of what they show.

A finished run is a file in the output folder and is never run again, so a study can be stopped
with Ctrl-C and continued by the same command, grow by more tasks, optimizers and seeds, and be
done by several processes at a time in one folder. Each run has one thread.

**Studies:** {", ".join(STUDIES)}; all does every one of them, each in a folder of its name.

Each writes NAME.json, NAME.md and a figure: the paper's claim, what was measured, and a verdict
that follows from the figures. The quick size shows that a study works and decides nothing.

complexity (Table 1): an update's time, memory and traffic by the width and rows of a layer.

memory (Table 6): peak memory of a step, and what is held between steps.

breakdown (Figure 3): the time of a step by stage, by method and model.

frequency (Figure 4): step time and final loss by the interval between updates of the factors.

rank (Figures 5, 10): how well means, sketches and windows stand for covariances.

spectrum (Figure 8): eigenvalues of K-FAC's factors, and inverses in half precision.

ablation (Lemmas, section 3.3): rounding against its bound; stabiliser, rescaling and rules
taken away.

hybrid (section 3.2): what MKOR-H saves, and when it switches.

learning-rate (Table 5): steps to converge over four decades of learning rate.

scaling (Figure 9): steps on 1, 2 and 4 processes, and predicted beyond.

convergence (Figures 2, 6, 11, 12, Tables 2-4): every optimizer tuned, steps and time to the best
first-order loss, by task.

defaults (section 4): tunes every optimizer alike (one seed on one grid of learning rates, which
grows where the best is at its edge; K-FAC's damping and frequency too), runs three seeds at the
best, and compares steps and time to the best final loss of SGD, AdamW and LAMB. Groups of tasks:
choice, and held-out (the two that defaults must not be chosen by).

**Tasks:** {_TASK_NAMES}. **Groups:** {", ".join(GROUPS)}.

**Optimizers:** {", ".join(OPTIMIZERS)}, with options as for mkor compare.

**Examples:**

* mkor study all --quick --output FOLDER

* mkor study defaults --quick

* mkor study defaults --data FOLDER --tasks choice --optimizers sgd,adamw,muon

* mkor study defaults --data FOLDER --optimizers mkor-lowrank:damping=0.003 --seeds 1

* mkor study defaults --data FOLDER --report

**Written to the output folder:** runs/ (a JSON file for each finished run, with the machine and
the versions), NAME.json, NAME.md and a PNG.
"""

REPORT_HELP = """
Put the findings of studies on one page: each claim of the paper, what was measured, a verdict.

The page is report.html in FOLDER, made of the sections that studies wrote into FOLDER and into
the folders in it. It needs no network and no other file, so it can be sent as it is: tables sort
by a click on a heading (or Tab and Enter), charts are in it, and it reads on a phone, in the dark
and on paper. Where a claim did not hold, it says so at the top.

A damaged section or figure is named, and then no page is written: an older report.html stays as
it was. Write the section anew with `mkor study NAME --report --output FOLDER`.

**Examples:**

* mkor study defaults --quick --output runs/mine/defaults

* mkor report runs/mine

**Written to the folder:** report.html.
"""

RECIPE_HELP = """
Train at full size, as a file says: task, batch, data type, workers, and for each optimizer its
options, learning rate, steps and schedule. recipes/ has trainings of the paper.

--check needs no data, no GPU and no network: the model is built without memory, a batch's shapes
go through it and its loss, every optimizer is built with its options and makes a step, and the
memory and traffic of a worker are told, with the command line that trains.

On one worker it trains at once; on more, torchrun starts it with the command that --check prints.
A checkpoint is written every so many steps; the same command with --resume continues it. A
worker accumulates the task's batches until all workers together have the recipe's.

**Examples:**

* mkor recipe recipes/bert-large-reviews-4.toml --check

* mkor recipe recipes/bert-large-reviews-1.toml --optimizer mkor --data FOLDER --steps 10

* mkor recipe recipes/bert-large-reviews-1.toml --optimizer mkor --data FOLDER --resume

**Written to the output folder:** recipe.json (the loss of each step, the metric, the time, the
machine and the versions) and recipe.pt (the checkpoint).
"""

ESTIMATE_HELP = """
Predict the time of a step of BERT-Large on many workers, with LAMB alone and with MKOR (dense
and window), Eva and K-FAC above it; or of another model, by other methods.

**Models:** bert-large, bert-base, minilm-l12, minilm-l6. For your own: `mkor.estimate` in Python.

**Methods:** mkor, mkor-window, mkor-lowrank (sketches), eva, kfac, kaisa-eigen, kbfgs, hylo-kid,
sngd. MKOR, K-BFGS, HyLo and SNGD update every 10 steps, K-FAC every 50, Eva in each. HyLo and
SNGD take every token as a row, which is why nobody trains BERT so.

Sizes and operations come from the methods themselves (`mkor.estimate`); the time follows an α-β
model: work over --flops, ring collectives over --bandwidth and --latency, nothing overlapping.
The batch is the same for all numbers of workers (strong scaling). Every operation counts alike,
which flatters methods that decompose matrices: their real rate is lower than a product's.

**Examples:**

* mkor estimate --workers 64

* mkor estimate --workers 1,8,64 --bandwidth 12 --latency 20 --flops 100

* mkor estimate --model bert-base --methods mkor,mkor-lowrank,kbfgs --batch 1024

* mkor estimate --output scaling.png
"""
