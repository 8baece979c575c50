"""The reference runner: plain torch on the CPU. It runs every model that penstock supports."""
