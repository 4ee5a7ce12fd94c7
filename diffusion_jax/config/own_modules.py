"""Decide which modules a config may name: those of this project, and those that a user names.

Importing a module runs its code, and a config may come from a stranger, such as config.json in a
downloaded model: python -m puts the current folder first on the path, so a name there can mean any
file. So a name in a file imports only modules of this project, modules that a flag (--config or
--trust) names too, and modules that the program has already imported.
"""

import importlib
import pathlib
import sys
from collections.abc import Mapping
from types import ModuleType
from typing import Any

_ROOT = pathlib.Path(__file__).parents[2]
_PACKAGES = ("diffusion_jax", "imagen_jax", "sd_jax")
_trusted: set[str] = set()


def find(field: str, name: str, module: str) -> ModuleType:
    """Import and return `module`, which the value `name` of a config field names.

    Raises:
        ValueError: It is neither of this project, nor imported already, nor trusted.
        ModuleNotFoundError: There is no such module.
    """
    if module not in _trusted and sys.modules.get(module) is None and not _is_of_project(module):
        raise ValueError(
            f"{field} is {name!r}, which is no part of this project: if you trust the module "
            f"{module}, add --trust={module} to the command (in Python, import it first)"
        )
    return importlib.import_module(module)


def trust(*modules: str) -> None:
    """Allow configs to name these modules."""
    _trusted.update(modules)


def trust_config(config: Mapping[str, Any]) -> None:
    """Allow configs to name the modules that `config`, which a user wrote, names."""
    trust(f"{str(config.get('system')).partition('.')[0]}.settings")
    if isinstance(data := config.get("data"), Mapping):
        trust_data(data)


def trust_data(data: Mapping[str, Any]) -> None:
    """Allow configs to name the sources that a user's `data` group names."""
    mixture = data.get("mixture")
    parts = mixture if isinstance(mixture, list | tuple) else ()
    names = [part[1] for part in parts if isinstance(part, list | tuple) and len(part) > 1]
    trust(*map(str, (data.get("source"), *names)))


def _is_of_project(module: str) -> bool:
    """Return whether a module is a file of this project, in folders that are regular packages."""
    package, *parts = module.split(".")
    if package not in _PACKAGES or not all(part.isidentifier() for part in parts):
        return False
    path = _ROOT.joinpath(package, *parts)
    folders = [parent for parent in path.parents if parent.is_relative_to(_ROOT / package)]
    regular = all((folder / "__init__.py").is_file() for folder in folders)
    return regular and (path.with_suffix(".py").is_file() or (path / "__init__.py").is_file())
