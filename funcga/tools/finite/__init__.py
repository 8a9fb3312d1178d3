"""Whether all numbers of a tree are finite, for tools that look at gradients."""
