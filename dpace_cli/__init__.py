"""dpace: train and measure DFlash drafters with the D-PACE loss."""

__version__ = "0.1.0"
