"""Taking jobs from the queue into the engine."""
