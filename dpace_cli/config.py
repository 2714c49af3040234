"""The one config schema of all stages. `docs/config.md` and the help of the flags are made from it.

Field names follow SpecForge and Transformers where they have one. `dpace_cli.settings` reads values
for it from presets, files, the environment and the command line. Nothing here imports torch.
"""

from __future__ import annotations

import itertools
import re
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

DEMO_TARGET = "demo"
"""Name of the embedded target, where a model folder or hub id is asked for."""

Reduction = Literal["sequence", "block", "token", "weight"]


class Section(BaseModel):
    """A part of the config; a key that it does not know is an error."""

    model_config = ConfigDict(extra="forbid", validate_default=True, protected_namespaces=())


# --- objectives: each has its own fields, so `alpha` on `dflash` is an error and not ignored ----------


class _Objective(Section):
    formula: ClassVar[str]  # loss of position k, for `dpace objectives`
    source: ClassVar[str]
    needs_target: ClassVar[bool] = False  # does it need the target's whole distribution?


class _Smoothed(_Objective):
    alpha: float = Field(0.5, ge=0, le=1, description="smoothing of the confidences in the weight; 0 stalls")
    reduction: Reduction = Field("sequence", description="what the weighted sum is divided by")


class Dpace(_Smoothed):
    """D-PACE: the accepted length that a position can still unlock."""

    formula: ClassVar[str] = "sum_{j>=k} c_1..c_j * -log q_k, c = (1 - alpha) q + alpha"
    source: ClassVar[str] = "arXiv 2605.18810, eq. 8"
    name: Literal["dpace"] = "dpace"


class DpaceCumulative(_Smoothed):
    """Ablation: the cumulative confidence alone."""

    formula: ClassVar[str] = "c_1..c_k * -log q_k"
    source: ClassVar[str] = "arXiv 2605.18810, appendix B.3"
    name: Literal["dpace-cumulative-confidence-only"] = "dpace-cumulative-confidence-only"


class DpaceContinuation(_Smoothed):
    """Ablation: the continuation value alone."""

    formula: ClassVar[str] = "(1 + sum_{j>k} c_{k+1}..c_j) * -log q_k"
    source: ClassVar[str] = "arXiv 2605.18810, appendix B.3"
    name: Literal["dpace-continuation-value-only"] = "dpace-continuation-value-only"


class DpaceTargetProbability(_Smoothed):
    """Ablation: the target's own probability of its token in place of the drafter's."""

    needs_target: ClassVar[bool] = True
    formula: ClassVar[str] = "dpace's weight of the target's p(y) * -log q_k"
    source: ClassVar[str] = "arXiv 2605.18810, section 5.4"
    name: Literal["dpace-target-probability"] = "dpace-target-probability"


class Dpakl(_Smoothed):
    """D-PACE for soft targets: KL divergence, weighted by its own confidences."""

    needs_target: ClassVar[bool] = True
    formula: ClassVar[str] = "dpace's weight of exp(sum_v p log q) * KL(p, q)"
    source: ClassVar[str] = "arXiv 2605.18810, appendix E"
    name: Literal["dpakl"] = "dpakl"


class _Decayed(_Objective):
    gamma: float | Literal["auto"] | None = Field(
        "auto", description="decay length in positions; auto: 7 for block size 16, 5 for 10, 4 for 8; null: uniform"
    )
    reduction: Reduction = Field("weight", description="what the weighted sum is divided by")

    @field_validator("gamma")
    @classmethod
    def _positive(cls, gamma: Any) -> Any:
        if isinstance(gamma, float) and gamma <= 0:
            raise ValueError("must be above 0, or null for uniform weights")
        return gamma


class Dflash(_Decayed):
    """DFlash's decayed cross-entropy, the baseline."""

    formula: ClassVar[str] = "exp(-(k-1)/gamma) * -log q_k"
    source: ClassVar[str] = "arXiv 2602.06036, eq. 4"
    name: Literal["dflash"] = "dflash"


class Lk(_Decayed):
    """LK loss: minus the log of the probability that the target accepts."""

    needs_target: ClassVar[bool] = True
    formula: ClassVar[str] = "exp(-(k-1)/gamma) * -log sum_v min(p, q)"
    source: ClassVar[str] = "arXiv 2602.23881"
    name: Literal["lk"] = "lk"


