"""The command line: `python -m benchmarks` measures funcga and what people use today, side by side."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from funcga.errors import FuncgaError


def main(argv: Sequence[str] | None = None) -> int:
    """The exit code: 0 if all went well, 1 if a case failed, 2 for bad usage, 130 after Ctrl-C.

    argv: the arguments after the program's name; default: those of this process.
    """
    try:
        options = _parser().parse_args(argv)
        return _run(options)
    except ModuleNotFoundError as error:
        sys.stderr.write(f"benchmarks: {error.name} is not installed: pip install 'funcga[bench]'\n")
        return 2
    except SystemExit:  # argparse, after --help
        return 0
    except FuncgaError as error:
        sys.stderr.write(f"benchmarks: {error}\n")
        return 2
    except KeyboardInterrupt:
        sys.stderr.write("benchmarks: interrupted. The same command goes on from here.\n")
        return 130


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise FuncgaError(f"{message.removeprefix('argument ')} (see python -m benchmarks --help)")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        "python -m benchmarks",
        description="Measures funcga and what people use today on the same models, data and seeds, each checked to "
        "compute the same gradients first. Writes tables, pictures and a JSON file, and goes on where it was "
        "interrupted. Exit code: 0, 1 if a case failed, 2 for bad usage.",
    )
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--quick", action="store_true", help="everything once, small, to see that it works")
    mode.add_argument("--full", action="store_true", help="longer, and how each grows: with n, leaves, size and ranks")
    mode.add_argument("--large", action="store_true", help="weights whose gradients are added in the backward pass")
    mode.add_argument("--coupled", action="store_true", help="losses over the whole batch (install the extra rivals)")
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="NAME",
        help="parts of cases' names (torch/transformer, growth) and contenders (accelerate)",
    )  # fmt: skip
    parser.add_argument("--device", default="cpu", type=_device, help="cpu, cuda or cuda:1 (default: cpu)")
    parser.add_argument(
        "--out", type=_file, metavar="FILE",
        help="of results, to which this adds; the pictures are beside it (default: benchmarks-MODE-DEVICE.json)",
    )  # fmt: skip
    parser.add_argument("--again", action="store_true", help="measure again what the file has already")
    instead = parser.add_mutually_exclusive_group()
    instead.add_argument("--list", action="store_true", help="the cases and their contenders, and measure nothing")
    instead.add_argument("--show", type=_there, metavar="FILE", help="the tables of a file, and measure nothing")
    instead.add_argument("--readme", action="store_true", help="write the committed results into the README alone")
    return parser


def _device(text: str) -> str:
    kind, _, index = text.partition(":")
    if kind not in ("cpu", "cuda") or (":" in text and not index.isdecimal()):
        raise argparse.ArgumentTypeError(f"{text!r} is no device: write cpu, cuda or cuda:1")
    return text


def _file(text: str) -> Path:
    path = Path(text)
    if path.suffix != ".json" or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is no file of JSON in a folder that exists: write FILE.json")
    return path


def _there(text: str) -> Path:
    if not Path(text).is_file():
        raise argparse.ArgumentTypeError(f"there is no file {text!r}")
    return Path(text)


def _run(options: argparse.Namespace) -> int:
    mode = next((name for name in ("quick", "full", "coupled", "large") if getattr(options, name)), "default")
    if options.readme:
        from benchmarks.readme import rewrite

        return rewrite()
    from benchmarks import command

    if options.show:
        return command.show(options.show)
    if options.list:
        return command.overview(mode, options.device)
    file = options.out or Path(f"benchmarks-{mode}-{options.device.replace(':', '-')}.json")
    return command.measure(mode, options.device, options.only, file, options.again)


if __name__ == "__main__":
    sys.exit(main())
