"""The machine and the versions that figures were measured with."""

from __future__ import annotations

import os
import platform
from importlib import metadata
from pathlib import Path

PACKAGES = ("mkor", "torch", "numpy", "scikit-learn")


def describe_machine() -> dict[str, str | int]:
    """Returns the processor, its cores and the operating system."""
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count() or 1,
        "system": platform.platform(),
    }


def versions() -> dict[str, str]:
    """Returns the versions of Python and of the packages that decide results."""
    return {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}}


def version(package: str = "mkor") -> str:
    """Returns the version of an installed package."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:  # a source tree, as for developers
        return "not installed"


def _cpu_model() -> str:
    # platform.processor() is empty on most Linux systems.
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
