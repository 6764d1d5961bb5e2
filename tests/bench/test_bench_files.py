"""A file is the old one or the new one, and who cannot write it is told so."""

import os

import pytest
import torch

from mkor_bench.errors import UserError
from mkor_bench.files import write_atomically


def full(path):
    path.write_text("half")
    raise OSError(28, "No space left on device", str(path))


def torn(path):
    path.write_text("half")
    raise RuntimeError("[enforce fail at inline_container.cc:672] . unexpected pos 64 vs 0")


@pytest.mark.parametrize(
    ("write", "reason"), [(full, "No space left on device"), (torn, "the disk may be full")]
)
def test_a_full_disk_leaves_the_old_file(tmp_path, write, reason):
    path = tmp_path / "results.json"
    path.write_text("old")
    with pytest.raises(UserError, match=f"'{path}' cannot be written \\({reason}\\): make room"):
        write_atomically(path, write)
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["results.json"]


def test_a_real_limit_on_files_is_told_of_a_checkpoint(tmp_path):
    resource = pytest.importorskip("resource")
    signal = pytest.importorskip("signal")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
    try:
        with pytest.raises(UserError, match=r"last.pt' cannot be written"):
            write_atomically(tmp_path / "last.pt", lambda path: torch.save(torch.ones(10**4), path))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert not os.listdir(tmp_path)


def test_the_folder_is_made_or_its_obstacle_named(tmp_path):
    write_atomically(tmp_path / "a" / "b.txt", lambda path: path.write_text("new"))
    assert (tmp_path / "a" / "b.txt").read_text() == "new"
    with pytest.raises(UserError, match=r"'.*b.txt/c.txt' cannot be written \("):
        write_atomically(tmp_path / "a" / "b.txt" / "c.txt", lambda path: path.write_text("new"))


def test_other_errors_stay_what_they_are(tmp_path):
    def broken(path):
        raise RuntimeError("of something else")

    with pytest.raises(RuntimeError, match="of something else"):
        write_atomically(tmp_path / "a", broken)
