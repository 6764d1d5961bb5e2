"""What all studies share: pieces that are done once, kept whole, and shared by processes."""

import json
import os
import socket
import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from mkor_bench.errors import UserError
from mkor_bench.report.section import Verdict
from mkor_bench.studies import STUDIES
from mkor_bench.studies.command import find_study
from mkor_bench.studies.drive import Job, do, drive, missing_pieces
from mkor_bench.studies.finding import conclude
from mkor_bench.studies.kept import Kept, sources
from mkor_bench.studies.piece import Piece
from mkor_bench.studies.study import Request
from mkor_bench.tasks import TASKS
from mkor_bench.workers import Workers
from toy_study import SECTION, STUDY, squares

OTHER = replace(SECTION, study="other", verdict=Verdict.FAILS)
PIECE = Piece("toy_study:square", {"number": 4, "of": ["a", None]}, "task opt:x=1 lr=0.1", 3)


def run(folder, count=3):
    """Drives the toy study; returns the rounds and the progress of each piece."""
    rounds, progress = [], Counter()

    def on_round(missing):
        rounds.append([piece.label for piece in missing])
        return lambda piece, steps: progress.update({piece.label: steps})

    with Workers(1, 1) as pool:
        request = Request((), (), count, data=str(folder))
        drive(STUDY, request, folder / "out", pool, on_round, lambda missing: None)
    return rounds, progress


def calls(folder):
    return sorted((folder / "calls.txt").read_text().splitlines())


def test_rounds_follow_from_results_and_nothing_is_done_twice(tmp_path):
    rounds, progress = run(tmp_path)
    assert rounds == [["square 0", "square 1", "square 2"], ["sum"]]
    assert progress == {"square 0": 3, "square 1": 3, "square 2": 3, "sum": 2}
    assert run(tmp_path) == ([], Counter())
    rounds, _ = run(tmp_path, count=4)
    assert rounds == [["square 3"], ["sum"]]
    assert Counter(calls(tmp_path)) == {**{f"square {n}": 1 for n in range(4)}, "add": 2}


def test_an_interrupted_study_goes_on_where_it_was(tmp_path):
    first, *_ = squares(3)
    do(Job(first, tmp_path / "out", str(tmp_path)), lambda steps: None)
    rounds, _ = run(tmp_path)
    assert rounds[0] == ["square 1", "square 2"]
    assert calls(tmp_path) == ["add", "square 0", "square 1", "square 2"]


def test_several_processes_share_the_work(tmp_path, environment):
    code = (
        "import sys, pathlib; sys.path[:0] = sys.argv[2:]\n"
        "from test_bench_studies import run; run(pathlib.Path(sys.argv[1]), 12)"
    )
    here = Path(__file__).parent
    command = [sys.executable, "-c", code, str(tmp_path), str(here), str(here.parent)]
    processes = [subprocess.Popen(command, env=environment) for _ in range(2)]
    assert [process.wait(timeout=100) for process in processes] == [0, 0]
    assert calls(tmp_path) == sorted([*(f"square {n}" for n in range(12)), "add"])
    assert list((tmp_path / "out/runs").glob("*.claim")) == []


def test_a_result_is_kept_with_what_it_came_from(tmp_path):
    kept = Kept(tmp_path)
    assert kept.get(PIECE) is None
    kept.put(PIECE, {"value": 1.5, "losses": [1.0, float("inf")]})
    assert Kept(tmp_path).get(PIECE) == {"value": 1.5, "losses": [1.0, None]}
    (path,) = (tmp_path / "runs").iterdir()
    assert path.name == f"task_opt_x=1_lr=0.1-{PIECE.key}.json"
    record = json.loads(path.read_text())
    assert record["spec"] == PIECE.spec and record["function"] == PIECE.function
    assert record["machine"]["cores"] and record["versions"]["torch"]
    assert record["sources"] == sources()


@pytest.mark.parametrize(
    "change",
    [{"spec": {"number": 5}}, {"function": "toy_study:add"}],
)
def test_whatever_determines_a_piece_is_in_its_key(change):
    fields = {"function": PIECE.function, "spec": PIECE.spec}
    assert Piece(**{**fields, **change}, label=PIECE.label, steps=3).key != PIECE.key
    assert Piece(**fields, label="another name", steps=9).key == PIECE.key


@pytest.mark.parametrize("content", ["{", "[]", '{"result": 3}', ""])
def test_a_damaged_result_is_named(tmp_path, content):
    path = tmp_path / "runs" / PIECE.file_name
    path.parent.mkdir()
    path.write_text(content)
    with pytest.raises(UserError, match=r"is not a study's result \(.*\): remove it to do it anew"):
        Kept(tmp_path).get(PIECE)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda record: record.pop("machine"), "it lacks machine"),
        (lambda record: record["spec"].update(seed=7), "its spec is not the one that its name"),
    ],
)
def test_an_edited_result_is_named(tmp_path, change, reason):
    Kept(tmp_path).put(PIECE, {"value": 1})
    path = tmp_path / "runs" / PIECE.file_name
    record = json.loads(path.read_text())
    change(record)
    path.write_text(json.dumps(record))
    with pytest.raises(UserError, match=f"is not a study's result \\({reason}.*\\): remove it"):
        Kept(tmp_path).get(PIECE)


