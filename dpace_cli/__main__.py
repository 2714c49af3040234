"""Entry point of ``python -m dpace_cli`` and ``torchrun -m dpace_cli train ...``."""

from dpace_cli.cli import main

if __name__ == "__main__":
    main()
