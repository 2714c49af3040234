"""SpecForge online: SGLang servers capture the target's states as training goes, Mooncake carries them over.

For targets that do not fit beside the trainer, and for many machines. dpace writes the tokenized rows, the
drafter's config and SpecForge's config, has SpecForge resolve the processes, and says how each server is
started. With the servers named and answering, it starts the training; a checkpoint of a training that was
started by hand it turns into DFlash's format just the same.
"""

from __future__ import annotations

import hashlib
import json
import os
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from dpace_cli import console
from dpace_cli.errors import RunError, UsageError
from dpace_cli.modeling.drafter import build_drafter, drafter_config
from dpace_cli.modeling.target import load_target_config, load_tokenizer
from dpace_cli.records import write_json, writing
from dpace_cli.trainers.base import Job, Outcome, Ranks
from dpace_cli.trainers.specforge import order_hash, refuse_scaled, target_name, warn_of_differences
from dpace_cli.trainers.specforge_config import check, flatten, generate, identity, nest, nodes, with_extra
from dpace_cli.trainers.specforge_process import Program, render
from dpace_cli.trainers.specforge_run import Course

PLACEHOLDERS = {
    "server_urls": ["http://capture-host:30000"],
    "mooncake_metadata_server": "http://mooncake-host:35880/metadata",
    "mooncake_master_server_addr": "mooncake-host:35551",
}
"""Stand for addresses that are not known yet, so that the plan can be made."""

HEALTH_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class OnlinePlan:
    """What is to be started for an online training, and with which files.

    Attributes:
        missing: fields of `train.specforge` that must name running servers before dpace starts the training.
        config: SpecForge's config, with placeholders for what is missing.
        single_machine: the same for one machine, where SpecForge starts the servers itself.
        plan: the processes as SpecForge resolved them from the config.
        servers: commands that start Mooncake's master and a capture server.
        start: commands that start the training, where dpace does not.
    """

    missing: list[str]
    config: str
    single_machine: str
    plan: str
    servers: list[str]
    start: list[str]


def train(job: Job, _target: None, _ranks: Ranks) -> Outcome | OnlinePlan:
    """Train with capture servers, or say what to start. The target's weights are not needed here.

    Raises:
        UsageError: SpecForge lacks something that is asked for, is not installed, or refuses the config.
        RunError: a server does not answer, or the training failed.
    """
    online = _Online(job)
    online.write()
    course = online.course
    if not course.done:
        if online.schedule.steps in course.saved():  # a training that was started by hand
            course.read_log(online.schedule.steps)
        elif online.missing or nodes(job.config) > 1:
            return online.plan()
        else:
            online.check_startable()
            course.follow(online.program, online.version, 0)
        course.convert()
        course.finish()
    course.clear()
    return course.outcome()


