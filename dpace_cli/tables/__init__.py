"""Which numbers stand together: arms of a comparison, and one function a table."""

from dpace_cli.tables.objectives import objectives_table

__all__ = ["objectives_table"]
