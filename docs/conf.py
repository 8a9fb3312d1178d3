"""The site: Sphinx with MyST-NB, as torch, JAX, optax and flax have theirs; the tutorials run when it is built."""

import re
import shutil
import sys
from pathlib import Path
from typing import TypeVar

import funcga
import funcga.folds
from sphinx.pycode import ModuleAnalyzer

sys.path.insert(0, str(Path(__file__).parent))
import llms

project, author, copyright = (
    "funcga",
    "the funcga developers",
    "2026, the funcga developers",
)
version = release = funcga.__version__
extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.napoleon",
    "sphinx_copybutton",
]
source_suffix = {".md": "myst-nb"}
exclude_patterns = ["_build"]
html_theme, html_title = "furo", f"funcga {version}"
html_static_path, html_css_files = ["_static"], ["site.css"]

myst_enable_extensions = ["colon_fence", "dollarmath"]
myst_heading_anchors = 3
myst_url_schemes = {"http": None, "https": None}
nb_execution_mode, nb_execution_raise_on_error, nb_execution_timeout = (
    "cache",
    True,
    300,
)
nb_merge_streams = True

autodoc_member_order = "bysource"
autodoc_typehints = "description"
autodoc_typehints_format = "short"
autodoc_preserve_defaults = True
napoleon_numpy_docstring = False
nitpicky = False


def link_to_files(app, docname, source):
    """Links to benchmarks, which are no pages of the site, become their names. Examples are downloads."""
    link = r"(?<!!)\[([^\]]*)\]\((?:\.\./)+(benchmarks/[^)]*)\)"
    name = lambda match: f"{match[1]}: `{match[2]}`"
    source[0] = re.sub(link, name, source[0])


def code_in_docstrings(app, what, name, obj, options, lines):
    """Docstrings mark code with single backticks, as editors show it; reStructuredText wants two, and a word's end."""
    code = lambda match: f"``{match[1]}``" + (r"\ " if match[2] else "") + match[2]
    lines[:] = re.sub(r"(?<!`)`([^`]+)`(?!`)(\w?)", code, "\n".join(lines)).split("\n")


def name_the_fold_tree(app, obj, bound_method):
    """The type of `fold=` is recursive: shown by its name, not written out."""
    fold_tree = TypeVar("FoldTree")
    annotations = getattr(obj, "__annotations__", {})
    annotations.update(
        {
            name: fold_tree
            for name, hint in annotations.items()
            if hint == funcga.folds.FoldTree
        }
    )


def analyze_without_overloads(analyzer):
    """A signature is shown once, that of the function itself, and not again for each overload of type checkers."""
    analyze(analyzer)
    analyzer.overloads = {}


analyze, ModuleAnalyzer.analyze = ModuleAnalyzer.analyze, analyze_without_overloads


def link_to_notebook(app, pagename, templatename, context, doctree):
    """Each tutorial offers itself as a notebook, with the outputs of this build."""
    if pagename.startswith("tutorials/"):
        name = f"{Path(pagename).name}.ipynb"
        link = f'<p><a class="reference download" href="{name}" download>Download this page as a notebook</a></p>'
        context["body"] = context["body"].replace("</h1>", f"</h1>\n{link}", 1)


def copy_notebooks(app, exception):
    """MyST-NB writes what it has executed beside the site."""
    for notebook in (Path(app.outdir).parent / "jupyter_execute" / "tutorials").glob(
        "*.ipynb"
    ):
        shutil.copy(notebook, Path(app.outdir, "tutorials"))


def write_llms(app, exception):
    """The overview for language models, at the root of the site."""
    Path(app.outdir, "llms.txt").write_text(llms.text())


def setup(app):
    """Sphinx calls it."""
    app.connect("autodoc-before-process-signature", name_the_fold_tree)
    app.connect("html-page-context", link_to_notebook)
    app.connect("build-finished", copy_notebooks)
    app.connect("build-finished", write_llms)
    app.connect("source-read", link_to_files)
    app.connect(
        "autodoc-process-docstring", code_in_docstrings, priority=100
    )  # before napoleon
