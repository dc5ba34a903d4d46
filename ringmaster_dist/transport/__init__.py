"""Torch RPC, and nothing else. The only room that imports torch.distributed."""
