"""`python -m driver.cli`: the `burst` command without its script."""

from driver.cli import main

main()
