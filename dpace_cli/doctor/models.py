"""The target and the drafter: files, chat template, and how they fit each other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dpace_cli.checks import Check, error, ok, warning
from dpace_cli.data.tokens import TemplateError, encode_row
from dpace_cli.doctor.setup import Setup, hub_answers
from dpace_cli.engines.measure_base import training_config
from dpace_cli.errors import UsageError
from dpace_cli.modeling.checker import ReaderReport, check_checkpoint, is_drafter
from dpace_cli.modeling.drafter import drafter_config
from dpace_cli.modeling.fit import compare, target_weights
from dpace_cli.modeling.target import load_target_config, load_tokenizer, target_location
from dpace_cli.records import checkpoint_ref, read_json

_PROBE = (
    {"role": "user", "content": "How many days has a week?"},
    {"role": "assistant", "content": "A week has seven days."},
    {"role": "user", "content": "And a leap year?"},
    {"role": "assistant", "content": "It has 366 of them."},
)


def target(setup: Setup) -> Iterator[Check]:
    """Find the target and read its config; the other checks work with it."""
    name, given = "target", setup.config.target
    setup.folder = _folder(setup)
    own = given.model_copy(update={"path": str(setup.folder)}) if setup.folder is not None else given
    whole = load_target_config(own)
    setup.target = own
    setup.text = whole.get_text_config()
    kind, layers, width = setup.text.model_type, setup.text.num_hidden_layers, setup.text.hidden_size
    yield ok(name, f"{given.path}: {kind}, {layers} layers, width {width}, vocabulary {setup.text.vocab_size:,}")


def tokenizer(setup: Setup) -> Iterator[Check]:
    """Read the target's tokenizer, and which tokens end an answer."""
    setup.need_config()
    setup.tokenizer = load_tokenizer(setup.target)
    setup.stop_token_ids = _stop_tokens(setup)
    yield ok("tokenizer", f"{type(setup.tokenizer).__name__}, {len(setup.tokenizer):,} tokens")


def _folder(setup: Setup) -> Path | None:
    """The target's files on this machine, or None where they would come from the hub.

    Raises:
        UsageError: they are neither here nor can the hub be reached.
    """
    given = setup.config.target
    folder = Path(target_location(given)).expanduser()
    if folder.is_dir():
        return folder
    if given.path.startswith((".", "/", "~")) or given.path.count("/") != 1:
        raise UsageError(
            f"target.path {given.path} is not a folder", "give a model folder or a hub id such as Qwen/Qwen3-4B"
        )
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(given.path, "config.json", revision=given.revision)
    if isinstance(cached, str):
        return Path(cached).parent
    if reason := hub_answers():
        raise UsageError(
            f"target {given.path} is not in the hub's cache, and {reason}",
            "download it where there is a network, or give a folder: config.json alone is enough for --estimate",
        )
    return None


def _stop_tokens(setup: Setup) -> list[int]:
    """Tokens that end an answer, where generation looks for them."""
    ids: Any = None
    generation = setup.folder / "generation_config.json" if setup.folder is not None else None
    if generation is not None and generation.is_file():
        ids = read_json(generation).get("eos_token_id")
    for fallback in (setup.text.eos_token_id, setup.tokenizer.eos_token_id):
        ids = fallback if ids is None else ids
    return [] if ids is None else [ids] if isinstance(ids, int) else list(ids)


def weights(setup: Setup) -> Iterator[Check]:
    """Are the target's weights there and whole, and is its head?"""
    config = setup.need_config()
    if setup.folder is None:
        yield ok("target weights", f"{setup.config.target.path} will be downloaded from the hub when it is first used")
        return
    here, head, setup.tensors = target_weights(setup.folder, config)
    yield from (here, head)


