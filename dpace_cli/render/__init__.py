"""How numbers look: terminal, files, plots, page. Everything here is given finished numbers and computes none."""

from dpace_cli.render.results import show_result

__all__ = ["show_result"]
