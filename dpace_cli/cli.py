"""The `dpace` command: parse, build the config, run one stage, print its result.

Nothing heavy is imported before a command runs, so that `dpace --help` answers at once.
"""

from __future__ import annotations

import functools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
import typer.core

from dpace_cli import __version__, console
from dpace_cli.errors import DpaceError, Interrupted, UsageError

if TYPE_CHECKING:
    from dpace_cli.records import RunFolder


class _InOrder(typer.core.TyperGroup):
    """Lists the commands in the order in which they are used."""

    def list_commands(self, ctx: Any) -> list[str]:
        order = ["run", "prep", "regen", "train", "bench", "report", "weights", "doctor", "objectives", "config"]
        return sorted(self.commands, key=order.index)


app = typer.Typer(
    cls=_InOrder,
    help="Train DFlash speculative-decoding drafters with the D-PACE loss, and measure what they are worth.",
    no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None,
)  # fmt: skip
prep_app = typer.Typer(no_args_is_help=True, help="Turn conversations of any source into SpecForge rows.")
config_app = typer.Typer(no_args_is_help=True, help="Show, write or describe the configuration.")
app.add_typer(prep_app, name="prep")
app.add_typer(config_app, name="config")

ConfigFile = Annotated[
    Path | None, typer.Option("--config", help="config file, YAML or JSON; its run folder is runs/NAME")
]
Preset = Annotated[
    str | None, typer.Option("--preset", help="settings that come with dpace: demo, qwen3-4b-3l and others")
]
Run = Annotated[Path | None, typer.Option("--run", help="run folder; default: DPACE_RUN, else the newest under ./runs")]
Json = Annotated[bool, typer.Option("--json", help="print one JSON object on standard output and nothing else there")]
Target = Annotated[str | None, typer.Option("--target", help="hub id or folder of the target; demo: the embedded one")]
Output = Annotated[Path | None, typer.Option("--output", help="write here instead of into the run folder")]
Overrides = Annotated[
    list[str] | None, typer.Argument(metavar="[SECTION.KEY=VALUE]...", help="any config value, such as regen.top_k=20")
]
Inputs = Annotated[
    list[str] | None,
    typer.Argument(metavar="[PATH|SECTION.KEY=VALUE]...", help="files, folders or hub ids; config values"),
]


def command(of: typer.Typer, name: str | None = None, resumes: bool = False) -> Callable[[Callable], Callable]:
    """Register a command: its DpaceErrors are shown as such, signals stop it cleanly, its result is printed.

    Args:
        resumes: the same command goes on where it was stopped.
    """

    def register(body: Callable[..., Any]) -> Callable[..., None]:
        @functools.wraps(body)
        def wrapped(**options: Any) -> None:
            for variable, value in (("TOKENIZERS_PARALLELISM", "false"), ("TRANSFORMERS_VERBOSITY", "error"),
                                    ("HF_HUB_DISABLE_PROGRESS_BARS", "1")):  # fmt: skip
                os.environ.setdefault(variable, value)
            try:
                with console.stoppable():
                    emit(body(**options), options.get("json_output", False))
            except DpaceError as error:
                console.show_error(error.message, error.hint)
                raise typer.Exit(error.exit_code) from None
            except Interrupted as stop:
                console.show_error(stop.message, "run the same command again to resume" if resumes else "")
                raise typer.Exit(stop.exit_code) from None
            except BrokenPipeError:
                os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # the reader of our output is gone
                raise typer.Exit(0) from None
            except OSError as error:
                console.show_error(f"{error.filename or 'input/output'}: {error.strerror or error}")
                raise typer.Exit(1) from None

        return of.command(name)(wrapped)

    return register


def emit(result: Any, as_json: bool) -> None:
    """Print a stage's result on standard output."""
    from dpace_cli.records import to_json

    if result is None:
        return
    if as_json:
        print(json.dumps(to_json(result), ensure_ascii=False))
        return
    from dpace_cli.render import show_result

    show_result(result, console.out)


PARTIAL = 3  # exit code of a prep that read every whole row of an input that breaks off


# --- prep ------------------------------------------------------------------------------------------------


