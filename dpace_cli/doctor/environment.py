"""The machine and what is installed on it: versions, devices, memory, disk, folders."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import torch

from dpace_cli.checks import Check, error, ok, warning
from dpace_cli.config import Config
from dpace_cli.doctor.setup import NotChecked, Setup
from dpace_cli.errors import UsageError
from dpace_cli.estimate import Estimate
from dpace_cli.modeling.target import resolve_device, resolve_dtype

SPECFORGE_VERSION = "0.2.0"
"""The one that dpace's trainer and its docs are about."""

_PYTHONS = ((3, 11), (3, 13))
_ROOM = 0.9


def versions(setup: Setup) -> Iterator[Check]:
    """Packages that are known not to work together."""
    name = "versions"
    found = {package: _version(package) for package in ("torch", "transformers", "dflash", "specforge", "sglang")}
    python = sys.version_info[:2]
    if not _PYTHONS[0] <= python <= _PYTHONS[1]:
        yield warning(name, f"Python {platform.python_version()}; dpace is tested on 3.11 to 3.13")
    bad = False
    for package, wanted in _pins("dflash", "local").items():
        if (found.get(package) or wanted).split("+")[0] != wanted:
            bad = True
            both = f"{package} {found[package]}, and dflash {found['dflash']} is made for {wanted}"
            yield warning(name, both, "install dpace-cli into an environment of its own: pip install dpace-cli")
    if not _can_rewind():
        bad = True
        lacking = f"transformers {found['transformers']} lacks DynamicCache.activate_past_recording"
        yield error(name, f"{lacking}, which dflash_generate calls", "pip install transformers==5.15.0")
    if found["sglang"] is not None:
        bad = True
        pinned = ", ".join(f"{k} {v}" for k, v in _pins("sglang").items() if k in ("torch", "transformers"))
        both = f"sglang {found['sglang']} is in this environment; it is made for {pinned}"
        yield warning(name, both, "serve from an environment of its own; dpace needs the server's address alone")
    if not bad:
        have = ("torch", "transformers", "dflash", "specforge")
        said = [f"{package} {found[package]}" for package in have if found[package]]
        yield ok(name, f"Python {platform.python_version()}, {', '.join(said)}")
    yield from _specforge(setup.config, found["specforge"])


def _specforge(config: Config, here: str | None) -> Iterator[Check]:
    if config.train.engine != "specforge":
        return
    name, python = "specforge", config.train.specforge.python
    install = f"pip install --no-deps specforge=={SPECFORGE_VERSION}"
    if python is not None:
        here = _version_in(Path(python).expanduser())
    where = f" for {python}" if python else ""
    if here is None:
        hint = f"{install}, or name its interpreter in train.specforge.python"
        yield error(name, f"train.engine is specforge, and SpecForge is not installed{where}", hint)
    elif here != SPECFORGE_VERSION:
        yield warning(
            name, f"SpecForge {here}{where}; dpace writes config and features for {SPECFORGE_VERSION}", install
        )
    else:
        yield ok(name, f"SpecForge {here}{where}")


def _version_in(python: Path) -> str | None:
    """SpecForge's version for another interpreter.

    Raises:
        UsageError: the interpreter cannot be run.
    """
    ask = "from importlib import metadata as m\ntry: print(m.version('specforge'))\nexcept m.PackageNotFoundError: pass"
    try:
        said = subprocess.run([python, "-c", ask], capture_output=True, text=True, timeout=30, check=True).stdout
    except (OSError, subprocess.SubprocessError) as reason:
        raise UsageError(
            f"train.specforge.python {python} cannot be run: {reason}", "name the interpreter where it is"
        ) from None
    return said.strip() or None


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _pins(package: str, extra: str | None = None) -> dict[str, str]:
    """Exact versions that an installed package asks for."""
    try:
        wanted = metadata.requires(package) or []
    except metadata.PackageNotFoundError:
        return {}
    pins = {}
    for line in wanted:
        requirement, _, marker = line.partition(";")
        named = re.search(r"""extra\s*==\s*["']([\w-]+)["']""", marker)
        if (named[1] if named else None) != extra:
            continue
        if match := re.match(r"\s*([A-Za-z0-9_.-]+)\s*==\s*([0-9][\w.]*)\s*$", requirement):
            pins[match[1].lower()] = match[2]
    return pins


def _can_rewind() -> bool:
    from transformers import DynamicCache

    return hasattr(DynamicCache, "activate_past_recording")


# --- devices ---------------------------------------------------------------------------------------------


