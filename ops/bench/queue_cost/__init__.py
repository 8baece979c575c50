"""What the queue and the gateway cost, measured around an engine that is a clock."""
