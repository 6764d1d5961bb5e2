"""Preconditioned optimizers for PyTorch: fewer steps from the optimizer you already use.

base = torch.optim.AdamW(model.parameters(), lr=1e-3)
optimizer = mkor.MKOR(model, base)
loss.backward(); optimizer.step(); optimizer.zero_grad()
"""

from mkor import presets
from mkor.baselines.lamb import LAMB
from mkor.estimate import Estimate, LayerEstimate, UpdateEstimate, estimate
from mkor.hybrid import HybridSwitch
from mkor.lr_scheduler import KneePointLR
from mkor.optimizer import Preconditioner
from mkor.optimizers.auto import auto
from mkor.optimizers.eva import Eva
from mkor.optimizers.hylo import HyLo
from mkor.optimizers.kbfgs import KBFGS
from mkor.optimizers.kfac import KFAC
from mkor.optimizers.mkor import MKOR
from mkor.optimizers.sngd import SNGD
from mkor.report import LayerInfo
from mkor.wire import Collective

__version__ = "0.1.0"
__all__ = [
    "KBFGS",
    "KFAC",
    "LAMB",
    "MKOR",
    "SNGD",
    "Collective",
    "Estimate",
    "Eva",
    "HyLo",
    "HybridSwitch",
    "KneePointLR",
    "LayerEstimate",
    "LayerInfo",
    "Preconditioner",
    "UpdateEstimate",
    "__version__",
    "auto",
    "estimate",
    "presets",
]
