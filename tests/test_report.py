"""`dpace report` from records to files: what is written, what is said, and what happens to bad input."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
from huggingface_hub import ModelCard
from report_setup import drawn, prompt, record, save_run
from rich.console import Console

from dpace_cli import report
from dpace_cli.config import Config
from dpace_cli.errors import RunError, UsageError
from dpace_cli.records import to_json, write_json
from dpace_cli.results import load_records

SETTINGS = {"report": {"reference": "dflash", "bootstrap_samples": 199}}


def config(**changes) -> Config:
    return Config.model_validate({"report": {**SETTINGS["report"], **changes}})


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory) -> Path:
    """Two arms on two data sets at two temperatures; one arm was measured on the way, too."""
    records = [
        drawn(arm, rate - 0.1 * heat, 8, dataset=data_set, temperature=heat, turns=2 if data_set == "mt-bench" else 1,
              objective={"name": arm, **extra}, lossless=heat == 0)
        for arm, rate, extra in (("dflash", 0.5, {"gamma": 4.0}), ("dpace", 0.8, {"alpha": 0.5}))
        for data_set in ("gsm8k", "mt-bench")
        for heat in (0.0, 1.0)
    ]  # fmt: skip
    records.append(drawn("dpace", 0.4, 8, step=100, objective={"name": "dpace", "alpha": 0.5}))
    return save_run(tmp_path_factory.mktemp("runs") / "demo", records)


@pytest.fixture(scope="module")
def result(run_folder, tmp_path_factory) -> report.ReportResult:
    return report.run(config(paper=True), [run_folder], tmp_path_factory.mktemp("report"))


def read(result: report.ReportResult, name: str) -> str:
    return Path(result.files[name]).read_text("utf-8")


# --- files ------------------------------------------------------------------------------------------------


def test_every_form_is_written(result):
    assert {Path(name).suffix for name in result.files} == {".png", ".csv", ".tex", ".md", ".html", ".json"}
    for path in result.files.values():
        assert Path(path).stat().st_size > 0
    names = set(result.files)
    assert {"report.md", "report.html", "report.json", "model-card.md"} <= names
    for stem in ("speed-t0", "speed-t1", "differences-t0", "figures-t0", "lossless-t0", "trajectory-t0", "published"):
        assert {f"{stem}.csv", f"{stem}.tex"} <= names, stem
    for stem in ("tau-t0", "sr-t0", "delta-tau-t0", "acceptance-t0", "positions-t1", "trajectory-tau-gsm8k-t0"):
        assert f"{stem}.png" in names, stem
    assert "lossless-t1.csv" not in names


def test_markdown_refers_to_plots_that_are_there(result):
    text = read(result, "report.md")
    images = re.findall(r"!\[([^\]]+)\]\(([^)]+)\)", text)
    assert len(images) >= 8
    for alt, name in images:
        assert name in result.files
        assert len(alt) > 30
    for table in result.tables:
        assert text.count(f"### {table.title}\n") == 1


def test_html_holds_every_plot_and_every_table_once(result):
    text = read(result, "report.html")
    assert text.count('class="plot"') == len([name for name in result.files if name.endswith(".png")])
    assert text.count("<caption") == len(result.tables)
    assert text.count("<details>") >= 3
    assert "Temperature 1" in text
    assert "Published figures" in text


def test_csv_has_the_records_own_figures(result, run_folder):
    rows = list(csv.DictReader(read(result, "figures-t0.csv").splitlines()))
    (row,) = [r for r in rows if (r["Arm"], r["Data set"]) == ("dpace", "mt-bench")]
    (own,) = [r for _, r in load_records([run_folder])
              if (r.arm, r.dataset, r.temperature, r.step) == ("dpace", "mt-bench", 0.0, 400)]  # fmt: skip
    assert float(row["tau"]) == pytest.approx(own.tau)
    assert float(row["SR"]) == pytest.approx(own.sr)
    assert float(row["pooled tau"]) == pytest.approx(own.tau_pooled)


def test_json_has_arms_tables_and_facts(result):
    saved = json.loads(read(result, "report.json"))
    assert saved["version"] == 1
    assert [arm["arm"] for arm in saved["arms"]] == ["dflash", "dpace"]
    assert saved["facts"]["Device"] == "cpu float32"
    assert len(saved["tables"]) == len(result.tables)
    assert set(saved["files"]) == set(result.files)


def test_the_whole_result_is_json(result):
    text = json.dumps(to_json(result), allow_nan=False)
    assert json.loads(text)["arms"][1]["delta_tau"]["low"] > 0


def test_files_name_no_machine_path(result, run_folder):
    for name in ("report.md", "report.html", "report.json", "model-card.md"):
        assert str(run_folder.parent) not in read(result, name), name


def test_terminal_shows_main_table_differences_and_where_the_files_are(result):
    console = Console(width=80, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(result)
    text = console.export_text()
    assert "Speed-up (SR) and acceptance length (tau), temperature 0" in text
    assert "Differences against dflash" in text
    assert "Published figures (not measured here)" in text
    assert max(map(len, text.splitlines())) <= 80


def test_a_second_report_is_the_same_and_removes_what_it_does_not_write(run_folder, tmp_path):
    first = report.run(config(paper=True), [run_folder], tmp_path, formats=("md", "html", "csv", "json"))
    contents = {name: read(first, name) for name in first.files if name != "report.json"}
    (tmp_path / "mine.csv").write_text("kept")
    assert (tmp_path / "published.csv").exists()
    second = report.run(config(), [run_folder], tmp_path, formats=("md", "html", "csv", "json"))
    assert not (tmp_path / "published.csv").exists()
    assert (tmp_path / "mine.csv").exists()
    assert all(read(second, name) == contents[name] for name in second.files if name.endswith(".csv"))
    assert "Published" not in read(second, "report.html")


def test_only_the_forms_asked_for(run_folder, tmp_path):
    found = report.run(config(), [run_folder], tmp_path, formats=("md",))
    assert set(found.files) == {"report.md"}
    assert "](" not in read(found, "report.md").replace("](https", "")


# --- what is said -----------------------------------------------------------------------------------------


def test_headline_has_the_best_arm_its_interval_and_the_reference(result):
    text = read(result, "report.html")
    keys = text[text.index('<ul class="keys"') : text.index("</ul>", text.index('<ul class="keys"'))]
    arm = result.arms[1]
    average = sum(fields["tau"] for key, fields in arm["datasets"].items() if key.endswith("t0")) / 2
    assert f'<span class="value">{average:.2f}</span>' in keys
    assert f"difference: {arm['delta_tau']['value']:+.2f}" in keys
    assert "dflash:" in keys
    assert '<span class="value">100.0%</span>' in keys


def test_an_incomplete_arm_is_said_everywhere(tmp_path):
    folder = save_run(tmp_path / "demo", [drawn("dflash", 0.5, 8, failed=(1, 2)), drawn("dpace", 0.8, 8)])
    found = report.run(config(), [folder], tmp_path / "out", formats=("md", "html"))
    (caution,) = found.cautions
    assert "finished 6 of 8" in caution
    assert caution in read(found, "report.md")
    assert caution in read(found, "report.html")
    assert found.arms[1]["datasets"]["gsm8k"]["prompts"] == 6


def test_one_prompt_has_no_interval_anywhere(tmp_path):
    folder = save_run(tmp_path / "demo", [record([prompt(0, [3, 4])], "dflash"), record([prompt(0, [6, 1])], "dpace")])
    found = report.run(config(), [folder], tmp_path / "out", formats=("md", "csv"))
    assert found.arms[1]["delta_tau"] == {"value": 0.0, "low": None, "high": None}
    assert "One prompt gives no interval" in read(found, "report.md")
    assert next(csv.DictReader(read(found, "figures-t0.csv").splitlines()))["tau low"] == ""


def test_published_figures_only_when_asked(run_folder, tmp_path):
    found = report.run(config(), [run_folder], tmp_path, formats=("md",))
    assert "not measured here" not in read(found, "report.md")


def test_the_first_arm_of_the_config_is_the_reference_where_none_is_named(run_folder, tmp_path):
    settings = Config.model_validate(
        {"arms": {"objectives": ["dpace", "dflash"]}, "report": {"bootstrap_samples": 199}}
    )
    found = report.run(settings, [run_folder], tmp_path, formats=())
    assert found.reference == "dpace"
    assert found.arms[1]["delta_tau"]["high"] < 0
    assert found.files == {}


def test_record_files_bench_folders_and_run_folders_are_inputs(run_folder, tmp_path):
    by_run = report.run(config(), [run_folder], tmp_path, formats=())
    by_bench = report.run(config(), [run_folder / "bench"], tmp_path, formats=())
    by_file = report.run(config(), sorted((run_folder / "bench").rglob("*.json")), tmp_path, formats=())
    assert [arm["delta_tau"] for arm in by_run.arms] == [arm["delta_tau"] for arm in by_bench.arms]
    assert [arm["delta_tau"] for arm in by_run.arms] == [arm["delta_tau"] for arm in by_file.arms]


def test_position_weights_of_a_run_are_in_its_report(tmp_path):
    folder = save_run(tmp_path / "demo", [drawn("dpace", 0.8, 4)])
    position = {
        "k": 1, "weight": 1.5, "share": 1.0, "quantiles": [1.0, 1.2, 1.5, 1.7, 2.0], "confidence": 0.5, "accuracy": 0.5,
        "accuracy_after_prefix": 0.5, "accepted": 0.5, "decay": 1.0, "decay_share": 1.0, "blocks": 9, "prefixes": 9,
        "whole": 9,
    }  # fmt: skip
    one = {"checkpoint": "c", "arm": "dpace", "seed": 0, "step": 400, "block_size": 2, "gamma": 1.0, "alpha": 0.5,
           "blocks": 9, "positions": [position], "correlation": None}  # fmt: skip
    write_json(folder / "weights" / "weights.json", {"data": "d", "rows": 1, "held_out": True, "checkpoints": [one]})
    settings = Config.model_validate({"report": {"bootstrap_samples": 199}})
    found = report.run(settings, [folder], tmp_path / "out", formats=("md", "png"))
    assert "weights-dpace-seed0-step400.png" in found.files
    assert "not the model's parameters" in read(found, "report.md")


# --- model card -------------------------------------------------------------------------------------------


def test_model_card_has_the_measured_results_for_the_hub(result):
    card = ModelCard.load(result.files["model-card.md"])
    results = {(r.dataset_name, r.dataset_config, r.metric_type): r for r in card.data.eval_results}
    tau = results["gsm8k", "temperature 0", "tau"]
    assert tau.dataset_type == "openai/gsm8k"
    assert tau.metric_value == pytest.approx(result.arms[1]["datasets"]["gsm8k-t0"]["tau"], abs=1e-4)
    assert len(results) == 3 * 4
    assert result.card_arm == "dpace"
    assert "speculative-decoding" in card.data.tags
    assert card.data.base_model is None  # the demo target is on no hub
    assert "`dpace` (alpha 0.5)" in card.text
    assert "Differences against dflash" in card.text


def test_model_card_names_a_base_model_that_is_on_the_hub(tmp_path):
    folder = save_run(tmp_path / "demo", [drawn("dpace", 0.8, 4, target="Qwen/Qwen3-4B")])
    settings = Config.model_validate({"report": {"bootstrap_samples": 199}})
    found = report.run(settings, [folder], tmp_path / "out", formats=("card",))
    assert ModelCard.load(found.files["model-card.md"]).data.base_model == "Qwen/Qwen3-4B"


class _Hub:
    """What the upload asks of the hub."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error, self.repos, self.files = error, [], {}

    def create_repo(self, repo_id, exist_ok):
        assert exist_ok
        self.repos.append(repo_id)

    def create_commit(self, repo_id, operations, commit_message):
        if self.error:
            raise self.error
        self.files = {o.path_in_repo: Path(o.path_or_fileobj).read_bytes() for o in operations}
        return SimpleNamespace(commit_url=f"https://hub/{repo_id}/commit")


