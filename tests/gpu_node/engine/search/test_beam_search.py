"""The algorithm of beam search: its order at equal scores, complete texts, length penalties, and its end."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from penstock.gpu_node.engine.search.searches import BeamSearch, Candidates, Continuation

END = 0


def run(search: BeamSearch, logprob: dict[tuple[int, ...], list[float]]) -> int:
    """Run a search over a table of log-probabilities by text. Return the number of steps."""
    for step in itertools.count(1):
        candidates = []
        for beam in search.beams:
            ordered = sorted(enumerate(logprob[beam]), key=lambda one: (-one[1], one[0]))[: search.num_candidates]
            candidates.append(Candidates([one for one, _ in ordered], [value for _, value in ordered]))
        if not search.advance(candidates):
            return step
    raise AssertionError


def random_tree(rng: random.Random, vocab: int, depth: int) -> dict[tuple[int, ...], list[float]]:
    table = {}
    for length in range(depth):
        for text in itertools.product(range(1, vocab), repeat=length):
            weights = [rng.random() + 0.05 for _ in range(vocab)]
            table[text] = [math.log(weight / sum(weights)) for weight in weights]
    return table


@pytest.mark.parametrize("length_penalty", [0.0, 1.0, 2.0])
def test_a_beam_as_wide_as_the_tree_finds_the_best_texts(length_penalty: float) -> None:
    rng = random.Random(1)
    for _ in range(5):
        table = random_tree(rng, 4, 4)
        scores = {}
        for length in range(1, 5):
            for text in itertools.product(range(1, 4), repeat=length - 1):
                total = sum(table[text[:at]][text[at]] for at in range(length - 1))
                for last in range(4) if length == 4 else (END,):
                    scores[*text, last] = (total + table[text][last]) / length**length_penalty
        search = BeamSearch(256, frozenset((END,)), 4, length_penalty=length_penalty, early_stopping="never")
        run(search, table)
        best = sorted(scores, key=lambda text: -scores[text])
        assert [one.token_ids for one in search.complete] == best
        assert [one.score for one in search.complete] == pytest.approx([scores[text] for text in best])


def test_of_equal_scores_the_better_beam_and_the_lower_token_come_first() -> None:
    search = BeamSearch(3, frozenset(), 2)
    assert search.advance([Candidates([7, 5, 6], [-1.0, -1.0, -1.0])]) == [
        Continuation(0, 5),
        Continuation(0, 6),
        Continuation(0, 7),
    ]
    same = Candidates([9, 8], [-1.0, -1.0])
    assert search.advance([same, same, same]) == []
    assert [one.token_ids for one in search.complete] == [(5, 8), (5, 9), (6, 8)]


def test_a_text_that_ends_counts_only_among_the_best() -> None:
    """Token 0 is the third best continuation of two beams' four, so the text that it ends is not kept."""
    search = BeamSearch(2, frozenset((END,)), 9)
    search.advance([Candidates([1, 2, END], [-1.0, -1.1, -3.0])])
    assert search.complete == []
    search.advance([Candidates([END, 1, 2], [-0.1, -2.0, -3.0]), Candidates([1, 2, END], [-0.2, -0.3, -0.5])])
    assert [one.token_ids for one in search.complete] == [(1, END)]
    assert search.beams == [(2, 1), (2, 2)]


@pytest.mark.parametrize(("early_stopping", "num_steps"), [(True, 2), (False, 3), ("never", 6)])
def test_the_end_of_a_search(early_stopping: bool | str, num_steps: int) -> None:
    """The open beams are unlikely in the third step and likely after that: only `never` waits for them."""
    by_length = {0: (0.5, 0.4, 0.1), 1: (0.3, 0.5, 0.2), 2: (0.005, 0.2, 0.1)}
    table = {
        text: [math.log(one) for one in by_length.get(length, (0.005, 0.99, 0.005))]
        for length in range(6)
        for text in itertools.product((1, 2), repeat=length)
    }
    search = BeamSearch(2, frozenset((END,)), 6, early_stopping=early_stopping)  # type: ignore[arg-type]
    assert run(search, table) == num_steps