def devices(setup: Setup) -> Iterator[Check]:
    """The device that the config asks for, and as many of it as it has processes."""
    name, config = "device", setup.config
    device = resolve_device(config.target.device)
    dtype = str(resolve_dtype(config.target.dtype, device)).removeprefix("torch.")
    if device.type == "cpu":
        if torch.cuda.is_available():
            yield warning(name, "target.device is cpu, and this machine has a GPU", "leave target.device=auto")
        if dtype == "float16" or (dtype == "bfloat16" and not _cpu_has_bfloat16()):
            yield warning(
                name, f"target.dtype is {dtype}, which this processor computes slowly", "use target.dtype=auto"
            )
        cores = os.cpu_count() or 1
        if config.train.nproc > cores:
            yield warning(
                name, f"train.nproc is {config.train.nproc}, and there are {cores} cores", "lower train.nproc"
            )
        yield ok(name, f"cpu, {torch.get_num_threads()} threads of {cores} cores, {dtype}")
        return
    if device.type == "cuda":
        count = torch.cuda.device_count()
        if config.train.nproc > count:
            yield error(name, f"train.nproc is {config.train.nproc}, and there are {count} GPUs",
                        f"set train.nproc to at most {count}")  # fmt: skip
        if dtype == "bfloat16" and not torch.cuda.is_bf16_supported(including_emulation=False):
            yield warning(name, f"{torch.cuda.get_device_name(device)} has no bfloat16", "set target.dtype=float16")
        yield ok(name, f"{count} x {torch.cuda.get_device_name(device)}, {dtype}")
        return
    yield ok(name, f"{device.type}, {dtype}")


def _cpu_has_bfloat16() -> bool:
    try:
        return "bf16" in Path("/proc/cpuinfo").read_text()  # avx512_bf16, amx_bf16, bf16
    except OSError:
        return platform.machine() == "arm64"


# --- memory and disk -------------------------------------------------------------------------------------


def memory(setup: Setup, need: Estimate | None) -> Iterator[Check]:
    """Does a training fit into the memory of its device?"""
    name = "memory"
    if need is None:
        raise NotChecked("the target's shapes are not known")
    device = resolve_device(setup.config.target.device)
    free, total = device_memory(device)
    processes = setup.config.train.nproc if device.type != "cuda" else 1
    wanted = need.memory_bytes * processes
    largest = sorted(need.memory, key=need.memory.__getitem__, reverse=True)[:2]
    said = f"a training takes about {size(wanted)} ({', '.join(f'{k} {size(need.memory[k])}' for k in largest)}, ...)"
    less = "lower train.batch_size, train.num_anchors or train.max_length (`dpace doctor --estimate` shows the parts)"
    if need.memory.get("cached states", 0) > 0.3 * need.memory_bytes:
        less = "set train.cache=disk"
    if wanted > total:
        yield error(name, f"{said}; this machine has {size(total)}", less)
    elif wanted > _ROOM * free:
        yield warning(name, f"{said}; {size(free)} of {size(total)} are free now", less)
    else:
        yield ok(name, f"{said}; {size(free)} are free")
    train = setup.config.train
    if train.cache != "none" and need.rows.count:
        states = need.rows.count * need.rows.tokens * need.state_bytes_per_token
        if states > train.cache_limit_gb * 2**30:
            over = f"the target's states take {size(states)}; train.cache_limit_gb is {train.cache_limit_gb:g}"
            yield error("cache", over, "raise it, shorten train.max_length, or set train.cache=none")
        else:
            yield ok("cache", f"{size(states)} of hidden states, train.cache={train.cache}")


def device_memory(device: torch.device) -> tuple[int, int]:
    """Free and total bytes of a device; on a CPU within the limits of its control group."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)
    page = os.sysconf("SC_PAGE_SIZE")
    total = free = page * os.sysconf("SC_PHYS_PAGES")
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free = next(int(line.split()[1]) << 10 for line in lines if line.startswith("MemAvailable:"))
        group = Path("/sys/fs/cgroup")
        limit = (group / "memory.max").read_text().strip()
        if limit != "max":
            total = min(total, int(limit))
            free = min(free, total - int((group / "memory.current").read_text()))
    except (OSError, ValueError, StopIteration):
        pass
    return free, total


def disk(setup: Setup, need: Estimate | None) -> Iterator[Check]:
    """Is there room for what the run writes?"""
    name = "disk"
    if need is None:
        raise NotChecked("the target's shapes are not known")
    place = nearest_folder(setup.run.root)
    free = shutil.disk_usage(place).free
    known = "" if need.rows.count else " and what the rows take, which are not there yet"
    said = f"the run writes about {size(need.disk_bytes)}{known}; {size(free)} are free at {place}"
    less = "free some space, lower train.keep_last, or set train.cache=none"
    if need.disk_bytes > free:
        yield error(name, said, less)
    elif need.disk_bytes > _ROOM * free:
        yield warning(name, said, less)
    else:
        yield ok(name, said)


def output(setup: Setup) -> Iterator[Check]:
    """Can the run's folders be written?"""
    name = "output"
    given = setup.config.train.output
    for folder in dict.fromkeys([setup.run.root, *([Path(given).expanduser()] if given else [])]):
        place = nearest_folder(folder)
        try:
            with tempfile.TemporaryFile(dir=place):
                pass
        except OSError as reason:
            yield error(name, f"{folder} cannot be written: {place}: {reason.strerror or reason}",
                        "choose a folder that you may write to")  # fmt: skip
        else:
            yield ok(name, f"{folder} can be written")


def nearest_folder(path: Path) -> Path:
    """The path itself or the nearest of its parents that exists."""
    path = path.absolute()
    return next(place for place in (path, *path.parents) if place.exists())


def size(count: float) -> str:
    """Bytes as people write them."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024:
            return f"{count:.0f} {unit}" if count >= 100 or unit == "B" else f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} TiB"