class TopkPrefix(_Objective):
    """GRIFFIN's mask: positions after the first that left the drafter's top k do not count."""

    formula: ClassVar[str] = "[no earlier y outside the drafter's top k] * -log q_k"
    source: ClassVar[str] = "GRIFFIN, its mask alone"
    name: Literal["topk-prefix"] = "topk-prefix"
    top_k: int = Field(3, ge=1, description="how many of the drafter's best tokens count as a hit")
    reduction: Reduction = Field("weight", description="what the weighted sum is divided by")


class AcceptRate(_Objective):
    """Minus the expected accepted length itself, unsmoothed."""

    formula: ClassVar[str] = "-sum_j q_1..q_j"
    source: ClassVar[str] = "the surrogate itself, unsmoothed"
    name: Literal["accept-rate"] = "accept-rate"
    reduction: Reduction = Field("sequence", description="what the sum is divided by")


class AcceptUntilFail(_Objective):
    """Spec-AUF: positions up to and including the drafter's first miss."""

    formula: ClassVar[str] = "[no earlier argmax miss] * -log q_k"
    source: ClassVar[str] = "Spec-AUF, arXiv 2607.01893"
    name: Literal["accept-until-fail"] = "accept-until-fail"
    reduction: Reduction = Field("weight", description="what the weighted sum is divided by")


class Custom(_Objective):
    """A function of the user's own; docs/objectives.md says what it is given."""

    formula: ClassVar[str] = "your own function"
    source: ClassVar[str] = "docs/objectives.md"
    name: Literal["custom"] = "custom"
    function: str = Field(description="package.module:function", pattern=r"^[\w.]+:\w+$")
    params: dict[str, Any] = Field({}, description="keyword arguments for the function")
    needs_target_logits: bool = Field(False, description="hand it the target's distribution as well")
    reduction: Reduction = Field("sequence", description="what the weighted sum is divided by")


OBJECTIVES: tuple[type[_Objective], ...] = (
    Dpace, DpaceCumulative, DpaceContinuation, DpaceTargetProbability, Dpakl,
    Dflash, TopkPrefix, AcceptRate, AcceptUntilFail, Lk, Custom,
)  # fmt: skip

Objective = Annotated[
    Dpace | DpaceCumulative | DpaceContinuation | DpaceTargetProbability | Dpakl
    | Dflash | TopkPrefix | AcceptRate | AcceptUntilFail | Lk | Custom,
    Field(discriminator="name"),
]  # fmt: skip


def needs_target(objective: _Objective) -> bool:
    """True where the objective reads the target's whole distribution at each position."""
    return objective.needs_target or getattr(objective, "needs_target_logits", False)


def caution(objective: _Objective) -> str:
    """What to know before training with an objective; empty where there is nothing to say."""
    if getattr(objective, "alpha", None) == 0:
        return f"alpha is 0: without smoothing, {objective.name} stalls near a kept length of one token; try 0.3 to 0.7"
    return ""


def objective_from_name(value: Any) -> Any:
    """`dpace` for `{name: dpace}`, and `package.module:function` for a custom objective."""
    if isinstance(value, str):
        return {"name": "custom", "function": value} if ":" in value else {"name": value}
    return {"name": Dpace().name, **value} if isinstance(value, dict) else value


# --- the stages ------------------------------------------------------------------------------------------


class TargetConfig(Section):
    """The language model that is to decode faster."""

    path: str = Field(DEMO_TARGET, description="hub id or model folder; demo: the embedded target")
    revision: str | None = Field(None, description="hub revision")
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="auto: float32 on a CPU, bfloat16 on a GPU"
    )
    device: str = Field("auto", description="auto, cpu, cuda, cuda:1, mps")
    trust_remote_code: bool = Field(False, description="run Python code that comes with the model")
    enable_thinking: bool | None = Field(None, description="template option of reasoning models; null: not passed")
    chat_template_kwargs: dict[str, Any] = Field({}, description="further options of the chat template")

    def template_options(self) -> dict[str, Any]:
        """Keyword arguments for `apply_chat_template`, the same in every stage."""
        thinking = {} if self.enable_thinking is None else {"enable_thinking": self.enable_thinking}
        return {**thinking, **self.chat_template_kwargs}


Source = Literal["sharegpt", "zlab", "ultrachat", "perfectblend", "alpaca", "jsonl", "demo"]


