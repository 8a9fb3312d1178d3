"""`python -m funcga parity`: the same gradients in torch and in JAX, whole and accumulated, compared on real data."""
