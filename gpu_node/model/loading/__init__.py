"""From the name of a model to a runner that is ready for steps. It imports the other packages; none imports it."""
