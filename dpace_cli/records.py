"""Where things live on disk, and how they get there whole.

A run directory holds one folder per stage (see docs/architecture.md). Every file is written under a
temporary name and renamed, or is append-only JSONL keyed by a row id; a reader never sees half a file.
"""

from __future__ import annotations

import errno
import fcntl
import glob
import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from typing import IO, Any, Literal

from dpace_cli.errors import RunError, UsageError


@contextmanager
def writing(path: Path, mode: str = "w") -> Iterator[IO]:
    """Open a temporary neighbour of `path` and rename it to `path` when the block ends well.

    Raises:
        RunError: the folder cannot be written or the disk is full; `path` is left as it was.
    """
    if not path.name:
        raise UsageError(f"{path} is a folder; a file name is needed")
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(temporary, mode, encoding=None if "b" in mode else "utf-8") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except OSError as error:
        raise write_error(path, error) from error
    finally:
        with suppress(OSError):  # whatever is wrong with the folder was said above
            temporary.unlink()


@contextmanager
def writing_folder(path: Path) -> Iterator[Path]:
    """As `writing`, for a folder: it appears under its own name complete, or not at all."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir(parents=True)
        yield temporary
        if path.exists():
            shutil.rmtree(path)
        os.replace(temporary, path)
    except OSError as error:
        raise write_error(path, error) from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@contextmanager
def only_one(path: Path) -> Iterator[IO[str]]:
    """Hold the lock of the folder that `path` is in, so that no second process works there.

    The system lets go of it when the process ends, however it ends; a child process that inherits the open file
    holds it too. `path` has the number of the holder, for the message.

    Raises:
        UsageError: another process holds it.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = open(path, "a+", encoding="utf-8")  # noqa: SIM115 - closed below
    except OSError as error:
        raise write_error(path, error) from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            lock.seek(0)
            raise UsageError(
                f"another process ({lock.read().strip() or 'unknown'}) is at work in {path.parent}",
                "wait for it or end it, then run the same command again",
            ) from None
        held_by(lock, os.getpid())
        yield lock


def held_by(lock: IO[str], process: int) -> None:
    """Note which process an open lock is to name."""
    lock.seek(0)
    lock.truncate()
    lock.write(f"{process}\n")
    lock.flush()


def write_error(path: Path, error: OSError) -> RunError:
    """The one error for a failed write, with the usual causes named."""
    hint = {
        errno.ENOSPC: "free some space (what was complete is kept), then run the same command again",
        errno.EACCES: "choose a folder that you may write to",
        errno.EROFS: "choose a folder on a writable file system",
    }.get(error.errno, "")
    return RunError(f"cannot write {path}: {error.strerror or error}", hint)


