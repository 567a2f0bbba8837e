"""Versions are checked at import, so that what does not fit together says so there."""

from __future__ import annotations

import importlib
import re


OLDEST = {"torch": (2, 6), "jax": (0, 10), "transformers": (5, 15)}  # as the extras of pyproject.toml say


def require(front: str, framework: str) -> None:
    """Raises ImportError unless `framework` is there, in a version from OLDEST on; `front` is who asks."""
    oldest = OLDEST[framework]
    expected = f"{front}: expected {framework} {oldest[0]}.{oldest[1]} or newer"
    try:
        found = str(importlib.import_module(framework).__version__)
    except ImportError as error:
        raise ImportError(f"{expected}, found none: pip install 'headrace[{framework}]'") from error
    numbers = re.match(r"(\d+)\.(\d+)", found)
    if numbers is None or (int(numbers[1]), int(numbers[2])) < oldest:
        raise ImportError(f"{expected}, got {found}")


def require_core(package: str, core: str) -> None:
    """Raises ImportError where the compiled module is left from another version of the package."""
    if core != package:
        raise ImportError(f"headrace._core: expected version {package} as that of the package, got {core}: "
                          "pip install --force-reinstall headrace")
