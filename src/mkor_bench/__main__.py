"""``python -m mkor_bench`` is the command ``mkor``."""

from mkor_bench.cli import main

# Worker processes import this file again; only the first process runs the command.
if __name__ == "__main__":
    main()
