"""Read a Config: preset, then file, environment, flags and dotted overrides, the later the stronger.

Also which run folder a command works on. Every value remembers where it came from, for `dpace config show` and for
error messages.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError

from dpace_cli import console
from dpace_cli.config import OBJECTIVES, Config, objective_from_name
from dpace_cli.errors import UsageError
from dpace_cli.records import RunFolder, newest_run, writing

ENV_PREFIX = "DPACE_"
RUNS = Path("runs")
_SHOWN_CHANGES = 8
_KINDS = {kind.model_fields["name"].default: kind for kind in OBJECTIVES}
_OVERRIDE = re.compile(r"^([A-Za-z_]\w*(?:\.[\w-]+)*)=(.*)$", re.DOTALL)

Origins = dict[str, str]
"""Dotted key to the place that set it."""


def preset_names() -> list[str]:
    """Names that `--preset` takes."""
    return sorted(p.name.removesuffix(".yaml") for p in resources.files("dpace_cli.presets").iterdir()
                  if p.name.endswith(".yaml"))  # fmt: skip


def load_config(
    *,
    preset: str | None = None,
    file: Path | None = None,
    flags: Mapping[str, Any] | None = None,
    overrides: Sequence[str] = (),
    environ: Mapping[str, str] | None = None,
) -> tuple[Config, Origins]:
    """Build the config of a command.

    Args:
        preset: name of a file in `dpace_cli/presets`.
        file: YAML or JSON file; its own `preset` key is honoured when `preset` is not given.
        flags: dotted key to value, from the command line's own options; None values are left out.
        overrides: `train.learning_rate=1e-3` strings; values are YAML.
        environ: environment; keys such as `DPACE_TRAIN__LEARNING_RATE`.
    Raises:
        UsageError: an unknown key (with the nearest known one) or a bad value, with where it came from.
    """
    values: dict[str, Any] = {}
    origins: Origins = {}
    from_file = _read_file(file) if file is not None else {}
    preset = preset or from_file.pop("preset", None)
    if preset is not None:
        _merge(values, _read_preset(preset), f"preset {preset}", origins)
    _merge(values, from_file, str(file), origins)
    for key, text in sorted((os.environ if environ is None else environ).items()):
        if key.startswith(ENV_PREFIX) and "__" in key:
            dotted = key.removeprefix(ENV_PREFIX).lower().replace("__", ".")
            _set(values, dotted, _parse(text), f"environment {key}", origins)
    for dotted, value in (flags or {}).items():
        if value is not None:
            _set(values, dotted, value, "command line", origins)
    for text in overrides:
        match = _OVERRIDE.match(text)
        if match is None:
            raise UsageError(f"override {text!r} is not of the form section.key=value")
        _set(values, match[1], _parse(match[2]), "command line", origins)
    return _validated(values, origins), origins


def named_run(config: Path | None, preset: str | None, run: Path | None) -> tuple[Path | None, RunFolder | None]:
    """The config file that a command reads, and the run that it works on, where there is one already.

    A named config file or preset has its own run folder, `runs/NAME`. With neither, the command works on
    `--run`, on `DPACE_RUN`, or on the newest run, and says which.
    """
    named = config is not None or preset is not None
    if run is None and os.environ.get("DPACE_RUN"):
        run = Path(os.environ["DPACE_RUN"])
    folder = RunFolder(run) if run is not None else None
    if folder is None and not named:
        folder = newest_run(RUNS)
        if folder is not None:
            console.note(f"run: {folder} (the newest; --run or DPACE_RUN names another)")
    if not named and folder is not None and folder.config_file.exists():
        config = folder.config_file
    return config, folder


def look_at_run(
    config: Path | None, preset: str | None, run: Path | None, flags: Mapping[str, Any], arguments: Sequence[str] | None
) -> tuple[Config, RunFolder]:
    """The config and the run folder of a command that leaves the run as it is."""
    config, folder = named_run(config, preset, run)
    loaded, _ = load_config(preset=preset, file=config, flags=flags, overrides=arguments or [])
    return loaded, folder or RunFolder(RUNS / loaded.name)


def open_run(
    config: Path | None, preset: str | None, run: Path | None, flags: Mapping[str, Any], arguments: Sequence[str] | None
) -> tuple[Config, RunFolder]:
    """The config and the run folder of a stage, the config kept there: `look_at_run`, then `keep`."""
    loaded, folder = look_at_run(config, preset, run, flags, arguments)
    keep(loaded, folder, named=config is not None or preset is not None)
    return loaded, folder


def keep(loaded: Config, folder: RunFolder, named: bool) -> None:
    """Begin the run where there is none yet, and keep a config there that was named, or is the first."""
    if not named and not folder.config_file.exists():
        console.note(f"run: {folder} (a new one)")
    if "RANK" not in os.environ and (named or not folder.config_file.exists()):
        if changed := changes(folder.config_file, loaded):
            console.note(f"{folder.config_file} changes: {'; '.join(changed)}")
        save_config(loaded, folder.config_file)


def is_override(text: str) -> bool:
    """True for `section.key=value` with a section that exists, so that a path is never taken for one."""
    match = _OVERRIDE.match(text)
    return match is not None and match[1].split(".")[0] in Config.model_fields


def save_config(config: Config, path: Path) -> None:
    """Write the resolved config as YAML, whole or not at all."""
    with writing(path) as file:
        yaml.safe_dump(config.model_dump(mode="json"), file, sort_keys=False, allow_unicode=True)


def changes(path: Path, new: Config) -> list[str]:
    """What another config changes in the saved one of a run, as "key: old -> new"; none where nothing is saved."""
    try:
        saved = Config.model_validate(_read_file(path))
    except (UsageError, ValidationError):
        return []
    old, now = (dict(_leaves(config.model_dump(mode="json"))) for config in (saved, new))
    found = [
        f"{key}: {_shown(old.get(key))} -> {_shown(now.get(key))}"
        for key in dict.fromkeys([*old, *now])
        if old.get(key) != now.get(key)
    ]
    more = [f"{len(found) - _SHOWN_CHANGES} more"] if len(found) > _SHOWN_CHANGES else []
    return found[:_SHOWN_CHANGES] + more


def _shown(value: Any) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, width=10**6, allow_unicode=True)
    return text.removesuffix("\n").removesuffix("...").strip()


def described(config: Config, origins: Origins) -> str:
    """The config as YAML, each value followed by the place that set it."""
    lines = []
    for dotted, value in _leaves(config.model_dump(mode="json")):
        origin = origins.get(dotted) or next((o for k, o in origins.items() if k.startswith(f"{dotted}.")), "default")
        lines.append(f"{dotted}: {_shown(value)}  # {origin}")
    return "\n".join(lines) + "\n"


def commented(config: Config) -> str:
    """The config as a YAML file to edit: every field, its meaning as a comment."""
    lines: list[str] = []
    for name, field in Config.model_fields.items():
        value = getattr(config, name)
        if isinstance(value, BaseModel):
            lines += ["", *(f"# {line}" for line in (type(value).__doc__ or "").strip().splitlines()), f"{name}:"]
            lines += _commented_fields(value, "  ")
        else:
            lines += [f"# {field.description}", f"{name}: {value}"]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def _commented_fields(section: BaseModel, indent: str) -> list[str]:
    lines: list[str] = []
    for name, field in type(section).model_fields.items():
        value = getattr(section, name)
        comment = f"  # {field.description}" if field.description else ""
        if isinstance(value, BaseModel):
            lines += [f"{indent}{name}:{comment}", *_commented_fields(value, indent + "  ")]
        else:
            plain = section.model_dump(mode="json")[name]
            lines.append(f"{indent}{name}: {_shown(plain)}{comment}")
    return lines


def _leaves(node: Mapping[str, Any], prefix: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for key, value in node.items():
        dotted = f"{prefix}{key}"
        nested = isinstance(value, dict) and value and not _is_free_form(dotted)
        found += _leaves(value, f"{dotted}.") if nested else [(dotted, value)]
    return found


def _read_preset(name: str) -> dict[str, Any]:
    if name not in preset_names():
        raise UsageError(f"there is no preset {name!r}", f"the presets are {', '.join(preset_names())}")
    return yaml.safe_load(resources.files("dpace_cli.presets").joinpath(f"{name}.yaml").read_text("utf-8"))


def _read_file(path: Path) -> dict[str, Any]:
    try:
        text = path.read_text("utf-8")
        loaded = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except FileNotFoundError:
        raise UsageError(f"config file {path} does not exist", "`dpace config init FILE` writes one") from None
    except (OSError, UnicodeDecodeError, ValueError, yaml.YAMLError) as error:
        raise UsageError(f"cannot read config file {path}: {' '.join(str(error).split())}") from None
    if loaded is None:
        return {}
    if not isinstance(loaded, dict):
        raise UsageError(f"config file {path} holds a {type(loaded).__name__}, not sections")
    return loaded


def _parse(text: str) -> Any:
    """A value as YAML reads it, and numbers such as 1e-3, which YAML 1.1 takes for a string."""
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            return value
    return value


def _merge(values: dict[str, Any], new: Mapping[str, Any], origin: str, origins: Origins, prefix: str = "") -> None:
    for key, value in new.items():
        dotted = f"{prefix}{key}"
        if dotted == "train.objective" and isinstance(value, str):
            value = objective_from_name(value)
        if isinstance(value, dict) and not _is_free_form(dotted):
            named = value.get("name")
            if dotted == "train.objective" and named and (values.get(key) or {}).get("name") != named:
                values[key] = {}  # another objective does not inherit the fields of the one it replaces
            if values.get(key) is None:
                values[key] = {}  # also a section that was left empty
            if not isinstance(values[key], dict):
                raise UsageError(f"{dotted} was given the value {values[key]!r}; it is a section, with fields")
            _merge(values[key], value, origin, origins, f"{dotted}.")
        elif value is None and dotted in Config.model_fields:
            continue  # a section with nothing in it changes nothing
        else:
            values[key] = value
            origins[dotted] = origin


def _set(values: dict[str, Any], dotted: str, value: Any, origin: str, origins: Origins) -> None:
    """Merge one dotted key."""
    nested: Any = value
    for part in reversed(dotted.split(".")):
        nested = {part: nested}
    _merge(values, nested, origin, origins)


def _is_free_form(dotted: str) -> bool:
    return dotted in ("target.chat_template_kwargs", "train.specforge.extra", "train.objective.params")


def _validated(values: dict[str, Any], origins: Origins) -> Config:
    try:
        return Config.model_validate(values)
    except ValidationError as error:
        raise _explain(error.errors(include_url=False)[0], values, origins) from None


def _explain(problem: Mapping[str, Any], values: dict[str, Any], origins: Origins) -> UsageError:
    """Pydantic's first complaint, as: what is wrong, where it was set, what would be right."""
    # Within a union, pydantic puts the member's tag into the location; it is not a key of the config.
    parts, node = [], values
    for part in problem["loc"]:
        if isinstance(node, dict) and part not in node and problem["type"] != "missing":
            if part in _KINDS:
                continue
        elif problem["type"] == "missing" and part in _KINDS:
            continue
        parts.append(str(part))
        node = node.get(part, {}) if isinstance(node, dict) else node[part] if isinstance(node, list) else {}
    dotted = ".".join(parts)
    origin = origins.get(dotted) or next((o for k, o in origins.items() if dotted.startswith(f"{k}.")), None)
    hint = f"it was set {_place(origin)}" if origin else ""
    if problem["type"] == "extra_forbidden":
        return _unknown_key(parts, values, hint)
    if problem["type"] == "union_tag_invalid":
        given = problem["ctx"]["tag"]
        near = difflib.get_close_matches(given, _KINDS, n=1)
        did_you_mean = f"did you mean {near[0]}? " if near else ""
        return UsageError(f"{dotted}: there is no objective {given!r}", f"{did_you_mean}`dpace objectives` lists them")
    message = problem["msg"].removeprefix("Value error, ")
    if not dotted:
        return UsageError(message, hint)
    if problem["type"] == "missing":
        return UsageError(f"{dotted} is missing", hint)
    if problem["type"] in ("model_type", "dict_type"):
        return UsageError(f"{dotted} is {problem['input']!r}; it is a section of keys", hint)
    return UsageError(f"{dotted} is {problem['input']!r}; {message[0].lower()}{message[1:]}", hint)


