"""The base of bodies that say how their jobs are queued."""

from __future__ import annotations

from typing import ClassVar, Self, cast

from pydantic import model_validator
from pydantic_core import PydanticCustomError

from penstock.contract.job import RETURN_PROGRESS, QueueFields, QueueOptions
from penstock.contract.named import WRONG_MEMBER
from penstock.contract.priority import ClassName
from penstock.contract.sampling import Endpoint
from penstock.producer.openai.fields import Wire, given_options


class QueuedBody(Wire):
    """A body with a priority class. `with_option_fields` adds those of `QueueFields` that its endpoint has."""

    endpoint: ClassVar[Endpoint]
    progress_needs: ClassVar[tuple[str, ...]] = ()
    """Of these fields one must be true if progress is asked for."""

    priority: ClassName | None = None

    @model_validator(mode="after")
    def _has_a_reader_of_progress(self) -> Self:
        needed = self.progress_needs
        if getattr(self, RETURN_PROGRESS, None) and needed and not any(getattr(self, name) for name in needed):
            message = f"allowed only when {' or '.join(needed)} is true"
            raise PydanticCustomError("unsupported_value", message, {WRONG_MEMBER: RETURN_PROGRESS})
        return self

    @property
    def asked_class(self) -> ClassName | None:
        """The class that the body asks for."""
        return self.priority

    def queueing(self) -> QueueOptions:
        """Return how to queue the jobs, as far as the body says it."""
        return cast(QueueOptions, given_options(self, QueueFields, self.endpoint))
