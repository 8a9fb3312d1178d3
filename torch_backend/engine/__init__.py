"""The engine: windows of micro-batches, at the cost of the hand-written loop.

    plan      what is known of calls of one structure, worked out at the first of them
    window    one window of a gradient that autograd computes: the page to read
    bound     what becomes of the output of a loss
    leaves    what is differentiated in place of arguments
    called    one window of any other function
    alone     a gradient that is taken by itself
    guards/   what has to hold for a result to be right, one file each

All windows fold into the Sums of torch_backend.sums.

Only torch has this package: XLA compiles the loop as a whole.
"""
