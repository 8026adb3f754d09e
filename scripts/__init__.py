"""Command lines: each parses its flags and hands the work to `training`. Run: `python scripts/NAME.py`."""
