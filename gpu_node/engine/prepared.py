"""The parts of a request that take long to make. Any thread makes them, so that the engine's thread need not."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.gpu_node.engine.structured.grammar import Grammar
from penstock.gpu_node.engine.text.bad_words import BadWords
from penstock.gpu_node.model.protocol import Adapter


@dataclass(frozen=True, slots=True)
class Prepared:
    """A request's grammar, adapter and bad words. The grammar and the adapter stay loaded while this object lives."""

    grammar: Grammar | None
    adapter: Adapter | None
    bad_words: BadWords

    @property
    def adapter_digest(self) -> str | None:
        """The digest of the adapter's content, if there is one."""
        return None if self.adapter is None else self.adapter.digest
