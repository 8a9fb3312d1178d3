"""Tolerances: how far two results may be apart that differ in nothing but the order of their operations."""

import math
import re

TERMS = 256
"""The terms of a sum, where the caller does not say how many there are."""

FACTOR = 4
"""What the limit is above the error of one random walk: there are two, each through several sums, and a worst leaf."""


def limit(dtype: str, reduction: int = TERMS) -> float:
    """The largest difference, over the largest element of a leaf, that rounding explains; 0 for what is exact.

    dtype: its name. reduction: the number of terms in a sum: rows times tokens, or what a matrix product contracts.

    `FACTOR * eps * sqrt(reduction)`: rounding errors of a sum of k terms are a random walk, so that they grow with
    sqrt(k), where the worst case would be k (Higham, Accuracy and Stability of Numerical Algorithms, 2002, 2.8; Higham
    and Mary, A New Approach to Probabilistic Rounding Error Analysis, 2019). Sums of dtypes of less than 32 bits are
    held in float32 by both frameworks and by every fold, so there the one rounding of the result outweighs.
    """
    eps = epsilon(dtype)
    return FACTOR * max(eps, min(eps, epsilon("float32")) * math.sqrt(reduction))


def epsilon(dtype: str) -> float:
    """The distance from 1 to the next number of a floating or complex dtype; 0 for integers, booleans and others."""
    narrow = re.match(r"float\d+_e\d+m(\d+)", dtype)
    return 2.0 ** -int(narrow[1]) if narrow else _EPSILONS.get(dtype, 0.0)


_EPSILONS = {
    "float16": 2.0**-10,
    "bfloat16": 2.0**-7,
    "float32": 2.0**-23,
    "complex64": 2.0**-23,
    "float64": 2.0**-52,
    "complex128": 2.0**-52,
    "longdouble": 2.0**-52,  # as which it is compared
    "clongdouble": 2.0**-52,
}


def coarser(left: str, right: str) -> str:
    """The one of two dtypes that rounds more."""
    return max(left, right, key=epsilon)


def reason(dtype: str, reduction: int = TERMS) -> str:
    """The limit of a dtype and where it comes from, in words: `float32 7.6e-06 (4 eps x sqrt(256) terms)`."""
    eps = epsilon(dtype)
    if eps == 0:
        return f"{dtype} 0 (exact)"
    found = limit(dtype, reduction)
    summed = f"4 eps x sqrt({reduction}) terms" if found > FACTOR * eps else "4 eps"
    if eps > epsilon("float32"):
        summed += ", summed in float32"
    return f"{dtype} {found:.1e} ({summed})"
