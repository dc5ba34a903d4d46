"""What the processes of a run import, imported once by the helper they are forked from."""

from ringmaster_dist.runtime import server_process
from ringmaster_dist.transport import client, host
from ringmaster_dist.worker import __main__ as worker

__all__ = ["client", "host", "server_process", "worker"]