class PrepConfig(Section):
    """Conversations of any source to SpecForge's row format."""

    source: Source = Field("demo", description="how the rows are laid out; demo: the embedded generator")
    inputs: list[str] = Field([], description="files, folders or hub ids")
    split: str = Field("train", description="split of a hub data set")
    output: str | None = Field(None, description="output file; default: prep/prompts.jsonl of the run")
    max_rows: int | None = Field(None, ge=1, description="keep at most this many rows, chosen by a hash of the id")
    val: float = Field(0.0, ge=0, lt=1, description="share set apart for validation, by a hash of the id")
    first_turn: bool = Field(False, description="keep the conversation up to the first answer")
    max_turns: int | None = Field(None, ge=1, description="keep at most this many user turns")
    max_tokens: int | None = Field(None, ge=1, description="reject rows longer than this for the target's tokenizer")
    max_prompt_tokens: int | None = Field(
        None, ge=1, description="reject rows whose prompt (up to the last user turn) is longer than this"
    )
    dedup: Literal["none", "exact", "near"] = Field("none", description="drop repeated prompts")
    decontaminate: bool = Field(True, description="drop prompts that are in a benchmark data set")
    disable: list[str] = Field([], description="names of repairs and rejections to turn off")
    seed: int = Field(0, description="seed of the row choice and of the embedded generator")


class RegenConfig(Section):
    """The target's own answers to the prompts."""

    engine: Literal["local", "http"] = Field("local", description="Transformers here, or OpenAI-compatible servers")
    base_urls: list[str] = Field([], description="servers, each up to and including /v1")
    served_model: str | None = Field(None, description="model name on the server; null: the only one it lists")
    api_key_env: str | None = Field(None, description="environment variable that holds the API key")
    concurrency: int = Field(32, ge=1, description="requests in flight per server")
    timeout_s: float = Field(600, gt=0, description="seconds for one request, and for all servers to come back")
    max_retries: int = Field(5, ge=0, description="tries again after a transient error")
    return_token_ids: bool = Field(False, description="ask the servers for token ids, to train on them (vLLM)")
    temperature: float = Field(0.0, ge=0, description="0: greedy")
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0, description="0: off")
    repetition_penalty: float = Field(1.0, gt=0)
    seed: int = Field(0, description="each row draws from this seed and its id")
    max_new_tokens: int = Field(2048, ge=1)
    batch_size: int = Field(32, ge=1, description="rows in one local batch")
    truncated: Literal["keep", "drop"] = Field("keep", description="what happens to an answer cut by max_new_tokens")
    keep_reasoning: bool = Field(True, description="keep the reasoning as reasoning_content")
    multi_turn: bool = Field(True, description="answer every user turn from the regenerated history, else the first")
    limit: int | None = Field(None, ge=1, description="only this many rows, from the top")
    overwrite: bool = Field(False, description="replace answers made with other settings")


class SpecForgeConfig(Section):
    """SpecForge as the trainer."""

    python: str | None = Field(None, description="interpreter where specforge is installed; null: this one")
    mode: Literal["offline", "online"] = Field("offline", description="features from files, or from capture servers")
    server_urls: list[str] = Field([], description="SGLang capture servers (online)")
    mooncake_metadata_server: str | None = Field(None, description="Mooncake's metadata server (online)")
    mooncake_master_server_addr: str | None = Field(None, description="Mooncake's master (online)")
    keep_files: bool = Field(False, description="keep SpecForge's features and checkpoints after success")
    extra: dict[str, Any] = Field(
        {}, description="SpecForge keys that dpace has no field for, such as data.dataloader_num_workers"
    )


