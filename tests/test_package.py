"""What is installed is all that the source tree has: files besides Python's too."""

import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BUILD = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Names of the files in a wheel, built from a copy so that nothing is left in the tree."""
    folder = tmp_path_factory.mktemp("wheel")
    copy = folder / "tree"
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "src", copy / "src", ignore=ignored)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, copy)
    command = [sys.executable, "-c", BUILD, str(folder)]
    done = subprocess.run(command, cwd=copy, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (path,) = folder.glob("*.whl")
    return set(zipfile.ZipFile(path).namelist())


def test_a_wheel_has_every_file_of_the_source_tree(wheel):
    src = ROOT / "src"
    files = {
        path.relative_to(src).as_posix()
        for path in src.rglob("*")
        if path.is_file() and not {"__pycache__", "mkor.egg-info"} & set(path.parts)
    }
    assert files <= wheel
    assert "mkor_bench/report/template/report.html" in files
