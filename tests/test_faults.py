"""The seeded faults of `tests/faults` still apply, and the tests that are said to notice them exist. None is run here."""

import pytest

from tests import faults

ALL = [fault for area in faults.areas() for fault in faults.faults(area)]


def test_ids_are_unique():
    ids = [fault.id for fault in ALL]
    assert sorted(set(ids)) == sorted(ids)


@pytest.mark.parametrize("fault", ALL, ids=lambda fault: fault.id)
def test_the_fault_applies(fault):
    assert fault.file.split("/")[0] in faults.PACKAGES
    text = fault.patched()
    assert text is not None, f"`old` does not stand exactly once in {fault.file}"
    compile(text, fault.file, "exec")
    assert fault.why.endswith(".")


@pytest.mark.parametrize("fault", ALL, ids=lambda fault: fault.id)
def test_what_notices_it_exists(fault):
    assert fault.killed_by
    assert [test for test in fault.killed_by if not faults.exists(test)] == []


def test_a_fault_that_no_longer_applies_is_noticed():
    fault = faults.Fault("", "", "funcga/folds.py", "no such line", "another", "", ())
    assert fault.patched() is None
    twice = faults.Fault("", "", "funcga/folds.py", "return", "yield", "", ())
    assert twice.patched() is None
    assert not faults.exists("tests/test_faults.py::test_that_nobody_wrote")
    assert not faults.exists("tests/test_nothing.py")
