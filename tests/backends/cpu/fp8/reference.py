"""FP8 in float64, block by block, from the definition of the formats: nothing of torch's FP8 is used."""

import math

import numpy as np

Matrix = np.ndarray

# (exponent bits, mantissa bits, the largest finite number)
FORMATS = {"e4m3": (4, 3, 448.0), "e5m2": (5, 2, 57344.0)}


def numbers(form: str) -> Matrix:
    """Every number from 0 of the format, ascending; the index of a number has its last mantissa bit."""
    exponents, mantissas, top = FORMATS[form]
    bias = 2 ** (exponents - 1) - 1
    found = [
        math.ldexp((e > 0) + m / 2**mantissas, max(e, 1) - bias)
        for e in range(2**exponents)
        for m in range(2**mantissas)
    ]
    return np.array([number for number in found if number <= top])


def nearest(x: Matrix, form: str) -> Matrix:
    """The nearest numbers of the format, ties to even mantissas, what is too large to the largest."""
    table = numbers(form)
    size = np.minimum(np.abs(x), table[-1])
    above = np.clip(np.searchsorted(table, size), 1, len(table) - 1)
    low, high = table[above - 1], table[above]
    up = (size - low > high - size) | ((size - low == high - size) & (above % 2 == 0))
    signed: Matrix = np.copysign(np.where(up, high, low), x)
    return signed


def scale_of(amax: float, form: str, rule: str) -> float:
    """What values are multiplied by: `exact`, a power of two not above that, or the E8M0 one."""
    top = FORMATS[form][2]
    if amax == 0:
        return 1.0
    if rule == "exact":
        return top / amax
    if rule == "power of two":
        return 2.0 ** math.floor(math.log2(top / amax))
    return 2.0 ** -math.ceil(math.log2(amax / top))


def blocks(x: Matrix, size: tuple[int, int], form: str, rule: str) -> Matrix:
    """`x` with one scale for each block of `size`; a block ends where the matrix does."""
    out = np.empty_like(x)
    for top in range(0, x.shape[0], size[0]):
        for left in range(0, x.shape[1], size[1]):
            at = np.s_[top : top + size[0], left : left + size[1]]
            scale = scale_of(np.abs(x[at]).max(), form, rule)
            out[at] = nearest(x[at] * scale, form) / scale
    return out


def operand(x: Matrix, scaling: str, form: str, *, contracted: int, weight: bool) -> Matrix:
    """`x` as one operand of a product that sums over dimension `contracted`."""
    if scaling == "tensorwise":
        return blocks(x, (x.shape[0], x.shape[1]), form, "exact")
    along, rule = (128, "power of two") if scaling == "blockwise" else (32, "e8m0")
    across = along if weight and scaling == "blockwise" else 1
    return blocks(x, (across, along) if contracted == 1 else (along, across), form, rule)


def products(x: Matrix, w: Matrix, g: Matrix, *, scaling: str, format: str) -> tuple[Matrix, Matrix, Matrix]:
    """A linear layer's output and the gradients of its input and weight, for the gradient `g` [t, out]."""
    backward = "e5m2" if format == "hybrid" else "e4m3"

    def of(a: Matrix, contracted: int, form: str = "e4m3", weight: bool = False) -> Matrix:
        return operand(a, scaling, form, contracted=contracted, weight=weight)

    return (
        of(x, 1) @ of(w, 1, weight=True).T,
        of(g, 1, backward) @ of(w, 0, weight=True),
        of(g, 0, backward).T @ of(x, 0),
    )
