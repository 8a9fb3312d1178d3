"""The command line: `python -m funcga parity`, `verify`, `doctor`, `plan` and `info`."""

import argparse
import sys
import traceback
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from funcga import __version__
from funcga.errors import FuncgaError
from funcga.tools.reports.commands import blamed, show

DTYPES = ("float16", "bfloat16", "float32", "float64")  # from coarse to fine


def main(argv: Sequence[str] | None = None) -> int | str:
    """The exit code of the command line: 0 within the limits, 1 beyond them, 2 for bad usage or a
    missing package.

    130, as shells have it, if it is interrupted; that of a script or its last message, as
    `sys.exit` takes it, if one that was watched ended with it.

    argv: the arguments after the program's name; default: those of this process. What is found is
    written to standard output, and a refusal, one line, to standard error; with --debug its
    traceback as well.
    """
    try:
        options = _parser().parse_args(argv)
    # This is how argparse ends: with 0 after --help and --version, and with 2 for bad usage.
    except SystemExit as end:
        return int(end.code or 0)
    try:
        if options.command == "info":
            show()
            return 0
        # Imported only now, so that --help is quick.
        run = getattr(import_module("funcga.tools.commands"), f"run_{options.command}")
        code: int | str = run(options)
        return code
    except KeyboardInterrupt:
        return 130
    # The code of a user may exit as well, and an exit code of its own would be taken for a verdict.
    except (Exception, SystemExit) as error:
        if options.debug:
            traceback.print_exc()
        sys.stderr.write(f"funcga: {_line(error)}\n")
        return 2


def _line(error: BaseException) -> str:
    """What an error says. One of ours says what to do; any other one is named with the line of the
    user's file that it came from.
    """
    if isinstance(error, FuncgaError):
        return str(error)
    if isinstance(error, ModuleNotFoundError):
        return f"{error.name} is not installed; the commands need pip install 'funcga[parity]'"
    return f"{blamed(error)}. --debug shows where."


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "funcga", description="Gradient accumulation as a pure fold, for PyTorch and JAX."
    )
    parser.add_argument("--version", action="version", version=f"funcga {__version__}")
    commands = parser.add_subparsers(
        dest="command", metavar="parity | verify | doctor | plan | info", required=True
    )
    _add_parity(commands)
    _add_verify(commands)
    _add_doctor(commands)
    _add_plan(commands)
    commands.add_parser("info", help="versions, devices, and what is installed")
    # On each command, so that it may stand at the end of the line.
    for name, command in commands.choices.items():
        command.add_argument("--debug", action="store_true", help="show the traceback of an error")
        if name != "info":
            command.add_argument(
                "--json", type=_file, metavar="FILE", help="write what was found to FILE"
            )
    return parser


def _add_parity(commands: Any) -> None:
    parity = commands.add_parser(
        "parity",
        help="the same loss in torch and in JAX: are the gradients the same, and if not, why?",
        description=(
            "Computes the same gradients in torch and in JAX, of the whole batch, of every "
            "micro-batch and accumulated, folds the same gradients in both and in NumPy, compares "
            "every dtype with float64, and trains; then says what a difference comes from. Exit "
            "code: 0 if every difference is within its limit, 1 if not, 2 for bad usage or a "
            "missing package."
        ),
        epilog=(
            "Built-in problems: digits (an MLP), cnn, and text (a transformer with padded rows)."
        ),
    )
    parity.add_argument(
        "problem",
        nargs="?",
        default="all",
        metavar="FILE.py:problem | name",
        help=(
            "a funcga.checks.Problem of your own, or a function that returns one; or a built-in "
            "one (default: all of them)"
        ),
    )
    parity.add_argument(
        "--n",
        type=counts,
        default="8",
        help="numbers of micro-batches, such as 1,2,4,8 (default: 8)",
    )
    parity.add_argument(
        "--dtype",
        type=dtypes,
        default="float32",
        help=(
            "of float32, bfloat16 and float16, which are compared with float64 (default: float32)"
        ),
    )
    parity.add_argument(
        "--device", default="cpu", help="where both compute: cpu, cuda, cuda:1 (default: cpu)"
    )
    parity.add_argument(
        "--updates", type=int, default="20", help="of each optimizer; 0 for none (default: 20)"
    )
    parity.add_argument(
        "--seed", type=int, default="0", help="of the problem, if it takes one (default: 0)"
    )
    parity.add_argument(
        "--html", type=_file, metavar="FILE", help="write the report with its pictures as a page"
    )


