"""`penstock rank`: compute a part of a model for a node on another host."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from penstock.cli.options import docstrings_of, options_of, taken_for, takes
from penstock.contract.errors import ConfigError
from penstock.gpu_node.rank import RankSettings, run_rank
from penstock.runtime.logging import LogSettings, configure_logging

_OPTIONS = [name for name in RankSettings.model_fields if name != "model"]


@takes(*options_of(RankSettings, _OPTIONS), *options_of(LogSettings))
def rank(
    model: Annotated[str | None, typer.Argument(help=docstrings_of(RankSettings).get("model"))] = None, **given: Any
) -> None:
    """Compute a part of a model that is divided over several hosts, until the command is ended.

    The node is started with --remote-ranks, --rank-address and --rank-secret-file. This command waits for it, and joins
    again whenever the node starts its ranks again. Each option can also be set with PENSTOCK_RANK_<NAME>.

    Examples:
        penstock rank ORG/MODEL --join 10.0.0.1:7700 --rank-secret-file secret
        penstock rank MODEL --join gpu-1:7700 --rank-secret-file key --runner cuda:1
    """
    logs = LogSettings.load(**taken_for(LogSettings, given))
    settings = RankSettings.load(**given | {"model": model})
    configure_logging(logs)
    try:
        run_rank(settings)
    except ModuleNotFoundError as error:
        raise ConfigError(f"{error.name} is not installed: pip install 'penstock-llm[node]'") from error
