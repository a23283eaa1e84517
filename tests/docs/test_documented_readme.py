"""The README is true: its commands run, its examples are valid, its tables are the code's own."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from rebuild.audit.checks import CHECKS
from rebuild.audit.facts import STATUSES
from rebuild.audit.set_checks import SET_CHECKS
from rebuild.prompts.refusal import REASONS
from rebuild.start.config import complete_config, load_schema
from rebuild.tables import GENERATED, HIDDEN_STATES, PROMPTS, REJECTED, TOKENIZED
from tests.support.checkout import repository_files, run
from tests.support.dummies import dummy_tree
from tests.support.trees import ROOT

README = (ROOT / "README.md").read_text()
DOCUMENTS = {name: (ROOT / name).read_text() for name in ("README.md", "CONTRIBUTING.md")}
SCHEMA = load_schema(ROOT / "workflow" / "schemas" / "config.schema.yaml")

# What takes minutes or changes the machine: the file that carries it out, and its words for it.
RUN_ELSEWHERE = {
    "make demo": ("tests/workflow/conftest.py", '"--cores", "all", "--resources", "gpu=4"'),
    "make test": (".ci/run", "make test"),
    "make check": (".ci/run", "make check"),
    "make venv": ("Makefile", "demo: venv"),
    ". .venv/bin/activate": ("Makefile", "/bin/activate"),
    "make masks FILE=results/demo/tokenized/00003.parquet": (
        "tests/unit/test_show_masks.py",
        '"make", "--dry-run", "masks"',
    ),
}


def fenced(text: str, language: str) -> list[str]:
    """Return the blocks of a Markdown text that are fenced with three backticks and this language."""
    return re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def commands() -> list[str]:
    """Return the commands of all shell blocks, without comments and blank lines, each once."""
    blocks = [block for text in DOCUMENTS.values() for block in fenced(text, "sh")]
    lines = [re.sub(r"\s+#.*", "", line).strip() for block in blocks for line in block.splitlines()]
    return list(dict.fromkeys(line for line in lines if line and not line.startswith("#")))


def section(title: str) -> str:
    """Return the part of the README under a heading, up to the next heading of any level."""
    return re.split(r"^#+ ", README.partition(f"# {title}\n")[2], maxsplit=1, flags=re.MULTILINE)[0]


def table(title: str) -> dict[str, list[str]]:
    """Return the one table of a section, or of its rows those that have code in their first cell: cells by that code."""
    rows = [
        line.strip("|").split("|") for line in section(title).splitlines() if line.startswith("| ")
    ]
    return {cells[0].strip(" `"): [cell.strip() for cell in cells[1:]] for cells in rows[1:]}


def write_example(tree: Path) -> None:
    """Write the README's first configuration, cut to two shards, and prompts for it and the production example."""
    example = fenced(README, "yaml")[0]
    name = example.splitlines()[0].removeprefix("# ")
    (tree / name).write_text(re.sub(r"shards: \d+", "shards: 2", example))
    prompts = (tree / "config" / "demo_prompts.jsonl").read_text()
    production = yaml.safe_load((tree / "config" / "qwen3.6-27b.yaml").read_text())
    (tree / production["prompts"]["path"]).mkdir(parents=True)
    (tree / production["prompts"]["path"] / "some.jsonl").write_text(prompts)
    (tree / yaml.safe_load(example)["prompts"]["path"]).write_text(prompts)


def test_every_command_is_run_here_or_known_to_be_run_elsewhere():
    others = [name for name in commands() if not name.startswith("snakemake ")]
    assert sorted(others) == sorted(RUN_ELSEWHERE)


@pytest.mark.parametrize("command", RUN_ELSEWHERE)
def test_a_command_that_is_run_elsewhere_is_run_there(command: str):
    place, words = RUN_ELSEWHERE[command]
    assert words in (ROOT / place).read_text()


def test_every_snakemake_command_works_as_it_is_written(tmp_path: Path):
    tree = dummy_tree(tmp_path / "tree")
    write_example(tree)
    for command in [name for name in commands() if name.startswith("snakemake ")]:
        done = run(command, tree)
        assert done.returncode == 0, f"{command}\n{done.stdout}"
        assert "Job stats:" in done.stdout or "Nothing to be done" in done.stdout


