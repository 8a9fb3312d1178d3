"""What the training scripts share: texts and digits as NumPy arrays, in which order they come, and a command line.

Nothing in here belongs to one framework: options, a progress bar and a picture of the losses.
"""

import argparse
import sys
from itertools import islice

import numpy as np

import funcga

PAD = 255
"""The token that fills a row up: the byte 0xFF, which no UTF-8 text contains."""


def paragraphs(rows=500, longest=64):
    """Short paragraphs of Python's own reference as bytes: int32[rows, longest], padded with PAD at the end."""
    from pydoc_data.topics import topics

    texts = dict.fromkeys(part.strip().encode() for name in sorted(topics) for part in topics[name].split("\n\n"))
    fitting = [text for text in texts if 2 <= len(text) <= longest]
    return np.array([[*text.ljust(longest, bytes([PAD]))] for text in fitting[:rows]], np.int32)


def digits(rows=1437):
    """Handwritten digits to train with and to test: (x, y), (x, y); x: float32[rows, 8, 8], y: int32[rows]."""
    from sklearn.datasets import load_digits

    found = load_digits()
    shuffled = np.random.default_rng(0).permutation(len(found.target))  # those of one writer stand together
    x, y = (found.images[shuffled] / 16).astype(np.float32), found.target[shuffled].astype(np.int32)
    return (x[:rows], y[:rows]), (x[1437:], y[1437:])


def order(examples, *, rows, n, updates):
    """For so many updates: a list of (indices of a micro-batch, whether it is the last of its window).

    Every epoch is shuffled anew and cut into micro-batches of so many rows, n to a window. Its last micro-batch has
    fewer rows and its last window fewer micro-batches, as they do not divide. The list is the same in every run, so
    that who goes on after k micro-batches takes order(...)[k:].
    """
    windows = islice(_windows(examples, rows, n), updates)
    return [(indices, indices is window[-1]) for window in windows for indices in window]


def _windows(examples, rows, n):
    random = np.random.default_rng(0)
    while True:
        shuffled = random.permutation(examples)
        yield from funcga.windows((shuffled[i : i + rows] for i in range(0, examples, rows)), n)


def options(arguments=None, *, updates):
    """The command line's: .updates .checkpoint .resume .stop_after .plot; arguments: a list, in place of sys.argv."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--updates", type=int, default=updates, metavar="N", help=f"{updates} by default")
    parser.add_argument("--checkpoint", metavar="PATH", help="save all every 25 micro-batches, and at the end")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint")
    parser.add_argument("--stop-after", type=int, metavar="N", help="micro-batches, wherever the window is then")
    parser.add_argument("--plot", metavar="PATH", help="save the loss of every update as a picture")
    found = parser.parse_args(arguments)
    if found.checkpoint is None and (found.resume or found.stop_after):
        parser.error("--resume and --stop-after need a --checkpoint PATH")
    return found


def progress(steps, start):
    """The steps from there on, with a progress bar if the output is a terminal."""
    from rich.progress import track

    return track(steps[start:], "training", disable=not sys.stdout.isatty())


def report(curve, picture):
    """Prints the losses of the first and of the last update, and saves all of them as a picture, if it has a path."""
    print(
        f"loss {curve[0]:.3f} at the first update, {curve[-1]:.3f} at update {len(curve)}"
        if len(curve)
        else "no update"
    )
    if picture is not None:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(6, 4), layout="constrained")
        figure.subplots(subplot_kw={"xlabel": "update", "ylabel": "loss"}).plot(range(1, len(curve) + 1), curve)
        figure.savefig(picture)
