"""A further rank of the GPU runner, with Triton's interpreter as tests correct it: `python -m … CONFIG`."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from unittest import mock

from penstock.gpu_node.model.loading import rank_host, torch_rank_process


@contextmanager
def mended_ranks() -> Iterator[None]:
    """Start further ranks so."""
    folders = {"PYTHONPATH": os.pathsep.join(sys.path)}
    with mock.patch.object(rank_host, "RANK_MODULE", __name__), mock.patch.dict(os.environ, folders):
        yield


if __name__ == "__main__":
    from fixtures import interpreter

    interpreter.mend()
    torch_rank_process.main()
