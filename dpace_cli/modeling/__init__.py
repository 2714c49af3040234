"""Models: loading, states, drafters, decoding. Transformers' own progress bars are off; dpace shows its own."""

from transformers.utils import logging

logging.disable_progress_bar()
