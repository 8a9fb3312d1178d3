"""Random numbers that belong to an example, and not to the micro-batch that it happens to be in."""
