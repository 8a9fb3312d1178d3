"""The museum of wrong gradients: what was computed is wrong, what funcga computes is right, and the page says so."""

import inspect
import math
import re

import pytest

import funcga
from tests import museum

PAGE = museum.PAGE.read_text()


@pytest.mark.parametrize("exhibit", museum.EXHIBITS, ids=lambda exhibit: exhibit.name)
def test_an_exhibit(exhibit):
    wrong, right, true = exhibit.trees()
    off = museum.error(wrong, true)
    assert math.isnan(off) or off > 0.01
    assert museum.error(right, true) <= exhibit.limit


def test_the_page_has_the_figures_of_this_run():
    assert museum.with_table(PAGE) == PAGE, "write the page anew: python -m tests.museum"


def test_every_exhibit_links_to_a_thread_of_its_own():
    links = re.findall(r"https://github\.com/([\w.-]+/[\w.-]+)/issues/(\d+)\)", PAGE)
    assert len(links) == len(set(links)) == sum(len(exhibit.threads) for exhibit in museum.EXHIBITS)


def test_an_error_is_relative_to_the_largest_element():
    assert museum.error({"w": museum.PARAMS["w"] * 1.5}, {"w": museum.PARAMS["w"]}) == pytest.approx(0.5)
    assert math.isnan(museum.error({"w": museum.PARAMS["w"] * math.nan}, {"w": museum.PARAMS["w"]}))


def test_verify_knows_the_causes_that_the_page_names():
    named = re.findall(r'"([^"]+)"', PAGE.split("## Would you have noticed?")[1])
    assert len(named) > 3
    documented = " ".join(inspect.getdoc(funcga.verify).split())
    assert all(f'"{cause}"' in documented for cause in named)
