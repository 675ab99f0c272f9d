"""Says which extra of the package brings what is not installed. No torch."""

from importlib.util import find_spec

from trainer.errors import InputError
from trainer.sysinfo.own_table import own_table

EXTRAS: dict[str, list[str]] = own_table(__file__, "extras.toml")
"""Modules by the extra of pyproject.toml that brings them; `pip install clipship` alone brings none."""


def missing_extra(module: str) -> str:
    """Returns how to install what a command could not import, "" if no extra brings it.

    `module` is the full name in a ModuleNotFoundError.
    """
    package = module.partition(".")[0]
    for extra, modules in EXTRAS.items():
        if package in modules:
            return (
                f"the Python package {package} is not installed: this command needs more than those of a "
                f"login node; python -m pip install 'clipship[{extra}]' brings it"
            )
    return ""


def require(module: str) -> None:
    """Raises InputError, which says what to install, if the module is not installed."""
    if find_spec(module) is None:
        raise InputError(missing_extra(module) or f"the Python module {module} is not installed")
