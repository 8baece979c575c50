"""`penstock config show`: every setting with its value, and the variable or file that set it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer
from pydantic_core import to_jsonable_python

from penstock.cli.command_line import App
from penstock.cli.output import AsJson, JsonArray, write_line
from penstock.contract.errors import ConfigError
from penstock.gateway.settings import GatewaySettings
from penstock.gpu_node.rank import RankSettings
from penstock.gpu_node.settings import NodeSettings
from penstock.producer.batch.settings import CelerySettings
from penstock.producer.client.settings import ClientSettings
from penstock.producer.files.storage import FilesSettings
from penstock.runtime.logging import LogSettings
from penstock.runtime.settings import KeySettings, RedisSettings, Settings, without_password

PARTS: Mapping[str, tuple[type[Settings], ...]] = {
    "shared": (RedisSettings, KeySettings, LogSettings),
    "node": (NodeSettings,),
    "rank": (RankSettings,),
    "gateway": (GatewaySettings,),
    "client": (ClientSettings,),
    "files": (FilesSettings,),
    "worker": (CelerySettings,),
}
"""The settings by the process that reads them. `shared` are those of several, and a gateway reads `client` too."""
DEFAULT = "default"
HIDDEN = "***"
_OF_REDIS = "redis_url"
_REQUIRED = {"model": "unset", _OF_REDIS: "unset", "join": "unset:1", "rank_secret_file": "unset"}
"""What a command line must give, with a stand-in."""

app = App()


@dataclass(frozen=True, slots=True)
class ShownSetting:
    """One setting. `origin` is the variable or file that set it, or DEFAULT."""

    part: str
    variable: str
    value: Any
    origin: str


@app.callback()
def config() -> None:
    """Show the settings of penstock's processes."""


@app.command()
def show(
    parts: Annotated[
        list[str] | None, typer.Argument(metavar="PARTS", help=f"Some of: {', '.join(PARTS)}. Default: all.")
    ] = None,
    changed: Annotated[bool, typer.Option("--changed", help="Only settings without their default.")] = False,
    as_json: AsJson = False,
) -> None:
    """Print each setting with its value, and what set it: a variable, a file, or the default.

    A process that starts in this environment has these values, unless its command line sets others. Secrets are hidden.

    Examples:
        penstock config show
        penstock config show gateway files --changed
    """
    if unknown := [part for part in parts or () if part not in PARTS]:
        raise ConfigError(f"no part {unknown[0]!r}: there are {', '.join(PARTS)}", param="parts")
    found = [one for part in parts or PARTS for one in settings_of(part) if not changed or one.origin != DEFAULT]
    if as_json:
        with JsonArray() as array:
            array.add(*map(asdict, found))
        return
    for part in dict.fromkeys(one.part for one in found):
        write_line(f"{part}:")
        for one in found:
            if one.part == part:
                write_line(f"  {one.variable} = {_text(one.value)}  ({one.origin})")


def settings_of(part: str) -> Iterator[ShownSetting]:
    """Yield the settings of a part. Raises ConfigError for one that is wrong or unknown."""
    for kind in PARTS[part]:
        origins = kind.origins()
        missing = {name: value for name, value in _REQUIRED.items() if name in kind.model_fields}
        values = kind.load(**{name: value for name, value in missing.items() if name not in origins})
        for name in kind.model_fields:
            if name == _OF_REDIS and part != "shared":
                continue  # Every part takes that of `shared`.
            is_unset = name in missing and name not in origins
            value = None if is_unset else _shown(kind, name, getattr(values, name))
            yield ShownSetting(part, kind.variable_of(name), value, origins.get(name, DEFAULT))


def _shown(kind: type[Settings], name: str, value: Any) -> Any:
    if name in kind.secrets and name != _OF_REDIS:
        return HIDDEN if value else None
    shown = to_jsonable_python(value)
    return without_password(shown) if isinstance(shown, str) else shown


def _text(value: Any) -> str:
    if value is None or value == "":
        return "unset"
    return str(value).lower() if isinstance(value, bool) else str(value)
