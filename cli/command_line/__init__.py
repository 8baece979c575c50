"""What all commands have in common: their base classes, help pages, one-line errors, and loading on first use."""
