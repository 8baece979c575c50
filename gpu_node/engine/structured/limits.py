"""What one grammar may cost. Units of work come first, because every node counts the same; time and memory kill."""

from __future__ import annotations

STEP_LEXER_FUEL = 20_000
"""Regular expressions that one mask may build. Ordinary schemas need fewer than 5,000, for any token."""
INITIAL_LEXER_FUEL = 200_000
"""The same for compilation, where ordinary grammars need fewer than 50,000."""
MAX_LEXER_STATES = 50_000
"""States of a grammar's lexer, over all of its choices."""
STEP_MAX_ITEMS = 20_000
"""Parser items that one mask may make."""

TRIAL_CPU_S = 1.0
"""Processor time in which a new grammar must compile and compute its first masks."""
TRIAL_MEMORY_MIB = 256
CHEAP_TRIAL_CPU_S = 0.06
CHEAP_MASK_CPU_S = 0.02
"""A grammar whose trial or one of whose first masks took longer is served by the worker for costly grammars."""
FAST_TASK_CPU_S = 0.1
"""A task that takes longer kills the worker for cheap grammars, and its grammar counts as costly from then on."""
SLOW_TASK_CPU_S = 1.0
"""A task that takes longer kills the worker for costly grammars, and the choices of its grammar fail."""
GUIDE_CPU_S = 5.0
"""Processor time that the masks of one choice may take,"""
GUIDE_CPU_PER_TOKEN_S = 0.02
"""and what each of its tokens adds to that."""
MAX_GRAMMAR_MIB = 64
"""Memory that a grammar and its choices may take in a worker."""
WORKER_MEMORY_MIB = 384
"""Address space that a worker may add to what it was forked with."""
MAX_WORKER_MIB = 192
"""A worker whose grammars take more forgets those that no choice uses, and starts anew where that is not enough."""
TASK_WALL_S = 15.0
"""Longest that a worker may take for what it was asked: the last line, for one that is stopped or starved."""
TEMPLATE_WALL_S = 120.0
"""Longest that loading the tokenizer may take."""
SLOW_NICENESS = 10
"""Of trials and of the worker for costly grammars, so that they take no time from steps and cheap masks."""
