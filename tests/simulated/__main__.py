"""Writes the table of launches and waits into the page of the docs."""

from tests import simulated

if __name__ == "__main__":
    simulated.install()
    from tests.simulated.table import PAGE, with_table

    PAGE.write_text(with_table(PAGE.read_text()))
