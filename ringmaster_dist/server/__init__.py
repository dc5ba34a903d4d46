"""The server. The core decides and updates, and the service puts it behind calls."""
