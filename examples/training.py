"""What the training scripts share: texts and digits as NumPy arrays, in which order they come, and a command line.

Nothing in here belongs to one framework: options, checkpoints, a progress bar and a picture of the losses.
"""

import argparse
import os
import sys
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from zipfile import ZipFile, is_zipfile

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


def options(script, arguments=None, *, updates):
    """The command line's: .updates .checkpoint .resume .stop_after .plot, with .training and .error for checkpoints.

    script: its __file__; arguments: a list, in place of sys.argv. Says what is wrong with them, and exits with 2.
    """
    parser = argparse.ArgumentParser(prog=Path(script).name)
    add = parser.add_argument
    add("--updates", type=_count, default=updates, metavar="N", help=f"updates of the parameters, {updates} by default")
    add("--checkpoint", type=_file, metavar="PATH", help="save all there every 25 micro-batches, and at the end")
    add("--resume", action="store_true", help="go on from the checkpoint, with the same --updates")
    add("--stop-after", type=_count, metavar="N", help="stop after N micro-batches, counted from the very start")
    add("--plot", type=_file, metavar="PATH", help="save the loss of every update as a picture")
    found = parser.parse_args(arguments)
    if found.checkpoint is None and (found.resume or found.stop_after):
        parser.error("--resume and --stop-after need a --checkpoint PATH")
    found.training, found.error = f"{parser.prog} --updates {found.updates}", parser.error
    return found


def _count(text):
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"a whole number from 1 on, not {text}")
    return int(text)


def _file(text):
    if os.path.isdir(text) or not os.path.isdir(os.path.dirname(text) or "."):
        raise argparse.ArgumentTypeError(f"a file in a folder that exists, not {text}")
    return text


@contextmanager
def saving(args):
    """A binary file, which becomes the checkpoint once it is whole: who is stopped before keeps the last one.

    torch.save and numpy.savez both write a zip archive; its comment says whose training it is.
    """
    unfinished = f"{args.checkpoint}.unfinished"
    with open(unfinished, "wb") as file:
        yield file
    with ZipFile(unfinished, "a") as archive:
        archive.comment = args.training.encode()
    os.replace(unfinished, args.checkpoint)


def load(args, read):
    """What read(path) makes of the checkpoint; if it is not one of this training, says so and exits with 2."""
    path = args.checkpoint
    if not os.path.exists(path):
        args.error(f"there is no checkpoint at {path}: leave --resume out")
    saved = _comment(path)
    if not saved:
        args.error(f"{path} is no checkpoint of a training script")
    if saved != args.training:
        args.error(f"{path} is a checkpoint of `{saved}`, and this is `{args.training}`, another training")
    return read(path)


def _comment(path):
    if not is_zipfile(path):
        return ""
    with ZipFile(path) as archive:
        return archive.comment.decode(errors="replace")


def progress(steps, start):
    """The steps from there on, with a progress bar if the output is a terminal; says so if there are none."""
    from rich.progress import track

    if start >= len(steps):
        print(f"nothing is left to do: the checkpoint is at micro-batch {start}, and {len(steps)} was the last to do")
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
