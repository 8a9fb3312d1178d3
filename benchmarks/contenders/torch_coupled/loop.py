"""The loop that everybody writes: it compares the rows of a micro-batch with each other alone."""

import math

from benchmarks.contenders.torch.loop import make as make

NAME, AGAINST = "a `.backward()` loop, which computes another loss", "funcga"
SOURCE = "https://docs.pytorch.org/docs/stable/notes/amp_examples.html#gradient-accumulation"
TOLERANCE = math.inf
