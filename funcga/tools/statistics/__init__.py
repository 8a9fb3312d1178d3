"""Statistics of BatchNorm layers, pooled over a window: `pure_loss(..., statistics=True)`."""
