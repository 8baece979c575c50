"""Code that the torch runner and the GPU runner share: layers, norms, positions, sampling."""
