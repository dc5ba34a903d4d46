"""What a run leaves behind and shows: its directory, its trace, its metrics, its summary."""