def test_a_full_disk_is_told_and_leaves_nothing_behind(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    (tmp_path / "runs").mkdir()
    monkeypatch.setattr("os.replace", full)
    with pytest.raises(
        UserError, match=r"cannot be written \(No space left on device\): make room"
    ):
        Kept(tmp_path).put(PIECE, {"value": 1})
    assert list((tmp_path / "runs").iterdir()) == []


def test_a_claim_is_for_one(tmp_path):
    kept = Kept(tmp_path)
    with kept.claim(PIECE) as mine, kept.claim(PIECE) as theirs:
        assert mine and not theirs
    with kept.claim(PIECE) as mine:
        assert mine


def ended_process():
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


CLAIMS = {
    "a process that has ended": (lambda: f"{socket.gethostname()} {ended_process()} 1", True),
    "another process of that number": (lambda: f"{socket.gethostname()} {os.getpid()} 1", True),
    "another machine": (lambda: f"elsewhere {ended_process()} 1", False),
    "not written yet": (lambda: "", False),
}


@pytest.mark.parametrize("by", CLAIMS)
def test_a_claim_that_nobody_holds_is_taken_over(tmp_path, by):
    content, free = CLAIMS[by]
    path = (tmp_path / "runs" / PIECE.file_name).with_suffix(".claim")
    path.parent.mkdir()
    path.write_text(content())
    with Kept(tmp_path).claim(PIECE) as mine:
        assert mine == free
    assert path.exists() != free


def test_pieces_of_others_are_waited_for(tmp_path, monkeypatch):
    others = Kept(tmp_path / "out")
    first, *_ = squares(1)
    waited = []

    def wait(missing):
        waited.append([piece.label for piece in missing])
        claim.__exit__(None, None, None)

    monkeypatch.setattr("mkor_bench.studies.drive._POLL_SECONDS", 0)
    claim = others.claim(first)
    assert claim.__enter__()
    with Workers(1, 1) as pool:
        request = Request((), (), 1, data=str(tmp_path))
        drive(STUDY, request, tmp_path / "out", pool, lambda missing: lambda *_: None, wait)
    assert waited == [["square 0"]]
    assert missing_pieces(STUDY, request, Kept(tmp_path / "out")) == []


@pytest.mark.parametrize("name", STUDIES)
def test_a_registered_study_is_one(name):
    study = find_study(name)
    assert study.name == name and study.description
    for quick in (False, True):
        asked = study.request(quick, None)
        assert asked.quick == quick and asked.seeds >= 0
        assert asked.tasks == () or set(asked.tasks) <= set(TASKS)


def test_pieces_that_measure_time_run_one_by_one_after_the_others(tmp_path):
    alone = [replace(piece, alone=True) for piece in squares(2)]
    beside = [replace(piece, spec={"number": 7}, label="beside") for piece in squares(1)]
    study = replace(STUDY, pieces=lambda request, kept: [*alone, *beside])
    turns, rounds = [], []

    class Pool:
        def map(self, function, jobs, on_progress):
            turns.append([job.piece.label for job in jobs])
            return [function(job, lambda steps: None) for job in jobs]

    def on_round(missing):
        rounds.append(len(missing))
        return lambda *_: None

    request = Request((), (), 1, data=str(tmp_path))
    drive(study, request, tmp_path / "out", Pool(), on_round, lambda missing: None)
    assert turns == [["beside"], ["square 0"], ["square 1"]]
    assert rounds == [1, 2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["memory", "--tasks", "digits"], "--tasks digits: study 'memory' has no tasks; leave"),
        (
            ["memory", "--seeds", "2"],
            "--seeds 2: study 'memory' has no seeds; leave the option out",
        ),
        (
            ["all", "--optimizers", "sgd"],
            "--optimizers sgd: all studies differ in their optimizers",
        ),
        (
            ["memory", "--autocast"],
            "--autocast: study 'memory' has no training on tasks; leave the option out",
        ),
        (
            ["learning-rate", "--lrs", "0.1"],
            "--lrs 0.1: study 'learning-rate' has no learning rates to tune; leave",
        ),
        (
            ["defaults", "--quick", "--lrs", "0.1,0.002"],
            "--lrs: 0.002 is not on the common grid, which everything is tuned on: give 1 or 3",
        ),
        (["memori"], "unknown study 'memori'"),
        (["memory", "--optimizers", "sgdd"], "unknown optimizer 'sgdd'"),
        (
            ["memory", "--optimizers", "mkor:state_dtype=bf17"],
            "state_dtype='bf17' is unknown: choose",
        ),
    ],
)
def test_what_a_study_has_not_is_refused(mkor, arguments, message):
    result = mkor("study", *arguments)
    assert result.exit_code == 2
    assert message in result.output


def test_all_studies_are_done_each_in_its_folder(mkor, tmp_path, monkeypatch):
    toy = replace(STUDY, request=lambda quick, data: Request((), (), 2, quick, str(tmp_path)))
    other = replace(toy, name="other", report=lambda r, k, f: conclude(r, k, f, OTHER))
    monkeypatch.setattr("mkor_bench.studies.command.STUDIES", {"toy": "", "other": ""})
    found = {"toy": toy, "other": other}
    monkeypatch.setattr("mkor_bench.studies.command.find_study", found.get)
    result = mkor("study", "all", "--quick", "--workers", "1", "--output", "every")
    assert result.exit_code == 0, result.output
    assert (tmp_path / "every/toy/toy.json").is_file()
    assert (tmp_path / "every/other/other.json").is_file()
    assert "does not hold" in result.output and "holds" in result.output
    assert calls(tmp_path) == sorted(["square 0", "square 1", "add"] * 2)
    assert mkor("study", "all", "--quick", "--workers", "1", "--output", "every").exit_code == 0
    assert len(calls(tmp_path)) == 6
