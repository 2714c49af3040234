"""Which records become which arms, which prompts count, and what stands in each table."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest
from report_setup import drawn, prompt, record

from dpace_cli.config import OBJECTIVES
from dpace_cli.stats import Bootstrap, Estimate
from dpace_cli.tables import catalog, objectives_table
from dpace_cli.tables.arms import arms_summary, cautions, common_prompts, sections
from dpace_cli.tables.positions import last_of_each, trajectories
from dpace_cli.tables.published import published
from dpace_cli.tables.table import Column, Table, best_cells

FEW = Bootstrap(resamples=199)


def made(records, reference=None, order=(), runs=None):
    paths = [Path(f"runs/{name}/bench/x/{i}.json") for i, name in enumerate(runs or ["one"] * len(records))]
    return sections(list(zip(paths, records)), reference, order, FEW)


def only(records, reference=None, order=()):
    (section,) = made(records, reference, order)
    return section


def row_of(table: Table, *headings: object) -> dict[str, object]:
    """A row by its headings, as full column name to cell."""
    for row in table.rows:
        if row[: len(headings)] == headings:
            return {column.full_name: cell for column, cell in zip(table.columns, row)}
    raise AssertionError(f"no row {headings} in {[row[: len(headings)] for row in table.rows]}")


# --- arms and sections ------------------------------------------------------------------------------------


def test_targets_engines_temperatures_and_loads_are_kept_apart():
    records = [
        drawn("dpace", 0.7), drawn("dpace", 0.7, temperature=1.0), drawn("dpace", 0.7, engine="simulate"),
        drawn("dpace", 0.7, target="other"), drawn("dpace", 0.7, engine="vllm", concurrency=8),
    ]  # fmt: skip
    found = made(records)
    assert len(found) == 5
    assert len({section.slug for section in found}) == 4  # targets share a slug
    assert found[0].title == "temperature 0"
    assert "temperature 0, vllm, 8 requests in flight" in [section.title for section in found]


def test_the_reference_comes_first_and_others_keep_the_order_of_the_run():
    records = [drawn("a", 0.5), drawn("b", 0.6), drawn("dflash", 0.4), drawn("c", 0.6)]
    assert [arm.name for arm in only(records, "dflash", ["c", "b"]).arms] == ["dflash", "c", "b", "a"]
    assert [arm.name for arm in only(records, None, ["c", "b"]).arms] == ["c", "b", "a", "dflash"]


def test_an_unknown_reference_is_an_error_that_names_the_arms():
    with pytest.raises(LookupError, match="a, b"):
        made([drawn("a", 0.5), drawn("b", 0.6)], "dflash")


def test_an_arm_is_compared_with_the_reference_of_its_own_depth():
    def arm(label, objective, layers):
        return drawn(label, 0.5, objective={"name": objective}, num_draft_layers=layers)

    section = only(
        [arm(f"{name}-l{layers}", name, layers) for layers in (3, 5) for name in ("dflash", "dpace")], "dflash"
    )
    pairs = {own.name: ref.name for own in section.arms if (ref := section.reference_of(own))}
    assert pairs == {"dpace-l3": "dflash-l3", "dpace-l5": "dflash-l5"}


def test_a_learning_rate_in_the_label_is_a_factor():
    section = only([drawn(f"{name}-lr{rate}", 0.5, objective={"name": name}) for rate in ("0.0006", "1e-05")
                    for name in ("dflash", "dpace")], "dflash")  # fmt: skip
    assert {arm.name: arm.learning_rate for arm in section.arms}["dpace-lr1e-05"] == 1e-05
    pairs = {own.name: ref.name for own in section.arms if (ref := section.reference_of(own))}
    assert pairs == {"dpace-lr0.0006": "dflash-lr0.0006", "dpace-lr1e-05": "dflash-lr1e-05"}
    (table,) = catalog.by_factor(section)
    assert [row[0:3] for row in table.rows if row[0] == "dpace"] == [("dpace", 3, "1e-05"), ("dpace", 3, "0.0006")]


def test_the_last_step_counts_and_all_steps_are_the_trajectory():
    section = only([drawn("dpace", rate, step=step) for step, rate in ((100, 0.2), (400, 0.8), (250, 0.5))])
    (arm,) = section.arms
    assert arm.records["gsm8k"][0].step == 400
    table = catalog.trajectory(section)
    assert [row[1] for row in table.rows] == [100, 250, 400]
    taus = [row[-1] for row in table.rows]
    assert taus == sorted(taus)
    assert taus[-1] == pytest.approx(arm.records["gsm8k"][0].tau)


def test_two_runs_with_one_label_are_two_arms():
    records = [drawn("dpace", 0.5), drawn("dpace", 0.7, checkpoint_sha256="other")]
    (section,) = made(records, runs=["one", "two"])
    assert [arm.name for arm in section.arms] == ["one/dpace", "two/dpace"]


def test_the_same_measurement_twice_is_one_arm_and_the_later_counts():
    late = drawn("dpace", 0.7, started="2026-08-02T10:00:00+00:00")
    section = only([late, drawn("dpace", 0.5)])
    assert section.arms[0].records["gsm8k"][0] is late


def test_one_drafter_with_two_block_sizes_is_two_arms_and_a_table():
    section = only([drawn("dpace", 0.7, block_size=size) for size in (4, 8)])
    assert [arm.name for arm in section.arms] == ["dpace-k4", "dpace-k8"]
    (table,) = catalog.by_factor(section)
    assert [row[2] for row in table.rows] == ["4", "8"]


# --- prompts ----------------------------------------------------------------------------------------------


def test_only_prompts_that_every_arm_finished_count():
    section = only([drawn("dflash", 0.5, failed=(2,)), drawn("dpace", 0.7, failed=(5, 7))])
    assert section.prompts("gsm8k") == [f"p{i}" for i in range(12) if i not in (2, 5, 7)]
    arm = section.arms[1]
    wanted = [p.draft.acceptance for p in arm.records["gsm8k"][0].prompts if p.index not in (2, 5, 7)]
    assert section.figures(arm, "gsm8k")["tau"].value == pytest.approx(statistics.fmean(wanted))
    (caution,) = cautions(section)
    assert "dflash finished 11 of 12" in caution
    assert "dpace finished 10 of 12" in caution
    assert "compared on the 9" in caution
    assert all("†" in row[1] for row in catalog.speed(section).rows)


def test_a_conversation_counts_when_every_turn_is_finished():
    turns = [prompt(0, [3, 3]), prompt(0, None, turn=1), prompt(1, [4]), prompt(1, [2], turn=1)]
    assert common_prompts([record(turns)]) == ["p1"]


def test_difference_equals_the_difference_of_the_shown_figures():
    section = only([drawn("dflash", 0.5, failed=(1,)), drawn("dpace", 0.7)], "dflash")
    row = row_of(catalog.differences(section), "dpace", "gsm8k")
    assert row["tau difference"].value == pytest.approx(row["tau arm"].value - row["tau reference"].value)
    assert row["SR difference"].value == pytest.approx(row["SR arm"].value - row["SR reference"].value)
    assert row["tau in %"] == pytest.approx(row["tau arm"].value / row["tau reference"].value - 1)
    assert row["prompts"] == 11


def test_settings_that_differ_are_said_loudly():
    section = only([drawn("dflash", 0.5), drawn("dpace", 0.7, template_options={"enable_thinking": True})])
    (caution,) = cautions(section)
    assert "template options" in caution
    assert "enable_thinking" in caution


def test_an_arm_that_lacks_a_data_set_has_no_average_and_is_named():
    section = only([drawn("dflash", 0.5), drawn("dflash", 0.5, dataset="mbpp"), drawn("dpace", 0.7)], "dflash")
    base, arm = section.arms
    assert set(section.figures(base, None)) >= {"sr", "tau"} and section.figures(arm, None) == {}
    assert section.difference(arm, None) == {} and section.difference(arm, "gsm8k")
    assert row_of(catalog.overview(section), "dpace")["tau mean"] is None
    assert cautions(section) == ["dpace: not measured on mbpp, so without an average."]


def test_means_over_other_seeds_than_the_references_are_said():
    records = [drawn("dflash", 0.5, seed=0), drawn("dflash", 0.5, seed=1), drawn("dpace", 0.7, seed=0)]
    (caution,) = cautions(only(records, "dflash"))
    assert "dpace with training seeds [0], dflash with [0, 1]" in caution and caution.startswith("gsm8k: ")
    assert cautions(only([*records, drawn("dpace", 0.7, seed=1)], "dflash")) == []


def test_trainings_of_unlike_length_are_said():
    known = [drawn("dflash", 0.5, step=20), drawn("dpace", 0.7, seed=0, step=20), drawn("dpace", 0.7, seed=1, step=200)]
    assert any("different numbers of training steps" in c and "200" in c for c in cautions(only(known, "dflash")))
    foreign = [drawn("dflash", 0.5, step=None), drawn("dpace", 0.7, step=20)]
    assert cautions(only(foreign, "dflash")) == []


def test_no_prompt_in_common_gives_no_figure_and_no_interval():
    other = record([prompt(100 + i, [4]) for i in range(5)], "dflash", data_sha256="e" * 64)
    section = only([other, drawn("dpace", 0.7)])
    assert section.prompts("gsm8k") == []
    assert section.figures(section.arms[0], "gsm8k") == {}
    assert any("different prompts" in caution for caution in cautions(section))
    assert catalog.differences(section) is None


# --- tables -----------------------------------------------------------------------------------------------


def test_main_table_has_the_papers_shape():
    sets = ("gsm8k", "alpaca", "math500", "own-set")
    records = [
        drawn(f"{name}-l{layers}", rate, objective={"name": name}, num_draft_layers=layers, dataset=data_set)
        for layers in (5, 3)
        for name, rate in (("dflash", 0.5), ("dpace", 0.8))
        for data_set in sets
    ]
    table = catalog.speed(only(records, "dflash"))
    assert [row[:2] for row in table.rows] == [(3, "dflash"), (3, "dpace"), (5, "dflash"), (5, "dpace")]
    assert [group for group, _ in table.groups()] == ["gsm8k", "math500", "alpaca", "own-set", "average"]
    assert [column.name for column in table.columns[2:4]] == ["SR", "tau"]
    row = row_of(table, 5, "dpace")
    assert row["average tau"].value == pytest.approx(statistics.fmean(row[f"{name} tau"].value for name in sets))
    assert {at for at in table.best if at[0] in (1, 3)} == set(table.best)  # dpace is best at either depth
    assert len(table.best) == 2 * 10


def test_simulated_and_draft_only_records_claim_no_sr():
    alone = record([prompt(i, [3, 4], baseline_s=None) for i in range(4)])
    for section in (only([drawn("dpace", 0.7, engine="simulate")]), only([alone])):
        names = [column.name for column in catalog.speed(section).columns]
        assert "SR" not in names
        assert "tau" in names


def test_counters_of_a_server_give_pooled_tau_without_interval():
    answers = [prompt(i, []) for i in range(4)]
    one = record(answers, engine="vllm", counters={"drafts": 100, "accepted": 250})
    section = only([one])
    found = section.figures(section.arms[0], "gsm8k")
    assert "tau" not in found
    assert found["tau_pooled"] == Estimate(3.5, by_seed=(3.5,))


def test_overview_has_a_row_for_each_arm_and_both_intervals_of_its_difference():
    records = [
        drawn(arm, rate, dataset=data_set, seed=seed)
        for arm, rate in (("dflash", 0.5), ("dpace", 0.8))
        for data_set in ("gsm8k", "mbpp")
        for seed in (0, 1, 2)
    ]
    section = only(records, "dflash")
    table = catalog.overview(section)
    arm, base = row_of(table, "dpace"), row_of(table, "dflash")
    by_seed = [
        statistics.fmean(r.tau for r in records if (r.arm, r.seed) == ("dpace", seed))
        - statistics.fmean(r.tau for r in records if (r.arm, r.seed) == ("dflash", seed))
        for seed in (0, 1, 2)
    ]
    assert arm["seeds"] == 3 and base["tau difference"] is None and base["tau over seeds"] is None
    assert arm["tau mean"].value == pytest.approx(statistics.fmean(r.tau for r in records if r.arm == "dpace"))
    assert arm["tau difference"].value == pytest.approx(statistics.fmean(by_seed))
    assert arm["tau over seeds"].value == pytest.approx(statistics.fmean(by_seed))
    assert arm["tau over seeds"].method == "t" and arm["tau difference"].method != "t"
    bold = {(table.rows[row][0], table.columns[column].full_name) for row, column in table.best}
    assert ("dpace", "tau difference") in bold and not any(arm == "dflash" for arm, _ in bold)
    assert "Averages over 2 data sets" in table.notes[0] and "to dflash" in table.notes[0]


def test_overview_of_one_seed_and_one_data_set_is_that_data_sets_figure():
    records = [drawn("dflash", 0.5), drawn("dpace", 0.8)]
    table = catalog.overview(only(records, "dflash"))
    assert not any(column.name in ("seeds", "over seeds") for column in table.columns)
    assert row_of(table, "dpace")["tau value"].value == pytest.approx(records[1].tau)
    assert "On gsm8k" in table.notes[0]
    assert catalog.overview(only(records[:1])) is None


def test_reduction_and_top_k_are_factors_too():
    records = [drawn(f"dpace-{r}", 0.5, objective={"name": "dpace", "alpha": 0.5, "reduction": r}) for r in "ab"]
    records += [drawn(f"topk-prefix-top{k}", 0.5, objective={"name": "topk-prefix", "top_k": k}) for k in (8, 4)]
    reduction, top_k = catalog.by_factor(only(records))
    assert (reduction.name, [row[2] for row in reduction.rows]) == ("reduction-t0", ["a", "b"])
    assert (top_k.name, [row[2] for row in top_k.rows]) == ("top-k-t0", ["4", "8"])


def test_alpha_table_has_the_arms_that_differ_in_alpha_alone():
    records = [drawn(f"dpace-a{a:g}", 0.5, objective={"name": "dpace", "alpha": a}) for a in (0.5, 0.0, 0.1)]
    records.append(drawn("dflash", 0.5, objective={"name": "dflash", "gamma": 7.0}))
    (table,) = catalog.by_factor(only(records))
    assert table.name == "alpha-t0"
    assert [row[:3] for row in table.rows] == [("dpace", 3, "0"), ("dpace", 3, "0.1"), ("dpace", 3, "0.5")]


def test_gamma_table_calls_no_gamma_uniform():
    records = [drawn(f"dflash-g{g}", 0.5, objective={"name": "dflash", "gamma": g}) for g in (7.0, None)]
    (table,) = catalog.by_factor(only(records))
    assert [row[2] for row in table.rows] == ["uniform", "7"]


def test_ablation_has_the_whole_before_its_parts():
    parts = ("dpace-continuation-value-only", "dpace", "dpace-cumulative-confidence-only")
    table = catalog.ablation(only([drawn(name, 0.5, objective={"name": name, "alpha": 0.5}) for name in parts]))
    assert [row[1] for row in table.rows] == [parts[1], parts[2], parts[0]]
    assert catalog.ablation(only([drawn("dpace", 0.5), drawn("dflash", 0.5)])) is None


def test_near_ties_are_counted_apart_from_real_differences():
    outcomes = [(True, None), (False, True), (False, False), (True, None)]
    prompts = [prompt(i, [3], lossless=ok, near_tie=tie) for i, (ok, tie) in enumerate(outcomes)]
    row = row_of(catalog.lossless(only([record(prompts)])), "dpace", "gsm8k")
    assert (row["checked"], row["equal"], row["near-tie"], row["different"]) == (4, 2, 1, 1)
    assert row["share equal"] == 0.5
    assert catalog.lossless(only([record([prompt(0, [3])], temperature=1.0)])) is None


def test_acceptance_tables_pool_data_sets_and_seeds():
    records = [record([prompt(0, [1, 8]), prompt(1, [8, 8])]), record([prompt(0, [3, 1]), prompt(1, [8])], seed=1)]
    section = only(records)
    table = catalog.acceptance_histogram(section)
    assert [row[0] for row in table.rows] == list(range(1, 9))
    assert [row[1] for row in table.rows] == pytest.approx([2 / 7, 0, 1 / 7, 0, 0, 0, 0, 4 / 7])
    # Position 1: steps of 1 fail but for the last of an answer, which is cut by its end.
    assert catalog.acceptance_positions(section).rows[0][1] == pytest.approx(5 / 6)


def test_steps_a_prompt_counts_all_turns():
    turns = [prompt(0, [3, 3]), prompt(0, [2], turn=1), prompt(1, [4, 1, 1]), prompt(1, [2], turn=1)]
    row = row_of(catalog.figures(only([record(turns)])), "dpace", "gsm8k")
    assert row["steps a prompt"] == pytest.approx(7 / 2)


def test_figures_that_are_written_alike_are_best_together():
    table = Table("t", "t", (Column("a", heading=True), Column("b")), (("x", 2.931), ("y", 2.934), ("z", 2.9)))
    assert best_cells(table, [1]) == ((0, 1), (1, 1))


def test_published_figures_have_a_source_and_are_the_papers():
    table = published()
    assert "not measured here" in table.title
    assert "2605.18810" in table.notes[0]
    rows = {(row[0], row[1], row[2]): row[-2:] for row in table.rows}
    assert rows["tau, average of six data sets", "Qwen3-4B", "3 layers, temperature 0"] == ("4.10", "4.52")
    assert rows["SR, average of six data sets", "Qwen3-4B", "5 layers, temperature 0"] == ("2.98", "3.27")
    assert rows["tau, change", "Qwen3-8B", ""] == (None, "+12.8%")
    assert len(table.rows) == 10


def test_objectives_table_has_every_objective():
    rows = objectives_table().rows
    assert [row[0] for row in rows] == [objective.model_fields["name"].default for objective in OBJECTIVES]
    assert all(all(row) for row in rows)


def test_concurrency_table_has_throughput_by_load():
    wall_s = {"baseline": 10.0, "draft": 4.0}
    loads = [drawn("dpace", 0.7, engine="sglang", concurrency=load, wall_s=wall_s) for load in (1, 8)]
    table = catalog.concurrency(made(loads))
    assert [row[3] for row in table.rows] == [1, 8]
    tokens = sum(p.draft.tokens for p in loads[0].prompts)
    assert table.rows[0][5] == pytest.approx(tokens / 4.0)
    assert catalog.concurrency(made([drawn("dpace", 0.7)])) is None


# --- the summary ------------------------------------------------------------------------------------------


def test_summary_has_bench_fields_by_data_set_and_differences_to_the_first_arm():
    records = [
        drawn(arm, rate, dataset=name) for arm, rate in (("dflash", 0.4), ("dpace", 0.8)) for name in ("gsm8k", "mbpp")
    ]
    found = made(records, "dflash")
    first, second = arms_summary(found, {id(one): f"{one.arm}-{one.dataset}.json" for one in records})
    assert (first["arm"], second["arm"]) == ("dflash", "dpace")
    assert (first["delta_tau"], first["reference"]) == (None, None)
    fields = second["datasets"]["mbpp"]
    assert (fields["dataset"], fields["temperature"], fields["prompts"]) == ("mbpp", 0.0, 12)
    assert fields["tau"] == pytest.approx(records[3].tau)
    assert fields["sr"] == pytest.approx(records[3].sr)
    assert fields["tau_pooled"] == pytest.approx(records[3].tau_pooled)
    assert fields["lossless"] == 1.0
    assert fields["result"] == ["dpace-mbpp.json"]
    assert second["delta_tau"]["low"] > 0
    taus = [statistics.fmean(one.tau for one in records[i : i + 2]) for i in (0, 2)]
    assert second["delta_tau"]["value"] == pytest.approx(taus[1] - taus[0])
    assert set(second["delta_sr"]) == {"value", "low", "high"}


def test_summary_names_the_section_where_there_are_several():
    found = made([drawn("dpace", 0.7), drawn("dpace", 0.6, temperature=1.0)])
    assert list(arms_summary(found, {})[0]["datasets"]) == ["gsm8k-t0", "gsm8k-t1"]


def test_checkpoints_of_one_training_are_a_trajectory():
    from dpace_cli.tables.positions import CheckpointWeights

    made = [CheckpointWeights("x", "dpace", 0, step, 4, 4.0, 0.5, 1, []) for step in (30, 10)]
    made.append(CheckpointWeights("y", "dflash", 0, 20, 4, 4.0, 0.5, 1, []))
    assert {name: [c.step for c in own] for name, own in trajectories(made).items()} == {"dpace-seed0": [10, 30]}
    assert [(c.arm, c.step) for c in last_of_each(made)] == [("dpace", 30), ("dflash", 20)]


def test_only_differences_whose_interval_excludes_zero_are_bold():
    def arm(name, shifts):
        return record([prompt(i, [4 + shift], 1.0, 2.0) for i, shift in enumerate(shifts)], name)

    reference, better = arm("dflash", [0] * 12), arm("dpace", [1, 2] * 6)
    noise = arm("dpakl", [1, -1] * 6)
    table = catalog.differences(only([reference, better, noise], "dflash"))
    bold = {(table.rows[row][0], table.columns[column].full_name) for row, column in table.best}
    assert ("dpace", "tau difference") in bold
    assert ("dpakl", "tau difference") not in bold


def test_acceptance_and_steps_are_of_the_prompts_that_every_arm_finished():
    section = only([record([prompt(0, [2, 2]), prompt(1, None)], "dflash"),
                    record([prompt(0, [3]), prompt(1, [8, 8, 8])], "dpace")], "dflash")  # fmt: skip
    assert catalog.histograms(section)["dpace"] == [0, 0, 0, 1, 0, 0, 0, 0, 0]
    assert [rate.hits for rate in catalog.position_rates(section)["dpace"]] == [1, 1, 0, 0, 0, 0, 0]
    rows = {row[0].split()[0]: row for row in catalog.figures(section).rows}
    column = [c.name for c in catalog.figures(section).columns].index("steps a prompt")
    assert (rows["dflash"][column], rows["dpace"][column]) == (2, 1)
