"""The model card of a drafter, with what was measured as evaluation results that the hub can read."""

from __future__ import annotations

import re
from collections.abc import Sequence

from huggingface_hub import EvalResult, ModelCard, ModelCardData

from dpace_cli.render.export import markdown
from dpace_cli.tables import catalog
from dpace_cli.tables.arms import Arm, Section
from dpace_cli.tables.table import MISSING

_HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*/[\w.-]+$")

HUB_DATA_SETS = {
    "gsm8k": "openai/gsm8k", "math500": "HuggingFaceH4/MATH-500", "humaneval": "openai/openai_humaneval",
    "mbpp": "google-research-datasets/mbpp", "mt-bench": "HuggingFaceH4/mt_bench_prompts",
    "alpaca": "tatsu-lab/alpaca",
}  # fmt: skip

_METRICS = {
    "sr": "Speed-up (SR)",
    "tau": "Acceptance length (tau)",
    "tau_pooled": "Acceptance length, pooled over steps",
}


def model_card(sections: Sequence[Section], arm: Arm, name: str) -> ModelCard:
    """The card of one arm's drafter.

    Args:
        sections: where the arm was measured.
        arm: whose card it is.
        name: what the model is called.
    """
    records = arm.all_records()
    target = records[0].target
    hub_id = target if _HUB_ID.match(target) else None
    data = ModelCardData(
        model_name=name,
        base_model=hub_id,
        library_name="transformers",
        tags=["speculative-decoding", "dflash", "d-pace", "drafter"],
        eval_results=_results(sections, arm) or None,
    )
    objective = ", ".join(f"{key} {value}" for key, value in arm.objective.items() if key != "name")
    shape = f"{arm.layers} layers, block size {arm.block_size}"
    text = [
        f"# {name}",
        f"A DFlash drafter for speculative decoding with {target}: {shape}, trained by dpace-cli with the objective "
        f"`{arm.objective_name}`{f' ({objective})' if objective else ''}. It is no language model by itself: it "
        "proposes blocks of tokens that the target verifies, and at temperature 0 the output is the target's own.",
        "## Use",
        _usage(hub_id or "TARGET", arm.block_size),
        "## Measured",
    ]
    for section in sections:
        for table in (catalog.speed(section), catalog.differences(section), catalog.lossless(section)):
            if table is not None:
                text.append(markdown(table).rstrip())
    text += ["## How it was measured", _method(sections, arm)]
    return ModelCard(f"---\n{data.to_yaml()}\n---\n\n" + "\n\n".join(text) + "\n")


def _results(sections: Sequence[Section], arm: Arm) -> list[EvalResult]:
    found = []
    for section in sections:
        own = next((other for other in section.arms if other.name == arm.name), None)
        for data_set in section.data_sets if own else ():
            for measure, estimate in section.figures(own, data_set).items():
                interval = MISSING if estimate.low is None else f"[{estimate.low:.3f}, {estimate.high:.3f}]"
                found.append(EvalResult(
                    task_type="text-generation",
                    dataset_type=HUB_DATA_SETS.get(data_set, data_set),
                    dataset_name=data_set,
                    dataset_config=section.title,
                    metric_type=measure,
                    metric_name=_METRICS[measure],
                    metric_value=round(estimate.value, 4),
                    metric_args={"prompts": estimate.prompts, "interval": interval},
                ))  # fmt: skip
    return found


def _usage(target: str, block_size: int) -> str:
    return (
        "```python\n"
        "from dflash.model import DFlashDraftModel, dflash_generate\n"
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        f'target = AutoModelForCausalLM.from_pretrained("{target}").eval()\n'
        f'tokenizer = AutoTokenizer.from_pretrained("{target}")\n'
        'drafter = DFlashDraftModel.from_pretrained("THIS_MODEL").eval()\n'
        'messages = [{"role": "user", "content": "What is 17 times 23?"}]\n'
        'ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")["input_ids"]\n'
        "output = dflash_generate(drafter, target, ids, 256, [tokenizer.eos_token_id])\n"
        "```\n\n"
        f"SGLang: `--speculative-algorithm DFLASH --speculative-draft-model-path PATH "
        f"--speculative-num-draft-tokens {block_size}`; vLLM counts without the anchor: "
        f'`"num_speculative_tokens": {block_size - 1}`.'
    )


def _method(sections: Sequence[Section], arm: Arm) -> str:
    record = arm.all_records()[0]
    versions = ", ".join(f"{name} {version}" for name, version in sorted(record.versions.items()))
    seeds = f"Training seeds: {', '.join(map(str, arm.seeds))}."
    if len(arm.seeds) > 1:
        seeds += f" The figures are means over them; this checkpoint is of seed {record.seed}."
    parts = [
        f"{seeds} Device: {record.device}, {record.dtype or 'unknown type'}. "
        f"Answers of at most {record.max_new_tokens} tokens. Versions: {versions}.",
        f"Template options: {record.template_options or 'none'}.",
        f"Intervals: {100 * sections[0].bootstrap.confidence:g}% bootstrap over prompts (BCa).",
    ]
    return " ".join(parts)
