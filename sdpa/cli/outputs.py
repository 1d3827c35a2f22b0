"""Files that a command is to write, refused before anything is measured."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import click


def require_picture(path: Path) -> None:
    """Raises UsageError where matplotlib writes no picture of a file's ending."""
    from matplotlib.backend_bases import FigureCanvasBase

    kinds = sorted(FigureCanvasBase.get_supported_filetypes())
    if path.suffix.lstrip(".").lower() not in kinds:
        raise click.UsageError(f"expected a picture that ends in one of {', '.join(kinds)}, got {str(path)!r}")


def require_output(path: Path, replaced: bool = False) -> None:
    """Raises UsageError where no file can be written, and leaves nothing there. A file that is replaced is written
    beside itself first, under a longer name."""
    try:
        if not path.parent.is_dir():
            raise click.UsageError(f"expected a file in a folder that exists, got {str(path)!r}")
        if replaced and path.exists() and not path.is_file():
            raise click.UsageError(f"expected a file, got {str(path)!r}")
        if path.is_file():
            path.open("ab").close()
        elif not path.exists():
            path.open("xb").close()
            path.unlink()
        elif not os.access(path, os.W_OK):  # a pipe's reader would take an open and a close for its end
            raise click.UsageError(f"cannot write {str(path)!r}")
        if replaced:
            tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.").close()
    except OSError as error:
        raise click.UsageError(f"cannot write {str(path)!r}: {error.strerror}") from None
