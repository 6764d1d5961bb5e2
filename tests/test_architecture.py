"""The rules that keep the tree readable: imports, lengths, documented names."""

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SRC = ROOT / "src"
CORE = SRC / "mkor"
FILES = sorted(SRC.rglob("*.py"))
CORE_FILES = sorted(CORE.rglob("*.py"))

# What the files of a folder may import of ours, besides each other.
SEES = {
    "baselines": {"mkor.checks"},
    "capture": {"mkor.blocks", "mkor.distributed", "mkor.linalg", "mkor.methods.base", "mkor.warn"},
    "distributed": set(),
    "factors": {"mkor.blocks", "mkor.linalg"},
    "integrations": {"mkor.optimizer"},
    "methods": {
        *("mkor.blocks", "mkor.factors", "mkor.linalg", "mkor.messages"),
        *("mkor.methods.base", "mkor.methods.statistics", "mkor.triangle"),
    },
}
MAX_FILE_LINES = 300
MAX_FUNCTION_LINES = 60


def name(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def imports(source: str, package: str) -> Iterator[tuple[int, str]]:
    """Line and absolute dotted name of each import; ``from a import b`` counts as ``a.b``."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")
                above = parents[: len(parents) - node.level + 1]
                base = ".".join([*above, *([node.module] if node.module else [])])
            yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)


def imports_of(path: Path) -> list[tuple[int, str]]:
    package = ".".join(path.relative_to(SRC).parent.parts)
    return list(imports(path.read_text(encoding="utf-8"), package))


def within(target: str, module: str) -> bool:
    return target == module or target.startswith(module + ".")


def test_imports_resolves_relative_names():
    source = "from . import base\nfrom ..factors import dense\nfrom .base import Method\nimport a.b"
    assert [target for _, target in imports(source, "mkor.methods")] == [
        "mkor.methods.base",
        "mkor.factors.dense",
        "mkor.methods.base.Method",
        "a.b",
    ]


@pytest.mark.parametrize("folder", SEES)
def test_a_folder_imports_only_what_it_may_see(folder):
    found = []
    for path in sorted((CORE / folder).rglob("*.py")):
        allowed = set(SEES[folder])
        # Methods stand alone, so that one page is enough to read one; the registry names them all.
        if folder != "methods" or path.name == "__init__.py":
            allowed.add(f"mkor.{folder}")
        for line, target in imports_of(path):
            ours = within(target, "mkor")
            if ours and not any(within(target, module) for module in allowed):
                found.append(f"{name(path)}:{line} imports {target}")
    assert not found, f"{folder} may see only {sorted(SEES[folder])}"


def test_the_library_never_sees_the_bench():
    found = [
        f"{name(path)}:{line} imports {target}"
        for path in CORE_FILES
        for line, target in imports_of(path)
        if within(target, "mkor_bench")
    ]
    assert not found


def test_one_file_talks_to_torch_distributed():
    found = []
    for path in CORE_FILES:
        if path == CORE / "distributed" / "comm.py":
            continue
        found += [
            f"{name(path)}:{line} imports {target}"
            for line, target in imports_of(path)
            if within(target, "torch.distributed")
        ]
        found += [
            f"{name(path)}:{node.lineno} uses torch.distributed"
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.distributed"
        ]
    assert not found


def test_the_library_never_prints():
    found = [
        f"{name(path)}:{node.lineno}"
        for path in CORE_FILES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "print"
    ]
    assert not found


def test_files_are_short():
    lengths = {name(p): len(p.read_text(encoding="utf-8").splitlines()) for p in FILES}
    assert {k: v for k, v in lengths.items() if v > MAX_FILE_LINES} == {}


def function_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of a function without its decorators and its docstring."""
    total = node.end_lineno - node.lineno + 1
    if ast.get_docstring(node) is not None:
        docstring = node.body[0]
        total -= docstring.end_lineno - docstring.lineno + 1
    return total


def test_functions_are_short():
    found = {
        f"{name(path)}:{node.lineno} {node.name}": function_lines(node)
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert {k: v for k, v in found.items() if v > MAX_FUNCTION_LINES} == {}


def public_names() -> list[str]:
    """What ``mkor.__all__`` lists, read from the source: collecting tests must not import it."""
    for node in ast.parse((CORE / "__init__.py").read_text(encoding="utf-8")).body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        if any(isinstance(t, ast.Name) and t.id == "__all__" for t in targets):
            return [n for n in ast.literal_eval(node.value) if not n.startswith("_")]
    raise AssertionError("src/mkor/__init__.py must assign a literal __all__")


@pytest.mark.parametrize("public", public_names())
def test_a_public_name_is_documented(public):
    import mkor

    thing = getattr(mkor, public)
    doc = vars(thing).get("__doc__") if inspect.isclass(thing) else thing.__doc__
    assert doc and doc.strip(), f"mkor.{public} has no docstring"
    reference = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    assert re.search(rf"^::: mkor\.{public}$", reference, re.MULTILINE), (
        f"docs/reference.md lacks '::: mkor.{public}'"
    )
