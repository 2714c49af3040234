"""The command line: exit codes, where output goes, which run a command works on."""

from __future__ import annotations

import importlib
import json
import math
import signal
from pathlib import Path

import matplotlib as mpl
import pytest
import typer.testing
from report_setup import drawn, save_run

from dpace_cli import console
from dpace_cli.cli import app
from dpace_cli.errors import Interrupted

runner = typer.testing.CliRunner()


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def sharegpt(tmp_path) -> Path:
    turns = [{"from": "human", "value": "What is 2 + 2?"}, {"from": "gpt", "value": "4"}]
    path = tmp_path / "sharegpt.json"
    path.write_text(json.dumps([{"id": "a", "conversations": turns}, {"id": "b", "conversations": []}]))
    return path


def test_json_is_one_object_on_standard_output_and_nothing_else(sharegpt):
    done = runner.invoke(app, ["prep", "sharegpt", str(sharegpt), "--output", "out.jsonl", "--json"])
    assert done.exit_code == 0
    result = json.loads(done.stdout)
    assert (result["read"], result["kept"], result["partial"]) == (2, 1, False)
    assert result["read"] == result["kept"] + sum(result["rejected"].values())
    assert "runs/run" in done.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["prep", "sharegpt", "missing.json"], "missing.json"),
        (["train", "--loss", "dpase"], "did you mean dpace"),
        (["train", "--loss", "dflash", "--alpha", "0.5"], "dflash takes no alpha"),
        (["train", "train.learning_rat=1"], "train.learning_rate"),
        (["train", "--config", "missing.yaml"], "missing.yaml"),
        (["run"], "--preset"),
        (["run", "--preset", "nope"], "no preset"),
        (["bench"], "has no checkpoint"),
        (["bench", "--checkpoint", "nowhere"], "nowhere"),
        (["train", "--target", "nowhere/at/all", "--data", "x.jsonl"], "x.jsonl"),
        (["regen", "--nonsense"], "nonsense"),
    ],
)
def test_wrong_usage_is_exit_code_2_and_no_traceback(arguments, message):
    done = runner.invoke(app, arguments)
    assert done.exit_code == 2, done.stderr
    assert message in done.stderr.replace("\n", " ") and "Traceback" not in done.stderr


def test_the_report_of_one_run_folder_is_that_runs(tmp_path):
    folder = save_run(tmp_path / "elsewhere" / "mine", [drawn("dflash", 0.5, 4), drawn("dpace", 0.8, 4)])
    (folder / "config.yaml").write_text("report: {reference: dflash, bootstrap_samples: 199}\n")
    done = runner.invoke(app, ["report", str(folder), "--json"])
    assert done.exit_code == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["reference"], Path(result["output"])) == ("dflash", folder / "report")
    assert not (tmp_path / "runs").exists()


def test_a_command_works_on_the_newest_run_and_says_which(sharegpt, monkeypatch):
    for name in ("first", "second"):
        runner.invoke(app, ["config", "init", f"{name}.yaml"])
        done = runner.invoke(app, ["prep", "sharegpt", str(sharegpt), "--config", f"{name}.yaml", f"name={name}"])
        assert done.exit_code == 0, done.stderr
    done = runner.invoke(app, ["prep", "sharegpt", str(sharegpt)])
    assert "runs/second" in done.stderr
    monkeypatch.setenv("DPACE_RUN", "runs/first")
    done = runner.invoke(app, ["prep", "sharegpt", str(sharegpt), "--json"])
    assert json.loads(done.stdout)["output"].startswith("runs/first/")


