"""docs/SIZES.md has the limits that the code has."""

from __future__ import annotations

import re

from docs_site import sizes

from penstock.contract.priority import NUM_LEVELS, NUM_PRIORITIES
from tests.source_tree import ROOT


def test_the_page_of_sizes_is_what_make_fields_writes() -> None:
    page = sizes.PAGE.read_text()
    assert page.partition(sizes.BEGIN)[2].partition(sizes.END)[0].strip() == sizes.tables().strip()


def test_a_limit_is_shown_in_the_unit_that_its_name_ends_with() -> None:
    tables = sizes.tables()
    assert re.search(r"\| 8 MiB \| [^|]+ \| `gateway/settings.py:max_body_bytes` \|\n", tables)
    assert "| 24 h | `src/penstock/queue/scripts/submit.lua:MAX_AGE_MS` |" in tables


def test_there_are_as_many_classes_and_levels_in_lua() -> None:
    prelude = (ROOT / "src/penstock/queue/scripts/shared/prelude.lua").read_text()
    assert sizes.value_in_lua(prelude, "CLASSES") == NUM_PRIORITIES
    assert sizes.value_in_lua(prelude, "LEVELS") == NUM_LEVELS
