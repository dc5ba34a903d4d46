"""The processes of a run: the server, its journal and checkpoints, the supervisor, the ranks of a torchrun."""
