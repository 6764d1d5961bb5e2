"""What a method's options do to the final loss: each set tuned over the learning rate, one seed.

    python benchmarks/options.py                                   # the digits autoencoder
    python benchmarks/options.py --method hylo --steps 600
    python benchmarks/options.py --task digits-classifier --steps 300

Prints the final loss at the best rate and the smoothed loss after a quarter and half of the steps.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

import torch
from record import save

import mkor
from mkor_bench import optimizers
from mkor_bench.summary import final_loss, smooth, window
from mkor_bench.tasks.source import resolve_tasks
from mkor_bench.train import Settings, Training, train

LRS = (0.001, 0.003, 0.01, 0.03, 0.1)
MKOR_SETS: list[dict[str, Any]] = [
    {},
    {"factor_update_steps": 1},
    {"damping": 0.1},
    {"damping": 0.01},
    {"norm_limit": 100.0},
    {"factor_decay": 0.95},
    {"blend": 0.8},
    {"vectors": 8},
    {"rule": "reference", "damping": 0.1},
    {"rule": "reference", "damping": None},
    {"rule": "paper"},
    {"damping": None},
    {"state_dtype": torch.bfloat16},
]
PUBLISHED: dict[str, Any] = {"rescale": None, "kl_clip": 0.001}
METHODS: dict[str, tuple[Any, list[dict[str, Any]]]] = {
    "mkor": (mkor.MKOR, MKOR_SETS),
    "sngd": (
        mkor.SNGD,
        [
            {},
            *({"damping": mu} for mu in (0.03, 0.1, 0.3, 1.0)),
            {"damping": 0.1, "kl_clip": 0.001},
            {"damping": 0.1, **PUBLISHED},
            {"damping": 1.0, **PUBLISHED},
        ],
    ),
    "hylo": (
        mkor.HyLo,
        [
            {"sampling": "kid"},
            {"sampling": "kis"},
            *({"sampling": way, "damping": mu} for mu in (0.1, 0.01) for way in ("kid", "kis")),
            {"sampling": "kid", "damping": 0.1, "rank": 0.5},
            {"sampling": "kis", "damping": 0.1, "rank": 0.5},
            {"sampling": "kid", "damping": 0.1, **PUBLISHED},
        ],
    ),
}
"""Classes and the sets of options to try."""


def build(
    model: torch.nn.Module, lr: float, *, method: Any, base: Any, options: dict[str, Any]
) -> Any:
    """The method with the options around a base optimizer."""
    return method(model, base(model, lr), **options)


def register(method: str, base: str, options: dict[str, Any] | None) -> str:
    """Add a row to the registry of this process; its name."""
    if options is None:
        return base
    text = ", ".join(f"{key}={str(value).removeprefix('torch.')}" for key, value in options.items())
    name = f"{method}-{base} {text or 'defaults'}"
    around = optimizers.OPTIMIZERS[base].build
    make = partial(build, method=METHODS[method][0], base=around, options=options)
    optimizers.OPTIMIZERS[name] = optimizers.OptimizerRow(name, name, make)
    return name


def main() -> None:
    """Tune, print, store."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--method", choices=METHODS, default="mkor")
    parser.add_argument("--task", default="digits-autoencoder")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seed", type=int, default=1000)
    parser.add_argument("--output", type=Path, default=None)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    (source,) = resolve_tasks(arguments.task, None)
    results: dict[str, Any] = {}
    for base in ("sgd", "adamw"):
        for options in [None, *METHODS[arguments.method][1]]:
            name = register(arguments.method, base, options)
            runs = []
            for lr in LRS:
                settings = Settings(name, lr, arguments.seed, arguments.steps)
                runs.append((lr, train(Training(source.load(), settings))))
            lr, run = min(runs, key=lambda item: final_loss(item[1]))
            curve = smooth(run.losses, window(arguments.steps))
            results[name] = {
                "lr": lr,
                "final": round(final_loss(run), 3),
                "quarter": round(curve[len(curve) // 4], 3),
                "half": round(curve[len(curve) // 2], 3),
            }
            print(f"{name:<50} {results[name]}", flush=True)
    suffix = "" if arguments.method == "mkor" else f"_{arguments.method}"
    save(arguments.output or Path(f"benchmarks/results/options{suffix}.json"), results)


if __name__ == "__main__":
    main()
