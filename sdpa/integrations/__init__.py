"""Other libraries' models with our attention; each module is imported by who uses its library."""

from __future__ import annotations

from importlib.util import find_spec


def told(package: str, error: ModuleNotFoundError) -> ModuleNotFoundError:
    """What to raise where an integration finds no such package; `error` where the package is here, but not whole."""
    if find_spec(package) is not None:
        return error
    return ModuleNotFoundError(f"sdpa.integrations.{package} needs {package}: pip install {package}", name=package)
