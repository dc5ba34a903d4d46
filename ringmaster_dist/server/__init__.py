"""The server: the core that decides and updates."""
