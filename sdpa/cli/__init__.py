"""The command `sdpa`: info, explain, check, bench, tune. click and rich are imported here and nowhere else."""

from __future__ import annotations

import sys
import warnings

NEEDED = ("click", "rich")


def main() -> None:
    """Entry point; where its packages are missing, one sentence instead of a traceback."""
    try:
        from sdpa.cli.app import app, show_warning
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in NEEDED:
            raise
        sys.exit("The command sdpa needs click and rich: pip install click rich")
    warnings.showwarning = show_warning
    app(prog_name="sdpa")
