"""Random flows, and the ends of their rows by a model that knows only what the rows say."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from penstock.producer.flows.progress import End

Rows = dict[str, dict[str, Any]]
"""`custom_id` → fields of the row, and `fails`: whether it fails when it runs; `made`: how many rows it makes."""


@st.composite
def flows(draw: st.DrawFn, max_rows: int = 12, max_made: int = 3) -> Rows:
    """Draw the rows of a flow. A maker's list comes from a row that is no maker."""
    rows: Rows = {}
    sizes = dict[str, int]()
    for number in range(draw(st.integers(1, max_rows))):
        names, fields = [*rows], dict[str, Any]()
        after = draw(st.lists(st.sampled_from(names), max_size=4, unique=True)) if names else []
        plain = [name for name in after if "made" not in rows[name]]
        if plain and draw(st.integers(0, 3)) == 0:
            source = draw(st.sampled_from(plain))
            size = sizes.setdefault(source, draw(st.integers(0, max_made)))
            fields |= {"for_each": f"{source}.json", "made": size}
        fields |= {"after": after, "on_failure": draw(st.sampled_from(["fail", "skip", "continue"]))}
        rows[f"r{number}"] = {**fields, "fails": draw(st.integers(0, 4)) == 0}
    return rows


def ends_of(rows: Rows) -> dict[str, End]:
    """Return how each row ends, those included that others make. Of a maker, also its rows tell how it ended."""
    ends, whole = dict[str, End](), dict[str, End]()
    for name, row in rows.items():
        parents = {whole[parent] for parent in row["after"]}
        if row["on_failure"] != "continue" and "failed" in parents:
            ends[name] = "failed" if row["on_failure"] == "fail" else "skipped"
        elif row["on_failure"] != "continue" and "skipped" in parents:
            ends[name] = "skipped"
        elif "made" in row:
            # Its list is gone with its parent.
            source = row["for_each"].removesuffix(".json")
            ends[name] = "succeeded"
            for index in range(row["made"] if whole[source] == "succeeded" else 0):
                ends[f"{name}[{index}]"] = "failed" if row["fails"] else "succeeded"
        else:
            ends[name] = "failed" if row["fails"] else "succeeded"
        own = [end for one, end in ends.items() if one == name or one.startswith(f"{name}[")]
        whole[name] = next((end for end in own if end != "succeeded"), "succeeded")
    return ends
