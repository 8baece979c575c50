"""The texts that a model expects before those that it embeds, such as "query: "."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock.contract.errors import RequestError
from penstock.contract.tasks import Embed


@dataclass(frozen=True, slots=True)
class EmbeddingPrompts:
    """A model's prompts, by name."""

    texts: Mapping[str, str] = field(default_factory=dict)
    default: str | None = None
    """The name of the prompt of requests that name none."""

    def before(self, task: Embed) -> str:
        """Return what stands before a task's texts: the caller's prompt, that of what they are for, or the default.

        Raises RequestError for a name that the model does not have.
        """
        if task.prompt_name is not None and task.prompt_name not in self.texts:
            names = ", ".join(self.texts) or "none"
            message = f"prompt_name is {task.prompt_name!r}, but this model's prompts are: {names}"
            raise RequestError(message, param="prompt_name")
        name = task.prompt_name or next((one for one in task.prompt_names if one in self.texts), self.default)
        return "" if name is None else self.texts[name]


NO_PROMPTS = EmbeddingPrompts()
