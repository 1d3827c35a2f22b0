"""python -m sdpa.cli, where the command `sdpa` is not on the path."""

from sdpa.cli import main

if __name__ == "__main__":
    main()
