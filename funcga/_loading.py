"""Objects by `FILE.py:NAME`, as the command line names what a user has written."""

import difflib
import importlib.util
import inspect
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, TypeGuard

from funcga.errors import FuncgaError


class Loaded(NamedTuple):
    """An object, the name that it has, and the module that it is in."""

    value: Any
    name: str
    module: ModuleType


def load_object(
    where: str, definition: str, can_run: Callable[[object, ModuleType], bool]
) -> Loaded:
    """The object of `FILE.py:NAME`; of `FILE.py` alone, that of the name which the definition has.

    The file is run as Python runs a script, with its own folder first in sys.path, but not as
    `__main__`. Raises FuncgaError for whatever the file raises, and if there is no such file or
    name: then it offers the names of what can be run, or else the definition, such as `problem =
    funcga.Problem(...)`.
    """
    # A colon may also stand in a path, so the name begins after ".py:".
    file, _, name = where.partition(".py:")
    path = Path(file if file.endswith(".py") else f"{file}.py")
    default = definition.split()[0]
    name = name or default
    if not path.is_file():
        raise FuncgaError(
            f"{where}: there is no file {path}. Write FILE.py:{default}, a path from the current "
            "folder."
        )
    module = _module(path)
    variables = vars(module)
    if name not in variables:
        # The names closest to the one that was asked for, else the last ones: results stand at the
        # end of a file.
        names = [
            each
            for each, value in variables.items()
            if not each.startswith("_") and can_run(value, module)
        ]
        offered = difflib.get_close_matches(name, names, n=3) or names[-6:]
        raise FuncgaError(
            f"{where}: {path} has no `{name}`. "
            + (
                f"It has {', '.join(offered)}: write {path}:{offered[0]}."
                if offered
                else f"Add one: {definition}."
            )
        )
    return Loaded(variables[name], name, module)


def is_function_of(value: object, module: ModuleType) -> TypeGuard[Callable[..., object]]:
    """Whether it is a function that the file defines, also one that a framework has transformed."""
    return callable(value) and not isinstance(value, type) and inspect.getmodule(value) is module


_PREFIX = "funcga_loaded_"


def _module(path: Path) -> ModuleType:
    name = f"{_PREFIX}{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    # Under a prefix in sys.modules: `blamed` knows it by that, and pickle finds it.
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(path.parent.resolve()))
    try:
        spec.loader.exec_module(module)
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise FuncgaError(f"{path} does not import: {blamed(error)}") from error
    return module


def blamed(error: BaseException) -> str:
    """An error in a line: its type and text, and the last line of a loaded file that it came
    through.
    """
    files = {module.__file__ for name, module in sys.modules.items() if name.startswith(_PREFIX)}
    frames = [
        frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename in files
    ]
    where = f" (line {frames[-1].lineno} of {frames[-1].filename})" if frames else ""
    text = " ".join(str(error).split())
    # Code that does not parse has no frame; the error itself says where it is.
    if isinstance(error, SyntaxError):
        text, where = str(error.msg), f" (line {error.lineno} of {error.filename})"
    return f"{type(error).__name__}{f': {text}' if text else ''}{where}"