def _prep(source: str, inputs: list[str] | None, options: dict[str, Any]) -> Any:
    from dpace_cli import prep
    from dpace_cli.settings import is_override, open_run

    paths = [item for item in inputs or [] if not is_override(item)]
    flags = {"prep.source": source, "prep.inputs": paths or None, "prep.max_rows": options["max_rows"],
             "target.path": options["target"]}  # fmt: skip
    config, folder = open_run(options["config"], options["preset"], options["run"], flags,
                              [item for item in inputs or [] if is_override(item)])  # fmt: skip
    config.prep.output = _text(options["output"]) or config.prep.output  # of this call alone: the run does not keep it
    result = prep.run(config, folder)
    if not result.kept:
        console.warn(f"no row was kept; {result.rejects} says why")
    if result.partial or not result.kept:
        emit(result, options["json_output"])
        raise typer.Exit(PARTIAL if result.partial else 1)
    return result


MaxRows = Annotated[int | None, typer.Option("--max-rows", help="keep at most this many rows")]


def _add_prep_source(source: str, help_text: str) -> None:
    def body(
        inputs: Inputs = None, config: ConfigFile = None, preset: Preset = None, run: Run = None,
        output: Output = None, max_rows: MaxRows = None, target: Target = None, json_output: Json = False,
    ) -> Any:  # fmt: skip
        return _prep(source, inputs, {"config": config, "preset": preset, "run": run, "output": output,
                                      "max_rows": max_rows, "target": target,
                                      "json_output": json_output})  # fmt: skip

    body.__doc__ = help_text
    command(prep_app, source)(body)


for _source, _help in (
    ("sharegpt", "ShareGPT conversations (from/value turns): JSON array or JSONL, plain, gzip or zstd."),
    ("zlab", "z-lab/qwen3-4b-instruct-100k, by hub id or as a local file."),
    ("ultrachat", "UltraChat 200k, by hub id or as a local file."),
    ("perfectblend", "Open-PerfectBlend, by hub id or as a local file."),
    ("alpaca", "Alpaca rows (instruction, input, output), by hub id or as a local file."),
    ("jsonl", "Rows with `conversations` or `messages`, also mended reject files."),
    ("demo", "Prompts of the embedded generator."),
):
    _add_prep_source(_source, _help)


@command(prep_app, "stats")
def prep_stats(
    file: Path, config: ConfigFile = None, run: Run = None, target: Target = None,
    output: Annotated[Path | None, typer.Option("--output", help="also draw it: a PNG, PDF or SVG file")] = None,
    json_output: Json = False,
) -> Any:  # fmt: skip
    """Turns, lengths, scripts, roles and supervised share of a file of rows: a table and a plot."""
    from dpace_cli import prep
    from dpace_cli.settings import look_at_run

    loaded, _ = look_at_run(config, None, run, {"target.path": target}, [])
    return prep.stats(file, loaded.target, output)


@command(prep_app, "preview")
def prep_preview(
    file: Path, row: Annotated[int, typer.Option("--row", help="which row, from 0")] = 0, config: ConfigFile = None,
    run: Run = None, target: Target = None, json_output: Json = False,
) -> Any:  # fmt: skip
    """Show a row as the target sees it, the supervised tokens coloured."""
    from dpace_cli import prep
    from dpace_cli.settings import look_at_run

    loaded, _ = look_at_run(config, None, run, {"target.path": target}, [])
    return prep.preview(file, loaded.target, row)


# --- regen, train ----------------------------------------------------------------------------------------


@command(app, resumes=True)
def regen(
    overrides: Overrides = None, config: ConfigFile = None, preset: Preset = None, run: Run = None,
    target: Target = None,
    data: Annotated[Path | None, typer.Option("--data", help="rows whose prompts are answered")] = None,
    output: Output = None,
    engine: Annotated[str | None, typer.Option("--engine", help="local or http")] = None,
    base_url: Annotated[list[str] | None, typer.Option("--base-url", help="server, up to /v1; repeatable")] = None,
    temperature: Annotated[float | None, typer.Option("--temperature", help="0: greedy")] = None,
    max_new_tokens: Annotated[int | None, typer.Option("--max-new-tokens", help="longest answer")] = None,
    limit: Annotated[int | None, typer.Option("--limit", help="only this many rows")] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="replace answers made with other settings")] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="show the first rendered prompt and stop")] = False,
    json_output: Json = False,
) -> Any:  # fmt: skip
    """Let the target answer every prompt itself; a stopped run goes on by row id."""
    from dpace_cli import regen as stage
    from dpace_cli.settings import open_run

    flags = {"target.path": target, "regen.engine": engine, "regen.base_urls": base_url or None,
             "regen.temperature": temperature, "regen.max_new_tokens": max_new_tokens, "regen.limit": limit,
             "regen.overwrite": overwrite or None}  # fmt: skip
    loaded, folder = open_run(config, preset, run, flags, overrides)
    return (stage.dry_run if dry_run else stage.run)(loaded, folder, data=data, output=output)


