"""What is wrong with a setup, before it costs a day.

Each group of checks is a function that yields findings; whatever it raises becomes a finding too, so that one
that cannot run says why and the others go on. No model weights are loaded.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from rich.console import Console, ConsoleOptions, RenderResult
from torch import Tensor

from dpace_cli import console
from dpace_cli.checks import Check
from dpace_cli.config import Config
from dpace_cli.doctor import environment, inputs, models
from dpace_cli.doctor.setup import Setup, look
from dpace_cli.doctor.show import show
from dpace_cli.errors import DpaceError
from dpace_cli.estimate import Batch, Estimate, Rates, Rows, Shapes, assumed_rows, estimate, mean_batch, shapes
from dpace_cli.modeling.checker import parameter_count
from dpace_cli.modeling.drafter import target_layer_ids
from dpace_cli.modeling.target import resolve_device, resolve_dtype
from dpace_cli.objectives import FROM_TARGET, make_objective
from dpace_cli.records import RunFolder

MEASURE_S = 0.4
"""Seconds that each of the two matrix products is measured for."""

_MOST_OPERATIONS = {"cpu": 2e10, "cuda": 4e12, "mps": 4e11}
"""Of one measured product: long enough to reach its rate, short enough to be repeated."""


@dataclass(frozen=True)
class DoctorResult:
    """What `dpace doctor` reports.

    Attributes:
        checks: every finding, in the order in which they were looked at.
        launch: for each checkpoint that was named, the command that uses it, by program.
        estimate: what the config needs; null where it was not asked for, or the target's config is not there.
    """

    checks: list[Check]
    errors: int
    warnings: int
    launch: dict[str, dict[str, str]]
    estimate: Estimate | None

    def render(self, out: Console) -> None:
        """Print it for a person."""
        show(self.checks, self.launch, self.estimate, out)

    def __rich_console__(self, out: Console, _options: ConsoleOptions) -> RenderResult:
        self.render(out)  # what is yielded to rich is cut at the terminal's width; commands must not be
        yield from ()


def run(config: Config, folder: RunFolder, checkpoints: list[Path], estimate: bool = False) -> DoctorResult:
    """Look at everything that a run with this config would need. Never raises for what it finds.

    Args:
        folder: the run's folder; it need not exist.
        checkpoints: drafters to look at; none: the drafter that a training would make.
        estimate: measure this machine's matrix products, and report what the config needs.
    """
    setup = Setup(config, folder, [path.expanduser() for path in checkpoints])
    checks = [
        *look(["versions"], partial(environment.versions, setup)),
        *look(["device"], partial(environment.devices, setup)),
        *look(["target"], partial(models.target, setup)),
        *look(["target weights", "tied head"], partial(models.weights, setup)),
        *look(["tokenizer"], partial(models.tokenizer, setup)),
        *look(["chat template"], partial(models.template, setup)),
        *look(models.FIT_CHECKS, partial(models.fit, setup)),
        *look(["data"], partial(inputs.data, setup)),
        *look(["config"], partial(inputs.plan, setup)),
    ]
    need = _need(setup, measured=estimate)
    checks += look(["memory"], partial(environment.memory, setup, need))
    checks += look(["disk"], partial(environment.disk, setup, need))
    checks += look(["output"], partial(environment.output, setup))
    for path in setup.checkpoints:
        checks += look(["checkpoint"], partial(models.checkpoint, setup, path))
    checks += look(["server"], partial(inputs.servers, setup))
    checks += look(["bench data"], partial(inputs.bench_data, setup))
    errors, warnings = (sum(check.level == level for check in checks) for level in ("error", "warning"))
    return DoctorResult(checks, errors, warnings, setup.launch, need if estimate else None)


# --- what the config needs -------------------------------------------------------------------------------


def _need(setup: Setup, measured: bool) -> Estimate | None:
    """What the config needs, or None where the target's shapes are not known."""
    if setup.text is None:
        return None
    try:
        shape = _shapes(setup)
    except (DpaceError, KeyError):
        return None  # the check of the layer taps says why
    rows = _rows(setup)
    rates = None
    if measured:
        console.note("measuring the matrix products of this machine")
        rates = measure_rates(setup.config, shape, mean_batch(setup.config, rows))
    return estimate(setup.config, shape, rows, rates)