@pytest.mark.parametrize("command", [name for name in commands() if name.startswith("make ")])
def test_every_make_command_is_a_documented_target_of_the_makefile(cloned: Path, command: str):
    assert re.search(
        rf"^{command.split()[1]}:.*## ", (cloned / "Makefile").read_text(), re.MULTILINE
    )
    assert run(f"make --dry-run {command.removeprefix('make ')}", cloned).returncode == 0


def test_every_make_target_that_a_text_mentions_is_there():
    reference = (ROOT / "config" / "README.md").read_text()
    mentioned = re.findall(r"`make ([a-z-]+)", "\n".join([*DOCUMENTS.values(), reference]))
    targets = re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert sorted(set(mentioned) - set(targets)) == []


@pytest.mark.parametrize("example", fenced(README, "yaml"), ids=lambda text: text.split()[1])
def test_every_configuration_in_the_readme_is_valid(example: str):
    complete_config(yaml.safe_load(example), SCHEMA)


def test_the_first_screen_has_the_two_commands_and_the_three():
    first_screen = "\n".join(README.splitlines()[:40])
    wanted = ["make demo", "make test", "snakemake --cores all --resources gpu=4"]
    wanted += ["snakemake --dry-run", "snakemake --rerun-incomplete", "## The stages"]
    assert [text for text in wanted if text not in first_screen] == []


def test_the_stages_are_the_rules_that_run_something(steps: dict[str, Any]):
    assert set(table("The stages")) == set(steps)


def test_every_target_is_named(targets: dict[str, Any]):
    assert [name for name in targets if f"`{name}`" not in section("The stages")] == []


def test_the_rooms_exist_and_no_file_is_outside_them():
    (tree,) = fenced(section("The rooms"), "text")
    rooms = [line.split()[0] for line in tree.splitlines()]
    assert [room for room in rooms if not (ROOT / room).exists()] == []
    homeless = [
        str(path)
        for path in repository_files()
        if not any(path.is_relative_to(room) for room in [*rooms, "README.md", ".gitignore"])
    ]
    assert homeless == []


def test_the_files_of_a_run_are_those_that_the_rules_write(steps: dict[str, Any]):
    (listing,) = fenced(section("The files of a run"), "text")
    written = {line.split()[0] for line in listing.splitlines()}
    for name, rule in steps.items():
        for path in rule["output"]:
            plain = re.sub(r"\{(\w+),?[^/]*?\}(?=[/.])", r"<\1>", path)
            assert re.sub(r"/(\d{5}|canary)\.", "/<shard>.", plain) in written, (
                f"{name} writes {path}"
            )


@pytest.mark.parametrize(
    ("file", "schema"),
    [
        ("prompts", PROMPTS),
        ("rejected", REJECTED),
        ("generated", GENERATED),
        ("tokenized", TOKENIZED),
        ("hidden_states", HIDDEN_STATES),
    ],
    ids=["prompts", "rejected", "generated", "tokenized", "hidden_states"],
)
def test_the_columns_are_those_of_the_files(file: str, schema: Any):
    (cell,) = table("The files of a run")[file]
    assert re.findall(r"`(\w+)`", cell) == schema.names


def test_every_status_is_explained():
    assert [status for status in STATUSES if status not in table("The files of a run")] == []


def test_the_reasons_for_rejecting_a_row_are_those_of_the_code():
    rows = table("Prompts")
    reasons = {name: cells[0] for name, cells in rows.items() if name in REASONS}
    assert reasons == REASONS


def test_the_checks_of_the_audit_are_those_of_the_code():
    assert list(table("The audit")) == [check.name for check in (*CHECKS, *SET_CHECKS)]


def test_every_message_in_the_troubleshooting_table_is_one_that_the_code_has():
    code = "\n".join(path.read_text() for path in (ROOT / "workflow" / "scripts").rglob("*.py"))
    spoken = re.sub(r"\"\s*\n\s*f?\"|\{[^{}]*\}", " … ", code)
    snakemakes_own = {"No such file or directory: 'audited'", "Unparsable value: 'audited'"}
    for message in set(table("Troubleshooting")) - snakemakes_own:
        text = re.match(r"[^`]*", message)[0]
        parts = [part.strip() for part in text.split("…")]
        assert all(part in spoken for part in parts), message


def test_links_within_the_readme_lead_somewhere():
    headings = re.findall(r"^#+ (.*)$", README, re.MULTILINE)
    anchors = {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in headings}
    for link in re.findall(r"\]\(([^)]+)\)", README):
        assert link.removeprefix("#") in anchors if link.startswith("#") else (ROOT / link).exists()