@command(app, resumes=True)
def train(
    overrides: Overrides = None, config: ConfigFile = None, preset: Preset = None, run: Run = None,
    target: Target = None,
    data: Annotated[Path | None, typer.Option("--data", help="rows with the target's answers")] = None,
    output: Output = None,
    loss: Annotated[str | None, typer.Option("--loss", help="see `dpace objectives`, or package.module:name")] = None,
    alpha: Annotated[float | None, typer.Option("--alpha", help="smoothing, for the dpace family")] = None,
    gamma: Annotated[float | None, typer.Option("--gamma", help="decay length, for dflash and lk")] = None,
    top_k: Annotated[int | None, typer.Option("--top-k", help="for topk-prefix")] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="initial weights, anchors, data order")] = None,
    max_steps: Annotated[int | None, typer.Option("--max-steps", help="optimizer steps")] = None,
    nproc: Annotated[int | None, typer.Option("--nproc", help="processes on this machine, through torchrun")] = None,
    engine: Annotated[str | None, typer.Option("--engine", help="native or specforge")] = None,
    restart: Annotated[bool, typer.Option("--restart", help="throw an earlier training of this arm away")] = False,
    replay: Annotated[Path | None, typer.Option("--replay", help="run a failed step again, from its folder")] = None,
    json_output: Json = False,
) -> Any:  # fmt: skip
    """Train a drafter; a stopped training goes on where it was."""
    from dpace_cli import train as stage
    from dpace_cli.settings import open_run

    if replay is not None:
        return stage.replay(replay)
    flags = {"target.path": target, "train.data": _text(data), "train.objective": loss,
             "train.objective.alpha": alpha, "train.objective.gamma": gamma, "train.objective.top_k": top_k,
             "train.seed": seed, "train.max_steps": max_steps, "train.nproc": nproc,
             "train.engine": engine}  # fmt: skip
    loaded, folder = open_run(config, preset, run, flags, overrides)
    loaded.train.output = _text(output) or loaded.train.output  # of this call alone: the run does not keep it
    result = stage.run(loaded, folder, restart=restart)
    return result if stage.reports() else None


# --- bench, report, weights ------------------------------------------------------------------------------

Checkpoints = Annotated[
    list[str] | None, typer.Option("--checkpoint", help="DFlash checkpoint, or a pattern of several; repeatable")
]


@command(app, resumes=True)
def bench(
    overrides: Overrides = None, config: ConfigFile = None, preset: Preset = None, run: Run = None,
    target: Target = None, checkpoint: Checkpoints = None, output: Output = None,
    dataset: Annotated[list[str] | None, typer.Option("--dataset", help="data set or JSONL file; repeatable")] = None,
    data_dir: Annotated[Path | None, typer.Option("--data-dir", help="folder with NAME.jsonl (DPACE_DATA_DIR)")] = None,
    engine: Annotated[str | None, typer.Option("--engine", help="local, simulate, sglang or vllm")] = None,
    temperature: Annotated[list[float] | None, typer.Option("--temperature", help="repeatable")] = None,
    num_prompts: Annotated[int | None, typer.Option("--num-prompts", help="prompts per data set")] = None,
    max_new_tokens: Annotated[int | None, typer.Option("--max-new-tokens", help="longest answer")] = None,
    base_url: Annotated[str | None, typer.Option("--base-url", help="server with speculation")] = None,
    baseline_url: Annotated[str | None, typer.Option("--baseline-url", help="server without speculation")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="print the command that launches each server")] = False,
    json_output: Json = False,
) -> Any:  # fmt: skip
    """Measure SR and tau of one or several checkpoints."""
    from dpace_cli import bench as stage
    from dpace_cli.settings import keep, look_at_run

    flags = {"target.path": target, "bench.datasets": dataset or None, "bench.data_dir": _text(data_dir),
             "bench.engine": engine, "bench.temperatures": temperature or None, "bench.num_prompts": num_prompts,
             "bench.max_new_tokens": max_new_tokens, "bench.base_url": base_url,
             "bench.baseline_url": baseline_url}  # fmt: skip
    loaded, folder = look_at_run(config, preset, run, flags, overrides)
    chosen = checkpoints_of(folder, checkpoint, loaded.bench.checkpoints)
    if dry_run:
        return stage.launch_commands(loaded, chosen)
    keep(loaded, folder, named=bool(config or preset))
    return stage.run(loaded, chosen, Path(output) if output else folder / "bench")


