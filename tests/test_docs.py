"""The documentation agrees with the tree: links, code blocks, the annotated tree, navigation."""

import re
from pathlib import Path
from textwrap import dedent

import pytest

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md")])


def page_id(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def blocks(page: Path, language: str) -> list[str]:
    """Bodies of the fenced code blocks of one language, those within lists as well."""
    text = page.read_text(encoding="utf-8")
    fenced = rf"^( *)```{language}[^\n]*\n(.*?)^\1```$"
    return [dedent(body) for _, body in re.findall(fenced, text, re.DOTALL | re.MULTILINE)]


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_relative_links_lead_somewhere(page):
    links = re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8"))
    relative = [link for link in links if not re.match(r"[a-z]+:", link)]
    assert [link for link in relative if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=page_id)
def test_python_blocks_compile(page):
    for block in blocks(page, "python"):
        compile(block, page_id(page), "exec")


def test_every_page_is_in_the_navigation():
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    pages = {page.relative_to(DOCS).as_posix() for page in DOCS.rglob("*.md")}
    assert {page for page in pages if f" {page}\n" not in navigation} == set()


def test_the_annotated_tree_is_the_tree():
    (tree,) = blocks(DOCS / "architecture.md", 'text title="src/mkor"')
    listed = {line.split()[0] for line in tree.splitlines() if not line.startswith(" ")}
    core = ROOT / "src" / "mkor"
    files = {p.relative_to(core).as_posix() for p in core.rglob("*.py")}
    # Only the public names and the registry are worth a line among the __init__ files.
    kept = {"__init__.py", "methods/__init__.py"}
    assert listed == {f for f in files if not f.endswith("__init__.py") or f in kept}
