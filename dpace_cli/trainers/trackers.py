"""Send metrics to the trackers named in `train.report_to`; they are imported only then."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dpace_cli.errors import UsageError


class Trackers:
    """A context that opens the named trackers, logs to each, and closes them.

    Lists are logged by position, as `name/1`, `name/2`, ...

    Raises:
        UsageError: a tracker is named and not installed.
    """

    def __init__(self, names: Sequence[str], folder: Path, config: Mapping[str, Any]) -> None:
        self.names, self.folder, self.config = names, folder, config
        self.writer = self.wandb_run = None

    def __enter__(self) -> Trackers:
        try:
            if "tensorboard" in self.names:
                from torch.utils.tensorboard import SummaryWriter

                self.writer = SummaryWriter(str(self.folder / "tensorboard"))
            if "wandb" in self.names:
                import wandb

                self.wandb_run = wandb.init(project="dpace", dir=str(self.folder), config=dict(self.config))
        except ImportError as error:
            raise UsageError(
                f"train.report_to names {error.name}, which is not installed", f"pip install {error.name}"
            ) from None
        return self

    def log(self, metrics: Mapping[str, Any], step: int) -> None:
        """Log numbers and lists of numbers."""
        flat: dict[str, float] = {}
        for name, value in metrics.items():
            if isinstance(value, list):
                flat.update({f"{name}/{position}": item for position, item in enumerate(value, start=1)})
            else:
                flat[name] = value
        if self.writer is not None:
            for name, value in flat.items():
                self.writer.add_scalar(name, value, step)
        if self.wandb_run is not None:
            self.wandb_run.log(flat, step=step)

    def __exit__(self, *_: object) -> None:
        if self.writer is not None:
            self.writer.close()
        if self.wandb_run is not None:
            self.wandb_run.finish()
