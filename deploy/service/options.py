"""Command-line options that are settings: their types, defaults and helps are those of the settings."""

import inspect
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_args

import typer

from .settings import FILE, ModelSettings, Policy, Section, ServerSettings, Settings, read_settings

Command = TypeVar("Command", bound=Callable[..., None])
_SECTIONS: dict[str, type[Section]] = {"server": ServerSettings, "policy": Policy, "model": ModelSettings}
_FLAGS = {"library_folders": "--library-folder"}  # given once for each folder


def takes_settings(**panels: Sequence[str]) -> Callable[[Command], Command]:
    """Give a command options for the settings that are named for each panel of its help.

    The command takes them as `**given`; they are None if they are not given.
    """

    def changed(command: Command) -> Command:
        signature = inspect.signature(command, eval_str=True)
        own = [each for each in signature.parameters.values() if each.kind is not each.VAR_KEYWORD]
        added = [_option(name, panel) for panel, names in panels.items() for name in names]
        command.__signature__ = signature.replace(parameters=[*own, *added])  # type: ignore[attr-defined]
        return command

    return changed


def _option(name: str, panel: str) -> inspect.Parameter:
    [field] = (kind.model_fields[name] for kind in _SECTIONS.values() if name in kind.model_fields)
    kind: Any = field.annotation
    if isinstance(field.default, tuple):  # the option is given several times
        each = get_args(kind)[0]
        kind = list[getattr(each, "__origin__", each)]  # type: ignore[misc]  # without a setting's conditions
    default = "" if field.default in (None, ()) else str(field.default)
    flags = [_FLAGS[name]] if name in _FLAGS else []
    option = typer.Option(
        *flags, help=field.description, rich_help_panel=panel, show_default=default or False
    )
    annotation = Annotated[kind | None, option]
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)


def settings_of(models: Path, config: Path | None, given: dict[str, Any], **fixed: Any) -> Settings:
    """Return the settings of a command: those of twinop.toml, the options, and `fixed` ones.

    Raises:
        SettingsError: a setting is invalid.
    """
    if config is None and os.path.lexists(models / FILE):
        config = models / FILE
    values = {name: value for name, value in given.items() if value is not None} | fixed
    sections = {
        section: {name: value for name, value in values.items() if name in kind.model_fields}
        for section, kind in _SECTIONS.items()
    }
    return read_settings(config, sections)