class TrainConfig(Section):
    """The drafter and how it is trained."""

    engine: Literal["native", "specforge"] = Field("native", description="who runs the training steps")
    objective: Objective = Field(Dpace(), description="the training loss")
    data: str | None = Field(None, description="rows to train on; default: regen/train.jsonl of the run")
    output: str | None = Field(None, description="checkpoint folder; default: train/ARM of the run")
    block_size: int = Field(16, ge=2, description="positions in a block, the anchor included")
    num_draft_layers: int = Field(3, ge=1)
    target_layer_ids: list[int] | None = Field(None, description="tapped target layers; null: DFlash's rule")
    intermediate_size: int | None = Field(None, ge=1, description="width of the drafter's MLP; null: the target's")
    mask_token_id: int | None = Field(None, ge=0, description="null: found in the tokenizer")
    num_anchors: int = Field(512, ge=1, description="blocks drawn in a sequence at a step, at most")
    max_length: int = Field(2048, ge=4, description="longer rows are cut")
    batch_size: int = Field(4, ge=1, description="sequences in a micro-batch of one process")
    accumulation_steps: int = Field(1, ge=1, description="micro-batches in an optimizer step")
    num_epochs: int = Field(6, ge=1)
    max_steps: int | None = Field(None, ge=1, description="optimizer steps; wins over num_epochs")
    learning_rate: float = Field(6e-4, gt=0)
    weight_decay: float = Field(0.01, ge=0)
    adam_beta1: float = Field(0.9, ge=0, lt=1)
    adam_beta2: float = Field(0.999, ge=0, lt=1)
    warmup_ratio: float = Field(0.04, ge=0, le=1)
    lr_scheduler_type: Literal["cosine", "linear", "constant"] = "cosine"
    max_grad_norm: float = Field(1.0, gt=0)
    seed: int = Field(0, description="initial weights, anchor draws and data order")
    cache: Literal["none", "memory", "disk"] = Field("memory", description="target states: made anew, or kept")
    cache_limit_gb: float = Field(8.0, gt=0, description="most that the cache may take")
    compute_dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="type of the drafter's arithmetic; auto: bfloat16 on CUDA, float32 elsewhere"
    )
    compile: bool = Field(False, description="torch.compile the drafter")
    head_chunk_tokens: int = Field(1024, ge=1, description="positions whose logits are held at once")
    logging_steps: int = Field(10, ge=1)
    save_steps: int = Field(500, ge=1)
    val_rows: int = Field(
        64, ge=0, description="rows held out of training; simulated acceptance is measured on them at each save"
    )
    keep_last: int = Field(2, ge=1, description="checkpoints kept")
    keep_best: bool = Field(True, description="keep the one with the best simulated acceptance, too")
    report_to: list[Literal["tensorboard", "wandb"]] = []
    nproc: int = Field(1, ge=1, description="processes on this machine")
    specforge: SpecForgeConfig = SpecForgeConfig()

    @field_validator("objective", mode="before")
    @classmethod
    def _by_name(cls, value: Any) -> Any:
        return objective_from_name(value)


class BenchConfig(Section):
    """SR and tau of a checkpoint."""

    engine: Literal["local", "simulate", "sglang", "vllm"] = "local"
    datasets: list[str] = Field(
        ["gsm8k", "math500", "humaneval", "mbpp", "mt-bench", "alpaca"],
        description="names of data sets, or JSONL files of prompts",
    )
    data_dir: str | None = Field(None, description="folder with NAME.jsonl; null: from the hub")
    num_prompts: int | None = Field(None, ge=1, description="prompts per data set, after DFlash's shuffle")
    temperatures: list[float] = [0.0]
    top_p: float = Field(1.0, gt=0, le=1)
    top_k: int = Field(0, ge=0, description="0: off")
    max_new_tokens: int = Field(2048, ge=1)
    block_size: int | None = Field(None, ge=2, description="null: the checkpoint's")
    checkpoints: Literal["last", "all"] = Field(
        "last", description="of each arm; all: every one that train.keep_last left, for a trajectory"
    )
    seed: int = 0
    warmup_tokens: int = Field(64, ge=0, description="tokens decoded by each arm before timing starts")
    check_lossless: bool = Field(True, description="compare with the target's own greedy output at temperature 0")
    base_url: str | None = Field(None, description="server with speculation")
    baseline_url: str | None = Field(None, description="server without speculation")
    concurrency: list[int] = Field([1], description="requests in flight (servers)")
    timeout_s: float = Field(600, gt=0, description="seconds for one request (servers)")

    @field_validator("temperatures")
    @classmethod
    def _not_negative(cls, values: list[float]) -> list[float]:
        if not values or any(value < 0 for value in values):
            raise ValueError("at least one temperature, each 0 or above")
        return values


class ReportConfig(Section):
    """Tables and plots."""

    reference: str | None = Field(None, description="arm to compare with; null: the first arm of the run")
    confidence: float = Field(0.95, gt=0, lt=1)
    bootstrap_samples: int = Field(9999, ge=100)
    paper: bool = Field(False, description="show the published figures beside, labelled")


class WeightsConfig(Section):
    """Per-position weights over held-out blocks."""

    alpha: float = Field(0.5, ge=0, le=1)
    num_rows: int = Field(64, ge=1, description="rows of the data file that are used")
    num_anchors: int = Field(64, ge=1, description="blocks drawn in a row, at most")
    correlation: bool = Field(False, description="also how well the surrogate ranks blocks by accepted length")
    seed: int = 0


