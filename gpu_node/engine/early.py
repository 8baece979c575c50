"""What is known of a node's model before anything is started or loaded."""

from __future__ import annotations

from penstock.contract.errors import ConfigError
from penstock.gpu_node.engine.config import EngineConfig, chat_template_of


def check_early(config: EngineConfig) -> None:
    """Raise ConfigError for what the arguments, config.json or the header of a file tell about a model."""
    from penstock.gpu_node.model.loading.early import check_model

    try:
        check_model(config.model, config, config.revision)
    except ConfigError:
        raise
    except Exception:
        # A file of unknown origin may raise anything. The node says what, when it loads the model.
        return
    if config.chat_template is not None:
        chat_template_of(config.chat_template)
