"""What holds for every source file: it says what it is, imports point one way, and nothing of a machine is in it."""

import ast
import re
import subprocess
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tests.support.checkout import repository_files
from tests.support.trees import COMMANDS, ROOT

FILES = [path for path in repository_files() if path.name != "LICENSE"]
PYTHON = [path for path in FILES if path.suffix == ".py"]
SCRIPTS = [path for path in PYTHON if path.parent == Path("workflow/scripts")]
STEPS = [path for path in SCRIPTS if path.stem not in COMMANDS]
REBUILD = Path("workflow/scripts/rebuild")
PACKAGE = [path for path in PYTHON if path.is_relative_to(REBUILD)]

# The hosts that a file may name: those that formats are known by, the machine itself, and nobody's (RFC 2606).
HOSTS = r"git-lfs\.github\.com|json-schema\.org|localhost|127\.0\.0\.1|\[?::1\]?|(\w+\.)*example(\.com|\.org)?|\{[^}]*\}"
URL = re.compile(rf"https?://(?!({HOSTS})([:/\"'`\s)]|$))[^\s\"'`)]+")
OF_A_MACHINE = re.compile(r"(?<![\w.])/(home|root|Users|work|mnt)/[\w.]+")
OF_AN_INDEX = re.compile(r"index[-_]url\b.*=|trusted[-_]host|files\.pythonhosted|simple/?\"")


def parsed(path: Path) -> ast.Module:
    return ast.parse((ROOT / path).read_text())


def is_guard(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) == "__name__ == '__main__'"


def names_snakemake(node: ast.AST) -> bool:
    return any(isinstance(part, ast.Name) and part.id == "snakemake" for part in ast.walk(node))


def imported(path: Path) -> set[str]:
    """Return the first part of every module that a file imports, at whatever depth."""
    found = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.split(".")[0])
    return found


def matches(pattern: re.Pattern[str]) -> list[str]:
    """Return file, line number and text of every match, this file's own patterns apart."""
    return [
        f"{path}:{number}: {line.strip()[:120]}"
        for path in FILES
        if path != Path(__file__).relative_to(ROOT)
        for number, line in enumerate((ROOT / path).read_text(errors="replace").splitlines(), 1)
        if pattern.search(line)
    ]


def test_every_module_says_what_it_is():
    assert [str(path) for path in PYTHON if not ast.get_docstring(parsed(path))] == []


@pytest.mark.parametrize("path", SCRIPTS, ids=str)
def test_a_script_is_one_public_function_of_its_own_name_and_a_guard(path: Path):
    functions = {node.name: node for node in parsed(path).body if isinstance(node, ast.FunctionDef)}
    assert ast.get_docstring(functions[path.stem])
    assert is_guard(parsed(path).body[-1])


@pytest.mark.parametrize("path", STEPS, ids=str)
def test_a_script_knows_of_snakemake_only_below_its_guard(path: Path):
    *body, guard = parsed(path).body
    assert [ast.unparse(node)[:80] for node in body if names_snakemake(node)] == []
    assert "snakemake" not in imported(path)
    assert ast.unparse(guard).splitlines()[1].strip() == "begin_step(snakemake.log[0])"


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_a_command_knows_nothing_of_snakemake_and_is_made_known(name: str):
    path = Path("workflow/scripts") / f"{name}.py"
    assert path in SCRIPTS
    assert not names_snakemake(parsed(path))
    assert "snakemake" not in imported(path)
    assert [
        file for file in ("README.md", "Makefile") if str(path) not in (ROOT / file).read_text()
    ] == []


def test_the_shared_package_knows_neither_snakemake_nor_the_scripts():
    above = {"snakemake", "tests", *(script.stem for script in SCRIPTS)}
    assert [str(path) for path in PACKAGE if names_snakemake(parsed(path))] == []
    assert [str(path) for path in PACKAGE if imported(path) & above] == []


def room(module: tuple[str, ...]) -> str:
    """Return the room of the package that a module below it is in, "" for those outside the rooms."""
    return module[0] if (ROOT / REBUILD / module[0]).is_dir() else ""


def test_the_rooms_of_the_shared_package_depend_on_each_other_one_way():
    needs: dict[str, set[str]] = {}
    for path in PACKAGE:
        own = room(path.relative_to(REBUILD).parts)
        nodes = [node for node in ast.walk(parsed(path)) if isinstance(node, ast.ImportFrom)]
        modules = [node.module.split(".")[1:] for node in nodes if node.module]
        names = [node.module.split(".")[0] for node in nodes if node.module]
        for first, module in zip(names, modules, strict=True):
            if first == "rebuild" and module:
                needs.setdefault(own, set()).add(room(tuple(module)))
    graph = {own: others - {own} for own, others in needs.items()}
    assert len([*TopologicalSorter(graph).static_order()]) >= 10  # raises CycleError
    assert graph[""] == set()


def test_importing_the_shared_package_imports_nothing():
    (docstring,) = parsed(Path("workflow/scripts/rebuild/__init__.py")).body
    assert isinstance(docstring, ast.Expr)


@pytest.mark.parametrize("path", SCRIPTS, ids=str)
def test_a_script_can_be_imported_without_snakemake(path: Path):
    command = [
        sys.executable,
        "-c",
        f"import sys, {path.stem}; sys.exit('snakemake' in sys.modules)",
    ]
    subprocess.run(command, cwd=ROOT / "workflow" / "scripts", check=True, timeout=120)


def test_no_file_names_a_path_of_somebodys_machine():
    assert matches(OF_A_MACHINE) == []


def test_no_file_names_a_package_index_or_an_unexpected_host():
    assert matches(OF_AN_INDEX) + matches(URL) == []
