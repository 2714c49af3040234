"""What a run reads: training rows, benchmark data, servers; and what its config would stumble over first."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dpace_cli.checks import Check, error, ok, warning
from dpace_cli.config import Config
from dpace_cli.data.audit import DataAudit, audit_rows, audit_stored
from dpace_cli.data.benchmarks import DATA_DIR_VARIABLE, DEMO_NAMES, TABLE, load_prompts
from dpace_cli.doctor.setup import Setup, hub_answers
from dpace_cli.engines.probe import ServerFacts, probe
from dpace_cli.errors import UsageError
from dpace_cli.modeling.checker import block_size, mask_token
from dpace_cli.modeling.target import target_location, tokenizer_fingerprint
from dpace_cli.objectives import make_objective

_MUCH = 0.1
"""Share of rows from which on something that happens to rows now and then is said as a warning."""


# --- rows ------------------------------------------------------------------------------------------------


def data(setup: Setup) -> Iterator[Check]:
    """A sample of the training rows against the tokenizer: lengths, masks, template drift."""
    config, path = setup.config, setup.data
    if not path.exists():
        if config.train.data:
            yield error("data", f"train.data {path} does not exist", "`dpace regen` makes such a file")
        else:
            yield from _prompts(setup)
        return
    tokenizer = setup.need_tokenizer()
    fingerprint, options = tokenizer_fingerprint(tokenizer), config.target.template_options()
    drafter, stored = setup.drafter or {}, path.with_name("tokens.jsonl")
    setup.audit = audit = audit_rows(
        path, tokenizer, fingerprint, options, max_length=config.train.max_length,
        block_size=config.train.block_size, mask_token_id=mask_token(drafter),
        stop_token_ids=setup.stop_token_ids, stored=stored,
    )  # fmt: skip
    yield from _rows(audit, path, config)
    if stored.exists():
        yield from _drift(setup, path, stored, fingerprint)


def _rows(audit: DataAudit, path: Path, config: Config) -> Iterator[Check]:
    refused, total = sum(audit.refused.values()), audit.sampled
    usable = total - refused - audit.empty
    said = f"{path}: {audit.rows:,} rows; of {total} of them {audit.tokens:.0f} tokens on average, "
    if refused:
        reason = max(audit.refused, key=audit.refused.__getitem__)
        level = error if refused == total else warning
        yield level(
            "data", f"{path}: {refused} of {total} rows cannot be rendered: {reason}", "`dpace prep` rejects them"
        )
    if audit.empty:
        level = error if not usable else warning
        yield level("loss mask", f"{path}: {audit.empty} of {total} rows have nothing to train on",
                    "a row needs two supervised tokens in a row before train.max_length")  # fmt: skip
    elif usable:
        yield ok("loss mask", f"{audit.supervised_share:.0%} of the tokens are supervised")
    if not usable:
        return
    yield ok("data", f"{said}{audit.longest} at most")
    longest, share = config.train.max_length, audit.cut / usable
    if share > _MUCH:
        yield warning("lengths", f"{share:.0%} of the rows are longer than train.max_length {longest}; they are cut",
                      "raise train.max_length, or shorten the answers with regen.max_new_tokens")  # fmt: skip
    else:
        yield ok("lengths", f"{audit.cut} of {usable} rows are cut at {longest} tokens")
    if audit.contains_mask:
        yield warning("mask token", f"the mask token occurs in {audit.contains_mask} of {total} rows",
                      "set train.mask_token_id to one that never does")  # fmt: skip
    if audit.ended < 1 - _MUCH:
        yield warning("answers", f"{1 - audit.ended:.0%} of the answers do not end with an end token",
                      "they were cut by regen.max_new_tokens, or the template ends a turn otherwise")  # fmt: skip


def _drift(setup: Setup, path: Path, stored: Path, fingerprint: str) -> Iterator[Check]:
    name, options = "template drift", setup.config.target.template_options()
    found = audit_stored(path, stored, setup.tokenizer, fingerprint, options)
    if found.other_tokenizer:
        many = f"{found.other_tokenizer} of {found.rows} answers were made with another tokenizer or chat template"
        yield error(
            name, f"{stored}: {many} than target.path has now", "run `dpace regen --overwrite` with this target"
        )
    elif found.rendered_otherwise:
        many = f"{found.rendered_otherwise} of {found.compared} prompts were rendered with other template options"
        hint = "set target.enable_thinking and target.chat_template_kwargs to those of the answers, or answer anew"
        yield error(name, f"{stored}: {many} than {options}", f"{hint} with `dpace regen --overwrite`")
    else:
        yield ok(name, f"{found.compared} stored prompts come out the same now")


def _prompts(setup: Setup) -> Iterator[Check]:
    """Where there are no answers yet: can they be made?"""
    name, prep = "data", setup.config.prep
    if setup.run.prompts.exists():
        yield ok(name, f"prompts are at {setup.run.prompts}; `dpace regen` answers them")
        return
    if prep.source == "demo":
        yield ok(name, "none yet; the demo's prompts are generated")
        return
    if not prep.inputs:
        yield ok(name, f"none yet; `dpace prep {prep.source} FILE` begins")
        return
    for given in prep.inputs:
        if Path(given).expanduser().exists():
            yield ok(name, f"none yet; {given} is there")
        elif given.startswith((".", "/", "~")) or given.count("/") != 1:
            yield error(name, f"prep.inputs: {given} does not exist", "give a file, a folder or a hub id")
        elif _cached_dataset(given):
            yield ok(name, f"none yet; {given} is in the hub's cache")
        elif reason := hub_answers():
            yield error(name, f"prep.inputs: {given} is not here, and {reason}", "download it, and give its path")
        else:
            yield ok(name, f"none yet; {given} comes from the hub")


def bench_data(setup: Setup) -> Iterator[Check]:
    """Is every benchmark data set there, without a network where there is none?"""
    name, bench = "bench data", setup.config.bench
    folder = bench.data_dir or os.environ.get(DATA_DIR_VARIABLE)
    for dataset in bench.datasets:
        if dataset in TABLE and not folder:
            hub_id = TABLE[dataset]["load_args"][0]
            if _cached_dataset(hub_id):
                yield ok(name, f"{dataset}: in the hub's cache")
            elif reason := hub_answers():
                hint = f"put {dataset}.jsonl into a folder and name it: bench.data_dir, or {DATA_DIR_VARIABLE}"
                yield error(name, f"{dataset} ({hub_id}) is not in the hub's cache, and {reason}", hint)
            else:
                yield ok(name, f"{dataset}: from the hub")
            continue
        try:
            prompts = load_prompts(dataset, folder, bench.num_prompts, bench.seed).prompts
        except UsageError as reason:
            yield error(name, reason.message, reason.hint)
            continue
        if dataset not in DEMO_NAMES and bench.num_prompts and len(prompts) < bench.num_prompts:
            yield warning(name, f"{dataset} has {len(prompts)} prompts; bench.num_prompts is {bench.num_prompts}")
        else:
            yield ok(name, f"{dataset}: {len(prompts)} prompts")


def _cached_dataset(hub_id: str) -> bool:
    from huggingface_hub.constants import HF_HOME, HF_HUB_CACHE

    # Importing `datasets` to ask it takes seconds.
    prepared = Path(os.environ.get("HF_DATASETS_CACHE") or Path(HF_HOME) / "datasets") / hub_id.replace("/", "___")
    return (Path(HF_HUB_CACHE) / f"datasets--{hub_id.replace('/', '--')}" / "snapshots").is_dir() or prepared.is_dir()


# --- servers ---------------------------------------------------------------------------------------------


def servers(setup: Setup) -> Iterator[Check]:
    """Does every server answer, with the right model, with speculation where it should be?"""
    config, bench, regen = setup.config, setup.config.bench, setup.config.regen
    key = None
    if regen.api_key_env is not None:
        key = os.environ.get(regen.api_key_env)
        if key is None and regen.engine == "http":
            yield error("server", f"regen.api_key_env names {regen.api_key_env}, which is not set", "export it")
    for url in regen.base_urls if regen.engine == "http" else []:
        facts = probe(url, key)
        yield from _serves(config, facts, regen.served_model) if facts.error is None else [_silent(facts)]
    if bench.engine in ("sglang", "vllm"):
        if bench.base_url is None:
            yield error("server", f"bench.engine is {bench.engine}, and bench.base_url is not set",
                        "`dpace bench --dry-run` prints the command that starts a server")  # fmt: skip
        if bench.baseline_url is None:
            yield warning("baseline server", "bench.baseline_url is not set: without a server that does not speculate "
                          "there is no SR")  # fmt: skip
    if bench.base_url is not None:
        yield from _speculating(setup, probe(bench.base_url))
    if bench.baseline_url is not None:
        if bench.baseline_url == bench.base_url:
            yield error("baseline server", "bench.baseline_url and bench.base_url are one server", "start a second one")
        else:
            yield from _plain(config, probe(bench.baseline_url))


def _silent(facts: ServerFacts, name: str = "server") -> Check:
    return error(name, f"{facts.url} does not answer: {facts.error}", "start it, or correct its address")


def _serves(config: Config, facts: ServerFacts, wanted: str | None, name: str = "server") -> Iterator[Check]:
    """Is it the target?"""
    listed = ", ".join(facts.models) or "no model"
    if wanted is not None and wanted not in facts.models:
        # `transformers serve` loads what a request names, and lists what is in the hub's cache.
        level = warning if facts.software == "other" else error
        yield level(name, f"{facts.url} serves {listed}, not regen.served_model {wanted}", "name one that it serves")
        return
    if wanted is None and len(facts.models) != 1:
        yield error(name, f"{facts.url} serves {listed}", "set regen.served_model to one of them")
        return
    model = facts.model_path or wanted or facts.models[0]
    if not _same_model(model, target_location(config.target)):
        yield warning(name, f"{facts.url} serves {model}; target.path is {config.target.path}",
                      "answers of another model make no training data for this one")  # fmt: skip
        return
    speculation = {True: "with speculation", False: "without speculation", None: "speculation not told"}
    yield ok(name, f"{facts.url}: {facts.software}, {model}, {speculation[facts.speculation]}")


def _same_model(a: str, b: str) -> bool:
    """Do two names, paths or hub ids end in the same part?"""
    return a.rstrip("/").split("/")[-1].lower() == b.rstrip("/").split("/")[-1].lower()


def _speculating(setup: Setup, facts: ServerFacts) -> Iterator[Check]:
    name, config = "server", setup.config
    if facts.error is not None:
        yield _silent(facts, name)
        return
    yield from _serves(config, facts, None, name)
    hint = "`dpace bench --dry-run` prints the command that starts it with the drafter"
    if config.bench.engine in ("sglang", "vllm") and facts.software not in (config.bench.engine, "other"):
        yield error(name, f"bench.engine is {config.bench.engine}, and {facts.url} is {facts.software}")
    if facts.speculation is False:
        yield error(name, f"{facts.url} (bench.base_url) does not speculate", hint)
    elif facts.speculation is None:
        yield warning(name, f"{facts.url} (bench.base_url) does not tell whether it speculates", hint)
    if facts.algorithm and facts.algorithm.upper() != "DFLASH":
        yield error(name, f"{facts.url} speculates with {facts.algorithm}, not DFLASH", hint)
    size = block_size(setup.drafter) if setup.drafter else None
    if facts.draft_tokens is not None and size is not None and facts.draft_tokens != size:
        yield warning(name, f"{facts.url} drafts blocks of {facts.draft_tokens}; the drafter was trained with {size}",
                      f"start it with --speculative-num-draft-tokens {size}")  # fmt: skip
    paths = [path for path in setup.checkpoints if facts.draft_model_path]
    if paths and not any(_same_place(facts.draft_model_path, path) for path in paths):
        yield warning(name, f"{facts.url} drafts with {facts.draft_model_path}, not with {paths[0]}", hint)


def _same_place(a: str | None, b: Path) -> bool:
    return a is not None and Path(a).expanduser().resolve() == b.expanduser().resolve()


def _plain(config: Config, facts: ServerFacts) -> Iterator[Check]:
    name = "baseline server"
    if facts.error is not None:
        yield _silent(facts, name)
        return
    yield from _serves(config, facts, None, name)
    if facts.speculation:
        yield error(name, f"{facts.url} (bench.baseline_url) speculates, so SR would compare two drafters",
                    "start it without a drafter")  # fmt: skip


# --- the config itself -----------------------------------------------------------------------------------


def plan(setup: Setup) -> Iterator[Check]:
    """The first things that this config would stumble over, or quietly do otherwise than meant."""
    name, config, found = "config", setup.config, False
    for check in _plan(setup, config, config.train):
        found = True
        yield check
    if not found:
        yield ok(name, f"{len(config.expand_arms())} trainings, {config.train.num_anchors} anchors a row")


def _plan(setup: Setup, config: Config, train: Any) -> Iterator[Check]:
    name = "config"
    for arm in config.expand_arms():
        objective = arm.config.train.objective
        make_objective(objective)  # a custom function that is not there raises here
        if getattr(objective, "alpha", None) == 0:
            stalls = f"{arm.label}: at alpha 0 the weights vanish with the confidences, and training stalls"
            yield warning(name, stalls, "0.5 is the paper's")
    for tracker in train.report_to:
        if importlib.util.find_spec(tracker) is None:
            yield error(name, f"train.report_to names {tracker}, which is not installed", f"pip install {tracker}")
    room = getattr(setup.text, "max_position_embeddings", None)
    if room is not None and train.max_length > room:
        yield warning(name, f"train.max_length is {train.max_length}; the target was trained on {room} positions",
                      f"lower it to {room}")  # fmt: skip
    if config.regen.max_new_tokens > train.max_length:
        yield warning(name, f"regen.max_new_tokens is {config.regen.max_new_tokens}, and train.max_length "
                      f"{train.max_length}: the ends of long answers are never trained on")  # fmt: skip
    rows, step = setup.audit.rows if setup.audit else None, train.batch_size * train.accumulation_steps * train.nproc
    if rows is not None and rows < step:
        yield warning(name, f"an optimizer step takes {step} rows, and there are {rows}",
                      "lower train.batch_size or train.accumulation_steps")  # fmt: skip
