"""The engine: windows of micro-batches, at the cost of the hand-written loop.

    plan      what is known of calls of one structure, worked out at the first of them
    window    one window of a gradient that autograd computes: the page to read
    called    one window of any other function
    alone     a gradient that is taken by itself
    sums      the accumulators of a window, and the result
    leaves    what is differentiated in place of arguments
    graphs    what the graph of a loss leads to
    guards/   what has to hold for a result to be right, one file each

Only torch has this package: XLA compiles the loop as a whole.
"""
