"""The paper's experiments: grids, runs, tables and figures, all in virtual time."""