@command(app)
def report(
    inputs: Inputs = None, config: ConfigFile = None, preset: Preset = None, run: Run = None, output: Output = None,
    reference: Annotated[str | None, typer.Option("--reference", help="arm to compare with, such as dflash")] = None,
    paper: Annotated[bool, typer.Option("--paper", help="show the published figures beside, labelled")] = False,
    push_to_hub: Annotated[str | None, typer.Option("--push-to-hub", help="hub id that the model card goes to")] = None,
    json_output: Json = False,
) -> Any:  # fmt: skip
    """Tables, plots and a model card of result files or run folders."""
    from dpace_cli import report as stage
    from dpace_cli.records import RunFolder
    from dpace_cli.settings import is_override, look_at_run

    flags = {"report.reference": reference, "report.paper": paper or None}
    paths = [Path(item) for item in inputs or [] if not is_override(item)]
    if not (config or preset or run) and len(paths) == 1 and RunFolder(paths[0]).config_file.exists():
        run = paths[0]  # a run's report goes into the run, and has its config
    loaded, folder = look_at_run(config, preset, run, flags, [i for i in inputs or [] if is_override(i)])
    result = stage.run(loaded, paths or [folder.root], output or folder / "report")
    if push_to_hub:
        stage.push_to_hub(result, push_to_hub)
    return result


@command(app)
def weights(
    overrides: Overrides = None, config: ConfigFile = None, preset: Preset = None, run: Run = None,
    target: Target = None, checkpoint: Checkpoints = None,
    data: Annotated[Path | None, typer.Option("--data", help="rows with the target's answers")] = None,
    output: Output = None,
    alpha: Annotated[float | None, typer.Option("--alpha", help="smoothing of the weights")] = None,
    correlation: Annotated[bool, typer.Option("--correlation", help="how well the surrogate ranks blocks")] = False,
    saved: Annotated[
        Path | None, typer.Option("--from", help="draw an earlier result again, from its JSON file; needs no model")
    ] = None,
    json_output: Json = False,
) -> Any:  # fmt: skip
    """Position weights: how much each position of a block can still add to the accepted length.

    Not the model's parameters: for every position k of held-out blocks, the D-PACE weight, the drafter's
    confidence and the share of blocks accepted so far, as a histogram here and as a PNG.
    """
    from dpace_cli import weights as stage
    from dpace_cli.data.training import training_file
    from dpace_cli.settings import keep, look_at_run

    if saved is not None:
        return stage.redraw(saved, output or saved.parent)
    flags = {"target.path": target, "weights.alpha": alpha, "weights.correlation": correlation or None}
    loaded, folder = look_at_run(config, preset, run, flags, overrides)
    paths = [ref.path for ref in checkpoints_of(folder, checkpoint)]
    keep(loaded, folder, named=bool(config or preset))
    return stage.run(loaded, paths, data or training_file(loaded, folder), output or folder / "weights")


# --- the whole, and its surroundings ---------------------------------------------------------------------


@command(app, "run", resumes=True)
def run_all(
    overrides: Overrides = None, config: ConfigFile = None, preset: Preset = None, run: Run = None,
    json_output: Json = False,
) -> Any:  # fmt: skip
    """All stages for all arms: prep, regen, train, bench, weights, report; skips what is done."""
    from dpace_cli import run as stage
    from dpace_cli.records import newest_run
    from dpace_cli.settings import RUNS, open_run

    begun = run is not None or os.environ.get("DPACE_RUN") or newest_run(RUNS)
    if config is None and preset is None and not begun:
        raise UsageError("`dpace run` needs --preset NAME or --config FILE: no run has begun here", "try --preset demo")
    loaded, folder = open_run(config, preset, run, {}, overrides)
    result, reported = stage.run(loaded, folder)
    return result if json_output else reported


