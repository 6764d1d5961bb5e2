"""Each study end to end at a tiny size: its pieces, its files, and that nothing is done twice."""

import json

import pytest

from mkor_bench.report.section import read_section

ENDS = {
    "complexity": ["--optimizers", "mkor,kfac"],
    "breakdown": ["--optimizers", "sgd,mkor,kbfgs"],
    "frequency": ["--optimizers", "mkor", "--tasks", "digits-classifier"],
    "rank": ["--tasks", "digits-classifier"],
    "spectrum": ["--tasks", "digits-classifier"],
    "hybrid": ["--tasks", "digits-classifier"],
    "learning-rate": ["--optimizers", "sgd,mkor"],
    "convergence": ["--tasks", "digits-classifier", "--optimizers", "sgd,mkor"],
    "ablation": ["--tasks", "digits-classifier"],
    "scaling": [],
    "memory": ["--optimizers", "sgd,mkor,auto"],
}


SMALLER = {
    "ablation.VARIANTS": {"mkor": "MKOR", "mkor:rescale=None": "without rescaling"},
    "frequency.QUICK_INTERVALS": (1, 100),
    "scaling.PROCESSES": (1,),
    "scaling.NUMBERS": (1, 4),
    "tuned.QUICK_GRID": (-3,),
    "tuning.LOWEST": -3,
    "tuning.HIGHEST": -2,
}
"""What the quick size does more than once; gloo processes have a test of their own."""


@pytest.mark.parametrize("name", ENDS)
def test_a_study_from_end_to_end(mkor, tmp_path, monkeypatch, name):
    for constant, value in SMALLER.items():
        monkeypatch.setattr(f"mkor_bench.studies.{constant}", value)
    command = ["study", name, "--quick", "--workers", "1", "--output", "out", *ENDS[name]]
    result = mkor(*command)
    assert result.exit_code == 0, result.output
    section, conditions = read_section(tmp_path / f"out/{name}.json")
    assert section.study == name and conditions["pieces"] > 0
    assert section.tables and all(table.rows for table in section.tables)
    for table in section.tables:
        assert {len(row) for row in table.rows} == {len(table.columns)}
    for figure in section.figures:
        assert (tmp_path / "out" / figure.file).read_bytes().startswith(b"\x89PNG")
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "out/runs").iterdir()}
    assert mkor(*command).exit_code == 0
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out/runs").iterdir()} == kept


@pytest.mark.parametrize("name", ENDS)
def test_a_report_before_anything_is_done(mkor, tmp_path, name):
    (tmp_path / "empty").mkdir()
    result = mkor("study", name, "--quick", "--report", "--output", "empty")
    assert result.exit_code == 0, result.output
    content = json.loads((tmp_path / f"empty/{name}.json").read_text())
    assert content["section"]["verdict"] == "not decided here"


def test_there_is_nothing_to_report_on_without_a_folder(mkor, tmp_path):
    result = mkor("study", "complexity", "--report", "--output", "mistyped")
    assert result.exit_code == 2 and not (tmp_path / "mistyped").exists()
    assert "no folder 'mistyped' to report on: name that of a study with --output" in result.stderr
