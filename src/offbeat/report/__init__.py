"""Turn summaries and journals into what people read: tables, sentences, timelines, the live display. Nothing here decides anything.

Who calls whom::

    journal.summary.Tally  (events -> a summary: plain numbers)        journal.file.read  (a journal's records)
          |                                                                  |
          v                                                                  v
    figures.py   numbers that follow from a summary, and their words   lanes.py   per worker: spans and marks
      |        |         |                                               |          |
      v        v         v                                               v          v
    table.py  remarks.py  live.py                                      timeline.py  chrome.py
      tables    sentences   redrawn while a job runs                     matplotlib   chrome://tracing, Perfetto

``columns.py`` fits columns into a terminal, ``chosen.py`` chooses the workers that have a row. `journal.turns` says what each worker does
and who ends its waits: for ``lanes.py``, ``waits.py`` (``--why wait``) and for `offbeat.view`, the page of a job. ``why.py`` tells, from
the records' causes, what led to one of them.

An example: ``offbeat report run.jsonl``. The journal's records go through a `Tally`; its summary has, for each worker, the number of pushes
by fate and the seconds computed and waited. `table` makes a row of each worker, and leaves out columns that are empty for all. `remarks`
adds a sentence where a number deserves one: a worker that computes much longer per step than the median is named.
"""
