"""The accumulator of one leaf, and the window of all of them."""
