"""`funcga.verify`: whether accumulation is exact for a loss, and what is wrong where it is not."""