@command(app)
def doctor(
    overrides: Overrides = None, config: ConfigFile = None, preset: Preset = None, run: Run = None,
    target: Target = None, checkpoint: Checkpoints = None,
    estimate: Annotated[bool, typer.Option("--estimate", help="memory, disk and time that the config needs")] = False,
    json_output: Json = False,
) -> Any:  # fmt: skip
    """What is wrong with this setup, before it costs a day; exit code 1 on an error."""
    from dpace_cli import doctor as stage
    from dpace_cli.records import matching
    from dpace_cli.settings import look_at_run

    loaded, folder = look_at_run(config, preset, run, {"target.path": target}, overrides)
    # A pattern that matches nothing is looked at as it stands, so that the doctor says what is missing.
    checkpoints = [path for pattern in checkpoint or [] for path in matching(pattern) or [Path(pattern)]]
    result = stage.run(loaded, folder, checkpoints, estimate=estimate)
    emit(result, json_output)
    raise typer.Exit(1 if result.errors else 0)


@command(app)
def objectives(
    plot: Annotated[Path | None, typer.Option("--plot", help="draw how D-PACE weighs a block, as a PNG")] = None,
    alpha: Annotated[float, typer.Option("--alpha", min=0, max=1, help="its smoothing, for --plot")] = 0.5,
    block_size: Annotated[int, typer.Option("--block-size", min=2, help="for --plot")] = 16,
    json_output: Json = False,
) -> Any:  # fmt: skip
    """The training objectives: name, formula, source, fields."""
    from dpace_cli.tables import objectives_table

    if plot is not None:
        from dpace_cli.records import writing
        from dpace_cli.render.method import confidence_plot

        with writing(plot, "wb") as file:
            confidence_plot(alpha, block_size).png(file)
        console.note(f"wrote {plot}")
    return objectives_table()


@command(config_app, "show")
def config_show(
    overrides: Overrides = None, config: ConfigFile = None, preset: Preset = None, run: Run = None,
    json_output: Json = False,
) -> Any:  # fmt: skip
    """The resolved config, and where each value came from."""
    from dpace_cli.settings import described, load_config, named_run

    config, _ = named_run(config, preset, run)
    loaded, origins = load_config(preset=preset, file=config, overrides=overrides or [])
    if json_output:
        return {"config": loaded, "origins": origins}
    print(described(loaded, origins), end="")
    return None


@command(config_app, "init")
def config_init(
    file: Path, preset: Preset = None,
    force: Annotated[bool, typer.Option("--force", help="replace the file if it is there")] = False,
) -> None:  # fmt: skip
    """Write a config file with every field and its meaning, to edit."""
    from dpace_cli.records import writing
    from dpace_cli.settings import commented, load_config

    if file.exists() and not force:
        raise UsageError(f"{file} is there already", "choose another name, or pass --force")
    with writing(file) as out:
        out.write(commented(load_config(preset=preset)[0]))
    console.note(f"wrote {file}")


@command(config_app, "schema")
def config_schema() -> None:
    """The JSON schema of the config."""
    from dpace_cli.config import Config

    print(json.dumps(Config.model_json_schema(), indent=2))


@app.callback(invoke_without_command=True)
def _top(
    version: Annotated[bool, typer.Option("--version", help="print the version", is_eager=True)] = False,
) -> None:  # fmt: skip
    if version:
        print(f"dpace {__version__}")
        raise typer.Exit


def checkpoints_of(folder: RunFolder, patterns: list[str] | None, which: Literal["last", "all"] = "last") -> list[Any]:
    """The checkpoints that a command works on: the named ones, else the last, or all, of every arm of the run.

    Raises:
        UsageError: there is none.
    """
    from dpace_cli.records import find_checkpoints

    return find_checkpoints(folder, patterns, which)


def _text(path: Path | None) -> str | None:
    return None if path is None else str(path)


def main() -> None:
    """Entry point of the `dpace` command."""
    app()
