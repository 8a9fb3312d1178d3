"""The comparison of two trees: how far their leaves are apart, how far they may be, and the report of it."""