class ArmsConfig(Section):
    """What `dpace run` compares. Every list is a factor; the arms are their product.

    All arms of one seed share target, data, initial weights, anchor draws and data order.
    """

    objectives: list[Objective] = Field([], description="empty: train.objective alone")
    alpha: list[float] = Field([], description="for the objectives that take it")
    gamma: list[float | None] = Field([], description="for the objectives that take it")
    block_size: list[int] = []
    num_draft_layers: list[int] = []
    learning_rate: list[float] = []
    seeds: list[int] = Field([], description="empty: train.seed alone")

    @field_validator("objectives", mode="before")
    @classmethod
    def _by_name(cls, values: Any) -> Any:
        return [objective_from_name(value) for value in values] if isinstance(values, list) else values


class Config(Section):
    """Everything about one run."""

    name: str = Field("run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", description="folder of the run under runs/")
    target: TargetConfig = TargetConfig()
    prep: PrepConfig = PrepConfig()
    regen: RegenConfig = RegenConfig()
    train: TrainConfig = TrainConfig()
    bench: BenchConfig = BenchConfig()
    report: ReportConfig = ReportConfig()
    weights: WeightsConfig = WeightsConfig()
    arms: ArmsConfig = ArmsConfig()

    @model_validator(mode="after")
    def _servers_are_named(self) -> Config:
        if self.regen.engine == "http" and not self.regen.base_urls:
            raise ValueError("regen.base_urls is empty; regen.engine http needs at least one server")
        return self

    def expand_arms(self) -> list[Arm]:
        """The arms of `dpace run`, the reference first, seeds innermost."""
        factors = self.arms
        arms: list[Arm] = []
        for objective, alpha, gamma, block, layers, rate in itertools.product(
            factors.objectives or [self.train.objective],
            factors.alpha or [...],
            factors.gamma or [...],
            factors.block_size or [...],
            factors.num_draft_layers or [...],
            factors.learning_rate or [...],
        ):
            own = {
                key: value
                for key, value in (("alpha", alpha), ("gamma", gamma))
                if value is not ... and key in type(objective).model_fields
            }
            shared = {
                key: value
                for key, value in (("block_size", block), ("num_draft_layers", layers), ("learning_rate", rate))
                if value is not ...
            }
            label = "-".join([objective_label(objective), *(_short(k, v) for k, v in {**own, **shared}.items())])
            chosen = objective.model_copy(update=own)
            alike = next((arm.config.train.objective for arm in arms if arm.label == label), chosen)
            label += "".join(f"-{_short(key, value)}" for key, value in chosen if value != getattr(alike, key))
            if any(arm.label == label for arm in arms):
                continue  # an objective without alpha is one arm, however many alphas there are
            for seed in factors.seeds or [self.train.seed]:
                train = self.train.model_copy(update={**shared, "objective": chosen, "seed": seed})
                arms.append(Arm(label=label, seed=seed, config=self.model_copy(update={"train": train})))
        return arms


class Arm(BaseModel):
    """One drafter of a comparison: a label shared by its seeds, and the config it is trained with."""

    label: str
    seed: int
    config: Config

    @property
    def folder(self) -> str:
        """Name of its folder under `train` and `bench`."""
        return f"{self.label}-seed{self.seed}"


_SHORT_NAMES = {"alpha": "a", "gamma": "g", "block_size": "k", "num_draft_layers": "l", "learning_rate": "lr",
                "top_k": "top"}  # fmt: skip


def _short(key: str, value: Any) -> str:
    number = isinstance(value, int | float)
    text = "none" if value is None else f"{value:g}" if number else re.sub(r"[^\w.]+", "", str(value))
    return f"{_SHORT_NAMES.get(key, '')}{text}"


def objective_label(objective: _Objective) -> str:
    """What an objective is called in file names and tables."""
    return objective.function.replace(":", ".") if isinstance(objective, Custom) else objective.name


def decay_length(gamma: float | Literal["auto"] | None, block_size: int) -> float | None:
    """Gamma in positions. `auto` follows the DFlash paper at block sizes 8, 10 and 16, linear between."""
    if gamma != "auto":
        return gamma
    for (low, at_low), (high, at_high) in itertools.pairwise([(0, 0.0), (8, 4.0), (10, 5.0), (16, 7.0)]):
        if block_size <= high:
            return at_low + (at_high - at_low) * (block_size - low) / (high - low)
    return 7.0 * block_size / 16
