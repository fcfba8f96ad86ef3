"""Exponentials for the CPU target, as expressions the C compiler can vectorise.

The C library's expf is a call an element, which keeps a loop scalar. This is the textbook form
(Cody and Waite, 1980): e^x = 2^n e^r with n = round(x / ln 2), a polynomial for e^r on
|r| <= ln(2) / 2, and 2^n written into the exponent bits. Relative error: below 1e-7. Results
below the smallest normal number are 0, those above 2^127.5 are infinite; NaN stays NaN.
"""

import math

import tilelang.language as T

# ln 2 in two parts: n times the first is exact, as it has few bits. TileLang writes constants for
# the C target with seven digits, which hold it.
LN2_HIGH, LN2_LOW = 0.693359375, math.log(2) - 0.693359375
LOWEST, HIGHEST = -87.33654, 88.37  # the logarithm of the smallest normal number
TAYLOR = tuple(1 / math.factorial(i) for i in range(8))


def exp(x):
    """e^x of a float32 expression."""
    clamped = T.max(T.min(x, HIGHEST + 0.1), LOWEST)
    n = T.floor(clamped * math.log2(math.e) + 0.5)
    # The compiler may reorder sums, which would add the two parts first; a maximum that changes
    # nothing stops it.
    high = T.max(clamped - n * LN2_HIGH, -1.0)
    return _scaled(x, LOWEST, high - n * LN2_LOW, n)


def exp2(x):
    """2^x of a float32 expression."""
    clamped = T.max(T.min(x, 128.0), -126.0)
    n = T.floor(clamped + 0.5)
    return _scaled(x, -126.0, (clamped - n) * math.log(2), n)


def _scaled(x, lowest: float, r, n):
    """2^n e^r, or 0 where x is below `lowest`, or x where it is NaN."""
    series = TAYLOR[-1]
    for coefficient in reversed(TAYLOR[:-1]):
        series = coefficient + r * series
    power = T.reinterpret(T.shift_left(T.cast(n, "int32") + 127, 23), "float32")
    return T.if_then_else(x >= lowest, series * power, T.if_then_else(x < lowest, 0.0, x))
