"""The registry: one row per method. A new method is a file beside this one and a row here."""

from __future__ import annotations

from mkor.methods.base import Method
from mkor.methods.eva import EvaMethod
from mkor.methods.hylo import HyLoMethod, SNGDMethod
from mkor.methods.kbfgs import KBFGSMethod
from mkor.methods.kfac import KFACMethod
from mkor.methods.mkor import MKORMethod

METHODS: dict[str, type[Method]] = {
    "mkor": MKORMethod,
    "kfac": KFACMethod,
    "eva": EvaMethod,
    "kbfgs": KBFGSMethod,
    "sngd": SNGDMethod,
    "hylo": HyLoMethod,
}
"""Methods by name."""
