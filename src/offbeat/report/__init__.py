"""From the journal to what people look at: tallies, tables, timelines, the live display. Nothing here decides anything."""