def _place(origin: str) -> str:
    if origin == "command line":
        return "on the command line"
    return f"by {origin}" if origin.startswith(("preset ", "environment ")) else f"in {origin}"


def _unknown_key(parts: list[str], values: dict[str, Any], hint: str) -> UsageError:
    dotted = ".".join(parts)
    if parts[:2] == ["train", "objective"] and len(parts) == 3:
        objective = values["train"]["objective"].get("name", "dpace")
        takers = [name for name, kind in _KINDS.items() if parts[2] in kind.model_fields]
        if takers:
            return UsageError(
                f"objective {objective} takes no {parts[2]} ({dotted})",
                f"{parts[2]} belongs to {', '.join(takers)}; `dpace objectives` lists the fields",
            )
        section: Any = _KINDS.get(objective)
    else:
        section = Config
        for part in parts[:-1]:
            section = _section_of(section, part)
    known = list(section.model_fields) if section is not None else []
    near = difflib.get_close_matches(parts[-1], known, n=1, cutoff=0.5)
    prefix = ".".join(parts[:-1])
    elsewhere = [f"{name}.{parts[-1]}" for name, field in Config.model_fields.items()
                 if parts[-1] in getattr(field.annotation, "model_fields", {})]  # fmt: skip
    nearest = f"{prefix}.{near[0]}".lstrip(".") if near else (elsewhere[0] if elsewhere else "")
    advice = f"did you mean {nearest}?" if nearest else "`dpace config show` lists every key"
    return UsageError(f"unknown config key {dotted}", "; ".join(filter(None, [advice, hint])))


def _section_of(section: Any, part: str) -> Any:
    field = getattr(section, "model_fields", {}).get(part)
    if field is None:
        return None
    annotation = field.annotation
    options = get_args(annotation) if get_origin(annotation) is Union else [annotation]
    return next((o for o in options if isinstance(o, type) and issubclass(o, BaseModel)), None)
