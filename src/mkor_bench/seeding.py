"""The random generators of a process: seeding, saving and restoring them together.

A user's task may draw from any of the three usual generators, so a run seeds all of
them, and a checkpoint holds the state of all of them.
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import torch


def seed_generators(seed: int) -> None:
    """Seeds Python's, NumPy's and torch's global generators."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def generator_states() -> dict[str, Any]:
    """Reads the generators.

    Returns:
        Their states as numbers, tuples and tensors, as a checkpoint may hold them.
    """
    state: Any = np.random.get_state()
    name, keys, *rest = state
    return {
        "python": random.getstate(),
        "numpy": (str(name), torch.from_numpy(keys.astype(np.int64)), *rest),
        "torch": torch.get_rng_state(),
    }


def restore_generators(states: dict[str, Any]) -> None:
    """Sets the generators to what :func:`generator_states` returned."""
    random.setstate(states["python"])
    name, keys, *rest = states["numpy"]
    np.random.set_state((name, keys.numpy().astype(np.uint32), *rest))
    torch.set_rng_state(states["torch"])
