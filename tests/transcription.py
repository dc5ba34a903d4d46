"""The specification as direct code: dense matrices, lists and a plain loop. It shares no code with the package.

`play` simulates a noiseless quadratic with any method, and returns the arrivals and the final iterate. Tests compare
the simulator with it event by event.
"""

import math

import numpy as np

COEFFICIENTS = [
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
]


def lmo(m):
    """Spectral, for a vector as a 1 x d matrix, by five iterations on the matrix itself."""
    y = m.reshape(1, -1) / (np.linalg.norm(m) + 1e-7)
    for a, b, c in COEFFICIENTS:
        gram = y @ y.T
        y = a * y + (b * gram + c * gram @ gram) @ y
    return -y.reshape(-1)


def quadratic(dim):
    matrix = (2 * np.eye(dim) - np.eye(dim, k=1) - np.eye(dim, k=-1)) / 4
    b = np.zeros(dim)
    b[0] = -0.25
    x0 = np.zeros(dim)
    x0[0] = math.sqrt(dim)
    return matrix, b, x0


def play(
    method, n, seconds_of, *, eta, dim, seconds, threshold=None, batch=None, beta=0.95, nesterov=True, interrupt=True,
    local=None,
):  # fmt: skip
    """Returns (events, iterate, interrupted); an event is (time, worker, gradient_version, version, verdict).

    ``seconds_of(worker, sequence)`` is how long a gradient takes. ``local`` is the number of local steps, their eta and
    their beta.
    """
    matrix, b, x = quadratic(dim)
    momentum, k = np.zeros(dim), 0
    sequences = [0] * n
    work = [{"finish": seconds_of(i, 0), "version": 0, "x": x} for i in range(n)]
    events, collected, contributed, interrupted = [], [], set(), 0

    def limit(k):
        if method == "ringmaster":
            return threshold
        if method == "ringmaster_agnostic":
            return max(1, math.isqrt(k))
        return 1 if method in ("rennala", "synchronous") else math.inf

    def gradient(start):
        if local is None:
            return matrix @ start - b
        steps, local_eta, local_beta = local
        y, m = start, np.zeros(dim)
        for _ in range(steps):
            g = matrix @ y - b
            m = local_beta * m + (1 - local_beta) * g
            y = y + local_eta * lmo(local_beta * m + (1 - local_beta) * g if nesterov else m)
        return start - y

    def update(g, delay):
        nonlocal x, momentum, k
        step, alpha = eta, 1 - beta
        if method == "ringmaster_agnostic":
            step, alpha = eta / (k + 1) ** 0.75, 1.0 if k == 0 else k**-0.5
        if method == "delay_adaptive":
            step = eta * n / max(n, delay)
        momentum = (1 - alpha) * momentum + alpha * g
        u = (1 - alpha) * momentum + alpha * g if nesterov else momentum
        x = x + step * (lmo(u) if local is None else -u)
        k += 1

    def start(i, now):
        sequences[i] += 1
        work[i] = {"finish": now + seconds_of(i, sequences[i]), "version": k, "x": x}

    while True:
        i = min(range(n), key=lambda j: (work[j]["finish"], j))
        now = work[i]["finish"]
        if now > seconds:
            return events, x, interrupted
        version, before = work[i]["version"], k
        delay = k - version
        accepted = delay < limit(k)
        events.append((now, i, version, k, "accepted" if accepted else "stale"))
        waits = False
        if accepted:
            g = gradient(work[i]["x"])
            if method in ("rennala", "synchronous"):
                collected.append(g)
                contributed.add(i)
                if len(collected) == (batch if method == "rennala" else n):
                    update(sum(collected) / len(collected), 0)
                    collected.clear()
                elif method == "synchronous":
                    waits = True
            else:
                update(g, delay)
        if waits:
            work[i] = {"finish": math.inf, "version": k, "x": x}
        else:
            start(i, now)
        if k > before:
            if method == "synchronous":
                for j in contributed - {i}:
                    start(j, now)
            contributed.clear()
            for j in range(n):
                if interrupt and k - work[j]["version"] >= limit(k):
                    start(j, now)
                    interrupted += 1
