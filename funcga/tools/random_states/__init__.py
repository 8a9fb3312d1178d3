"""The states of random generators, for tools that draw the same once more."""
