"""Where and with what a measurement was made, and the results file."""

from __future__ import annotations

import datetime
import json
import os
import platform
import sys
from pathlib import Path
from typing import Any

import torch

import mkor


def machine() -> dict[str, Any]:
    """Processor, versions and command of this run."""
    model = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line for line in info.read_text().splitlines() if line.startswith("model name")]
        model = names[0].split(":", 1)[1].strip() if names else model
    return {
        "processor": model,
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "mkor": mkor.__version__,
        "command": " ".join(["python", *sys.argv]),
        "date": datetime.date.today().isoformat(),
    }


def save(path: Path, results: dict[str, Any]) -> None:
    """Write results beside the machine they come from."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"machine": machine(), "results": results}, indent=1) + "\n")
    print(f"wrote {path}")


def stored(path: Path) -> dict[str, Any]:
    """What `save` wrote, or nothing yet."""
    results: dict[str, Any] = json.loads(path.read_text())["results"] if path.exists() else {}
    return results
