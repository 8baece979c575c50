"""The bar over a model's loading."""

from __future__ import annotations

from penstock.cli.progress import LoadingBar


def test_a_bar_takes_events_before_it_shows_and_odd_ones_after() -> None:
    bar = LoadingBar("models/some.gguf")
    bar.update({"event": "progress", "stage": "load", "fraction": 0.1})
    with bar:
        for fraction in (0.2, 1, 7.0, None, "x"):
            bar.update({"event": "progress", "stage": "load", "fraction": fraction})
        bar.update({"event": "progress"})
