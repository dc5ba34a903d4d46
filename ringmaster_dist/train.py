"""``torchrun --nproc-per-node=N -m ringmaster_dist.train [key=value ...]``: rank 0 serves, the others work."""

from __future__ import annotations

import os
import sys

from ringmaster_dist.transport.process_settings import prepare_environment

prepare_environment()


def main(argv: list[str]) -> int:
    if "RANK" not in os.environ:
        from ringmaster_dist.cli.main import main as ringmaster

        return ringmaster(["train", *argv])

    from ringmaster_dist.config.errors import exit_code_of
    from ringmaster_dist.runtime.torchrun_rank import take_part

    return exit_code_of(lambda: take_part(argv))


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # without the interpreter's farewell, in which TensorPipe's threads may hang
