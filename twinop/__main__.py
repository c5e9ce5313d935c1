"""`python -m twinop`."""

from twinop.cli import app

app(prog_name="twinop")
