"""The reference runner in plain torch on the CPU. It runs every model that penstock supports."""
