"""Tolerances: how far two results may be apart that differ in nothing but the order of their
operations.
"""

import math
import re

TERMS = 256
"""The terms of a sum, where the caller does not say how many there are."""

OPERATIONS = 32
"""The operations one after another whose results are rounded, where that matters more: in less
than 32 bits.
"""

FACTOR = 4
"""How far above the error of a single random walk the limit is, as there are two, and a leaf has
many elements.
"""

MOST = 0.5
"""The largest limit: one of 1 would let pass an array of zeros, and one of 2 the negative one,
whatever is expected.
"""

# Gradients of an MLP, a convolutional net and attention with layer norm, in torch against JAX on a
# CPU, in seven sizes, from three seeds, were at most 21 (float32), 34 (float64) and 15 (bfloat16)
# eps apart, in their worst leaf.


def limit(dtype: str, reduction: int = TERMS) -> float:
    """The largest difference, over the largest element of a leaf, that rounding explains; 0 for
    what is exact.

    dtype: its name. reduction: the number of terms in a sum: rows times tokens, or what a matrix
    product contracts.

    `4 eps sqrt(reduction)`: rounding errors of a sum of k terms are a random walk, so that they
    grow with sqrt(k), where the worst case would be k (Higham, Accuracy and Stability of Numerical
    Algorithms, 2002, section 2.8; Higham and Mary, A New Approach to Probabilistic Rounding Error
    Analysis, 2019). Sums of dtypes of less than 32 bits are held in float32 by both frameworks and
    by every fold; there the results of operations are a walk of larger steps. It is MOST where that
    would be more, as in float8.
    """
    step, count, _ = _walk(dtype, reduction)
    return min(MOST, FACTOR * step * math.sqrt(count))


def reason(dtype: str, reduction: int = TERMS) -> str:
    """The limit of a dtype and where it comes from, in words: `float32 7.6e-06 (4 eps x
    sqrt(256) terms)`.
    """
    step, count, of = _walk(dtype, reduction)
    why = f"{FACTOR} eps x sqrt({count}) {of}" if step else "exact"
    if FACTOR * step * math.sqrt(count) > MOST:
        why = f"the most, as {why} is more"
    return f"{dtype} {limit(dtype, reduction):.2g} ({why})"


def _walk(dtype: str, reduction: int) -> tuple[float, int, str]:
    """The longer random walk of rounding errors: a step of it, how many there are, and of what."""
    eps, single = epsilon(dtype), epsilon("float32")
    if eps <= single:
        return eps, reduction, "terms"
    walks = [(eps, OPERATIONS, "operations"), (single, reduction, "terms in float32")]
    return max(walks, key=lambda walk: walk[0] * math.sqrt(walk[1]))


def epsilon(dtype: str) -> float:
    """The distance from 1 to the next number of a floating or complex dtype; 0 for integers,
    booleans and others.
    """
    narrow = re.match(r"float\d+_e\d+m(\d+)", dtype)
    if narrow:
        return 2.0 ** -int(narrow[1])
    # NumPy's longdouble, by whatever name, is compared as float64.
    is_wide = re.match("float|complex|c?longdouble", dtype)
    return _EPSILONS.get(dtype, 2.0**-52 if is_wide else 0.0)


_EPSILONS = {
    "float16": 2.0**-10,
    "bfloat16": 2.0**-7,
    "float32": 2.0**-23,
    "complex64": 2.0**-23,
}
