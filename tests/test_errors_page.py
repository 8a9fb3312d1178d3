"""The page of errors: each text on it is one that the library raises, and every room that refuses anything is on it."""

import ast
import functools
import re
from pathlib import Path

import funcga

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs" / "reference" / "errors.md").read_text()
PACKAGES = ("funcga", "torch_backend", "jax_backend")
ANYTHING = "…"


def template(node):
    """The text of an expression, with `…` for what is filled in."""
    match node:
        case ast.Constant(value=str() as text):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(template(part) for part in parts)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return template(left) + template(right)
    return ANYTHING


def texts(path):
    """The long texts of a file, and of its errors: a text may be made in one place and raised in another."""
    tree = ast.parse(path.read_text())
    return [template(node) for node in ast.walk(tree) if isinstance(node, ast.Constant | ast.JoinedStr | ast.BinOp)]


def refuses(path):
    calls = (node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call))
    return any(isinstance(call.func, ast.Name) and call.func.id.endswith("FuncgaError") for call in calls)


FILES = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
FRAGMENTS = re.findall(r"^\| `([^`]+)` \|.*\|.*\|$", PAGE, re.MULTILINE)


@functools.cache
def templates():
    return [text for path in FILES for text in texts(path) if len(text) > 8]


def is_raised(fragment):
    """Whether the parts of the fragment stand in this order in a text of the library."""
    pattern = re.compile(".*".join(re.escape(part.strip()) for part in fragment.split(ANYTHING)), re.DOTALL)
    return any(pattern.search(text) for text in templates())


def test_the_library_says_so():
    assert [text for text in FRAGMENTS if text not in ("FuncgaError", "AssertionError") and not is_raised(text)] == []
    assert not is_raised("the moon is made of … cheese")
    assert len(FRAGMENTS) > 80


def test_every_room_that_refuses_anything_is_on_the_page():
    rooms = {str(path.parent.relative_to(ROOT)) for path in FILES if refuses(path)}
    listed = [room for comment in re.findall(r"<!-- (.*?) -->", PAGE) for room in comment.split()]
    assert sorted(listed) == sorted(rooms)


def test_every_class_of_error_is_on_the_page():
    classes = {
        node.name
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ClassDef) and node.name.endswith("Error") and node.name in dir(funcga)
    }
    assert classes == {"FuncgaError"} <= set(FRAGMENTS)
