"""Trees of two frameworks: converted, matched, saved."""
