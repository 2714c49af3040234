"""The doctor: silent on a good setup, and each planted fault found by its own line."""

from __future__ import annotations

import io
import json
import shutil
import sys
from collections import namedtuple
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from doctor_setup import Place, make_place, models, server, sglang, vllm
from rich.console import Console
from safetensors.torch import load_file, save_file
from typer.testing import CliRunner

from dpace_cli.cli import app
from dpace_cli.doctor import DoctorResult, environment, inputs
from dpace_cli.doctor.setup import hub_answers
from dpace_cli.records import to_json
from dpace_cli.render import show_result

GOOD = (
    "checkpoint for dflash, checkpoint for specforge, checkpoint for sglang, checkpoint for vllm, chat template, data, "
)
GOOD += (
    "loss mask, lengths, template drift, mask token, layer taps, RoPE, block size, vocabulary, end tokens, tied head, "
)
GOOD += "target weights, versions, device, memory, cache, disk, output, bench data, config"


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory, tiny_target: Path) -> Place:
    return make_place(tmp_path_factory.mktemp("good"), tiny_target)


@pytest.fixture
def place(tmp_path: Path, good: Place) -> Place:
    """A copy of the good setup that a test may break."""
    return good.copy(tmp_path / "place")


def needing(result: DoctorResult) -> list[str]:
    """Names of the findings that need something, those left out that only say that they could not run."""
    found = [c for c in result.checks if c.level != "ok" and not c.message.startswith("not checked:")]
    return list(dict.fromkeys(check.name for check in found))


def lines(result: DoctorResult, name: str) -> str:
    return "\n".join(f"{c.level}: {c.message}" for c in result.checks if c.name == name)


def test_a_good_setup_needs_nothing(place):
    with ExitStack() as stack:
        first, second = (
            stack.enter_context(server(pages))
            for pages in (sglang(str(place.target), str(place.checkpoint)), sglang(str(place.target)))
        )
        place.set(bench__engine="sglang", bench__base_url=first, bench__baseline_url=second)
        place.set(regen__engine="http", regen__base_urls=[second])
        result = place.doctor()
    assert [c for c in result.checks if c.level != "ok"] == []
    assert (result.errors, result.warnings) == (0, 0)
    assert {*GOOD.split(", "), "server", "baseline server"} <= {check.name for check in result.checks}


def test_the_doctor_takes_patterns_of_checkpoints_and_names_what_is_not_there(place, tmp_path):
    shutil.copytree(place.checkpoint, place.checkpoint.parent / "step-000999")
    config = tmp_path / "my.yaml"
    config.write_text(json.dumps(place.values))

    def launched(pattern: Path) -> dict:
        arguments = ["doctor", "--config", str(config), "--run", str(place.run.root), "--json"]
        return json.loads(CliRunner().invoke(app, [*arguments, "--checkpoint", str(pattern)]).stdout)

    found = launched(place.checkpoint.parent / "step-*")
    assert len(found["launch"]) == 2 and not found["errors"]
    missing = launched(place.checkpoint.parent / "stop-*")
    assert missing["errors"] and "stop-*" in json.dumps(missing["checks"])


def test_what_is_no_drafter_is_one_error_and_launches_nothing(place, tmp_path):
    place.checkpoint = place.target
    result = place.doctor()
    assert needing(result) == ["checkpoint"] and result.launch == {}
    assert "describes no DFlash drafter, but ['Qwen3ForCausalLM']" in lines(result, "checkpoint")
    place.checkpoint = tmp_path / "nothing"
    result = place.doctor()
    assert needing(result) == ["checkpoint"] and "config.json does not exist" in lines(result, "checkpoint")


def test_only_what_can_read_a_checkpoint_is_launched(place):
    place.edit_json(place.checkpoint / "config.json", architectures=["SomethingElse"])
    result = place.doctor()
    assert set(result.launch[str(place.checkpoint)]) == {"dflash"}


def test_a_run_that_has_not_begun_needs_nothing(place, tmp_path):
    shutil.rmtree(place.run.root)
    result = place.doctor(checkpoint=False)
    assert [c for c in result.checks if c.level != "ok"] == []
    assert not place.run.root.exists()


# --- planted faults: what is broken, which line says so, at which level, in which words --------------------

Fault = namedtuple("Fault", "plant check level words also", defaults=((),))


def _write_template(place: Place, template: str) -> None:
    place.target.joinpath("chat_template.jinja").write_text(template)