class _Online:
    """One online training: its files, its plan."""

    def __init__(self, job: Job) -> None:
        self.job, self.train, self.settings = job, job.config.train, job.config.train.specforge
        self.schedule = check(job.config, len(job.rows))
        target = load_target_config(job.config.target).get_text_config()
        if "gemma" in target.model_type:  # its embedding module scales; only the loaded model tells by how much
            raise UsageError("SpecForge has no input_embedding_scale, which this target needs", "use --engine native")
        self.config = drafter_config(target, load_tokenizer(job.config.target), self.train)
        refuse_scaled(self.config)
        self.course = Course(
            job, self.schedule, {"data_order": order_hash(job)},
            drafter=lambda: build_drafter(self.config, self.train.seed), validate=lambda drafter: None,
        )  # fmt: skip
        self.program = Program(self.settings.python, "cuda")
        self.version = self.program.version()
        self.missing = [f"train.specforge.{name}" for name in PLACEHOLDERS if not self._address(name)]
        self.work = self.course.work
        self.control = next(p for n in range(1, 10**6) if not (p := self.work / f"control-{n}").exists())
        self.generated = self._generate()

    def _address(self, name: str) -> Any:
        """An address from the config, or from the variable in which SpecForge looks for it too."""
        variable = {"server_urls": "DISAGG_SERVER_URLS"}.get(name, name.upper())
        given = os.environ.get(variable)
        if given:
            return given.split(",") if name == "server_urls" else given
        return getattr(self.settings, name)

    def _generate(self) -> dict[str, Any]:
        dtype = "bfloat16" if self.train.compute_dtype == "auto" else self.train.compute_dtype
        generated = generate(
            self.job.config, self.schedule, target=target_name(self.job.config), dtype=dtype, on_gpu=True,
            drafter=(self.work / "drafter.json").absolute(), output=self.course.checkpoints.absolute(),
        )  # fmt: skip
        generated["data"]["prompts_path"] = str((self.work / "prompts.jsonl").absolute())
        generated["deployment"] |= {
            "mode": "disaggregated",
            "disaggregated": {
                "control_dir": str(self.control.absolute()),
                "backend": "mooncake",
                **{name: self._address(name) or stand_in for name, stand_in in PLACEHOLDERS.items()},
            },
        }
        # The producer must run ahead of the trainer by a whole optimizer step at least.
        if self.schedule.sequences > 192:
            generated["runtime"] = {
                "in_flight_low_watermark": self.schedule.sequences,
                "in_flight_high_watermark": 2 * self.schedule.sequences,
            }
        return with_extra(self.job.config, generated)

    def write(self) -> None:
        """Write the rows, the drafter's config and SpecForge's config, and have SpecForge check it."""
        self.work.mkdir(parents=True, exist_ok=True)
        with writing(self.work / "prompts.jsonl") as file:
            for row in self.job.rows:
                file.write(json.dumps({"input_ids": row.input_ids, "loss_mask": row.loss_mask}) + "\n")
        write_json(self.work / "drafter.json", self.config.to_dict())
        self.course.begin({
            # Addresses may change between two starts; what is trained may not.
            **{key: value for key, value in identity(self.generated).items() if ".disaggregated." not in key},
            "drafter": hashlib.sha256(self.config.to_json_string().encode()).hexdigest(),
            "training data (sha256)": self.job.data_sha256,
            "rows": len(self.job.rows),
        })  # fmt: skip
        self.course.write_config(self.generated)
        plans = [self.program.plan(self.course.config_file, *options) for options in self._roles()]
        write_json(self.work / "plan.json", plans[0] if len(plans) == 1 else plans)

    def _roles(self) -> list[list[str]]:
        """Options of each `specforge train` that is to be started."""
        machines = nodes(self.job.config)
        if machines == 1:
            return [[]]
        return [["--role", "producer"],
                *(["--role", "consumer", "--node-rank", str(rank)] for rank in range(machines))]  # fmt: skip

    def check_startable(self) -> None:
        """Is nothing begun, and do the servers answer?

        Raises:
            UsageError: an earlier online training was interrupted.
            RunError: a server does not answer.
        """
        saved = self.course.saved()
        if saved:
            raise UsageError(
                f"an online training stopped at step {max(saved)}; SpecForge resumes its trainer alone, by hand",
                f"specforge train --role consumer, training.resume_from={saved[max(saved)]}; --restart begins anew",
            )
        for url in self._address("server_urls"):
            try:
                with urllib.request.urlopen(f"{url.rstrip('/')}/health", timeout=HEALTH_TIMEOUT_S):
                    pass
            except (urllib.error.URLError, OSError, ValueError) as error:
                raise RunError(
                    f"capture server {url} does not answer: {getattr(error, 'reason', error)}",
                    f"{self.work / 'plan.json'} has the processes; without train.specforge.server_urls, "
                    "`dpace train` shows how to start a server",
                ) from None
        warn_of_differences(self.version, self.train)

    def plan(self) -> OnlinePlan:
        """Say what to start."""
        single = self._single_machine()
        services = self.program.plan(single)["services"]
        log = self.course.log.path  # from which the metrics are read afterwards
        result = OnlinePlan(
            missing=self.missing,
            config=str(self.course.config_file),
            single_machine=str(single),
            plan=str(self.work / "plan.json"),
            servers=[self._command(service["command"]) for service in services],
            start=[
                f"{render(self.program.command(self.course.config_file, *options))} 2>&1 | tee -a {log}"
                for options in self._roles()
            ],
        )
        console.note("Start Mooncake and at least one capture server (on other machines: with their own addresses):")
        for command in result.servers:
            console.note(f"  {command}")
        if self.missing:
            console.note(f"then set {', '.join(self.missing)} and run this command again,")
        else:
            console.note("then start the training on each machine:")
            for command in result.start:
                console.note(f"  {command}")
        console.note(f"or, on one machine with {self.train.nproc + 1} GPUs or more, all of it at once:")
        console.note(f"  {render(self.program.command(single))}")
        console.note("When it is done, this command turns its checkpoint into DFlash's format.")
        return result

    def _single_machine(self) -> Path:
        """A config for one machine, of which SpecForge starts the servers too."""
        own = flatten(self.generated)
        for key in list(own):
            if key.startswith(("deployment.disaggregated.", "deployment.trainer.nnodes", "deployment.trainer.master")):
                del own[key]
        local = nest(own)
        gpus = [str(index) for index in range(self.train.nproc + 1)]
        local["deployment"]["disaggregated"] = {
            "control_dir": f"{self.control.absolute()}-local",
            "backend": "mooncake",
            "managed_local": {
                "trainer_cuda_visible_devices": gpus[:-1],
                "capture_servers": [{"port": 30000, "cuda_visible_devices": gpus[-1:]}],
            },
        }
        path = self.work / "single-machine.yaml"
        with writing(path) as file:
            yaml.safe_dump(local, file, sort_keys=False)
        return path

    def _command(self, command: Mapping[str, Any]) -> str:
        """A server's command, with the addresses that are known in place of SpecForge's local ones."""
        environment = dict(command["env"])
        for name in ("mooncake_metadata_server", "mooncake_master_server_addr"):
            if name.upper() in environment and self._address(name):
                environment[name.upper()] = self._address(name)
        environment.pop("DISAGG_SERVER_URLS", None)
        return render(self._public(command["argv"]), environment)

    @staticmethod
    def _public(argv: Sequence[str]) -> list[str]:
        """Listen on every network interface; SpecForge's own servers listen on this machine alone."""
        return [part.replace("127.0.0.1", "0.0.0.0") for part in argv]
