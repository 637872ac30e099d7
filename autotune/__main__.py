"""`python -m autotune`: the command line."""

from autotune.cli.app import main

main()