def _config(place: Place) -> Path:
    return place.checkpoint / "config.json"


def _nested(place: Place, **changes: Any) -> None:
    own = json.loads(_config(place).read_text())["dflash_config"]
    place.edit_json(_config(place), dflash_config={**own, **changes})


def _truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-64])


def _without_tensor(place: Place) -> None:
    tensors = load_file(place.checkpoint / "model.safetensors")
    tensors.pop("layers.1.self_attn.k_norm.weight")
    save_file(tensors, place.checkpoint / "model.safetensors")


def _empty_answers(row: dict[str, Any]) -> dict[str, Any]:
    row["conversations"][1]["content"] = ""
    return row


def _with_mask(row: dict[str, Any]) -> dict[str, Any]:
    row["conversations"][0]["content"] += " <|mask|>"
    return row


def _unended(row: dict[str, Any]) -> dict[str, Any]:
    row["turns"][0]["answer_ids"].pop()
    return row


def _drop_tokens(place: Place) -> None:
    place.run.answers.with_name("tokens.jsonl").unlink()


def _no_run(place: Place) -> None:
    shutil.rmtree(place.run.root / "regen")


def _silent_template(place: Place) -> None:
    """A template that leaves the answers out."""
    _no_run(place)
    _write_template(place, "{% for m in messages %}{% if m['role'] == 'user' %}<|im_start|>{{ m['content'] }}<|im_end|>"
                           "{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>{% endif %}")  # fmt: skip


def _edit_stored(place: Place, change: Callable[[dict], dict]) -> None:
    place.edit_rows(place.run.answers.with_name("tokens.jsonl"), change)


def _option(place: Place) -> None:
    """Answers made with thinking on, and a config that turns it off."""
    template = place.target.joinpath("chat_template.jinja").read_text()
    said = "assistant\n' }}"
    thinks = template.replace(
        f"{said}{{% endif", f"{said}{{% if enable_thinking is false %}}{{{{ 'At once: ' }}}}{{% endif %}}{{% endif"
    )
    assert thinks != template
    _write_template(place, thinks)
    from dpace_cli.modeling.target import load_tokenizer, tokenizer_fingerprint

    fingerprint = tokenizer_fingerprint(load_tokenizer(place.config.target))
    _edit_stored(place, lambda row: {**row, "fingerprint": fingerprint})
    place.set(target__enable_thinking=False)


def _under_a_file(place: Place) -> None:
    place.set(train__output=str(place.target / "config.json" / "out"))


