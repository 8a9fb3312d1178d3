"""The command line: `python -m funcga parity`."""

import argparse
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from funcga.errors import FuncgaError

_NEEDED = {
    "torch": "torch",
    "jax": "jax",
    "optax": "optax",
    "numpy": "numpy",
    "sklearn": "scikit-learn",
    "rich": "rich",
}


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code of the command line: 0 within the limits, 1 beyond them, 2 for bad usage or a missing package.

    argv: the arguments after the program's name; default: those of this process. What is found is written to standard
    output, and a refusal, one line, to standard error.
    """
    try:
        options = _parser().parse_args(argv)
        _check_installed()
        return _parity(options)
    except FuncgaError as error:
        sys.stderr.write(f"funcga: {error}\n")
        return 2
    except SystemExit as stop:  # argparse, after --help
        return int(stop.code or 0)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise FuncgaError(f"{message.removeprefix('argument ')} (see {self.prog} --help)")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser("python -m funcga", description="Gradient accumulation as a pure fold, for PyTorch and JAX.")
    commands = parser.add_subparsers(dest="command", metavar="parity", required=True)
    parity = commands.add_parser(
        "parity",
        help="the same gradients in torch and in JAX, whole and accumulated, compared on real data",
        description="Computes the same gradients in torch and in JAX, of the whole batch and accumulated over uneven "
        "micro-batches, and trains with four optimizers; prints how far the two are apart. Exit code: 0 if every "
        "difference is within its limit, 1 if not, 2 for bad usage or a missing package.",
        epilog="Problems: digits, a mean loss on scikit-learn's handwritten digits; text, a summed loss on padded "
        "paragraphs of Python's own help.",
    )
    parity.add_argument("--n", type=_counts, default="7", help="numbers of micro-batches, such as 1,2,7 (default: 7)")
    parity.add_argument(
        "--dtype", type=_dtypes, default="float32,float64", help="float32, float64 or both (default: float32,float64)"
    )
    parity.add_argument("--problem", choices=("digits", "text", "all"), default="all", help="(default: all)")
    parity.add_argument(
        "--updates", type=_updates, default="50", help="of each optimizer in training; 0 for none (default: 50)"
    )
    parity.add_argument("--json", type=_file, metavar="FILE", help="write the figures to FILE as well")
    return parser


def _counts(text: str) -> list[int]:
    counts = [int(part) if part.strip().isdecimal() else 0 for part in text.split(",")]
    if min(counts) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers of micro-batches, each at least 1: --n 1,2,7")
    return list(dict.fromkeys(counts))


def _dtypes(text: str) -> list[str]:
    names = [part.strip() for part in text.split(",")]
    if not {"float32", "float64"}.issuperset(names):
        raise argparse.ArgumentTypeError(f"{text!r} is none of float32, float64, and no list of them")
    return list(dict.fromkeys(names))


def _updates(text: str) -> int:
    if not text.strip().isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is no number of updates: --updates 50, or 0 for no training")
    return int(text)


def _file(text: str) -> Path:
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is no file in a folder that exists")
    return path


def _check_installed() -> None:
    """Raises FuncgaError that names the packages which are missing, and the extra that has them."""
    missing = [package for module, package in _NEEDED.items() if not _is_found(module)]
    if missing:
        raise FuncgaError(
            f"{' and '.join(missing)} {'is' if len(missing) == 1 else 'are'} not installed, and parity compares torch "
            f"with JAX on data of scikit-learn. Install what parity needs: pip install 'funcga[parity]'"
        )


def _is_found(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ImportError:
        return False


def _parity(options: argparse.Namespace) -> int:
    from funcga.parity.command import parity

    return parity(options.problem, options.dtype, options.n, options.updates, options.json)


if __name__ == "__main__":
    sys.exit(main())
