"""Studies: many pieces of work, each done once and kept, and a report of what they show.

A study is a module with a ``STUDY``, a :class:`~mkor_bench.studies.study.Study`, and one row below.

This module imports nothing heavy, so that ``mkor --help`` is quick.
"""

from __future__ import annotations

STUDIES: dict[str, str] = {
    "complexity": "mkor_bench.studies.complexity",
    "memory": "mkor_bench.studies.memory",
    "breakdown": "mkor_bench.studies.breakdown",
    "frequency": "mkor_bench.studies.frequency",
    "rank": "mkor_bench.studies.rank",
    "spectrum": "mkor_bench.studies.spectrum",
    "ablation": "mkor_bench.studies.ablation",
    "hybrid": "mkor_bench.studies.hybrid",
    "learning-rate": "mkor_bench.studies.learning_rate",
    "scaling": "mkor_bench.studies.scaling",
    "convergence": "mkor_bench.studies.convergence",
    "defaults": "mkor_bench.studies.defaults",
}
"""Studies: the name and the module."""

ALL = "all"
"""The name that stands for every study."""
