"""The tables and figures of the papers, made anew: ``python -m experiments --list``. What an experiment is: experiments/README.md."""
