"""The project itself: layers, docs that are true, a command line that answers at once."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest
from importlinter import cli as import_linter

ROOT = Path(__file__).parent.parent


def test_imports_go_downward_only(monkeypatch):
    monkeypatch.chdir(ROOT)
    assert import_linter.lint_imports(no_cache=True) == 0


@pytest.mark.parametrize("command", [["--help"], ["config", "show"], ["train", "--help"]])
def test_no_torch_is_imported_before_it_is_needed(command):
    code = f"import sys; sys.argv = ['dpace', *{command}]\nimport atexit\n" \
           "atexit.register(lambda: print('LOADED', 'torch' in sys.modules or 'transformers' in sys.modules))\n" \
           "from dpace_cli.cli import main; main()"  # fmt: skip
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and "LOADED False" in done.stdout


@pytest.mark.parametrize("page", ["cli", "config"])
def test_generated_docs_are_up_to_date(page):
    spec = importlib.util.spec_from_file_location("generate", ROOT / "docs" / "generate.py")
    generate = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generate)
    made = getattr(generate, f"{page}_page")()
    assert (ROOT / "docs" / f"{page}.md").read_text("utf-8") == made, "run `python docs/generate.py`"


def test_links_in_the_docs_lead_somewhere():
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]:
        for link in re.findall(r"\]\((?!https?:|#)([^)#]+)", page.read_text("utf-8")):
            assert (page.parent / link).exists(), f"{page.name}: {link}"


def test_commands_in_the_readme_exist():
    from typer.main import get_command

    from dpace_cli.cli import app

    commands = get_command(app).commands
    for name in re.findall(r"^(?:\.venv/bin/)?dpace (\w+)", (ROOT / "README.md").read_text("utf-8"), re.MULTILINE):
        assert name in commands
