"""``python -m ringmaster_dist`` is the ``ringmaster`` command."""

from ringmaster_dist.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
