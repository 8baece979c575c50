"""Models of 1B and 3B parameters with random weights: engines, measured ceilings of the machine, table of results."""
