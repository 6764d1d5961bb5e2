"""The methods that the contract is tested on, with options. A new method is one row."""

import torch
from torch import nn

import mkor

CASES = {
    "mkor": (mkor.MKOR, {}),
    "mkor exact raw": (mkor.MKOR, {"damping": None}),
    "mkor exact r=3": (mkor.MKOR, {"vectors": 3}),
    "mkor paper": (mkor.MKOR, {"rule": "paper"}),
    "mkor reference": (mkor.MKOR, {"rule": "reference", "damping": None}),
    "mkor bfloat16": (mkor.MKOR, {"state_dtype": torch.bfloat16}),
    "mkor float16": (mkor.MKOR, {"state_dtype": torch.float16, "vectors": 2}),
    "mkor float64": (mkor.MKOR, {"state_dtype": torch.float64}),
    "mkor packed bfloat16": (mkor.MKOR, {"packed": True, "state_dtype": torch.bfloat16}),
    "mkor one side": (mkor.MKOR, {"max_dim": 4}),
    "mkor reset": (mkor.MKOR, {"on_nonfinite": "reset"}),
    "mkor window": (mkor.MKOR, {"representation": "window", "window": 3}),
    "mkor lowrank": (mkor.MKOR, {"representation": "lowrank", "rank": 3, "vectors": 2}),
    "mkor lowrank reset": (mkor.MKOR, {"representation": "lowrank", "on_nonfinite": "reset"}),
    "mkor lowrank bfloat16": (
        mkor.MKOR,
        {"representation": "lowrank", "rank": 3, "state_dtype": torch.bfloat16},
    ),
    "mkor sketch": (mkor.MKOR, {"statistic": "sketch", "vectors": 4}),
    "mkor lowrank sketch": (
        mkor.MKOR,
        {"representation": "lowrank", "statistic": "sketch", "vectors": 3},
    ),
    "mkor window sketch bfloat16": (
        mkor.MKOR,
        {
            **{"representation": "window", "window": 4, "statistic": "sketch", "vectors": 3},
            "state_dtype": torch.bfloat16,
        },
    ),
    "mkor window beside dense": (
        mkor.MKOR,
        {"max_dim": 4, "wide_sides": "window", "window": 3},
    ),
    "mkor lowrank sketch beside dense bfloat16": (
        mkor.MKOR,
        {
            **{"max_dim": 4, "wide_sides": "lowrank", "rank": 3},
            **{"statistic": "sketch", "vectors": 3, "state_dtype": torch.bfloat16},
        },
    ),
    "kfac": (mkor.KFAC, {}),
    "kfac inverse": (mkor.KFAC, {"solver": "inverse"}),
    "kfac inverse plain": (mkor.KFAC, {"solver": "inverse", "damping_split": "plain"}),
    "kfac reduce": (mkor.KFAC, {"weight_sharing": "reduce"}),
    "kfac bfloat16": (mkor.KFAC, {"state_dtype": torch.bfloat16}),
    "kfac float64": (mkor.KFAC, {"state_dtype": torch.float64, "inverse_dtype": torch.float64}),
    "kfac one side": (mkor.KFAC, {"max_dim": 4}),
    "kfac reset": (mkor.KFAC, {"on_nonfinite": "reset"}),
    "eva": (mkor.Eva, {}),
    "eva bfloat16": (mkor.Eva, {"state_dtype": torch.bfloat16}),
    "eva reset": (mkor.Eva, {"on_nonfinite": "reset"}),
    "kbfgs": (mkor.KBFGS, {}),
    "kbfgs memory": (mkor.KBFGS, {"memory": 5}),
    "kbfgs bfloat16": (mkor.KBFGS, {"state_dtype": torch.bfloat16}),
    "kbfgs one side": (mkor.KBFGS, {"max_dim": 4}),
    "kbfgs reset": (mkor.KBFGS, {"on_nonfinite": "reset"}),
    "sngd": (mkor.SNGD, {}),
    "sngd bfloat16": (mkor.SNGD, {"state_dtype": torch.bfloat16}),
    "sngd reset": (mkor.SNGD, {"on_nonfinite": "reset"}),
    "hylo": (mkor.HyLo, {"damping": 0.3}),
    "hylo kid": (mkor.HyLo, {"damping": 0.3, "sampling": "kid", "rank": 0.5}),
    "hylo kis": (mkor.HyLo, {"damping": 0.3, "sampling": "kis", "rank": 0.5}),
}


def method_of(case):
    cls, options = CASES[case]
    model = nn.Linear(2, 2)
    return cls(model, torch.optim.SGD(model.parameters(), lr=0.1), **options)._method
