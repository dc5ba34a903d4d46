"""Bits per byte: the nats of all tokens that stand for bytes, over the number of these bytes."""

import math

import torch


@torch.no_grad()
def evaluate_bpb(model, batches, steps, token_bytes):
    nats, num_bytes = 0.0, 0
    for (x, y), _ in zip(batches, range(steps), strict=False):
        losses = model(x, y, loss_reduction="none").view(-1)
        sizes = token_bytes[y.view(-1)]
        nats += float((losses * (sizes > 0)).sum())
        num_bytes += int(sizes.sum())
    return nats / (math.log(2) * num_bytes)
