"""A window of micro-batches on autograd, at the cost of the loop by hand."""