def to_json(value: Any) -> Any:
    """Plain JSON values of a record (dataclass, pydantic model, path, tuple)."""
    if is_dataclass(value) and not isinstance(value, type):
        return to_json(asdict(value))
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    if isinstance(value, dict):
        return {str(key): to_json(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def write_json(path: Path, value: Any) -> None:
    """Write one JSON document, whole or not at all."""
    with writing(path) as file:
        json.dump(to_json(value), file, indent=2, ensure_ascii=False)
        file.write("\n")


def read_json(path: Path) -> Any:
    """Read a JSON document that a stage wrote.

    Raises:
        UsageError: the file is missing or is not JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"{path} does not exist") from None
    except (ValueError, OSError) as error:
        raise UsageError(f"cannot read {path}: {error}") from None


def file_sha256(path: Path) -> str:
    """Hex SHA-256 of a file's bytes; of a folder, of its files' names and hashes in name order."""
    digest = hashlib.sha256()
    if path.is_dir():
        for child in sorted(p for p in path.rglob("*") if p.is_file()):
            digest.update(f"{child.relative_to(path)}\0{file_sha256(child)}\0".encode())
    else:
        with open(path, "rb") as file:
            while chunk := file.read(1 << 20):
                digest.update(chunk)
    return digest.hexdigest()


class RunFolder:
    """One run directory: `runs/NAME/{config.yaml, prep, regen, train, bench, report}`."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def __str__(self) -> str:
        return str(self.root)

    def __truediv__(self, name: str) -> Path:
        return self.root / name

    @property
    def config_file(self) -> Path:
        return self.root / "config.yaml"

    @property
    def prompts(self) -> Path:
        return self.root / "prep" / "prompts.jsonl"

    @property
    def answers(self) -> Path:
        return self.root / "regen" / "train.jsonl"

    def arm(self, stage: str, arm: str) -> Path:
        """Folder of one arm's files in `train` or `bench`."""
        return self.root / stage / arm

    def checkpoints(
        self, which: Literal["last", "all"] = "last", arms: Iterable[str] | None = None
    ) -> list[CheckpointRef]:
        """Complete checkpoints of the run's arms, by step: of each arm the last, or all that are kept.

        Args:
            arms: folders of the arms in the wanted order; null: all that are there, by name.
        """
        if arms is None:
            arms = sorted(p.name for p in (self.root / "train").glob("*") if p.is_dir())
        steps = [
            [p for p in step_folders(self.arm("train", arm)) if (p / "model.safetensors").exists()] for arm in arms
        ]
        return [checkpoint_ref(path) for found in steps for path in (found if which == "all" else found[-1:])]


@dataclass(frozen=True)
class CheckpointRef:
    """A drafter checkpoint, and the arm of a comparison that it belongs to.

    Attributes:
        path: its folder, in DFlash's format.
        arm: label shared by the seeds of one arm, such as "dpace".
        seed: seed of its training.
        step: optimizer step, or None for a checkpoint from elsewhere.
    """

    path: Path
    arm: str
    seed: int = 0
    step: int | None = None

    @property
    def folder(self) -> str:
        """Name of the arm's folder under `train` and `bench`."""
        return f"{self.arm}-seed{self.seed}"


def checkpoint_ref(path: Path) -> CheckpointRef:
    """Arm, seed and step from a path `.../ARM-seedN/step-S`; elsewhere the folder's name is the arm."""
    step = _STEP.fullmatch(path.name)
    arm = re.fullmatch(r"(.+)-seed(\d+)", path.absolute().parent.name)
    if step and arm:
        return CheckpointRef(path, arm[1], int(arm[2]), int(step[1]))
    return CheckpointRef(path, path.absolute().name)


def find_checkpoints(
    folder: RunFolder, patterns: Sequence[str] | None, which: Literal["last", "all"] = "last"
) -> list[CheckpointRef]:
    """The named checkpoints (folders or glob patterns, by step), else the last, or all, of every arm of the run.

    Raises:
        UsageError: a pattern names no checkpoint, or the run has none.
    """
    if not patterns:
        found = folder.checkpoints(which)
        if not found:
            raise UsageError(f"{folder} has no checkpoint", "`dpace train` makes one, or pass --checkpoint FOLDER")
        return found
    refs: list[CheckpointRef] = []
    for pattern in patterns:
        paths = [path for path in matching(pattern) if (path / "config.json").exists()]
        if not paths:
            raise UsageError(f"--checkpoint {pattern}: no folder with a config.json there")
        refs += sorted(map(checkpoint_ref, paths), key=lambda ref: (ref.folder, ref.step or 0))
    return refs


def matching(pattern: str) -> list[Path]:
    """The paths that a pattern such as `runs/x/train/*/step-*` stands for, sorted."""
    found = glob.glob(str(Path(pattern).expanduser()))  # noqa: PTH207 - Path.glob takes no absolute pattern
    return sorted(map(Path, found))


_STEP = re.compile(r"step-(\d+)")


def step_of(checkpoint: Path) -> int:
    """The optimizer step that a folder `step-S` is named after."""
    return int(_STEP.fullmatch(checkpoint.name)[1])


def step_folders(arm: Path) -> list[Path]:
    """The checkpoint folders of an arm by step; a folder of another name, such as a copy, is none of them."""
    return sorted((path for path in arm.glob("step-*") if _STEP.fullmatch(path.name)), key=step_of)


def newest_run(runs_root: Path) -> RunFolder | None:
    """The run whose config was written last, or None."""
    configs = sorted(runs_root.glob("*/config.yaml"), key=lambda path: path.stat().st_mtime)
    return RunFolder(configs[-1].parent) if configs else None