FAULTS: dict[str, Fault] = {
    "specforge not there": Fault(
        lambda p: p.set(train__engine="specforge", train__specforge={"python": "/nowhere/python"}),
        "versions", "error", "cannot be run",
    ),
    "device not there": Fault(lambda p: p.set(target__device="cuda:99"), "device", "error", "cuda:99"),
    "target not there": Fault(lambda p: p.set(target__path="./nowhere"), "target", "error", "is not a folder"),
    "target on an unreachable hub": Fault(
        lambda p: p.set(target__path="some-lab/some-model"), "target", "error", "HF_HUB_OFFLINE"
    ),
    "weights cut off": Fault(
        lambda p: _truncate(p.target / "model.safetensors"), "target weights", "error", "its header says"
    ),
    "weights not there": Fault(
        lambda p: (p.target / "model.safetensors").unlink(), "target weights", "error", "has no weights"
    ),
    "head not there": Fault(
        lambda p: p.edit_json(p.target / "config.json", tie_word_embeddings=False), "tied head", "error", "random"
    ),
    "embedding of another size": Fault(
        lambda p: p.edit_json(p.target / "config.json", vocab_size=300), "tied head", "error", "260 rows",
        ("vocabulary", "checkpoint for vllm"),
    ),
    "no chat template": Fault(
        lambda p: (p.target / "chat_template.jinja").unlink(), "tokenizer", "error", "has no chat template"
    ),
    "answers not in the template": Fault(_silent_template, "chat template", "error", "answers"),
    "option that the template never reads": Fault(
        lambda p: p.set(target__enable_thinking=False), "chat template", "warning", "never reads enable_thinking"
    ),
    "end of turn is no end token": Fault(
        lambda p: p.edit_json(p.target / "generation_config.json", eos_token_id=[1]),
        "end tokens", "error", "run on", ("answers",),
    ),
    "end tokens differ": Fault(
        lambda p: p.edit_json(_config(p), eos_token_id=7), "end tokens", "warning", "the target's [256]"
    ),
    "mask is the end token": Fault(
        lambda p: _nested(p, mask_token_id=256), "mask token", "error", "is the end token"
    ),
    "mask beyond the embedding": Fault(
        lambda p: _nested(p, mask_token_id=999), "mask token", "error", "beyond the embedding",
        ("checkpoint for sglang", "checkpoint for vllm"),
    ),
    "mask in the data": Fault(
        lambda p: (p.edit_rows(p.run.answers, _with_mask), _drop_tokens(p)), "mask token", "warning", "occurs in 40"
    ),
    "last layer tapped": Fault(lambda p: _nested(p, target_layer_ids=[1, 3]), "layer taps", "error", "[1, 3]",
                               tuple(f"checkpoint for {r}" for r in ("dflash", "specforge", "sglang", "vllm"))),
    "made for a deeper target": Fault(
        lambda p: p.edit_json(_config(p), num_target_layers=36), "layer taps", "error", "36 layers"
    ),
    "theta lost": Fault(
        lambda p: p.edit_json(_config(p), rope_theta=1e6, rope_parameters={"rope_type": "default", "rope_theta": 1e6}),
        "RoPE", "error", "rope_theta 1000000.0 (target 10000",
    ),
    "two block sizes": Fault(lambda p: _nested(p, block_size=16), "block size", "error", "reads block_size 8"),
    "longer blocks than trained": Fault(
        lambda p: p.set(bench__block_size=16), "block size", "warning", "trained with blocks of 8"
    ),
    "another vocabulary": Fault(
        lambda p: p.edit_json(_config(p), vocab_size=512), "vocabulary", "error", "vocab_size is 512",
        ("checkpoint for vllm",),
    ),
    "data not there": Fault(lambda p: p.set(train__data="nowhere.jsonl"), "data", "error", "does not exist"),
    "data garbled": Fault(
        lambda p: p.run.answers.write_text("not a row\n"), "data", "error", "line 1: not a row"
    ),
    "nothing supervised": Fault(
        lambda p: (p.edit_rows(p.run.answers, _empty_answers), _drop_tokens(p)), "loss mask", "error", "40 of 40"
    ),
    "rows too long": Fault(lambda p: p.set(train__max_length=64), "lengths", "warning", "longer than", ("config",)),
    "answers cut": Fault(lambda p: _edit_stored(p, _unended), "answers", "warning", "do not end"),
    "another tokenizer": Fault(
        lambda p: _edit_stored(p, lambda row: {**row, "fingerprint": "0"}),
        "template drift", "error", "40 of 40 answers were made with another tokenizer",
    ),
    "other template options": Fault(_option, "template drift", "error", "rendered with other template options"),
    "too much memory": Fault(lambda p: p.set(train__batch_size=10**7), "memory", "error", "machine has", ("config",)),
    "cache over its limit": Fault(lambda p: p.set(train__cache_limit_gb=1e-6), "cache", "error", "cache_limit_gb"),
    "unwritable output": Fault(_under_a_file, "output", "error", "cannot be written"),
    "tensor missing": Fault(_without_tensor, "checkpoint for dflash", "error", "k_norm",
                            tuple(f"checkpoint for {r}" for r in ("specforge", "sglang", "vllm"))),
    "not a checkpoint": Fault(lambda p: _config(p).unlink(), "checkpoint", "error", "config.json does not exist",
                              ("mask token",)),
    "data set not there": Fault(
        lambda p: p.set(bench__datasets=["humaneval"]), "bench data", "error", "has no humaneval.jsonl"
    ),
    "data set on an unreachable hub": Fault(
        lambda p: p.set(bench__data_dir=None, bench__datasets=["math500"]), "bench data", "error", "HF_HUB_OFFLINE"
    ),
    "objective not there": Fault(
        lambda p: p.set(train__objective="nowhere.losses:mine"), "config", "error", "nowhere"
    ),
    "objective stalls": Fault(
        lambda p: p.set(train__objective={"name": "dpace", "alpha": 0}), "config", "warning", "stalls"
    ),
    "tracker not there": Fault(lambda p: None, "config", "error", "not installed"),
    "a step of more rows than there are": Fault(
        lambda p: p.set(train__batch_size=64), "config", "warning", "there are 40"
    ),
    "server not there": Fault(
        lambda p: p.set(regen__engine="http", regen__base_urls=["http://127.0.0.1:9/v1"]),
        "server", "error", "does not answer",
    ),
    "key not there": Fault(
        lambda p: p.set(regen__engine="http", regen__base_urls=["http://127.0.0.1:9/v1"], regen__api_key_env="NO_KEY"),
        "server", "error", "NO_KEY",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found_by_its_own_line(place, name, monkeypatch):
    fault = FAULTS[name]
    fault.plant(place)
    if name == "tracker not there":
        place.set(train__report_to=["wandb"])
        monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    result = place.doctor()
    said = lines(result, fault.check)
    assert any(line.startswith(f"{fault.level}: ") and fault.words in line for line in said.splitlines()), said
    others = set(needing(result)) - {fault.check, *fault.also}
    assert not others, [lines(result, other) for other in others]
    assert (result.errors > 0) == any(c.level == "error" for c in result.checks)


def test_versions_that_do_not_work_together_are_found(place, monkeypatch):
    installed = environment._version
    monkeypatch.setattr(environment, "_version", lambda name: "2.11.0" if name == "torch" else installed(name))
    result = place.doctor()
    assert needing(result) == ["versions"]
    assert "torch 2.11.0, and dflash 0.1.0 is made for 2.13.0" in lines(result, "versions")


def test_a_full_disk_is_found(place, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1000))
    result = place.doctor()
    assert needing(result) == ["disk"]
    assert "1000 B are free" in lines(result, "disk")


def test_the_interpreter_with_specforge_is_asked(place):
    place.set(train__engine="specforge", train__specforge={"python": sys.executable})
    assert "SpecForge" in lines(place.doctor(), "specforge")


def test_a_checkpoint_that_was_trained_otherwise_is_found(place):
    trained = place.config.model_dump(mode="json")
    manifest = place.checkpoint.parent / "manifest.json"
    manifest.write_text(json.dumps({"config": trained}))
    assert needing(place.doctor()) == []
    trained["target"].update(path="lab/other", enable_thinking=True)
    manifest.write_text(json.dumps({"config": trained}))
    said = lines(place.doctor(), "training")
    assert f"was trained for lab/other, and target.path is {place.target}" in said
    assert "trained with template options {'enable_thinking': True}; they are {} now" in said


def test_whatever_a_check_raises_becomes_a_finding(place, monkeypatch):
    def broken(*_: Any) -> Any:
        raise ZeroDivisionError("of my own")
        yield

    monkeypatch.setattr(inputs, "data", broken)
    result = place.doctor()
    assert "error: the check itself failed (ZeroDivisionError: of my own)" in lines(result, "data")
    assert {"memory", "output", "bench data"} <= {check.name for check in result.checks}


# --- the hub ---------------------------------------------------------------------------------------------


def test_a_target_in_the_hubs_cache_needs_no_network(place, tmp_path, monkeypatch):
    repository = tmp_path / "hub" / "models--lab--tiny"
    shutil.copytree(place.target, repository / "snapshots" / "0123")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("0123")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    place.set(target__path="lab/tiny")
    assert needing(place.doctor()) == []


def test_the_hub_is_asked_once_and_shortly(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.is_offline_mode", lambda: False)
    for name in ("HTTPS_PROXY", "https_proxy"):
        monkeypatch.delenv(name, raising=False)
    ask = hub_answers.__wrapped__
    with server({}) as url:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", url)
        assert ask() is None
    assert f"{url} does not answer" in ask()


# --- servers ---------------------------------------------------------------------------------------------


def test_each_server_has_the_role_that_it_should_have(place):
    with server(sglang(str(place.target), str(place.checkpoint))) as speculating, server(sglang("tgt")) as other:
        place.set(bench__engine="sglang", bench__base_url=other, bench__baseline_url=speculating)
        result = place.doctor()
    assert "(bench.base_url) does not speculate" in lines(result, "server")
    assert f"serves tgt; target.path is {place.target}" in lines(result, "server")
    assert "(bench.baseline_url) speculates" in lines(result, "baseline server")


def test_sglang_is_held_to_block_size_and_drafter(place):
    pages = sglang(str(place.target), "/elsewhere/drafter", speculative_num_draft_tokens=16)
    with server(pages) as url, server(sglang(str(place.target))) as baseline:
        place.set(bench__engine="sglang", bench__base_url=url, bench__baseline_url=baseline)
        said = lines(place.doctor(), "server")
    assert "drafts blocks of 16; the drafter was trained with 8" in said
    assert "drafts with /elsewhere/drafter" in said


def test_another_kind_of_speculation_is_found(place):
    with server(sglang(str(place.target), str(place.checkpoint), speculative_algorithm="EAGLE3")) as url:
        place.set(bench__engine="sglang", bench__base_url=url)
        result = place.doctor()
    assert "speculates with EAGLE3, not DFLASH" in lines(result, "server")
    assert "there is no SR" in lines(result, "baseline server")


def test_vllm_tells_by_its_counters(place):
    with server(vllm(str(place.target), True)) as on, server(vllm(str(place.target), False)) as off:
        place.set(bench__engine="vllm", bench__base_url=on, bench__baseline_url=off)
        assert needing(place.doctor()) == []
        place.set(bench__engine="sglang")
        assert "bench.engine is sglang" in lines(place.doctor(), "server")
        place.set(bench__engine="vllm", bench__base_url=off, bench__baseline_url=on)
        assert needing(place.doctor()) == ["server", "baseline server"]


def test_one_server_cannot_be_both(place):
    with server(vllm(str(place.target), True)) as url:
        place.set(bench__engine="vllm", bench__base_url=url, bench__baseline_url=url)
        assert "are one server" in lines(place.doctor(), "baseline server")


def test_a_model_has_to_be_named_where_a_server_has_several(place):
    with server({"/v1/models": models("a", place.target.name)}) as url:
        place.set(regen__engine="http", regen__base_urls=[url])
        assert "set regen.served_model" in "".join(c.hint for c in place.doctor().checks if c.name == "server")
        place.set(regen__served_model=place.target.name)
        assert needing(place.doctor()) == []


def test_an_answer_that_is_no_list_of_models_is_found(place):
    with server({"/v1/models": "<html>"}) as url:
        place.set(regen__engine="http", regen__base_urls=[url])
        assert "not a list of models" in lines(place.doctor(), "server")


# --- what comes out --------------------------------------------------------------------------------------


def test_the_estimate_needs_the_targets_config_alone(place):
    for file in place.target.iterdir():
        if file.name != "config.json":
            file.unlink()
    result = place.doctor(estimate=True, checkpoint=False)
    assert result.estimate is not None and result.estimate.parameters["target"] > 0
    assert result.estimate.floor_s["head"] > 0
    assert "has no weights" in lines(result, "target weights")


def test_there_is_no_estimate_without_the_targets_config(place):
    place.set(target__path="some-lab/some-model")
    result = place.doctor(estimate=True)
    assert result.estimate is None and result.errors


def test_launch_lines_take_k_for_sglang_and_one_less_for_vllm(place):
    launch = place.doctor().launch[str(place.checkpoint)]
    assert "--speculative-num-draft-tokens 8" in launch["sglang"]
    assert '"num_speculative_tokens": 7' in launch["vllm"]


def test_it_is_printed_with_what_to_do(place):
    _nested(place, mask_token_id=256)
    result, out = place.doctor(estimate=True), io.StringIO()
    show_result(result, Console(file=out, width=80))
    text = out.getvalue()
    assert "error   mask token" in text and "do: set train.mask_token_id" in text
    assert "memory of a process" in text and "hidden states" in text and "growth" in text
    assert result.launch[str(place.checkpoint)]["vllm"] in text  # uncut, however narrow the terminal is
    assert f"{result.errors} errors, {result.warnings} warnings" in text


def test_json_holds_every_finding(place):
    plain = json.loads(json.dumps(to_json(place.doctor(estimate=True))))
    assert plain["errors"] == 0 and plain["checks"][0].keys() == {"name", "level", "message", "hint"}
    assert plain["estimate"]["memory_bytes"] == sum(plain["estimate"]["memory"].values())


def test_the_command_ends_with_1_on_an_error(place, tmp_path):
    file = tmp_path / "run.json"
    for level, code in ((None, 0), ("nowhere", 1)):
        if level:
            place.set(target__path="./nowhere")
        file.write_text(json.dumps(place.values))
        done = CliRunner().invoke(app, ["doctor", "--config", str(file), "--run", str(place.run.root), "--json"])
        assert done.exit_code == code, done.output
        assert json.loads(done.stdout)["errors"] == sum(
            c["level"] == "error" for c in json.loads(done.stdout)["checks"]
        )