def template(setup: Setup) -> Iterator[Check]:
    """Does the chat template tell the answers from the rest, and are its options read?"""
    name, tokenizer = "chat template", setup.need_tokenizer()
    options = setup.config.target.template_options()
    text = str(tokenizer.chat_template)
    unread = [option for option in options if option not in text]
    if unread:
        yield warning(name, f"the template never reads {', '.join(unread)}; it changes nothing",
                      "remove it from target.enable_thinking or target.chat_template_kwargs")  # fmt: skip
    try:
        pieces = encode_row(tokenizer, {"id": "probe", "conversations": list(_PROBE)}, options, None)
    except TemplateError as reason:
        yield error(name, reason.message, reason.hint)
        return
    supervised = [[t for t, m in zip(piece.input_ids, piece.loss_mask) if m] for piece in pieces]
    learned = "".join(tokenizer.decode(ids) for ids in supervised)
    answers = [message["content"] for message in _PROBE if message["role"] == "assistant"]
    prompts = [message["content"] for message in _PROBE if message["role"] == "user"]
    if any(answer not in learned for answer in answers):
        yield error(name, "an answer of a probe conversation is not supervised", "`dpace prep preview` shows a row")
    elif any(prompt in learned for prompt in prompts):
        yield error(name, "a user's words of a probe conversation are supervised", "`dpace prep preview` shows a row")
    else:
        share = sum(map(len, supervised)) / sum(len(piece.input_ids) for piece in pieces)
        yield ok(name, f"{share:.0%} of a probe conversation is supervised: its answers with their ends")
    last = pieces[-1].input_ids[-1]
    if last not in setup.stop_token_ids:
        ends = tokenizer.convert_ids_to_tokens([last, *setup.stop_token_ids])
        on = f"an answer ends with {ends[0]!r} in the template, and generation stops at {ends[1:]}; it would run on"
        yield error("end tokens", on, "add that token to eos_token_id in the target's generation_config.json")


FIT_CHECKS = ("mask token", "layer taps", "RoPE", "block size", "vocabulary", "end tokens")


def fit(setup: Setup) -> Iterator[Check]:
    """The drafter against the target: of each checkpoint, else of the drafter that a training would make."""
    config, tokenizer = setup.need_config(), setup.need_tokenizer()
    if setup.checkpoints:
        for path in filter(is_drafter, setup.checkpoints):  # what is none is an error of the check "checkpoint"
            yield from _fit_checkpoint(setup, path)
        return
    built = drafter_config(config, tokenizer, setup.config.train)
    setup.drafter = built.to_dict()
    yield from compare(setup.drafter, config, tokenizer, setup.stop_token_ids, "the drafter of this config")


def _fit_checkpoint(setup: Setup, path: Path) -> Iterator[Check]:
    drafter = read_json(path / "config.json")
    setup.drafter = setup.drafter or drafter
    yield from compare(drafter, setup.text, setup.tokenizer, setup.stop_token_ids, str(path))
    wanted, trained = setup.config.bench.block_size, drafter.get("block_size")
    if wanted is not None and trained is not None and wanted > trained:
        yield warning("block size", f"bench.block_size is {wanted}; {path} was trained with blocks of {trained}",
                      "positions that it was never trained on are seldom right")  # fmt: skip
    then = training_config(checkpoint_ref(path)).get("target")
    if then:
        now = setup.config.target
        thinking = {} if then.get("enable_thinking") is None else {"enable_thinking": then["enable_thinking"]}
        options = {**thinking, **(then.get("chat_template_kwargs") or {})}
        if then.get("path") != now.path:
            yield warning("training", f"{path} was trained for {then.get('path')}, and target.path is {now.path}")
        if options != now.template_options():
            both = f"{path} was trained with template options {options}; they are {now.template_options()} now"
            yield error("training", both, "measure and serve with the options of the training")


def checkpoint(setup: Setup, path: Path) -> Iterator[Check]:
    """What each program that reads a checkpoint finds in it; the lines that launch them go into the setup."""
    if not is_drafter(path):
        made = read_json(path / "config.json")
        kind = made.get("architectures") if isinstance(made, dict) else f"a {type(made).__name__}"
        yield error("checkpoint", f"{path / 'config.json'} describes no DFlash drafter, but {kind}",
                    "name the folder of a drafter, such as runs/NAME/train/ARM/step-000400")  # fmt: skip
        return
    reports = check_checkpoint(path, target_location(setup.config.target), setup.text, setup.tokenizer)
    setup.launch[str(path)] = {
        report.reader: report.launch for report in reports if all(p.level != "error" for p in report.problems)
    }
    for report in reports:
        yield from _report(path, report)


def _report(path: Path, report: ReaderReport) -> list[Check]:
    name = f"checkpoint for {report.reader}"
    if not report.problems:
        return [ok(name, f"{path} has what it reads")]
    return [Check(name, problem.level, f"{path}: {problem.message}", problem.hint) for problem in report.problems]
