"""The command line: one module per command, wiring only. Nobody imports this room."""
