"""Random numbers of each example, whatever the micro-batch that it is in."""
