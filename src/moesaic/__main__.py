"""`python -m moesaic` equals `moesaic`."""

from moesaic.cli.main import main

main()
