"""One process, eager."""

BASELINE = "loop"