def uploadable(result, tmp_path, monkeypatch, hub):
    from dataclasses import replace

    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors").write_bytes(b"weights")
    (tmp_path / "trainer_state.json").write_text("not for the hub")
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: hub)
    return replace(result, card_checkpoint=str(tmp_path))


def test_upload_sends_card_and_checkpoint_in_one_commit(result, tmp_path, monkeypatch):
    hub = _Hub()
    ready = uploadable(result, tmp_path, monkeypatch, hub)
    assert report.push_to_hub(ready, "me/drafter") == "https://hub/me/drafter/commit"
    assert hub.repos == ["me/drafter"]
    assert set(hub.files) == {"README.md", "config.json", "model.safetensors"}
    assert hub.files["README.md"] == Path(result.files["model-card.md"]).read_bytes()


def test_nothing_is_uploaded_unasked(run_folder, tmp_path, monkeypatch):
    hub = _Hub()
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: hub)
    report.run(config(), [run_folder], tmp_path, formats=("card",))
    assert hub.repos == []


def test_a_failed_upload_is_one_clear_error(result, tmp_path, monkeypatch):
    ready = uploadable(result, tmp_path, monkeypatch, _Hub(OSError("no route to host")))
    with pytest.raises(RunError, match=r"cannot upload to me/drafter: no route to host") as caught:
        report.push_to_hub(ready, "me/drafter")
    assert "hf auth login" in caught.value.hint


# --- bad input --------------------------------------------------------------------------------------------


def test_an_unknown_reference_names_the_arms(run_folder, tmp_path):
    with pytest.raises(UsageError, match="no arm is called dflsh") as caught:
        report.run(config(reference="dflsh"), [run_folder], tmp_path / "out")
    assert "dflash, dpace" in caught.value.hint
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("content", [None, "{}", "not json", '{"version": 99, "prompts": []}'])
def test_a_missing_or_foreign_file_is_a_usage_error(tmp_path, content):
    path = tmp_path / "record.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UsageError):
        report.run(config(), [path], tmp_path / "out")


def test_a_file_that_cannot_be_written_is_a_run_error(run_folder, tmp_path):
    (tmp_path / "report.md").mkdir()
    with pytest.raises(RunError, match="cannot write"):
        report.run(config(), [run_folder], tmp_path, formats=("md",))
    assert [path.name for path in tmp_path.iterdir()] == ["report.md"]
