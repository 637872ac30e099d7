"""`python -m autotune.cli`, which users' crontabs and timers hold, and `python -m autotune`."""

from autotune.cli import main

main()
