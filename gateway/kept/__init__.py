"""Answers that outlive their gateway: what a slot of shared memory holds of each, and its way to the successor."""
