"""Write docs/cli.md and docs/config.md from the commands and the schema: `python docs/generate.py`.

A test fails when they are out of date.
"""

from __future__ import annotations

import types
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

import typer
from pydantic import BaseModel

from dpace_cli.cli import app
from dpace_cli.config import OBJECTIVES, Config
from dpace_cli.settings import preset_names

DOCS = Path(__file__).parent


def cli_page() -> str:
    """Every command with its arguments and options, as the help texts have them."""
    lines = [
        "# Commands",
        "",
        "Made from the commands by `python docs/generate.py`.",
        "",
        "Exit codes: 0 done, 1 a run that failed or a prep that kept no row, 2 wrong usage or configuration, 3 a prep",
        "whose input breaks off (all whole rows are written), 128 + signal when stopped (the same command goes on from",
        "there). Results go to standard output, everything else to standard error.",
    ]
    root = typer.main.get_command(app)
    for path, command in _commands(root, "dpace"):
        lines += ["", f"## {path}", "", *(command.help or "").strip().splitlines(), ""]
        usage = [p.metavar or p.name.upper() for p in command.params if p.param_type_name == "argument"]
        lines += ["```", " ".join([path, *usage, "[OPTIONS]"]), "```", ""]
        options = [p for p in command.params if p.param_type_name == "option"]
        lines += ["| option | meaning |", "| --- | --- |"]
        lines += [f"| `{' / '.join(p.opts)}` | {(p.help or '').replace('|', '/')} |" for p in options]
    return "\n".join(lines) + "\n"


def _commands(node: Any, path: str) -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name in node.list_commands(None):
        child = node.commands[name]
        inner = f"{path} {name}"
        found += _commands(child, inner) if getattr(child, "commands", None) else [(inner, child)]
    return found


def config_page() -> str:
    """Every section and field of the schema."""
    lines = [
        "# Configuration",
        "",
        "Made from the schema by `python docs/generate.py`. One YAML or JSON file serves all stages, and `dpace config",
        "init FILE` writes one with every field. Strength, from weak to strong: preset, file, environment",
        "(`DPACE_TRAIN__LEARNING_RATE=1e-3`), options of a command, `train.learning_rate=1e-3` at its end.",
        "",
        f"Presets: {', '.join(f'`{name}`' for name in preset_names())}.",
        "",
        "| key | type | default | meaning |",
        "| --- | --- | --- | --- |",
        *_rows(Config, "", nested=False),
    ]
    for name, field in Config.model_fields.items():
        if _is_section(field.annotation):
            lines += ["", f"## {name}", "", (field.annotation.__doc__ or "").strip(), "",
                      "| key | type | default | meaning |", "| --- | --- | --- | --- |",
                      *_rows(field.annotation, f"{name}.")]  # fmt: skip
    lines += ["", "## Objectives", "", "`train.objective` is one of these; each has its own fields.", "",
              "| name | fields | meaning |", "| --- | --- | --- |"]  # fmt: skip
    for objective in OBJECTIVES:
        fields = [f"`{key}` ({_default(field)})" for key, field in objective.model_fields.items() if key != "name"]
        meaning = (objective.__doc__ or "").strip().splitlines()[0]
        lines.append(f"| `{objective.model_fields['name'].default}` | {', '.join(fields)} | {meaning} |")
    return "\n".join(lines) + "\n"


def _rows(section: type[BaseModel], prefix: str, nested: bool = True) -> list[str]:
    rows = []
    for name, field in section.model_fields.items():
        if _is_section(field.annotation):
            if nested:
                rows += _rows(field.annotation, f"{prefix}{name}.")
            continue
        meaning = (field.description or "").replace("|", "/")
        rows.append(f"| `{prefix}{name}` | {_type(field.annotation)} | {_default(field)} | {meaning} |")
    return rows


def _is_section(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _type(annotation: Any) -> str:
    origin, inner = get_origin(annotation), get_args(annotation)
    if origin is Annotated or (origin in (Union, types.UnionType) and all(_is_section(i) for i in inner)):
        return "objective"
    if origin is Literal:
        return ", ".join(f"`{value}`" for value in inner)
    if origin in (Union, types.UnionType):
        return " or ".join("null" if item is type(None) else _type(item) for item in inner)
    if origin is list:
        return f"list of {_type(inner[0])}"
    if origin is dict:
        return "mapping"
    return {"str": "text", "int": "integer", "float": "number", "bool": "true, false"}.get(
        getattr(annotation, "__name__", ""), str(annotation)
    )


def _default(field: Any) -> str:
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if isinstance(value, BaseModel):
        return f"`{value.name}`"
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return "empty" if value in ("", [], {}) else f"`{value}`"


if __name__ == "__main__":
    (DOCS / "cli.md").write_text(cli_page(), "utf-8")
    (DOCS / "config.md").write_text(config_page(), "utf-8")
