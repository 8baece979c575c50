"""`ops/` is no package of ours: `make bench` puts it on the path, and so do these tests."""

from __future__ import annotations

import sys

from tests.source_tree import ROOT

sys.path.append(str(ROOT / "ops"))