def _shapes(setup: Setup) -> Shapes:
    config, train = setup.config, setup.config.train
    device = resolve_device(config.target.device)
    half = train.compute_dtype == "bfloat16" or (train.compute_dtype == "auto" and device.type == "cuda")
    return shapes(
        setup.text.to_dict(), config, target_layer_ids(setup.text.num_hidden_layers, train),
        target_bytes=resolve_dtype(config.target.dtype, device).itemsize, compute_bytes=2 if half else 4,
        device=device.type, whole_target=bool(make_objective(train.objective).needs & set(FROM_TARGET)),
        target_parameters=parameter_count(setup.tensors) if setup.tensors else None,
    )  # fmt: skip


def _rows(setup: Setup) -> Rows:
    audit = setup.audit
    if audit is None or not audit.anchors:
        return assumed_rows(setup.config)
    longest = float(min(audit.longest, setup.config.train.max_length))
    return Rows(audit.rows, audit.tokens, longest, audit.anchors, float(audit.most_anchors), audit.supervised,
                f"a sample of {audit.sampled} of the rows in {setup.data}")  # fmt: skip


def measure_rates(config: Config, s: Shapes, batch: Batch) -> Rates:
    """Measure the two matrix products that decide a step's time, on the config's device and in its number type.

    Args:
        batch: an average micro-batch.
    """
    device = resolve_device(config.target.device)
    dtype = torch.bfloat16 if s.compute_bytes == 2 else torch.float32
    most, width = _MOST_OPERATIONS[device.type], s.drafter.width
    inner = s.drafter.mlp_active // (3 * width)
    chunk = min(s.head_chunk_tokens, batch.sequences * batch.blocks * batch.supervised)
    positions = max(1, int(min(chunk, most / (2 * width * s.vocabulary))))
    rows = max(1, int(min(batch.sequences * batch.blocks * s.block_size, most / (2 * width * inner))))
    head = _rate(positions, width, s.vocabulary, device, dtype)
    drafter = _rate(rows, width, inner, device, dtype)
    where = f"{device.type}, {torch.get_num_threads()} threads" if device.type == "cpu" else device.type
    how = f"{where}, {str(dtype).removeprefix('torch.')}, [{positions}, {width}] x [{width}, {s.vocabulary}]"
    return Rates(head, drafter, f"{how} and [{rows}, {width}] x [{width}, {inner}]")


def _rate(m: int, k: int, n: int, device: torch.device, dtype: torch.dtype) -> float:
    """Operations a second of [m, k] times [k, n].

    The fastest of as many as fit into MEASURE_S: a floor is what the machine can do, and others may be using it.
    """
    a, b = torch.randn(m, k, device=device, dtype=dtype), torch.randn(n, k, device=device, dtype=dtype)
    out = torch.empty(m, n, device=device, dtype=dtype)
    _timed(a, b, out)
    fastest, begun = _timed(a, b, out), time.perf_counter()
    while time.perf_counter() - begun < MEASURE_S:
        fastest = min(fastest, _timed(a, b, out))
    return 2.0 * m * k * n / fastest


def _timed(a: Tensor, b: Tensor, out: Tensor) -> float:
    """Seconds of one product; on a CPU, of its threads' own time where others took the processor in between."""
    begun, begun_cpu = time.perf_counter(), time.process_time()
    torch.mm(a, b.t(), out=out)
    if out.device.type == "cpu":
        return min(time.perf_counter() - begun, (time.process_time() - begun_cpu) / torch.get_num_threads())
    torch.cuda.synchronize(out.device) if out.device.type == "cuda" else torch.mps.synchronize()
    return time.perf_counter() - begun
