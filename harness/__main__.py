"""`python -m harness`: the same as `walkaway`."""

from harness.cli import main

if __name__ == "__main__":
    main()
