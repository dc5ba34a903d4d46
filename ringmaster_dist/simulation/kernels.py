"""The arithmetic of the compiled lane: draws and the quadratic's gradient and update, as machine code.

Draws equal `ringmaster_dist.randomness` to the bit; gradient and update equal problems/quadratic.py and
algorithm/update.py to rounding, because sums are taken in another order.
"""

from __future__ import annotations

import math

import numpy as np
from numba import njit

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_FIRST = np.uint64(0xBF58476D1CE4E5B9)
_SECOND = np.uint64(0x94D049BB133111EB)

# What becomes of the direction.
PLAIN, NORMALIZED, POLYNOMIAL, SIGN = range(4)


@njit(cache=True)
def _mix(value):
    value = (value ^ (value >> np.uint64(30))) * _FIRST
    value = (value ^ (value >> np.uint64(27))) * _SECOND
    return value ^ (value >> np.uint64(31))


@njit(cache=True)
def unit(key, sequence):
    value = _mix(key + np.uint64(sequence + 1) * _GOLDEN)
    return (np.float64(value >> np.uint64(12)) + 0.5) * 2.0**-52


@njit(cache=True)
def inverse_normal_cdf(p):
    """Wichura's algorithm AS 241, as in Python's statistics module."""
    q = p - 0.5
    if abs(q) <= 0.425:
        r = 0.180625 - q * q
        num = (((((((2.5090809287301226727e3 * r + 3.3430575583588128105e4) * r + 6.7265770927008700853e4) * r
               + 4.5921953931549871457e4) * r + 1.3731693765509461125e4) * r + 1.9715909503065514427e3) * r
               + 1.3314166789178437745e2) * r + 3.3871328727963666080e0) * q  # fmt: skip
        den = (((((((5.2264952788528545610e3 * r + 2.8729085735721942674e4) * r + 3.9307895800092710610e4) * r
               + 2.1213794301586595867e4) * r + 5.3941960214247511077e3) * r + 6.8718700749205790830e2) * r
               + 4.2313330701600911252e1) * r + 1.0)  # fmt: skip
        return num / den
    r = math.sqrt(-math.log(p if q <= 0.0 else 1.0 - p))
    if r <= 5.0:
        r -= 1.6
        num = (((((((7.74545014278341407640e-4 * r + 2.27238449892691845833e-2) * r + 2.41780725177450611770e-1) * r
               + 1.27045825245236838258e0) * r + 3.64784832476320460504e0) * r + 5.76949722146069140550e0) * r
               + 4.63033784615654529590e0) * r + 1.42343711074968357734e0)  # fmt: skip
        den = (((((((1.05075007164441684324e-9 * r + 5.47593808499534494600e-4) * r + 1.51986665636164571966e-2) * r
               + 1.48103976427480074590e-1) * r + 6.89767334985100004550e-1) * r + 1.67638483018380384940e0) * r
               + 2.05319162663775882187e0) * r + 1.0)  # fmt: skip
    else:
        r -= 5.0
        num = (((((((2.01033439929228813265e-7 * r + 2.71155556874348757815e-5) * r + 1.24266094738807843860e-3) * r
               + 2.65321895265761230930e-2) * r + 2.96560571828504891230e-1) * r + 1.78482653991729133580e0) * r
               + 5.46378491116411436990e0) * r + 6.65790464350110377720e0)  # fmt: skip
        den = (((((((2.04426310338993978564e-15 * r + 1.42151175831644588870e-7) * r + 1.84631831751005468180e-5) * r
               + 7.86869131145613259100e-4) * r + 1.48753612908506148525e-2) * r + 1.36929880922735805310e-1) * r
               + 5.99832206555887937690e-1) * r + 1.0)  # fmt: skip
    x = num / den
    return -x if q < 0.0 else x


# Sums may be taken in any order here, so that the loops become vector code; the rest keeps to the letter.
_fast = njit(cache=True, fastmath={"reassoc", "contract"})


@_fast
def quadratic_gradient(x, noise, out):
    """Writes ``A x - b + noise`` to out; returns the loss. See problems/quadratic.py."""
    last = len(x) - 1
    product = 0.0
    for i in range(1, last):
        value = 0.5 * x[i] - 0.25 * (x[i - 1] + x[i + 1])
        product += x[i] * value
        out[i] = value + noise
    first_value = 0.5 * x[0] + 0.25
    if last > 0:
        first_value -= 0.25 * x[1]
        last_value = 0.5 * x[last] - 0.25 * x[last - 1]
        product += x[last] * last_value
        out[last] = last_value + noise
    out[0] = first_value + noise
    return 0.5 * (product + x[0] * first_value) + 0.125 * x[0]


@_fast
def move_momentum(m, g, u, alpha, nesterov):
    """Moves m, writes the oracle's argument to u, returns its squared norm."""
    ahead = alpha if nesterov else 0.0
    square = 0.0
    for i in range(len(m)):
        moved = m[i] + alpha * (g[i] - m[i])
        m[i] = moved
        looked = moved + ahead * (g[i] - moved)
        u[i] = looked
        square += looked * looked
    return square


@_fast
def total_of(values):
    total = 0.0
    for value in values:
        total += value
    return total


@_fast
def take_step(x, u, norm, eta, radius, weight_decay, oracle, coefficients, out):
    """``out = (1 - eta weight_decay) x + eta radius lmo(u)``.

    See algorithm/update.py and `_iterate_vector` of algorithm/geometry.py.
    """
    scale = 1.0
    if oracle == NORMALIZED:
        scale = 1.0 / norm if norm > 0.0 else 0.0
    elif oracle == POLYNOMIAL:
        length = norm / (norm + 1e-7)
        for i in range(len(coefficients)):
            square = length * length
            length *= coefficients[i, 0] + square * (coefficients[i, 1] + coefficients[i, 2] * square)
        scale = length / norm if norm > 0.0 else 0.0
    keep, step = 1.0 - eta * weight_decay, eta * radius * scale
    if oracle == SIGN:
        for i in range(len(x)):
            out[i] = keep * x[i] - step * np.sign(u[i])
    else:
        for i in range(len(x)):
            out[i] = keep * x[i] - step * u[i]
