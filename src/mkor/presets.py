"""Options under which `mkor.MKOR` is what was published, or what its authors released.

    optimizer = mkor.MKOR(model, base, **mkor.presets.paper())

Each returns a dict of options, which may be changed before they are passed.
"""

from __future__ import annotations

from typing import Any

import torch


def paper(half: bool = True) -> dict[str, Any]:
    """Algorithm 1 as printed: eqs. 5 and 6, raw mean vectors, an update every 10 steps.

    It amplifies the directions that it should damp, so that inputs of unit size make the inverse
    grow until the stabiliser acts; the docs of the method show why. γ, ε and ζ are not printed:
    γ is 0.9, the others are those of the released code.

    Args:
        half: Whether factors and messages are in half precision (bfloat16), as in section 3.3.
    """
    dtype = torch.bfloat16 if half else None
    return {
        "rule": "paper",
        "statistic": "mean",
        "vectors": 1,
        "representation": "dense",
        "damping": None,
        "factor_decay": 0.9,
        "norm_limit": 2.0,
        "blend": 0.95,
        "rescale": "gradient",
        "factor_update_steps": 10,
        "warmup_steps": 0,
        "state_dtype": dtype,
        "wire_dtype": dtype,
    }


def reference() -> dict[str, Any]:
    """What the authors' released code computes: a mix with the identity and a reset of the inverse.

    Its mix of 0.95 acts as an absolute damping: where gradients are small it leaves them as they
    are.
    """
    return {
        "rule": "reference",
        "statistic": "mean",
        "vectors": 1,
        "representation": "dense",
        "damping": None,
        "norm_limit": 2.0,
        "blend": 0.95,
        "rescale": "gradient",
        "factor_update_steps": 10,
        "warmup_steps": 0,
    }