def _add_verify(commands: Any) -> None:
    verify = commands.add_parser(
        "verify",
        help=(
            "is accumulation exact for this loss? If not, which mistake is it, and which line "
            "fixes it?"
        ),
        description=(
            "Runs a gradient function over n micro-batches, permuted and unevenly split, against "
            "the whole batch. Exit code: 0 if accumulation is exact, 1 if not, 2 for bad usage."
        ),
        epilog=(
            "The file also has the arguments, a tuple named `args` (--args says another name), and "
            "may have `fold`, `weight` and `in_axes`. A funcga.checks.Problem has all of them: its "
            "losses are verified in both frameworks."
        ),
    )
    verify.add_argument(
        "grad_fn",
        metavar="FILE.py:grad_fn",
        help="a gradient function, a step of coupled, or a Problem",
    )
    _add_args(verify)
    verify.add_argument("--n", type=counts, help="numbers of micro-batches (default: several)")


def _add_doctor(commands: Any) -> None:
    doctor = commands.add_parser(
        "doctor",
        help="how does this training script weigh what it accumulates?",
        description=(
            "Runs a script of torch as it is, and watches its backward passes and steps. Exit "
            "code: 0 if every target weighs the same in every step, 1 if not, 2 if that cannot be "
            "told, if the script raises an error, or for bad usage; or that of the script, if it "
            "is not 0. Ctrl-C and SIGTERM end it with the report. Options stand before the script."
        ),
    )
    doctor.add_argument(
        "--across", action="store_true", help="gather what all processes weigh, at each step"
    )
    doctor.add_argument(
        "--steps",
        type=count,
        default="1000",
        help="how many are watched; then comes the report, and the run goes on (default: 1000)",
    )
    doctor.add_argument(
        "-m", dest="module", action="store_true", help="the script is a module, as python -m has it"
    )
    doctor.add_argument("script", metavar="FILE.py | -m MODULE")
    doctor.add_argument("arguments", nargs=argparse.REMAINDER, help="of the script")


def _add_plan(commands: Any) -> None:
    plan = commands.add_parser(
        "plan",
        help="how many micro-batches does a batch need to fit in memory?",
        description=(
            "Finds the memory that a step takes for every number of micro-batches, without running "
            "it. Exit code: 0 if one fits, 1 if none does, 2 for bad usage."
        ),
        epilog=(
            "The file also has the arguments, a tuple named `args` (--args says another name), of "
            "arrays or of "
            'shapes alone: torch.empty(..., device="meta"), jax.ShapeDtypeStruct.'
        ),
    )
    plan.add_argument(
        "step", metavar="FILE.py:step", help="a step of accumulate, or a gradient function"
    )
    _add_args(plan)
    plan.add_argument("--memory", metavar="BYTES", help='such as "14 GiB" (default: what is free)')


def _add_args(command: argparse.ArgumentParser) -> None:
    name = "of its arguments in the file (default: args)"
    command.add_argument("--args", default="args", metavar="NAME", help=name)


def counts(text: str) -> list[int]:
    """The numbers of a list such as 1,2,7. Raises ValueError if it is no such list."""
    return sorted({count(part) for part in text.split(",")})


def count(text: str) -> int:
    """A number of 1 or more. Raises ValueError for any other text."""
    number = int(text)
    if number < 1:
        raise ValueError
    return number


def dtypes(text: str) -> list[str]:
    """The dtypes of a list, and float64, from coarse to fine. Raises ValueError for any other."""
    return sorted({*text.split(","), "float64"}, key=DTYPES.index)


def _file(text: str) -> Path:
    path = Path(text)
    if path.is_dir() or not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{text!r} is not a file in a folder that exists")
    return path.resolve()  # before a script goes to another folder


if __name__ == "__main__":
    sys.exit(main())
