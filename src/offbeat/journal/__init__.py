"""The journal of a run and what is counted from it. Records go in, summaries come out; the standard library only."""