def test_commands_that_only_look_leave_no_run_behind_and_see_the_newest(sharegpt):
    looks = (["prep", "stats", "rows.jsonl"], ["prep", "preview", "rows.jsonl"], ["doctor"], ["config", "show"])
    in_vain = (["report"], ["weights"], ["bench"])
    row = {"id": "a", "conversations": [{"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "4"}]}
    Path("rows.jsonl").write_text(json.dumps(row) + "\n")
    for look in (*looks, *in_vain):
        runner.invoke(app, look)
    assert not Path("runs").exists()
    assert runner.invoke(app, ["prep", "sharegpt", str(sharegpt), "target.path=demo", "train.seed=41"]).exit_code == 0
    saved = Path("runs/run/config.yaml").read_bytes()
    for look in looks:
        done = runner.invoke(app, [*look, "--json"])
        assert "run: runs/run (the newest" in done.stderr, look
        assert json.loads(done.stdout)
    assert json.loads(done.stdout)["config"]["train"]["seed"] == 41
    assert Path("runs/run/config.yaml").read_bytes() == saved and len(list(Path("runs").iterdir())) == 1


def test_where_one_output_goes_is_not_kept_in_the_run(sharegpt):
    prep = ["prep", "sharegpt", str(sharegpt), "--preset", "demo"]
    assert runner.invoke(app, [*prep, "--output", "elsewhere.jsonl"]).exit_code == 0
    Path("elsewhere.jsonl").write_text("mine")
    done = runner.invoke(app, ["prep", "sharegpt", str(sharegpt), "--json"])
    assert json.loads(done.stdout)["output"] == "runs/demo/prep/prompts.jsonl"
    assert Path("elsewhere.jsonl").read_text() == "mine"


def test_run_needs_a_config_where_no_run_has_begun():
    done = runner.invoke(app, ["run"])
    assert done.exit_code == 2 and "no run has begun here" in done.stderr


def test_config_commands():
    assert runner.invoke(app, ["config", "init", "my.yaml", "--preset", "demo"]).exit_code == 0
    assert runner.invoke(app, ["config", "init", "my.yaml"]).exit_code == 2
    shown = runner.invoke(app, ["config", "show", "--config", "my.yaml", "train.seed=7", "--json"])
    result = json.loads(shown.stdout)
    assert result["config"]["train"]["seed"] == 7 and result["origins"]["train.seed"] == "command line"
    schema = json.loads(runner.invoke(app, ["config", "schema"]).stdout)
    assert "train" in schema["properties"]


def test_the_weights_of_a_block_are_drawn_for_known_confidences(tmp_path):
    done = runner.invoke(app, ["objectives", "--plot", str(tmp_path / "w.png"), "--block-size", "8", "--json"])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "w.png").read_bytes().startswith(b"\x89PNG")
    from dpace_cli.render.method import CONFIDENCES, confidence_plot

    with mpl.rc_context():
        axes = confidence_plot(0.5, 8).draw().axes[0]
    drawn = {line.get_label(): line.get_ydata() for line in axes.get_lines()}
    decay, *shares = list(drawn.values())[: 1 + len(CONFIDENCES)]
    assert decay[0] / decay[4] == pytest.approx(math.e)  # gamma 4 for blocks of eight
    for q, share in zip(CONFIDENCES, shares):
        c = [(q + 1) / 2] * 7  # each weight by the definition, as a sum of products
        own = [sum(math.prod(c[: j + 1]) for j in range(k, 7)) for k in range(7)]
        assert list(share) == pytest.approx([100 * w / sum(own) for w in own], rel=1e-5)


def test_objectives_are_listed():
    done = runner.invoke(app, ["objectives", "--json"])
    names = json.dumps(json.loads(done.stdout))
    for name in ("dpace", "dflash", "topk-prefix", "accept-rate", "accept-until-fail", "lk", "dpakl"):
        assert name in names


def test_a_full_disk_is_said_plainly(sharegpt):
    done = runner.invoke(app, ["prep", "sharegpt", str(sharegpt), "--output", "/dev/full/out.jsonl"])
    assert done.exit_code == 1 and "/dev/full" in done.stderr and "Traceback" not in done.stderr


def test_version():
    from dpace_cli import __version__

    assert runner.invoke(app, ["--version"]).stdout.strip() == f"dpace {__version__}"


def test_settings_that_a_run_did_not_have_before_are_named(sharegpt):
    def prep(*overrides):
        done = runner.invoke(app, ["prep", "sharegpt", str(sharegpt), "--preset", "demo", *overrides])
        assert done.exit_code == 0, done.stderr
        return [line for line in done.stderr.splitlines() if "config.yaml changes" in line]

    assert prep() == prep() == []
    assert prep("train.seed=7") == ["runs/demo/config.yaml changes: train.seed: 0 -> 7"]
    (line,) = prep("train.objective=dflash")
    assert "train.seed: 7 -> 0" in line and "train.objective.name: dpace -> dflash" in line


def test_a_stop_in_the_middle_of_an_import_waits_for_its_end(tmp_path, monkeypatch):
    """Compiled modules swallow whatever is raised while they import something."""
    (tmp_path / "stopped_module.py").write_text(
        "import os, signal, time\n"
        "try:\n    os.kill(os.getpid(), signal.SIGINT)\n    time.sleep(0.1)\nexcept BaseException:\n    whole = False\n"
        "else:\n    whole = True\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(Interrupted), console.stoppable():
        module = importlib.import_module("stopped_module")
        signal.pause()
    assert module.whole


def test_no_estimate_before_what_was_begun_together_is_done(monkeypatch):
    monkeypatch.setattr(console, "PLAIN_INTERVAL_S", 0)
    said: list[str] = []
    monkeypatch.setattr(console, "note", said.append)
    with console.meter("regen", 100, "rows", 20, together=32) as shown:
        for done in (20, 21, 51, 52):
            shown.update(done, "5 tokens")
    assert said[:3] == [f"regen: {done}/100 rows, 5 tokens" for done in (20, 21, 51)]
    assert " left, 5 tokens" in said[3] and "rows/s" in said[3]


def test_the_exit_code_of_prep_says_that_an_input_breaks_off(sharegpt):
    cut = sharegpt.with_name("cut.json")
    cut.write_bytes(sharegpt.read_bytes()[:-9])
    done = runner.invoke(app, ["prep", "sharegpt", str(cut), "--output", "out.jsonl", "--json"])
    assert done.exit_code == 3
    assert json.loads(done.stdout)["partial"] and Path("out.jsonl").read_text().count("\n") == 1
    assert f"{cut} breaks off at byte" in done.stderr


def test_a_prep_that_keeps_nothing_has_failed(sharegpt):
    sharegpt.write_text("")
    done = runner.invoke(app, ["prep", "sharegpt", str(sharegpt), "--output", "out.jsonl", "--json"])
    assert done.exit_code == 1 and json.loads(done.stdout)["kept"] == 0 and "no row was kept" in done.stderr


def test_a_picture_of_no_known_kind_is_wrong_usage(sharegpt):
    row = {"id": "a", "conversations": [{"role": "user", "content": "2?"}, {"role": "assistant", "content": "2"}]}
    Path("rows.jsonl").write_text(json.dumps(row) + "\n")
    done = runner.invoke(app, ["prep", "stats", "rows.jsonl", "--target", "demo", "--output", "st.xyz"])
    assert done.exit_code == 2 and "end it in .png" in done.stderr


@pytest.mark.parametrize("output", ["sharegpt.json", "other/../sharegpt.json"])
def test_prep_replaces_none_of_its_inputs(sharegpt, output):
    Path("other").mkdir()
    before = sharegpt.read_bytes()
    done = runner.invoke(app, ["prep", "sharegpt", str(sharegpt), "--output", output])
    assert done.exit_code == 2 and "is an input" in done.stderr and "--output" in done.stderr
    assert sharegpt.read_bytes() == before


def test_rejects_are_not_read_and_replaced_at_once(sharegpt):
    runner.invoke(app, ["prep", "sharegpt", str(sharegpt), "--run", "runs/a"])
    rejects, prompts = (Path("runs/a/prep") / name for name in ("rejects.jsonl", "prompts.jsonl"))
    before = (rejects.read_bytes(), prompts.read_bytes())
    done = runner.invoke(app, ["prep", "jsonl", str(rejects), "--run", "runs/a"])
    assert done.exit_code == 2 and "rejects.jsonl is an input" in done.stderr
    assert (rejects.read_bytes(), prompts.read_bytes()) == before
