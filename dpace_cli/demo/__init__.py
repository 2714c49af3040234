"""The small demo target that ships with dpace: a model folder and the prompts it was trained to answer.

The model lets every command be tried within minutes, without a network and without a GPU. It only knows the
three kinds of prompts of :mod:`dpace_cli.demo.prompts`. ``examples/demo-target`` shows how it was trained.
"""

from pathlib import Path


def target_path() -> Path:
    """Return the folder of the packaged demo target, ready for ``from_pretrained``."""
    return Path(__file__).resolve().parent / "target"
