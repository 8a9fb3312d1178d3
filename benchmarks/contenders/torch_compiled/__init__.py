"""One process, compiled by torch.compile: the loss, or as much as goes in."""

BASELINE = "loop"
