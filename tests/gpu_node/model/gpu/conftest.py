"""The card's runner, on a card where there is one, else on the CPU by Triton's interpreter."""

from __future__ import annotations

import torch
from fakes import interpreter

if not torch.cuda.is_available():
    interpreter.mend()
