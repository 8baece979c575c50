"""Prompts of a wanted number of tokens, without a tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

HASH_BLOCK_TOKENS = 512
"""Tokens of a prompt that one of a trace's `hash_ids` stands for, as in Mooncake's traces."""
_FREQUENT_WORDS = """
time people way day man thing woman life child world school state family student group country problem hand part
place case week company system program question work number night point home water room mother area money story
fact month lot right study book eye job word business issue side kind head house service friend father power hour
game line end member law car city community name president team minute idea body information back parent face
level office door health person art war history party result change morning reason research girl moment air
teacher force education foot boy age policy music market sense nation plan college interest death course
experience effect
"""
"""Words of which each is one token in most vocabularies, together with the space before it."""
_WORDS = tuple(_FREQUENT_WORDS.split())


@dataclass(frozen=True, slots=True)
class TokenRatio:
    """How a prompt of these words becomes tokens: a server's chat template adds `overhead`."""

    tokens_per_word: float = 1.0
    overhead: float = 0.0

    @classmethod
    def measured(cls, few: tuple[int, int], many: tuple[int, int]) -> TokenRatio:
        """Return the ratio that two prompts show; each is (words, tokens by the server's usage)."""
        (few_words, few_tokens), (many_words, many_tokens) = few, many
        slope = (many_tokens - few_tokens) / (many_words - few_words)
        # A server that cuts prompts, or counts them otherwise, shows no usable slope.
        if slope <= 0:
            return cls()
        return cls(slope, few_tokens - slope * few_words)

    def num_words(self, num_tokens: int) -> int:
        """Return how many words make a prompt of about that many tokens, at least one."""
        return max(1, round((num_tokens - self.overhead) / self.tokens_per_word))


def words(random: Random, num_words: int) -> str:
    """Return that many random words."""
    return " ".join(random.choices(_WORDS, k=num_words))


def hashed_words(hash_ids: Sequence[int], num_words: int, words_per_block: int) -> str:
    """Return a prompt whose blocks depend on a trace's hash ids alone, so that equal prefixes are equal texts."""
    blocks = (words(Random(block), words_per_block) for block in hash_ids[: -(-num_words // words_per_block)])
    found = " ".join(blocks).split(" ")[:num_words]
    missing = num_words - len(found)
    return " ".join([*found, words(Random(hash_ids[-1] + 1), missing)] if missing else found)


def random_lengths(mean: int, range_ratio: float, num_lengths: int, random: Random) -> list[int]:
    """Return lengths with a uniform distribution from mean × (1 - ratio) to mean × (1 + ratio), at least 1."""
    low, high = max(1, round(mean * (1 - range_ratio))), max(1, round(mean * (1 + range_ratio)))
    return [random.randint(low, high) for _ in range(num_lengths)]
