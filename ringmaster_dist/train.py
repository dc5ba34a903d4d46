"""``torchrun --nproc-per-node=N -m ringmaster_dist.train [key=value ...]``: rank 0 serves, the others work.

Without torchrun it is ``ringmaster train``.
"""

from __future__ import annotations

import os
import sys

from ringmaster_dist.signals import end_at_once, raise_when_stopped


def main(argv: list[str]) -> int:
    end_at_once()

    from ringmaster_dist.cli.main import main as ringmaster
    from ringmaster_dist.config.errors import exit_code_of
    from ringmaster_dist.process_settings import prepare_environment

    if "RANK" not in os.environ:
        raise_when_stopped()
        code = ringmaster(["train", *argv])
        end_at_once()
        return code
    prepare_environment()  # before torch is imported

    from ringmaster_dist.runtime.torchrun_rank import take_part

    raise_when_stopped()
    code = exit_code_of(lambda: take_part(argv))
    end_at_once()
    return code


if __name__ == "__main__":
    code = main(sys.argv[1:])

    from ringmaster_dist.runtime.processes import leave

    leave(code)
