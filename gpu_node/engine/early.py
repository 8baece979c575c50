"""What is known of a node's model before anything is started or loaded."""

from __future__ import annotations

from penstock.contract.errors import ConfigError
from penstock.gpu_node.engine.config import EngineConfig, chat_template_of


def check_early(config: EngineConfig, tool_parser: str | None) -> None:
    """Raise ConfigError for what the arguments, config.json or the header of a file tell about a model."""
    from penstock.gpu_node.model.loading.early import check_model

    try:
        templates = check_model(config.model, config, config.revision)
    except ConfigError:
        raise
    except Exception:
        # A file of unknown origin may raise anything. The node says what, when it loads the model.
        return
    if config.chat_template is not None:
        templates = chat_template_of(config.chat_template)
    if templates is not None and "tools" not in templates:
        require_tools(tool_parser, takes_tools=False)


def require_tools(tool_parser: str | None, *, takes_tools: bool) -> None:
    """Raise ConfigError if a parser of calls is given for a chat template that offers the model no tools."""
    if tool_parser not in (None, "none") and not takes_tools:
        message = (
            f"tool_parser: {tool_parser} reads a model's calls, but this model's chat template takes no tools; leave "
            "the option out, or also give a template that takes them: --chat-template FILE"
        )
        raise ConfigError(message, param="tool_parser")
